"""Compares a graph with the checkpoint, times it, and writes down what was found: the graph's entry of the manifest."""

from __future__ import annotations

import dataclasses

import onnx_ir as ir

from export.artifact import Artifact
from export.checkpoint.load import Checkpoint
from export.errors import ParityError
from export.evidence import latency, parity
from export.evidence.batch_invariance import HALF_ROW_ERROR, MAX_ROW_ERROR
from export.graph import onnx_files
from service.backend.onnx_engine import OnnxEngine
from service.backend.sessions import why_not
from service.bundle.files import digest
from service.bundle.graph_spec import Evidence, GraphFile, GraphSpec
from service.errors import BertServeError
from service.text.tokenizer import Tokenizer


def measure(
    made: Artifact, checkpoint: Checkpoint, tokenizer: Tokenizer, reference: parity.Reference, *, default: bool
) -> tuple[GraphSpec, OnnxEngine]:
    """Compares a graph with the checkpoint; returns its manifest entry with the evidence, and the engine that ran it.

    Args:
        made: The graph.
        checkpoint: What it was made of.
        tokenizer: The service's tokenizer.
        reference: The checkpoint's own answers.
        default: Whether the service takes it for its provider when not told otherwise.

    Raises:
        ParityError: It answers differently, or cannot be served.
    """
    graph = _unmeasured(made, checkpoint, default=default)
    measured_on = made.provider if why_not(made.provider) is None else "cpu"
    try:
        engine = OnnxEngine(made.path, graph, pad_id=checkpoint.pad_id, padding_side=checkpoint.padding_side, provider=measured_on)
        found = parity.compare(engine, tokenizer, reference, checkpoint, made.precision)
    except BertServeError as error:
        raise ParityError(
            f"{type(checkpoint.model).__name__} is not understood: its {made.precision} graph cannot be served. {error}"
        ) from error
    model = ir.load(made.path)
    evidence = Evidence(
        **dataclasses.asdict(found) | {"lengths": found.lengths},
        nodes=len(model.graph),
        opset=model.graph.opset_imports.get(""),
        speed=latency.measure(engine, max_length=checkpoint.max_length, pad_id=checkpoint.pad_id),
        fusions=made.fusions,
        quantized=made.quantized,
        quantization_error=made.error,
        provider=measured_on,
    )
    invariant = found.worst_row_error <= (HALF_ROW_ERROR if made.precision == "fp16" else MAX_ROW_ERROR)
    return graph.model_copy(update={"evidence": evidence, "batch_invariant": invariant}), engine


def _unmeasured(made: Artifact, checkpoint: Checkpoint, *, default: bool) -> GraphSpec:
    """Returns the manifest entry of a graph, its evidence still to come."""
    unknown = Evidence(samples=0, worst_abs_error=0.0, label_agreement=0.0, worst_row_error=0.0, nodes=0, fusions={}, quantized={})
    own, *data = (GraphFile(file=path.name, sha256=digest(path), size_bytes=path.stat().st_size) for path in onnx_files.files(made.path))
    return GraphSpec(
        file=own.file,
        sha256=own.sha256,
        size_bytes=own.size_bytes,
        data=tuple(data),
        provider=made.provider,
        precision=made.precision,
        form=made.form,
        default=default,
        batch_invariant=False,
        inputs=made.inputs,
        outputs=checkpoint.outputs,
        evidence=unknown,
        shapes=made.shapes,
    )
