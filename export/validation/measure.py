"""Compares a graph with its checkpoint, times it, and writes the validation report of the manifest.

The times are from a few runs of single texts at a few lengths on this machine, not from a full benchmark.
"""

from __future__ import annotations

import statistics
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

from bertserve.export import progress
from bertserve.export.artifact import Artifact
from bertserve.export.checkpoint.checkpoint import Checkpoint
from bertserve.export.errors import ParityError
from bertserve.export.graph import onnx_files
from bertserve.export.progress import time_runs, track
from bertserve.export.validation.agreement import RowErrors, measure_row_errors
from bertserve.export.validation.comparison import Comparison, describe
from bertserve.export.validation.reference import Reference, measure_attention
from bertserve.export.validation.served_graph import Answer, ServedGraph, open_engine
from bertserve.service.bundle.files import digest
from bertserve.service.bundle.graph_spec import GraphFile, GraphSpec, Speed, Timing, ValidationReport
from bertserve.service.engine.hardware import cpu_instructions, cpu_name
from bertserve.service.engine.onnx_engine import Engine, Row
from bertserve.service.engine.sessions import why_not
from bertserve.service.errors import BertServeError, EngineError
from bertserve.service.text.tokenizer import Encoding, Tokenizer

LENGTHS = (16, 64, 128)  # in tokens; the model's maximum length is timed too
MAX_SECONDS = 0.5  # for each length
RUNS = (3, 15)  # minimum and maximum
MAX_REASON = 300  # of ONNX Runtime's own message


def measure_graph(
    folder: Path, graph: GraphSpec, checkpoint: Checkpoint, tokenizer: Tokenizer, reference: Reference
) -> tuple[GraphSpec, ServedGraph]:
    """Compares a graph with its checkpoint; returns its manifest entry with a new validation report, and the graph that ran.

    The facts about the graph's creation in the report, on which the bounds depend, stay the same.

    Raises:
        ParityError: The graph does not agree with the checkpoint, or cannot be served.
    """
    measured_on = graph.provider if why_not(graph.provider) is None else "cpu"
    try:
        engine = open_engine(folder, graph, checkpoint.tokenizer_spec, measured_on)
        served = ServedGraph(graph, engine, tokenizer, checkpoint.task, checkpoint)
        comparison, row_errors = compare(served, reference)
        attention_error = measure_attention(served, reference.attention)
    except BertServeError as error:
        raise ParityError(
            f"{type(checkpoint.model).__name__} is not supported: its {graph.precision} graph cannot be served. {error}"
        ) from error
    model = ir.load(folder / graph.file)
    updates = comparison.measured() | {
        "worst_row_error": row_errors.worst,
        "nodes": len(model.graph),
        "opset": model.graph.opset_imports.get(""),
        "speed": measure_latency(engine, max_length=checkpoint.tokenizer_spec.max_length, pad_id=checkpoint.tokenizer_spec.pad_id),
        "provider": measured_on,
        "attention_error": attention_error,
    }
    is_invariant = row_errors.is_rounding(graph.precision)
    return graph.model_copy(update={"evidence": graph.evidence.model_copy(update=updates), "batch_invariant": is_invariant}), served


def compare(served: ServedGraph, reference: Reference) -> tuple[Comparison, RowErrors]:
    """Compares a graph with the checkpoint's outputs, for int8 also on ordinary texts, and its rows in batches with rows that run alone.

    Raises:
        ParityError: It exceeds a bound, or fails on a request.
    """
    requests = reference.requests if served.graph.precision == "int8" else reference.requests[: reference.fixed]
    answers = track(progress.each(partial(_answer, served), requests), "compare answers", unit="samples", total=len(requests))
    comparison = Comparison(served)
    encodings, rows = list[Encoding](), list[Row]()
    for i, answer in enumerate(answers):
        comparison.add(requests[i], answer, Answer((), reference.rows[i], None), fixed=i < reference.fixed)
        encodings += answer.encodings
        rows += answer.rows
    comparison.check()
    return comparison, measure_row_errors(served.engine, encodings, rows)


def _answer(served: ServedGraph, request: Any) -> Answer:
    """Returns a graph's answer; if the graph fails where the checkpoint works, the trace does not support the request."""
    try:
        return served.answer(request)
    except EngineError as error:
        reason = (str(error.__cause__ or error).splitlines() or [""])[0]
        raise ParityError(
            f"the graph fails on a text that PyTorch answers: {describe(request)}. A traced graph cannot follow code that depends on the "
            f"length or the values of a text; such a model is not supported. {reason[:MAX_REASON]}"
        ) from error


def without_validation_report(artifact: Artifact, checkpoint: Checkpoint, *, default: bool) -> GraphSpec:
    """Returns a graph's manifest entry, whose validation report has only the facts of the graph's creation."""
    report = ValidationReport(
        samples=0,
        worst_abs_error=0.0,
        label_agreement=None,
        worst_row_error=0.0,
        nodes=0,
        fusions=artifact.fusions,
        quantized=artifact.quantized,
        quantization_error=artifact.error,
        quantization_limit=artifact.max_error,
    )
    graph_file, *data = (
        GraphFile(file=path.name, sha256=digest(path), size_bytes=path.stat().st_size) for path in onnx_files.files(artifact.path)
    )
    return GraphSpec(
        **dict(graph_file),
        data=tuple(data),
        provider=artifact.provider,
        precision=artifact.precision,
        form=artifact.form,
        default=default,
        batch_invariant=False,
        inputs=artifact.inputs,
        outputs=checkpoint.outputs,
        evidence=report,
        shapes=artifact.shapes,
    )


def measure_latency(engine: Engine, *, max_length: int, pad_id: int) -> Speed:
    """Times runs of single texts at each length in tokens, on one thread; the token `pad_id` fills the texts."""
    lengths = sorted({min(length, max_length) for length in (*LENGTHS, max_length)})
    timings = tuple(Timing(length=length, median_ms=_median_ms(engine, length, pad_id)) for length in lengths)
    return Speed(cpu=cpu_name(), instructions=cpu_instructions(), threads=1, timings=timings)


def _median_ms(engine: Engine, length: int, pad_id: int) -> float:
    """Returns the median milliseconds of one text, after one run that is not timed."""
    batch = [Encoding(np.full(length, pad_id, dtype=np.int64), np.zeros(length, dtype=np.int64), masks=(1,))]
    return round(1000 * statistics.median(time_runs(lambda: engine.run(batch), RUNS, MAX_SECONDS)), 3)
