"""A tiny checkpoint's graph after each stage before quantization, and helpers that create and run graphs."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from bertserve.export import cpu, inference, int8_texts, onnx_trace
from bertserve.export.checkpoint.checkpoint import Checkpoint
from bertserve.export.checkpoint.load import load_checkpoint
from bertserve.export.graph import cpu_passes, rewrite
from bertserve.export.graph.rewrite import CONTRIB
from bertserve.export.inference import Feed
from bertserve.service.text.tokenizer import Tokenizer
from support import tiny
from support.checkpoints import bert, service_tokenizer

ARCHITECTURES = {
    "text-classification": "BertForSequenceClassification",
    "token-classification": "BertForTokenClassification",
    "question-answering": "BertForQuestionAnswering",
    "fill-mask": "BertForMaskedLM",
}
LABELS = {"question-answering": ("LABEL_0", "LABEL_1")}


@dataclass(frozen=True)
class Staged:
    """A checkpoint, its tokenizer, its graph after each stage, and the number of nodes that read one row."""

    loaded: Checkpoint
    tokenizer: Tokenizer
    fused: Path
    unfused: Path
    cls_only: Path
    packed: Path
    nodes_restricted: int

    def feeds(self, texts: Sequence[str]) -> list[Feed]:
        return inference.make_feeds(int8_texts.SplitTexts(tuple(texts)), self.loaded, self.tokenizer)


def checkpoint_of(folder: Path, task: str) -> Path:
    """Writes the tiny checkpoint of a task and returns its path."""
    return bert(folder, task, architecture=ARCHITECTURES[task], labels=LABELS.get(task, tiny.LABELS))


def rewritten(rewriting: Callable[[ir.Model], Any], source: Path, target: Path) -> Any:
    """Writes the graph after a pass to a new file, and returns what the pass returns."""
    model = rewrite.load(source)
    result = rewriting(model)
    rewrite.save(model, target)
    return result


def stage(source: Path, folder: Path) -> Staged:
    """Runs all stages before quantization on a checkpoint."""
    folder.mkdir()
    raw = folder / "raw.onnx"
    after = {name: folder / f"{name}.onnx" for name in ("fused", "unfused", "cls_only", "packed")}
    checkpoint = load_checkpoint(str(source))
    onnx_trace.trace(checkpoint, raw, "torchscript")  # explicit, because session fixtures are created before module fixtures
    cpu.fuse_for_cpu(raw, after["fused"], checkpoint)
    rewritten(cpu_passes.unfuse, after["fused"], after["unfused"])
    nodes_restricted = rewritten(cpu_passes.restrict_to_cls, after["unfused"], after["cls_only"])
    rewritten(cpu_passes.pack_qkv, after["cls_only"], after["packed"])
    return Staged(checkpoint, service_tokenizer(checkpoint, folder), **after, nodes_restricted=nodes_restricted)


def graph_of(
    nodes: Sequence[onnx.NodeProto],
    constants: Mapping[str, NDArray[Any]],
    inputs: Mapping[str, Sequence[int | str]],
    outputs: Sequence[str] = ("y",),
    kind: int = TensorProto.FLOAT,
) -> onnx.ModelProto:
    """Returns a model of these nodes in order, with constants and input shapes by name; `kind` is the type of the inputs."""
    graph = helper.make_graph(
        list(nodes),
        "handmade",
        [helper.make_tensor_value_info(name, kind, shape) for name, shape in inputs.items()],
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in outputs],
        [numpy_helper.from_array(value, name) for name, value in constants.items()],
    )
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid(CONTRIB, 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=9)


def padded(feeds: Sequence[Feed], length: int) -> Feed:
    """Returns one batch of several texts, each padded on the right to `length` tokens."""
    batch = {
        name: np.concatenate([np.pad(feed[name], ((0, 0), (0, length - feed[name].shape[1]))) for feed in feeds])
        for name in feeds[0]
        if name != "mask_index"
    }
    if "mask_index" in feeds[0]:
        batch["mask_index"] = np.concatenate([i * length + feed["mask_index"] for i, feed in enumerate(feeds)])
    return batch


def run(path: Path, feed: Feed) -> list[NDArray[np.float32]]:
    outputs: list[NDArray[np.float32]] = inference.open_cpu_session(path).run(None, feed)
    return outputs


def operators(path: Path) -> Counter[str]:
    return Counter(node.op_type for node in onnx.load(str(path)).graph.node)


def assert_equal_outputs(actual: Path, expected: Path, feed: Feed, mask: Any = None, atol: float = 1e-5) -> None:
    """Asserts that two graphs give the same outputs; rows of padding tokens are not compared."""
    for a, b in zip(run(actual, feed), run(expected, feed), strict=True):
        assert a.shape == b.shape
        assert np.abs(b).max() > 0.1  # zeros would hide a difference
        positions = ... if mask is None or a.shape[:2] != mask.shape else mask.astype(bool)
        np.testing.assert_allclose(a[positions], b[positions], rtol=0, atol=atol)
