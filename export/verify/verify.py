"""Checks a bundle again, graph by graph: its files, its stored example, its batches, its checkpoint, and the user's own data.

Without a checkpoint it needs no torch, so that it runs where the service does.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from export.errors import ExportError, ParityError
from export.evidence import samples
from export.evidence.batch_invariance import HALF_ROW_ERROR, MAX_ROW_ERROR, worst_row_error
from export.verify import agreement, dataset, loaded_graph
from export.verify.loaded_graph import LoadedGraph
from service.bundle import files as bundles
from service.bundle.files import Bundle
from service.bundle.graph_spec import Precision, Provider
from service.check import CHECK_TOLERANCE, difference
from service.errors import BertServeError
from service.tasks.catalog import TASKS
from service.text.tokenizer import Tokenizer
from service.wire.reading import Limits, read_body

if TYPE_CHECKING:
    from export.checkpoint.load import Checkpoint


@dataclass(frozen=True)
class VerifySpec:
    """What to check, as the flags say.

    Attributes:
        bundle: The bundle's folder.
        checkpoint: The checkpoint that it was made from, a folder or a hub id.
        data: JSONL of inputs, see `export/verify/dataset.py`.
        min_agreement: Least agreement of each graph on the data.
        providers: Whose graphs are checked, each on that provider; None stands for all, on what there is.
        precisions: Of which the graphs are checked; None stands for all.
    """

    bundle: Path
    checkpoint: str | None = None
    data: Path | None = None
    min_agreement: float | None = None
    providers: tuple[Provider, ...] | None = None
    precisions: tuple[Precision, ...] | None = None


@dataclass(frozen=True)
class Check:
    """One line of the report.

    Attributes:
        name: What was checked.
        passed: Whether it is as it should be; None for what was measured and has no bound.
        detail: What was found.
        figures: The same for machines.
    """

    name: str
    passed: bool | None
    detail: str
    figures: dict[str, Any] = field(default_factory=dict)


def verify(spec: VerifySpec) -> Iterator[Check]:
    """Runs the checks, each when the next is asked for; those that need what a failed one found are left out.

    Raises:
        DataError: The data cannot be read, or a line cannot be answered.
        CheckpointError: The checkpoint cannot be loaded.
    """
    try:
        bundle = bundles.load_bundle(spec.bundle.resolve())
    except BertServeError as error:
        yield Check("files", False, error.message)
        return
    manifest = bundle.manifest
    # before minutes of work
    lines = [] if spec.data is None else dataset.read(spec.data, manifest.task, manifest)
    yield Check("files", True, f"the digests of tokenizer and {len(manifest.graphs)} graphs are those of the manifest")
    try:
        chosen = loaded_graph.choose(bundle, spec.providers, spec.precisions)
    except BertServeError as error:
        yield Check("graphs", False, error.message)
        return
    usable = []
    for graph in chosen:
        runs_on, lacking = loaded_graph.place(graph, asked=spec.providers is not None)
        subject = LoadedGraph(bundle, graph, runs_on)
        yield _evidence(subject)
        reason = subject.unusable()
        if reason is not None or lacking is not None:
            yield _engine(subject, reason, lacking)
        if reason is None:
            usable.append(subject)
            yield _example(subject)
            yield _rows(subject)
    loaded = None if spec.checkpoint is None or not usable else checkpoint_of(spec.checkpoint, bundle)
    if loaded is not None:
        yield from _parity(usable, loaded)
    if lines and usable:
        yield from _data(usable, loaded, lines, spec.min_agreement)


def _engine(subject: LoadedGraph, reason: str | None, lacking: str | None) -> Check:
    """Says why a graph cannot run, or that it runs on the CPU, as it did at export where its provider was not there."""
    name = f"engine {subject.name}"
    if lacking is None:
        return Check(name, False, reason or "")
    said = f"{subject.graph.provider} is not there ({lacking})"
    if reason is None:
        return Check(name, None, f"checked on the CPU, for {said}")
    return Check(name, None, f"not checked: {said}, and the CPU cannot run it ({reason})")


def _evidence(subject: LoadedGraph) -> Check:
    """Judges the manifest's figures of a graph by its own claims."""
    name, graph = f"evidence {subject.name}", subject.graph
    evidence = graph.evidence
    if not evidence.samples:
        return Check(name, False, f"the manifest has none for {graph.file}; export the bundle again")
    spans = "" if evidence.span_agreement is None else f", F1 of {evidence.spans} spans {evidence.span_agreement:.4f}"
    moved = f", its precision moves the outputs by {evidence.quantization_error:.3f} of their spread" if evidence.quantization_error else ""
    return Check(
        name,
        True,
        f"at export on {evidence.provider}: worst logit error {evidence.worst_abs_error:.1e}, answers agree on "
        f"{evidence.label_agreement:.1%} of {evidence.samples} samples{spans}{moved}",
        evidence.model_dump(mode="json"),
    )


