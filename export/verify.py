"""Checks a bundle again: its files, its stored example, its batches, its checkpoint, and the user's own data.

Without a checkpoint it needs no torch, so that it runs where the service does.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from export import agreement, answers, dataset, samples
from export.errors import ExportError, ParityError
from export.rows import MAX_ROW_ERROR, worst_row_error
from service import bundle as bundles
from service.api import reading
from service.bundle import Bundle
from service.cli import CHECK_TOLERANCE, difference
from service.engine import OnnxEngine
from service.errors import BertServeError
from service.graph import GraphSpec, Provider
from service.model import TASKS
from service.tokenization import Tokenizer

if TYPE_CHECKING:
    from export.checkpoint import Checkpoint


@dataclass(frozen=True)
class VerifySpec:
    """What to check, as the flags say.

    Attributes:
        bundle: The bundle's folder.
        checkpoint: The checkpoint that it was made from, a folder or a hub id.
        data: JSONL of inputs, see `export/dataset.py`.
        min_agreement: Least agreement on the data.
        provider: Of which provider the graphs are checked.
    """

    bundle: Path
    checkpoint: str | None = None
    data: Path | None = None
    min_agreement: float | None = None
    provider: Provider = "cpu"


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
        bundle = bundles.load(spec.bundle.resolve())
    except BertServeError as error:
        yield Check("files", False, error.message)
        return
    manifest = bundle.manifest
    # before minutes of work
    lines = [] if spec.data is None else dataset.read(spec.data, manifest.task, manifest)
    yield Check("files", True, f"the digests of tokenizer and {len(manifest.graphs)} graphs are those of the manifest")
    yield _evidence(bundle)
    graphs = [graph for graph in manifest.graphs if graph.provider == spec.provider]
    try:
        default = bundle.graph(spec.provider)
        subjects = [_Subject(bundle, graph) for graph in graphs]
    except BertServeError as error:
        yield Check("engine", False, error.message)
        return
    served = next(subject for subject in subjects if subject.graph == default)
    yield _example(served)
    for subject in subjects:
        yield _rows(subject)
    loaded = None if spec.checkpoint is None else _load(spec.checkpoint, bundle)
    if loaded is not None:
        yield from _parity(subjects, loaded)
    if lines:
        yield from _data(served, subjects, loaded, lines, spec.min_agreement)


class _Subject:
    """A graph of the bundle, ready to answer."""

    def __init__(self, bundle: Bundle, graph: GraphSpec) -> None:
        tokenizer = bundle.manifest.tokenizer
        self.manifest = bundle.manifest
        self.graph = graph
        self.name = f"{graph.provider}/{graph.precision}"
        self.tokenizer = Tokenizer(bundle.tokenizer_path, tokenizer)
        self.engine = OnnxEngine(bundle.path / graph.file, graph, pad_id=tokenizer.pad_id, padding_side=tokenizer.padding_side)

    def answer(self, request: Any) -> Any:
        """Returns the result of a request."""
        return answers.answer(self.manifest.task, request, self.tokenizer, self.engine, self.manifest)


def _evidence(bundle: Bundle) -> Check:
    """Judges the manifest's figures by its own claims."""
    without = [graph.file for graph in bundle.manifest.graphs if not graph.evidence.samples]
    if without:
        return Check("evidence", False, f"the manifest has none for {', '.join(without)}; export the bundle again")
    figures = {f"{graph.provider}/{graph.precision}": graph.evidence.model_dump(mode="json") for graph in bundle.manifest.graphs}
    worst = [f"{name} {entry['worst_abs_error']:.1e}, {entry['label_agreement']:.1%}" for name, entry in figures.items()]
    return Check("evidence", True, f"at export, worst logit error and agreement: {'; '.join(worst)}", figures)


def _example(subject: _Subject) -> Check:
    """Asks for the stored example."""
    manifest, tolerance = subject.manifest, CHECK_TOLERANCE[subject.graph.precision]
    try:
        body = reading.read(manifest.task, json.dumps(manifest.example.request).encode(), reading.Limits(max_inputs=1, max_chars=10**6))
        result = body.shape([subject.answer(request) for request in body.requests(manifest)])
    except BertServeError as error:
        return Check("example", False, error.message)
    reason = difference(manifest.example.result, result, tolerance)
    return Check("example", reason is None, reason or f"{subject.name} gives the stored result, scores within {tolerance}")


