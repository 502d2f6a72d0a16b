"""Measures the agreement of a graph with its checkpoint, and checks its validation report against the operator's requirements.

A measure must be able to fail: the share of equal labels is always 1 if there is only one label, and an empty list of
entities always equals an empty list.
"""

import math
from collections.abc import Sequence

from bertserve.service.bundle.graph_spec import Agreement, GraphSpec, Measure, ValidationReport
from bertserve.service.bundle.manifest import Metric
from bertserve.service.errors import StartError

# the measures' names for users
MEASURES: dict[Measure, str] = {
    "label": "share of equal answers",
    "set_f1": "F1 of the label sets",
    "span_f1": "F1 of the spans",
    "cosine": "mean cosine similarity",
    "spearman": "Spearman correlation",
}
# Below this agreement with the checkpoint, by the measure of its task, the service logs a warning, and an int8 graph is not the default
# unless requested.
LOW_AGREEMENT_THRESHOLD = 0.98
_MEASURE_AGAIN = "run `bert-export verify BUNDLE --checkpoint DIR --update`"  # measures the validation report of an existing bundle
_Z = 1.96  # quantile of the normal distribution for 95 %


def has_low_agreement(graph: GraphSpec) -> bool:
    """Returns whether a graph's agreement with its checkpoint is below `LOW_AGREEMENT_THRESHOLD`; false without samples.

    An int8 graph is also low if there is no decision to compare, because only the agreement can show that quantization does no harm.
    """
    agreement = graph.validation.agreement
    if agreement is None:
        return False
    if agreement.value is None:
        return graph.precision == "int8"
    return not agreement.value >= LOW_AGREEMENT_THRESHOLD  # not `<`, which is false for NaN


def metrics_match_checkpoint(metrics: Sequence[Metric], graph_name: str) -> bool:
    """Returns whether all metrics of a graph on labeled data, which prove more than agreement, are within 0.01 of its checkpoint's.

    The graph is named as `provider/precision`.
    """
    pairs = [(metric.checkpoint, metric.graphs[graph_name]) for metric in metrics if graph_name in metric.graphs]
    return bool(pairs) and all(abs(checkpoint - measured) <= 0.01 for checkpoint, measured in pairs)


def other_int8_instructions(graph: GraphSpec, instructions: Sequence[str]) -> Sequence[str]:
    """Returns the instruction sets that measured an int8 graph, if they add products in another way than `instructions`, this CPU's.

    The result is empty if they add them in the same way, or if either is unknown.
    """
    # these add int8 products in 32 bits; other x86 CPUs add pairs of them in 16 bits, which can saturate
    exact, speed = {"avx_vnni", "avx512_vnni", "amx_int8", "asimd"}, graph.validation.speed
    if graph.precision != "int8" or speed is None or not speed.instructions or not instructions:
        return ()
    return speed.instructions if exact.isdisjoint(speed.instructions) != exact.isdisjoint(instructions) else ()


def agreement_range(share: float, n: int) -> tuple[float, float]:
    """Returns the 95 % confidence interval of a measured share of `n` inputs, at least one, for texts like them (Wilson's interval)."""
    center, spread = share + _Z**2 / (2 * n), _Z * math.sqrt(share * (1 - share) / n + (_Z / (2 * n)) ** 2)
    return max(0.0, (center - spread) / (1 + _Z**2 / n)), min(1.0, (center + spread) / (1 + _Z**2 / n))


def describe_agreement(validation: ValidationReport) -> str:
    """Returns a graph's agreement as text; for a quantized graph it includes the confidence interval.

    For a float graph a limit applies to the logits themselves, and samples only serve to find a fault.
    """
    agreement = validation.agreement
    if agreement is None:
        return "answers were not compared"
    if agreement.value is None:
        return f"the agreement was not measured ({MEASURES[agreement.measure]}: no input can show a difference)"
    if agreement.measure != "label":
        worst = "" if agreement.worst is None else f", the worst {agreement.worst:.4f}"
        return f"{MEASURES[agreement.measure]} is {agreement.value:.4f} on {agreement.decisions} of {validation.samples} samples{worst}"
    low, high = agreement_range(agreement.value, agreement.decisions)
    interval = f" (95% confidence: {low:.1%} to {high:.1%})" if validation.quantized else ""
    return f"answers agree on {agreement.value:.1%} of {agreement.decisions} samples{interval}"


def summarize_agreement(agreement: Agreement | None) -> str:
    """Returns the value of an agreement and its number of inputs, briefly for a table."""
    if agreement is None or agreement.value is None:
        return "not measured"
    if agreement.measure == "label":
        return f"{agreement.value:.1%} of {agreement.decisions}"
    return f"{MEASURES[agreement.measure]} {agreement.value:.4f} on {agreement.decisions}"


def check_report(name: str, graph: GraphSpec, *, required: bool = False, min_agreement: float | None = None) -> None:
    """Refuses a graph whose validation report is missing, is for another provider or precision, or is too weak.

    A validation report counts only for the provider and the precision that run: a GPU graph that was measured on a CPU has none. Another
    CPU is allowed, because `bert-export` chooses int8 scales so that products hardly depend on it; `other_int8_instructions` detects it.

    `name` is that of the bundle. A minimum agreement, by the measure of the task, also requires a validation report.

    Raises:
        StartError: It is refused; the message gives the bundle, the measurement, the requirement and the remedy.
    """
    if not required and min_agreement is None:
        return
    subject, validation = f"bundle `{name}`, graph {graph.name}", graph.validation
    flag = "--require-validation is set" if required else f"--min-agreement is {min_agreement}"
    provider = validation.provider
    # a CPU computes fp16 graphs in fp32
    precision = "fp32" if provider == "cpu" and graph.precision == "fp16" else graph.precision
    if not validation.samples or (provider, precision) != (graph.provider, graph.precision):
        raise StartError(
            f"{subject}: its validation report ({validation.samples} samples) was measured on {provider} in {precision}, and {flag}, "
            f"which needs samples on {graph.provider} in {graph.precision}, as it would run; {_MEASURE_AGAIN} on a machine with "
            f"{graph.provider}, or serve without the setting."
        )
    value = None if validation.agreement is None else validation.agreement.value
    if min_agreement is not None and (value is None or not value >= min_agreement):  # not `<`, which is false for NaN
        raise StartError(
            f"{subject}: {describe_agreement(validation)}, which does not reach --min-agreement {min_agreement}; {_MEASURE_AGAIN}, choose "
            "a closer graph (--precision fp32), export again with a lower `bert-export --max-int8-error`, your own --int8-texts, or "
            "--int8-validation with texts of the model's own domain, or lower --min-agreement."
        )