def _example(subject: LoadedGraph) -> Check:
    """Asks for the stored example, whose result is that of one of the default graphs; others may differ as their precisions do."""
    manifest, graph = subject.bundle.manifest, subject.graph
    defaults = sorted((other for other in manifest.graphs if other.default), key=lambda other: other.provider != "cpu")
    stored = defaults[0].precision
    tolerance = max(CHECK_TOLERANCE[graph.precision], CHECK_TOLERANCE[stored])
    name = f"example {subject.name}"
    try:
        body = read_body(manifest.task, json.dumps(manifest.example.request).encode(), Limits(max_inputs=1, max_chars=10**6))
        result = body.answer([subject.answer(request) for request in body.requests(manifest)])
    except BertServeError as error:
        return Check(name, False, error.message)
    reason = difference(manifest.example.result, result, tolerance)
    if reason is None:
        return Check(name, True, f"the stored result, scores within {tolerance}")
    if graph.precision != stored:
        return Check(name, None, f"not the stored result, which is that of {stored}: {reason}")
    return Check(name, False, reason)


def _rows(subject: LoadedGraph) -> Check:
    """Compares texts in a batch with the same texts alone, and with what the manifest says of that."""
    name, manifest = f"batches {subject.name}", subject.bundle.manifest
    bound = HALF_ROW_ERROR if subject.graph.precision == "fp16" else MAX_ROW_ERROR
    mask = manifest.tokenizer.mask
    task = TASKS[manifest.task]
    try:
        requests = samples.samples(manifest.task, manifest.tokenizer.max_length, mask.token if mask else None)
        encodings = [encoding for request in requests for encoding in task.encode(request, subject.tokenizer).encodings]
        error = worst_row_error(subject.engine, encodings, [subject.engine.run([encoding])[0] for encoding in encodings])
    except BertServeError as fault:
        return Check(name, False, fault.message)
    claim = "batch-invariant" if subject.graph.batch_invariant else "not batch-invariant"
    return Check(
        name,
        error <= bound or not subject.graph.batch_invariant,
        f"a row in a batch differs from the row alone by {error:.1e} at most; the manifest says {claim}",
        {"worst_row_error": error, "batch_invariant": subject.graph.batch_invariant},
    )


def checkpoint_of(source: str, bundle: Bundle) -> Checkpoint:
    """Loads a checkpoint for the task and layers of a bundle.

    Raises:
        CheckpointError: It cannot be loaded.
    """
    # torch and transformers take seconds to import, and most checks need neither
    from export.checkpoint.load import load_checkpoint

    embedding = bundle.manifest.embedding
    return load_checkpoint(source, task=bundle.manifest.task, layers="last" if embedding is None else embedding.layers)


