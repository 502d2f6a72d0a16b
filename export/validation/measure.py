"""Compares a graph with its checkpoint, times it, and writes the validation report of the manifest.

The times are from a few runs of single texts at a few lengths on this machine, not from a full benchmark.
"""

from __future__ import annotations

import statistics

import numpy as np
import onnx_ir as ir

from bertserve.export.artifact import Artifact
from bertserve.export.checkpoint.checkpoint import Checkpoint
from bertserve.export.errors import ParityError
from bertserve.export.graph import onnx_files
from bertserve.export.progress import time_runs
from bertserve.export.validation.parity import INT8_SLACK, measure_parity
from bertserve.export.validation.reference import Reference, measure_attention
from bertserve.service.backend.hardware import cpu_instructions, cpu_name
from bertserve.service.backend.onnx_engine import Engine, OnnxEngine
from bertserve.service.backend.sessions import why_not
from bertserve.service.bundle.files import digest
from bertserve.service.bundle.graph_spec import GraphFile, GraphSpec, Speed, Timing, ValidationReport
from bertserve.service.errors import BertServeError
from bertserve.service.text.tokenizer import Encoding, Tokenizer

LENGTHS = (16, 64, 128)  # in tokens; the model's maximum length is timed too
MAX_SECONDS = 0.5  # for each length
RUNS = (3, 15)  # minimum and maximum


def measure_graph(
    artifact: Artifact, checkpoint: Checkpoint, tokenizer: Tokenizer, reference: Reference, *, default: bool
) -> tuple[GraphSpec, OnnxEngine]:
    """Compares a graph with its checkpoint; returns its manifest entry with the validation report, and the engine that ran it.

    Raises:
        ParityError: The graph does not agree with the checkpoint, or cannot be served.
    """
    graph = without_validation_report(artifact, checkpoint, default=default)
    measured_on = artifact.provider if why_not(artifact.provider) is None else "cpu"
    try:
        engine = OnnxEngine(
            artifact.path,
            graph,
            pad_id=checkpoint.tokenizer_spec.pad_id,
            padding_side=checkpoint.tokenizer_spec.padding_side,
            provider=measured_on,
        )
        int8_bound = max(INT8_SLACK * artifact.error, artifact.max_error)
        parity = measure_parity(engine, tokenizer, reference.of(artifact.precision), checkpoint, artifact.precision, int8_bound)
        attention_error = measure_attention(engine, tokenizer, reference.attention, artifact.precision)
    except BertServeError as error:
        raise ParityError(
            f"{type(checkpoint.model).__name__} is not supported: its {artifact.precision} graph cannot be served. {error}"
        ) from error
    model = ir.load(artifact.path)
    validation = ValidationReport(
        **{name: value for name, value in vars(parity).items() if name != "row_errors"},
        label_agreement=parity.label_agreement,
        worst_row_error=parity.row_errors.worst,
        nodes=len(model.graph),
        opset=model.graph.opset_imports.get(""),
        speed=measure_latency(engine, max_length=checkpoint.tokenizer_spec.max_length, pad_id=checkpoint.tokenizer_spec.pad_id),
        fusions=artifact.fusions,
        quantized=artifact.quantized,
        quantization_error=artifact.error,
        provider=measured_on,
        attention_error=attention_error,
    )
    is_invariant = parity.row_errors.is_rounding(artifact.precision)
    return graph.model_copy(update={"evidence": validation, "batch_invariant": is_invariant}), engine


def without_validation_report(artifact: Artifact, checkpoint: Checkpoint, *, default: bool) -> GraphSpec:
    """Returns a graph's manifest entry with an empty validation report."""
    empty_report = ValidationReport(
        samples=0, worst_abs_error=0.0, label_agreement=None, worst_row_error=0.0, nodes=0, fusions={}, quantized={}
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
        evidence=empty_report,
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
