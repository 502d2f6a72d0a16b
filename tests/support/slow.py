"""Tiny bundles that are slow but return the same results as the tiny bundle.

One runs each text alone and multiplies large matrices first, so its predicted time is long too. The other hangs, for seconds or hours,
if a text contains a certain word, which the runs that are timed at the load do not contain.
"""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

from support import tiny

SIDE = 1000  # 2 GFLOP: tens of milliseconds on one core


SECOND = 4 * 10**5  # turns of the loop: 0.5 to 1 second
HOURS = 10**13


def bundle(folder: Path, name: str = "slow") -> Path:
    """Writes the slow bundle to `folder/name` and returns its path."""
    return tiny.replace_graph(tiny.bundle(folder, name, max_length=512, batch_invariant=False), _graph())


def hanging_bundle(folder: Path, name: str = "hanging", word: str = "dull", *, turns: int = HOURS, **changes: Any) -> Path:
    """Writes a bundle to `folder/name` whose runs take this many loop turns if a text contains the word; returns its path."""
    path = tiny.bundle(folder, name, max_length=512, **changes)
    return tiny.replace_graph(path, _hanging_graph(tiny.VOCABULARY.index(word), turns))


def _hanging_graph(token: int, turns: int) -> onnx.ModelProto:
    """Returns the tiny graph followed by a loop. The loop turns once, and `turns` more times if the token is in the batch."""
    graph = tiny.graph()
    graph.graph.node[-1].output[0] = "quick"
    body = helper.make_graph(
        [helper.make_node("Identity", ["go_on"], ["goes_on"]), helper.make_node("Mul", ["carried", "one"], ["same"])],
        "turn",
        [
            helper.make_tensor_value_info("turn", onnx.TensorProto.INT64, []),
            helper.make_tensor_value_info("go_on", onnx.TensorProto.BOOL, []),
            helper.make_tensor_value_info("carried", onnx.TensorProto.FLOAT, ["rows", "labels"]),
        ],
        [
            helper.make_tensor_value_info("goes_on", onnx.TensorProto.BOOL, []),
            helper.make_tensor_value_info("same", onnx.TensorProto.FLOAT, ["rows", "labels"]),
        ],
    )
    graph.graph.node.extend(
        [
            helper.make_node("Equal", ["input_ids", "guilty"], ["found"]),
            helper.make_node("Cast", ["found"], ["counted"], to=onnx.TensorProto.INT64),
            helper.make_node("ReduceMax", ["counted"], ["any"], keepdims=0),
            helper.make_node("Mul", ["any", "turns_more"], ["long"]),
            helper.make_node("Add", ["long", "once"], ["turns"]),
            helper.make_node("Loop", ["turns", "true", "quick"], ["logits"], body=body),
        ]
    )
    values = {"guilty": np.array(token), "turns_more": np.array(turns), "once": np.array(1), "true": np.array(True), "one": np.float32(1)}
    graph.graph.initializer.extend([numpy_helper.from_array(np.asarray(value), name) for name, value in values.items()])
    onnx.checker.check_model(graph)
    return graph


def _graph() -> onnx.ModelProto:
    """Returns the tiny graph with extra work whose result, always zero, is added to the logits. No optimizer can fold it away."""
    graph = tiny.graph()
    nodes = graph.graph.node
    nodes[-1].output[0] = "quick"
    nodes.extend(
        [
            helper.make_node("ReduceMean", ["quick"], ["scalar"], keepdims=0),
            helper.make_node("Expand", ["scalar", "shape"], ["square"]),
            helper.make_node("MatMul", ["square", "square"], ["product"]),
            helper.make_node("ReduceMean", ["product"], ["worked"], keepdims=0),
            helper.make_node("Mul", ["worked", "zero"], ["nothing"]),
            helper.make_node("Add", ["quick", "nothing"], ["logits"]),
        ]
    )
    graph.graph.initializer.extend(
        [numpy_helper.from_array(np.array([SIDE, SIDE]), "shape"), numpy_helper.from_array(np.array(0, dtype=np.float32), "zero")]
    )
    onnx.checker.check_model(graph)
    return graph
