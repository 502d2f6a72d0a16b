"""Checks one graph of a bundle against what the manifest says of it."""

from __future__ import annotations

import json

from bertserve.export.evidence.batch_invariance import measure_row_errors
from bertserve.export.evidence.samples import sample_requests
from bertserve.export.verify.loaded_graph import Check, LoadedGraph
from bertserve.service.bundle.evidence_policy import describe_agreement
from bertserve.service.check import CHECK_TOLERANCE, difference
from bertserve.service.errors import BertServeError
from bertserve.service.tasks import choose
from bertserve.service.tasks.batch import TaskModel, first_batch
from bertserve.service.tasks.body import Limits
from bertserve.service.tasks.catalog import TASKS
from bertserve.service.tasks.cost import Budget
from bertserve.service.wire.reading import read_body


def check_engine(loaded: LoadedGraph, error: str | None, missing: str | None) -> Check:
    """Reports that a graph cannot run, or that it runs on the CPU in place of its provider.

    Args:
        loaded: The graph.
        error: Why it cannot be loaded, or None.
        missing: Why its provider is not available, or None.
    """
    name = f"engine {loaded.name}"
    if missing is None:
        return Check(name, False, error or "")
    reason = f"{loaded.graph.provider} is not there ({missing})"
    if error is None:
        return Check(name, None, f"checked on the CPU, for {reason}")
    return Check(name, None, f"not checked: {reason}, and the CPU cannot run it ({error})")


def check_evidence(loaded: LoadedGraph) -> Check:
    """Checks that the manifest has evidence of a graph, and reports it."""
    name, graph = f"evidence {loaded.name}", loaded.graph
    evidence = graph.evidence
    if not evidence.samples:
        return Check(name, False, f"the manifest has none for {graph.file}; export the bundle again")
    error = f", its precision moves the outputs by {evidence.quantization_error:.3f} of their spread" if evidence.quantization_error else ""
    return Check(
        name,
        True,
        f"at export on {evidence.provider}: worst logit error {evidence.worst_abs_error:.1e}, {describe_agreement(evidence)}{error}",
        evidence.model_dump(mode="json"),
    )


def check_example(loaded: LoadedGraph) -> Check:
    """Asks the stored example again. Its result is that of one default graph; graphs of other precisions may answer otherwise."""
    manifest, graph = loaded.bundle.manifest, loaded.graph
    defaults = sorted((other for other in manifest.graphs if other.default), key=lambda other: other.provider != "cpu")
    stored = defaults[0].precision
    tolerance = max(CHECK_TOLERANCE[graph.precision], CHECK_TOLERANCE[stored])
    name = f"example {loaded.name}"
    try:
        body = read_body(
            manifest.task, json.dumps(manifest.example.request).encode(), Limits(max_inputs=choose.MAX_CHOICES, max_chars=10**6)
        )
        result = body.answer([loaded.answer(request) for request in body.requests(manifest)])
    except BertServeError as error:
        return Check(name, False, error.message)
    reason = difference(manifest.example.result, result, tolerance)
    if reason is None:
        return Check(name, True, f"the stored result, scores within {tolerance}")
    if graph.precision != stored:
        return Check(name, None, f"not the stored result, which is that of {stored}: {reason}")
    return Check(name, False, reason)


def check_batches(loaded: LoadedGraph) -> Check:
    """Compares texts in a batch with the same texts alone, and with what the manifest claims of that."""
    name, manifest = f"batches {loaded.name}", loaded.bundle.manifest
    task = TASKS[manifest.task].run
    try:
        prompts = manifest.embedding.prompts.values() if manifest.embedding else ()
        requests = sample_requests(manifest.task, manifest.tokenizer, prompts)
        model = TaskModel(loaded.tokenizer, manifest, Budget())
        encodings = [encoding for request in requests for encoding in first_batch(task, request, model).encodings]
        errors = measure_row_errors(loaded.engine, encodings, [loaded.engine.run([encoding])[0] for encoding in encodings])
    except BertServeError as error:
        return Check(name, False, error.message)
    claim = "batch-invariant" if loaded.graph.batch_invariant else "not batch-invariant"
    return Check(
        name,
        errors.is_rounding(loaded.graph.precision) or not loaded.graph.batch_invariant,
        f"a row in a batch differs from the row alone by {errors.worst:.1e} at most; the manifest says {claim}",
        {"worst_row_error": errors.worst, "batch_invariant": loaded.graph.batch_invariant},
    )
