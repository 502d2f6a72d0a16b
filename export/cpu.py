"""Creates the graphs for the CPU from the traced graph: float32, fused by ONNX Runtime's transformer optimizer, and int8."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import onnx_ir as ir
from onnxruntime.transformers.fusion_options import AttentionMaskFormat

from bertserve.export import inference
from bertserve.export.build_input import GraphBuildInput, new_graph
from bertserve.export.checkpoint.checkpoint import Checkpoint
from bertserve.export.graph import cpu_passes, onnx_files, ort_fusion, rewrite
from bertserve.export.int8 import quantize
from bertserve.export.progress import stage
from bertserve.service.bundle.graph_spec import GraphSpec, Precision


def optimize(traced: Path, target: Path, checkpoint: Checkpoint, trace_description: str) -> GraphSpec:
    """Writes the float32 graph to a new file, and the fused one next to the traced one; `trace_description` is for readers."""
    fused = traced.with_name("fused.onnx")
    fusions = fuse_for_cpu(traced, fused, checkpoint)
    model = rewrite.load(fused)
    cpu_passes.unfuse(model)
    restricted = cpu_passes.restrict_to_cls(model)
    cpu_passes.pack_qkv(model)
    rewrite.save(model, target)
    del model  # maps the file that is removed, which is as large as the model
    onnx_files.remove(fused)
    is_fused = not fusions.keys().isdisjoint({"Attention", "MultiHeadAttention"})
    attention = "packed MultiHeadAttention with key padding" if is_fused else "attention as traced"
    description = f"{trace_description}, {attention}" + (", last layer for the first token only" if restricted else "")
    return new_graph(checkpoint, "cpu", description, checkpoint.inputs, fusions)


def build_for_cpu(build_input: GraphBuildInput, precisions: Sequence[Precision]) -> Iterator[GraphSpec]:
    """Creates the graphs one by one on request; float32 is always first, because int8 is created from it.

    Raises:
        ExportError: There is nothing to quantize, or the outputs' error is too large; the float32 graph has been yielded before.
    """
    checkpoint, texts, max_error = build_input.checkpoint, build_input.texts, build_input.max_int8_error
    scratch, int8_name = build_input.traced.parent, "model.cpu.int8.onnx"
    packed = scratch / "packed.onnx"
    with stage("optimize", f"cpu, from {build_input.description}"):
        fp32 = optimize(build_input.traced, packed, checkpoint, build_input.description)
        onnx_files.save(ir.load(packed), build_input.folder / fp32.file)
    yield fp32
    if "int8" not in precisions:
        return
    with stage("quantize", f"int8, calibrated on {len(texts['calibration'])} texts, with {len(texts['gate'])} others for the gate"):
        feeds, gate = (inference.make_feeds(texts[split], checkpoint, build_input.tokenizer) for split in ("calibration", "gate"))
        counts, error = quantize.quantize(
            packed, build_input.folder / int8_name, scratch, feeds, gate, max_error=max_error, quick=build_input.quick
        )
    description = f"{fp32.description}, int8 by --quick" if build_input.quick else fp32.description
    report = fp32.validation.model_copy(update={"quantized": counts, "quantization_error": error, "quantization_limit": max_error})
    yield fp32.model_copy(update={"file": int8_name, "precision": "int8", "description": description, "validation": report})


def fuse_for_cpu(source: Path, target: Path, checkpoint: Checkpoint) -> dict[str, int]:
    """Writes the fused graph to a new file; returns the fused operators with their counts.

    The embedding stays unfused: the fused operator would need one scale for the whole int8 table, but
    `export/int8/quantize.py` has one per row. The mask stays a matrix, so that padding can be on either side.

    If the optimizer does not know a model's attention, it stays as traced, which is slower but correct. It also stays for a model that
    returns its attention, because fusion would remove it.
    """
    attention, mask = not checkpoint.attention_heads, AttentionMaskFormat.AttentionMask
    fused, counts = ort_fusion.fuse_graph(source, checkpoint.heads_and_hidden_size, attention=attention, mask=mask, embeddings=False)
    fused.topological_sort()
    onnx_files.save_proto(fused.model, target, folder=source.parent)
    return counts
