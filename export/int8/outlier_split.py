"""Takes the few channels of huge values out of what will be int8, and computes them beside it in float. Exact.

A handful of channels carry values ten times those of the others (Dettmers et al. 2022, arXiv:2208.07339). One int8 scale for all
then leaves few steps for the rest. The split is made in the graph once, for channels known from calibration.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from onnx import NodeProto

from export.graph.ir import CONTRIB, Graph

HIDDEN_UNITS = 16
INPUT_CHANNELS = 4

Floats = NDArray[np.float32]


def feed_forwards(graph: Graph) -> list[NodeProto]:
    """Returns the activation in the middle of each feed-forward block: `MatMul(Gelu(MatMul(x) + bias))`."""
    producers, consumers = graph.producers(), graph.consumers()
    found = []
    for node in graph.nodes:
        readers = consumers[node.output[0]]
        if node.op_type != "Gelu" or len(readers) != 1 or readers[0].op_type != "MatMul":
            continue
        addition = producers.get(node.input[0])
        product = None if addition is None or addition.op_type != "Add" else producers.get(addition.input[0])
        constants = [] if product is None or addition is None else [product.input[1], addition.input[1], readers[0].input[1]]
        if len(constants) == 3 and all(graph.constant(name) is not None for name in constants):
            found.append(node)
    return found


def split_hidden_units(graph: Graph, activation: NodeProto, peak: Floats) -> None:
    """Computes the hidden units of the largest values in a small feed-forward block of their own.

    A feed-forward block is a sum over its hidden units, so it may be cut in two.

    Args:
        graph: Changed in place.
        activation: One that `feed_forwards` returned.
        peak: Largest magnitude of each hidden unit's value, [units].
    """
    producers, consumers = graph.producers(), graph.consumers()
    addition = producers[activation.input[0]]
    first, second = producers[addition.input[0]], consumers[activation.output[0]][0]
    x, total = first.input[0], second.output[0]
    order = np.argsort(-peak, kind="stable")
    outlying, others = np.sort(order[:HIDDEN_UNITS]), np.sort(order[HIDDEN_UNITS:])
    weights = [_value(graph, name) for name in (first.input[1], addition.input[1], second.input[1])]
    names = [first.input[1], addition.input[1], second.input[1]]
    kept = [weights[0][:, others], weights[1][others], weights[2][others]]
    apart = [weights[0][:, outlying], weights[1][outlying], weights[2][outlying]]
    first.input[1], addition.input[1], second.input[1] = (
        graph.add_constant(f"{name}/rest", np.ascontiguousarray(value)) for name, value in zip(names, kept, strict=True)
    )
    a, b, c = (graph.add_constant(f"{name}/float", np.ascontiguousarray(value)) for name, value in zip(names, apart, strict=True))
    product, biased, active, part = (graph.fresh(total) for _ in range(4))
    second.output[0] = graph.fresh(total)
    # the sum comes after the second matrix's own bias, so that the pair of them stays recognizable
    bias = consumers[total][0]
    result, bias.output[0] = bias.output[0], graph.fresh(total)
    bias.input[list(bias.input).index(total)] = second.output[0]
    _insert_after(
        graph,
        bias,
        [
            graph.node("MatMul", [x, a], product),
            graph.node("Add", [product, b], biased),
            graph.node("Gelu", [biased], active, domain=CONTRIB),
            graph.node("MatMul", [active, c], part),
            graph.node("Add", [bias.output[0], part], result),
        ],
    )


def split_input_channels(graph: Graph, product: NodeProto, peak: Floats) -> None:
    """Multiplies the channels of the largest values with their rows of the matrix in float, and adds the result.

    Args:
        graph: Changed in place; the rows left behind are zero.
        product: A `MatMul` that is followed by the addition of its bias.
        peak: Largest magnitude of each channel that it reads, [channels].
    """
    x, name = product.input
    outlying = np.sort(np.argsort(-peak, kind="stable")[:INPUT_CHANNELS])
    rest = _value(graph, name).copy()
    apart = graph.add_constant(f"{name}/outlying", np.ascontiguousarray(rest[outlying]))
    rest[outlying] = 0
    product.input[1] = graph.add_constant(f"{name}/rest", rest)
    bias = graph.consumers()[product.output[0]][0]
    gathered, part, result = graph.fresh(x), graph.fresh(name), bias.output[0]
    bias.output[0] = graph.fresh(result)
    _insert_after(
        graph,
        bias,
        [
            graph.node("Gather", [x, graph.add_constant(f"{x}/outlying", outlying.astype(np.int64))], gathered, axis=-1),
            graph.node("MatMul", [gathered, apart], part),
            graph.node("Add", [bias.output[0], part], result),
        ],
    )


def _insert_after(graph: Graph, node: NodeProto, parts: list[NodeProto]) -> None:
    place = next(i for i, other in enumerate(graph.nodes) if other is node)
    graph.nodes[place + 1 : place + 1] = parts


def _value(graph: Graph, name: str) -> Floats:
    value = graph.constant(name)
    assert value is not None, name
    return value
