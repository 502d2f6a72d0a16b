"""Runs of a graph as it is written, by ONNX Runtime on the CPU: its inputs, text by text or in batches without padding, and its outputs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from bertserve.export import progress
from bertserve.export.checkpoint.signature import MASK_INDEX

BATCH_SIZE, BATCH_TOKENS = 16, 1024

Feed = Mapping[str, NDArray[Any]]


def run(session: Any, feeds: Iterable[Feed], names: Sequence[str] | None = None) -> list[list[NDArray[Any]]]:
    """Returns the outputs for each of the inputs, or those of these names.

    Args:
        session: One that takes a single thread.
        feeds: The inputs.
        names: Which outputs; all by default.
    """
    return list(progress.each(lambda feed: session.run(names, dict(feed)), feeds))


def batches(feeds: Sequence[Feed]) -> list[Feed]:
    """Returns the inputs of batches, by length: texts of the same number of tokens together, so that none is padded.

    The longest come first: one core would be at work on them at the end, while the others have nothing left.

    Args:
        feeds: The inputs of each text.
    """
    by_length: dict[int, list[Feed]] = {}
    for feed in feeds:
        by_length.setdefault(tokens(feed), []).append(feed)
    made = []
    for length, same in sorted(by_length.items(), reverse=True):
        size = max(1, min(BATCH_SIZE, BATCH_TOKENS // max(1, length)))
        made += [_joined(same[start : start + size], length) for start in range(0, len(same), size)]
    return made


def tokens(feed: Feed) -> int:
    """Returns the number of tokens of a text or, in a batch, of each text."""
    return next(int(value.shape[1]) for value in feed.values() if value.ndim == 2)


def _joined(feeds: Sequence[Feed], length: int) -> Feed:
    """Returns the inputs of several texts of the same length as those of one batch; masks are counted through all of it."""
    return {
        name: np.concatenate([feed[name] + i * length if name == MASK_INDEX.name else feed[name] for i, feed in enumerate(feeds)])
        for name in feeds[0]
    }


def outputs(path: Path, feeds: Sequence[Feed]) -> list[NDArray[np.float32]]:
    """Returns each output of a graph over all feeds, flattened, in an order that depends on the feeds alone."""
    return flat(run(open_session(path, threads=1), batches(feeds)))


def flat(runs: Sequence[Sequence[NDArray[Any]]]) -> list[NDArray[Any]]:
    """Returns each output over all runs, flattened."""
    return [np.concatenate([value.ravel() for value in values]) for values in zip(*runs, strict=True)]


def relative_error(expected: Sequence[NDArray[np.float32]], actual: Sequence[NDArray[np.float32]]) -> float:
    """Returns the root mean square difference of outputs over their standard deviation, the worst output's; one that is empty has none."""
    pairs = [pair for pair in zip(expected, actual, strict=True) if pair[0].size]
    return max(float(np.sqrt(np.mean((a - b) ** 2)) / max(float(a.std()), 1e-12)) for a, b in pairs)


def open_session(path: Path, *, threads: int = 0) -> Any:
    """Returns a CPU session that runs the graph as it is written.

    Args:
        path: The graph.
        threads: That a run takes; 0 for one a core.
    """
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_BASIC
    options.intra_op_num_threads = threads
    options.log_severity_level = 3
    return ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
