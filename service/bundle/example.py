"""Compares the answer to a bundle's stored example with the export's answer, for `bert-serve check` and `bert-export verify`."""

from collections.abc import Sequence
from typing import Any

from bertserve.service.bundle.graph_spec import GraphSpec, Precision

# Maximum difference of a score from the stored one; kernels differ between CPUs, most of all in int8.
TOLERANCES: dict[Precision, float] = {"fp32": 1e-4, "fp16": 1e-2, "int8": 0.05}


def example_precision(graphs: Sequence[GraphSpec]) -> Precision:
    """Returns the precision of the graph that gave the result of the stored example."""
    return min((graph for graph in graphs if graph.default), key=lambda graph: graph.provider != "cpu").precision


def example_tolerance(graph: GraphSpec, graphs: Sequence[GraphSpec]) -> float:
    """Returns the maximum difference of a graph's score from the stored one, which can be from a graph with another precision."""
    return max(TOLERANCES[graph.precision], TOLERANCES[example_precision(graphs)])


def difference(expected: Any, actual: Any, tolerance: float) -> str | None:
    """Returns the difference between two results, or None. Numbers can differ by `tolerance`; other values must be equal."""
    if isinstance(expected, list) and isinstance(actual, list) and len(expected) == len(actual):
        return next((why for pair in zip(expected, actual, strict=True) if (why := difference(*pair, tolerance))), None)
    if isinstance(expected, dict) and isinstance(actual, dict) and expected.keys() == actual.keys():
        return next((f"{key}: {why}" for key in expected if (why := difference(expected[key], actual[key], tolerance))), None)
    if isinstance(expected, float) and isinstance(actual, float):
        return (
            None if abs(expected - actual) <= tolerance else f"{actual:.6f} differs from the stored {expected:.6f} by more than {tolerance}"
        )
    is_equal = expected == actual and isinstance(expected, bool) == isinstance(actual, bool)  # in Python, False equals 0
    return None if is_equal else f"{actual!r} is not the stored {expected!r}"