def _rows(subject: _Subject) -> Check:
    """Compares texts in a batch with the same texts alone, and with what the manifest says of that."""
    name, manifest = f"batches {subject.name}", subject.manifest
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
        error <= MAX_ROW_ERROR or not subject.graph.batch_invariant,
        f"a row in a batch differs from the row alone by {error:.1e} at most; the manifest says {claim}",
        {"worst_row_error": error, "batch_invariant": subject.graph.batch_invariant},
    )


def _load(source: str, bundle: Bundle) -> Checkpoint:
    # torch and transformers take seconds to import, and most checks need neither
    from export import checkpoint

    embedding = bundle.manifest.embedding
    return checkpoint.load(source, task=bundle.manifest.task, layers="last" if embedding is None else embedding.layers)


def _parity(subjects: list[_Subject], loaded: Checkpoint) -> Iterator[Check]:
    """Compares each graph with the checkpoint in PyTorch, as the export did."""
    from export import parity

    manifest = subjects[0].manifest
    yield Check(
        "checkpoint",
        manifest.source.weights_sha256 == loaded.weights_sha256,
        f"sha256 over its weights is {loaded.weights_sha256[:12]}…, the manifest says {manifest.source.weights_sha256[:12]}…",
        {"weights_sha256": loaded.weights_sha256},
    )
    requests = samples.samples(loaded.task, loaded.max_length, loaded.mask.token if loaded.mask else None)
    reference = parity.Reference(loaded, requests)
    for subject in subjects:
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


def _data(
    served: _Subject, subjects: list[_Subject], loaded: Checkpoint | None, lines: list[dataset.Line], floor: float | None
) -> Iterator[Check]:
    """Measures the default graph on the user's data, against the checkpoint or else the float32 graph, and against the right answers."""
    manifest = served.manifest
    fp32 = next((subject for subject in subjects if subject.graph.precision == "fp32" and subject is not served), None)
    name, reference = ("the fp32 graph", fp32.answer) if fp32 else (None, None)
    if loaded is not None:
        name, reference = "the checkpoint", partial(_torch_answer, loaded, served.tokenizer)
    found = agreement.measure(lines, manifest.task, manifest, served.answer, reference)
    yield _agreement_check(served.name, found, name, floor)
    for figure, values in found.scores.items():
        beside = f" ({name} {values['reference']:.4f})" if "reference" in values else ""
        yield Check(figure, None, f"{served.name} {values['graph']:.4f}{beside} on {found.labeled} labeled inputs", values)


def _agreement_check(served: str, found: agreement.Measured, reference: str | None, floor: float | None) -> Check:
    if reference is None:
        hint = "nothing to compare with: the bundle has no other fp32 graph; give --checkpoint"
        return Check("agreement", None if floor is None else False, hint, {"inputs": found.inputs})
    figures = replace(found, scores={}).__dict__ | {"reference": reference}
    if found.agreement is None:
        detail = f"values of {served} and {reference} differ by {found.worst_difference:.1e} at most (of vectors, 1 - cosine) on {found.inputs} inputs"
        return Check(
            "agreement", None if floor is None else False, detail + ("" if floor is None else "; a value has no agreement"), figures
        )
    detail = f"{served} answers as {reference} on {found.agreement:.4f} of {found.inputs} inputs"
    if found.span_agreement is not None:
        detail += f", F1 of its spans {found.span_agreement:.4f}"
    if floor is None:
        return Check("agreement", None, detail, figures)
    return Check("agreement", found.agreement >= floor, f"{detail}; at least {floor} is asked for", figures)


def _torch_answer(loaded: Checkpoint, tokenizer: Tokenizer, request: Any) -> Any:
    """Returns the checkpoint's result in PyTorch, with the Hugging Face tokenizer's own truncation and windows."""
    from export import parity

    task = TASKS[loaded.task]
    encoded = task.encode(request, tokenizer)
    (rows,) = parity.Reference(loaded, [request]).rows
    if len(rows) != len(encoded.encodings):
        raise ExportError(f"the checkpoint's tokenizer makes {len(rows)} windows where the bundle's makes {len(encoded.encodings)}.")
    return task.decode(request, encoded, rows, loaded)