def _parity(usable: list[LoadedGraph], loaded: Checkpoint) -> Iterator[Check]:
    """Compares each graph with the checkpoint in PyTorch, as the export did."""
    from export.evidence import parity

    manifest = usable[0].bundle.manifest
    yield Check(
        "checkpoint",
        manifest.source.weights_sha256 == loaded.weights_sha256,
        f"sha256 over its weights is {loaded.weights_sha256[:12]}…, the manifest says {manifest.source.weights_sha256[:12]}…",
        {"weights_sha256": loaded.weights_sha256},
    )
    requests = samples.samples(loaded.task, loaded.max_length, loaded.mask.token if loaded.mask else None)
    reference = parity.Reference(loaded, requests)
    for subject in usable:
        name, evidence = f"parity {subject.name}", subject.graph.evidence
        try:
            found = parity.compare(subject.engine, subject.tokenizer, reference, loaded, subject.graph.precision)
        except (BertServeError, ParityError) as error:
            yield Check(name, False, str(error))
            continue
        yield Check(
            name,
            True,
            f"worst logit error {found.worst_abs_error:.1e} (at export {evidence.worst_abs_error:.1e}), answers agree on "
            f"{found.label_agreement:.1%} of {found.samples} samples ({evidence.label_agreement:.1%} of {evidence.samples})",
            {"worst_abs_error": found.worst_abs_error, "label_agreement": found.label_agreement, "samples": found.samples}
            | {"lengths": [entry.model_dump() for entry in found.lengths], "span_agreement": found.span_agreement},
        )


def _data(usable: list[LoadedGraph], loaded: Checkpoint | None, lines: list[dataset.Line], floor: float | None) -> Iterator[Check]:
    """Measures each graph on the user's data, against the checkpoint or else the float32 graph, and against the right answers."""
    bundle = usable[0].bundle
    manifest = bundle.manifest
    fp32 = None if loaded is not None else loaded_graph.reference(bundle, usable)
    known: str | None = None
    right: agreement.Answer | None = None
    if loaded is not None:
        known, right = "the checkpoint", _remembered(partial(_torch_answer, loaded, usable[0].tokenizer))
    elif fp32 is not None and usable != [fp32]:
        known, right = "the fp32 graph", _remembered(fp32.answer)
    for subject in usable:
        # the reference agrees with itself, which says nothing
        itself = subject is fp32
        answer = right if itself and right is not None else subject.answer
        found = agreement.measure(lines, manifest.task, manifest, answer, None if itself else right)
        if not itself or right is None:
            yield _agreement_check(subject.name, found, known, floor)
        for figure, values in found.scores.items():
            beside = f" ({known} {values['reference']:.4f})" if "reference" in values else ""
            yield Check(f"{figure} {subject.name}", None, f"{values['graph']:.4f}{beside} on {found.labeled} labeled inputs", values)


def _remembered(answer: agreement.Answer) -> agreement.Answer:
    """Returns what answers each request once, however many graphs are compared with it."""
    results: dict[int, Any] = {}

    def remembered(request: Any) -> Any:
        if id(request) not in results:  # the data outlives this
            results[id(request)] = answer(request)
        return results[id(request)]

    return remembered


def _agreement_check(graph: str, found: agreement.Measured, reference: str | None, floor: float | None) -> Check:
    name = f"agreement {graph}"
    if reference is None:
        hint = "nothing to compare with: the bundle has no other fp32 graph; give --checkpoint"
        return Check(name, None if floor is None else False, hint, {"inputs": found.inputs})
    figures = replace(found, scores={}).__dict__ | {"reference": reference}
    if found.agreement is None:
        detail = f"values of {graph} and {reference} differ by {found.worst_difference:.1e} at most (of vectors, 1 - cosine) on {found.inputs} inputs"
        return Check(name, None if floor is None else False, detail + ("" if floor is None else "; a value has no agreement"), figures)
    detail = f"answers as {reference} on {found.agreement:.4f} of {found.inputs} inputs"
    if found.span_agreement is not None:
        detail += f", F1 of its spans {found.span_agreement:.4f}"
    if floor is None:
        return Check(name, None, detail, figures)
    return Check(name, found.agreement >= floor, f"{detail}; at least {floor} is asked for", figures)


def _torch_answer(loaded: Checkpoint, tokenizer: Tokenizer, request: Any) -> Any:
    """Returns the checkpoint's result in PyTorch, with the Hugging Face tokenizer's own truncation and windows."""
    from export.evidence import parity

    task = TASKS[loaded.task]
    encoded = task.encode(request, tokenizer)
    (rows,) = parity.Reference(loaded, [request]).rows
    if len(rows) != len(encoded.encodings):
        raise ExportError(f"the checkpoint's tokenizer makes {len(rows)} windows where the bundle's makes {len(encoded.encodings)}.")
    return task.decode(request, encoded, rows, loaded)
