"""Which layer of an encoder a node of its graph belongs to, by the attention before and behind it; names say too little after fusion. Pure.

A layer begins with the matrices whose products attention reads, which come after the norm of the layer before, and ends with its last
norm. What comes before the first layer is `embeddings`, what comes after the last one `head`. In a model without a norm before its first
layer, as XLNet is, the first matrices count as embeddings.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

EMBEDDINGS, HEAD = "embeddings", "head"
_FUSED = frozenset({"Attention", "MultiHeadAttention", "QAttention", "GroupQueryAttention"})
_NORMS = frozenset({"LayerNormalization", "SkipLayerNormalization", "SimplifiedLayerNormalization", "RMSNormalization"})
_NORMS_OF_A_LAYER = 2


@dataclass(frozen=True)
class Node:
    """A node of a graph.

    Attributes:
        op: Its operator.
        inputs: Names of the values that it reads.
        outputs: Names of the values that it gives.
    """

    op: str
    inputs: Sequence[str]
    outputs: Sequence[str]


def find_parts(nodes: Sequence[Node]) -> list[str]:
    """Returns the part that each node belongs to: `embeddings`, `layer 1` and so on, `head`.

    Args:
        nodes: All nodes, each after those whose outputs it reads.

    Returns:
        The parts in the order of the nodes; all are `head` where there is no attention.
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
    """Returns where attention is: its fused operators, and the softmax of each layer in which it is not fused."""
    return {i for i, node in enumerate(nodes) if node.op in _FUSED or node.op == "Softmax"}


def _sources(node: Node, producers: dict[str, int]) -> list[int]:
    """Returns the nodes whose outputs a node reads."""
    return [producers[name] for name in node.inputs if name in producers]


def _cores(nodes: Sequence[Node], marks: Iterable[int]) -> set[int]:
    """Returns the nodes that read queries, keys and values: attention, and behind a softmax the product with the values."""
    consumers: dict[str, list[int]] = {}
    for i, node in enumerate(nodes):
        for name in node.inputs:
            consumers.setdefault(name, []).append(i)
    found: set[int] = set()
    for mark in marks:
        found.add(mark)
        open_ = [mark] if nodes[mark].op == "Softmax" else []
        while open_:
            readers = [reader for name in nodes[open_.pop()].outputs for reader in consumers.get(name, ())]
            found.update(reader for reader in readers if nodes[reader].op == "MatMul")
            open_ += [reader for reader in readers if nodes[reader].op in ("Cast", "Where", "Dropout", "Mul")]
    return found


def _feeding(core: int, nodes: Sequence[Node], producers: dict[str, int]) -> set[int]:
    """Returns the nodes between a part of attention and the norm before it."""
    found: set[int] = set()
    open_ = [core]
    while open_:
        for source in _sources(nodes[open_.pop()], producers):
            if source not in found and nodes[source].op not in _NORMS and _reads_norm(source, nodes, producers):
                found.add(source)
                open_.append(source)
    return found


def _reads_norm(start: int, nodes: Sequence[Node], producers: dict[str, int]) -> bool:
    """Returns whether there is a norm above a node: what has none, as the mask and the positions, belongs to no layer."""
    seen, open_ = {start}, [start]
    while open_:
        for source in _sources(nodes[open_.pop()], producers):
            if nodes[source].op in _NORMS:
                return True
            if source not in seen:
                seen.add(source)
                open_.append(source)
    return False


def _after_last_norm(nodes: Sequence[Node], owners: Sequence[int], producers: dict[str, int], last: int) -> set[int]:
    """Returns the nodes of the last layer that come after as many norms as any layer has, of which a head may have one more."""
    norms = Counter(owner for node, owner in zip(nodes, owners, strict=True) if node.op in _NORMS)
    own = norms[1] if last > 1 else min(_NORMS_OF_A_LAYER, norms[1])
    passed: list[int] = []
    for i, node in enumerate(nodes):
        above = max((passed[source] for source in _sources(node, producers)), default=0)
        passed.append(above + (node.op in _NORMS and owners[i] == last))
    return {
        i
        for i, (node, owner) in enumerate(zip(nodes, owners, strict=True))
        if owner == last and own and (passed[i] > own or (passed[i] == own and node.op not in _NORMS))
    }
