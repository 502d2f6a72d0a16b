"""Runs a bundle's graph under ONNX Runtime's profiler: the time of each node, by layer, by operator, and of attention.

ONNX Runtime measures kernels. Attention is one kernel for all heads of a layer. They have the same size, so the time of a head is its
share.

The layer of a node is derived from the attention before and after it, because names are not reliable after fusion. A layer begins with the
matrices whose products attention reads, after the norm of the previous layer, and ends with its last norm. Nodes before the
first layer are `embeddings`, nodes after the last one `head`. In a model without a norm before its first layer, such as XLNet, the first
matrices count as embeddings.
"""

from __future__ import annotations

import json
import statistics
import tempfile
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort

from bertserve.export.errors import GraphError
from bertserve.export.progress import time_runs
from bertserve.service.backend.sessions import session_options
from bertserve.service.bundle.files import Bundle
from bertserve.service.bundle.graph_spec import GraphSpec, InputSpec

EMBEDDINGS, HEAD = "embeddings", "head"
_FUSED = frozenset({"Attention", "MultiHeadAttention", "QAttention", "GroupQueryAttention"})
_NORMS = frozenset({"LayerNormalization", "SkipLayerNormalization", "SimplifiedLayerNormalization", "RMSNormalization"})
_NORMS_OF_A_LAYER = 2

RUNS = (5, 50)  # minimum and maximum number for each length
_SUFFIX = "_kernel_time"


@dataclass(frozen=True)
class Node:
    """A node of a graph.

    Attributes:
        op: Its operator.
        inputs: Names of its input values.
        outputs: Names of its output values.
    """

    op: str
    inputs: Sequence[str]
    outputs: Sequence[str]


def find_parts(nodes: Sequence[Node]) -> list[str]:
    """Returns the part of each node: `embeddings`, `layer 1` and so on, or `head`.

    Args:
        nodes: All nodes in topological order.

    Returns:
        The parts in the order of the nodes; all are `head` if there is no attention.
    """
    producers = {name: i for i, node in enumerate(nodes) for name in node.outputs if name}
    marks = find_attention(nodes)
    depths: list[int] = []
    for i, node in enumerate(nodes):
        above = max((depths[producer] for producer in _sources(node, producers)), default=0)
        depths.append(above + (i in marks))
    last = max(depths, default=0)
    owners = list(depths)
    for core in _cores(nodes, marks):
        for i in _feeding(core, nodes, producers):
            owners[i] = max(owners[i], depths[core])
    head = _after_last_norm(nodes, owners, producers, last)
    return [HEAD if i in head or not last else f"layer {owner}" if owner else EMBEDDINGS for i, owner in enumerate(owners)]


def find_attention(nodes: Sequence[Node]) -> set[int]:
    """Returns the indices of attention: fused operators, and the softmax of attention that is not fused."""
    return {i for i, node in enumerate(nodes) if node.op in _FUSED or node.op == "Softmax"}


def _sources(node: Node, producers: dict[str, int]) -> list[int]:
    return [producers[name] for name in node.inputs if name in producers]


def _cores(nodes: Sequence[Node], marks: Iterable[int]) -> set[int]:
    """Returns the nodes that read queries, keys and values: attention, and after a softmax the product with the values."""
    consumers: dict[str, list[int]] = {}
    for i, node in enumerate(nodes):
        for name in node.inputs:
            consumers.setdefault(name, []).append(i)
    cores: set[int] = set()
    for mark in marks:
        cores.add(mark)
        open_ = [mark] if nodes[mark].op == "Softmax" else []
        while open_:
            readers = [reader for name in nodes[open_.pop()].outputs for reader in consumers.get(name, ())]
            cores.update(reader for reader in readers if nodes[reader].op == "MatMul")
            open_ += [reader for reader in readers if nodes[reader].op in ("Cast", "Where", "Dropout", "Mul")]
    return cores


def _feeding(core: int, nodes: Sequence[Node], producers: dict[str, int]) -> set[int]:
    """Returns the nodes between a part of attention and the norm before it."""
    sources: set[int] = set()
    open_ = [core]
    while open_:
        for source in _sources(nodes[open_.pop()], producers):
            if source not in sources and nodes[source].op not in _NORMS and _reads_norm(source, nodes, producers):
                sources.add(source)
                open_.append(source)
    return sources


def _reads_norm(start: int, nodes: Sequence[Node], producers: dict[str, int]) -> bool:
    """Returns whether a node depends on a norm; nodes that do not, such as the mask and the positions, belong to no layer."""
    visited, open_ = {start}, [start]
    while open_:
        for source in _sources(nodes[open_.pop()], producers):
            if nodes[source].op in _NORMS:
                return True
            if source not in visited:
                visited.add(source)
                open_.append(source)
    return False


