"""How the agreement of a graph with its checkpoint is measured. `export/tasks` says which task has which measure. Pure.

A measure must be able to fail: the share of equal labels is 1 by construction where there is no label to choose, and an empty list of
entities always equals an empty list.
"""

from __future__ import annotations

from collections.abc import Sequence

from bertserve.service.bundle.graph_spec import Agreement, Evidence, Measure
from bertserve.service.bundle.manifest import Activation, Manifest, Task

# each as it is named to users
MEASURES: dict[Measure, str] = {
    "label": "share of equal answers",
    "set_f1": "F1 of the label sets",
    "span_f1": "F1 of the spans",
    "cosine": "mean cosine similarity",
    "spearman": "Spearman correlation",
}
# why inputs can leave a measure without a value
NOT_MEASURED: dict[Measure, str] = {
    "label": "there are no inputs",
    "set_f1": "no input has a label",
    "span_f1": "no input has a span",
    "cosine": "there are no inputs",
    "spearman": "all inputs have the same score",
}


def _older_measure(task: Task, labels: Sequence[str], activation: Activation) -> Measure:
    """Returns the measure of a bundle that was exported before the field `agreement` existed.

    Args:
        task: Hugging Face name of the task.
        labels: The model's labels.
        activation: What turns its logits into scores.
    """
    if task == "feature-extraction":
        return "cosine"
    if task == "token-classification":
        return "span_f1"
    if task == "text-classification" and len(labels) == 1:
        return "spearman"
    if task == "text-classification" and activation == "sigmoid":
        return "set_f1"
    return "label"


def upgrade_evidence(manifest: Manifest) -> Manifest:
    """Returns a manifest whose evidence has the field `agreement`, also where it was exported before that field existed.

    What older exports recorded says nothing about embeddings, single scores and independent labels; these have no agreement.

    Args:
        manifest: A manifest as it was read.
    """
    measure = _older_measure(manifest.task, manifest.labels, manifest.activation)
    graphs = tuple(
        graph.model_copy(update={"evidence": graph.evidence.model_copy(update={"agreement": _recorded(measure, graph.evidence)})})
        for graph in manifest.graphs
    )
    return manifest.model_copy(update={"graphs": graphs})


def _recorded(measure: Measure, evidence: Evidence) -> Agreement | None:
    """Returns the agreement of a graph, of an older manifest from the fields that it has."""
    if evidence.agreement is not None or not evidence.samples:
        return evidence.agreement
    if measure == "label" and evidence.label_agreement is not None:
        return Agreement(measure=measure, value=evidence.label_agreement, decisions=evidence.samples)
    if measure == "span_f1" and evidence.span_agreement is not None:
        return Agreement(measure=measure, value=evidence.span_agreement, decisions=None)
    return None
