"""Runs a graph of a bundle under ONNX Runtime's profiler: how long each node takes, by layer, by kind of operator, and within attention.

ONNX Runtime measures kernels. Attention is one kernel for all heads of a layer, which are of one size, so that a head's time is its share.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort

from bertserve.export.analyze.layers import Node, find_attention, find_parts
from bertserve.export.errors import GraphError
from bertserve.service.bundle.files import Bundle
from bertserve.service.bundle.graph_spec import GraphSpec, InputSpec

RUNS = (5, 50)  # at least, at most, of each length
_SUFFIX = "_kernel_time"


@dataclass(frozen=True)
class NodeTime:
    """What a node takes.

    Attributes:
        part: The part of the model that it belongs to: `embeddings`, `layer 1` and so on, `head`.
        op: Its operator.
        ms: Median of its runs.
        attention: Whether it is attention, or its softmax where attention is not fused.
    """

    part: str
    op: str
    ms: float
    attention: bool


@dataclass(frozen=True)
class Profile:
    """Where the time of a text goes.

    Attributes:
        length: Tokens of the text.
        run_ms: Median of whole runs.
        runs: How many.
        nodes: The nodes, in the order in which they run.
        heads: Part -> its attention heads, where the graph says so.
    """

    length: int
    run_ms: float
    runs: int
    nodes: Sequence[NodeTime]
    heads: Mapping[str, int]

    @property
    def kernels_ms(self) -> float:
        """Time of all nodes; what is missing to `run_ms` is ONNX Runtime's own."""
        return sum(node.ms for node in self.nodes)

    def by_part(self) -> dict[str, float]:
        """Returns the time of each part, in the order of the model."""
        return _sums((node.part, node.ms) for node in self.nodes)

    def by_operator(self) -> dict[str, float]:
        """Returns the time of each operator, the longest first."""
        return dict(sorted(_sums((node.op, node.ms) for node in self.nodes).items(), key=lambda item: -item[1]))

    def attention(self) -> dict[str, float]:
        """Returns the time of attention in each part that has it."""
        return _sums((node.part, node.ms) for node in self.nodes if node.attention)


def profile_graph(bundle: Bundle, graph: GraphSpec, lengths: Sequence[int], *, seconds: float) -> list[Profile]:
    """Profiles a graph for the CPU on one thread, a text alone.

    Args:
        bundle: The bundle.
        graph: Its entry in the manifest.
        lengths: In tokens; the model's usable length at most.
        seconds: That the runs of each length may take, beside the least number of runs.

    Raises:
        GraphError: ONNX Runtime cannot run it.
    """
    with tempfile.TemporaryDirectory(prefix="bert-export-analyze-") as name:
        model = ir.load(bundle.path / graph.file)
        for i, node in enumerate(model.graph):
            node.name = _name(i)  # a pass of onnxruntime gives a new node the name of one that it replaces, and more
        path = Path(name) / "named.onnx"
        ir.save(model, path, external_data="named.onnx.data")
        nodes = [
            Node(node.op_type, [value.name or "" for value in node.inputs if value], [value.name or "" for value in node.outputs])
            for node in model.graph
        ]
        heads = [_heads(node) for node in model.graph]
        return [_profile(path, nodes, heads, graph.inputs, length, bundle.manifest.tokenizer.pad_id, seconds) for length in lengths]


def _profile(
    path: Path, nodes: Sequence[Node], heads: Sequence[int | None], inputs: Sequence[InputSpec], length: int, pad_id: int, seconds: float
) -> Profile:
    feed = make_feed(inputs, length, pad_id)
    try:
        session = ort.InferenceSession(str(path), _options(path.with_name(f"profile-{length}")), providers=["CPUExecutionProvider"])
        runs = run_for(lambda: session.run(None, feed), seconds)
        written = Path(session.end_profiling())
    except Exception as error:  # onnxruntime's pybind exceptions share no base class but Exception
        raise GraphError(f"the graph cannot be profiled at {length} tokens: {error}") from error
    events = json.loads(written.read_text(encoding="utf-8"))
    parts, marks = find_parts(nodes), find_attention(nodes)
    places = {_name(i): i for i in range(len(nodes))}
    times: dict[tuple[str, str], list[float]] = {}
    for event in events:
        if event.get("cat") == "Node" and event["name"].endswith(_SUFFIX):
            times.setdefault((event["name"].removesuffix(_SUFFIX), event["args"]["op_name"]), []).append(event["dur"] / 1000)
    found = []
    for (name, op), durations in times.items():
        i = places.get(name[: len(_name(0))])
        # the first run is not timed, here as there
        ms = statistics.median(durations[1:] or durations)
        found.append(NodeTime("other" if i is None else parts[i], op, ms, i in marks))
    order = {part: i for i, part in enumerate([*dict.fromkeys(sorted(set(parts), key=_place)), "other"])}
    found.sort(key=lambda node: order[node.part])
    of_parts = {parts[i]: count for i in sorted(marks) if (count := heads[i]) is not None}
    return Profile(length, 1000 * statistics.median(runs), len(runs), found, of_parts)


def run_for(run: Any, seconds: float) -> list[float]:
    """Returns the seconds of runs, after one that is not timed."""
    run()
    times: list[float] = []
    least, most = RUNS
    while len(times) < least or (len(times) < most and sum(times) < seconds):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return times


def make_feed(inputs: Sequence[InputSpec], length: int, pad_id: int) -> dict[str, Any]:
    """Returns the graph's inputs of one text of so many tokens, of which the second is a mask to fill where the graph fills masks."""
    values = {
        "token_ids": np.full((1, length), pad_id),
        "attention_mask": np.ones((1, length)),
        "type_ids": np.zeros((1, length)),
        "mask_index": np.array([min(1, length - 1)]),
        "lengths": np.array([length]),
        "attention_index": np.zeros((0, 3)),
    }
    return {spec.name: values[spec.fill].astype(spec.dtype) for spec in inputs}


def _options(prefix: Path) -> Any:
    """Returns the service's options of a session, with a profile."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.enable_cpu_mem_arena = options.enable_mem_pattern = False
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_BASIC
    options.log_severity_level = 3
    options.enable_profiling = True
    options.profile_file_prefix = str(prefix)
    return options


def _name(i: int) -> str:
    """Returns the name of a node, which no other's begins with."""
    return f"node{i:06}"


def _heads(node: ir.Node) -> int | None:
    attribute = node.attributes.get("num_heads")
    return None if attribute is None else int(attribute.as_int())


def _place(part: str) -> tuple[int, int]:
    """Returns where a part stands in the model."""
    name, _, number = part.partition(" ")
    return ("embeddings", "layer", "head").index(name), int(number or 0)


def _sums(values: Iterable[tuple[str, float]]) -> dict[str, float]:
    sums: dict[str, float] = {}
    for name, ms in values:
        sums[name] = sums.get(name, 0.0) + ms
    return sums