def _after_last_norm(nodes: Sequence[Node], owners: Sequence[int], producers: dict[str, int], last: int) -> set[int]:
    """Returns the nodes of the last layer after the usual number of norms of a layer; a head may have another norm."""
    norms = Counter(owner for node, owner in zip(nodes, owners, strict=True) if node.op in _NORMS)
    norm_count = norms[1] if last > 1 else min(_NORMS_OF_A_LAYER, norms[1])
    passed: list[int] = []
    for i, node in enumerate(nodes):
        above = max((passed[source] for source in _sources(node, producers)), default=0)
        passed.append(above + (node.op in _NORMS and owners[i] == last))
    return {
        i
        for i, (node, owner) in enumerate(zip(nodes, owners, strict=True))
        if owner == last and norm_count and (passed[i] > norm_count or (passed[i] == norm_count and node.op not in _NORMS))
    }


@dataclass(frozen=True)
class NodeTime:
    """The time of a node.

    Attributes:
        part: Its part of the model: `embeddings`, `layer 1` and so on, or `head`.
        op: Its operator.
        ms: Median of its runs in milliseconds.
        attention: Whether it is attention, or its softmax if attention is not fused.
    """

    part: str
    op: str
    ms: float
    attention: bool


@dataclass(frozen=True)
class Profile:
    """The times of a text.

    Attributes:
        length: Tokens of the text.
        run_ms: Median of whole runs in milliseconds.
        runs: Number of runs.
        nodes: The nodes in the order of execution.
        heads: Part -> number of its attention heads, if the graph has it.
    """

    length: int
    run_ms: float
    runs: int
    nodes: Sequence[NodeTime]
    heads: Mapping[str, int]

    @property
    def kernels_ms(self) -> float:
        """Total time of all nodes; the difference to `run_ms` is ONNX Runtime's overhead."""
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
    """Profiles a CPU graph on one thread, with single texts.

    Lengths are in tokens, at most the model's maximum. `seconds` limits the runs of each length after their minimum number.

    Raises:
        GraphError: ONNX Runtime cannot run the graph.
    """
    with tempfile.TemporaryDirectory(prefix="bert-export-analyze-") as name:
        model = ir.load(bundle.path / graph.file)
        for i, node in enumerate(model.graph):
            node.name = _name(i)  # an onnxruntime pass derives names of new nodes from the names of replaced ones
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
        options = session_options(1)
        options.enable_profiling, options.profile_file_prefix = True, str(path.with_name(f"profile-{length}"))
        session = ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        runs = time_runs(lambda: session.run(None, feed), RUNS, seconds)
        profile_path = Path(session.end_profiling())
    except Exception as error:  # onnxruntime's pybind exceptions only have Exception as a common base class
        raise GraphError(f"the graph cannot be profiled at {length} tokens: {error}") from error
    events = json.loads(profile_path.read_text(encoding="utf-8"))
    parts, marks = find_parts(nodes), find_attention(nodes)
    places = {_name(i): i for i in range(len(nodes))}
    times: dict[tuple[str, str], list[float]] = {}
    for event in events:
        if event.get("cat") == "Node" and event["name"].endswith(_SUFFIX):
            times.setdefault((event["name"].removesuffix(_SUFFIX), event["args"]["op_name"]), []).append(event["dur"] / 1000)
    node_times = []
    for (name, op), durations in times.items():
        i = places.get(name[: len(_name(0))])
        # the first run is not timed, as for whole runs
        ms = statistics.median(durations[1:] or durations)
        node_times.append(NodeTime("other" if i is None else parts[i], op, ms, i in marks))
    order = {part: i for i, part in enumerate([*dict.fromkeys(sorted(set(parts), key=_place)), "other"])}
    node_times.sort(key=lambda node: order[node.part])
    of_parts = {parts[i]: count for i in sorted(marks) if (count := heads[i]) is not None}
    return Profile(length, 1000 * statistics.median(runs), len(runs), node_times, of_parts)


def make_feed(inputs: Sequence[InputSpec], length: int, pad_id: int) -> dict[str, Any]:
    """Returns the graph's inputs for one text of `length` tokens; its second token is a mask if the graph fills masks."""
    values = {
        "token_ids": np.full((1, length), pad_id),
        "attention_mask": np.ones((1, length)),
        "type_ids": np.zeros((1, length)),
        "mask_index": np.array([min(1, length - 1)]),
        "lengths": np.array([length]),
        "attention_index": np.zeros((0, 3)),
    }
    return {spec.name: values[spec.fill].astype(spec.dtype) for spec in inputs}


def _name(i: int) -> str:
    """Returns the name of a node; no name is a prefix of another one."""
    return f"node{i:06}"


def _heads(node: ir.Node) -> int | None:
    attribute = node.attributes.get("num_heads")
    return None if attribute is None else int(attribute.as_int())


def _place(part: str) -> tuple[int, int]:
    name, _, number = part.partition(" ")
    return ("embeddings", "layer", "head").index(name), int(number or 0)


def _sums(values: Iterable[tuple[str, float]]) -> dict[str, float]:
    sums: dict[str, float] = {}
    for name, ms in values:
        sums[name] = sums.get(name, 0.0) + ms
    return sums
