"""Runs graphs unchanged with ONNX Runtime on the CPU: single texts or batches without padding, and comparisons of their outputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from bertserve.export.checkpoint.signature import MASK_INDEX
from bertserve.export.progress import parallel_map

BATCH_TEXTS, BATCH_TOKENS = 16, 1024  # maximum texts and tokens of a batch, which bound its memory; a single text may have more tokens

Feed = Mapping[str, NDArray[Any]]


def run_each(session: Any, feeds: Sequence[Feed], names: Sequence[str] | None = None) -> list[list[NDArray[Any]]]:
    """Returns the outputs `names` (None: all) for each of the inputs; the session must have a single thread."""
    return list(parallel_map(lambda feed: session.run(names, dict(feed)), feeds))


def batch_by_length(feeds: Sequence[Feed]) -> list[Feed]:
    """Returns the inputs as batches of texts with the same number of tokens, so that no text is padded.

    The longest come first; otherwise, one core would work on them at the end while the others are idle.
    """
    by_length: dict[int, list[Feed]] = {}
    for feed in feeds:
        by_length.setdefault(token_count(feed), []).append(feed)
    batched_feeds = []
    for length, group in sorted(by_length.items(), reverse=True):
        size = max(1, min(BATCH_TEXTS, BATCH_TOKENS // max(1, length)))
        batched_feeds += [_join(group[start : start + size], length) for start in range(0, len(group), size)]
    return batched_feeds


def token_count(feed: Feed) -> int:
    """Returns the number of tokens of a text or, in a batch, of each of its texts."""
    return next(int(value.shape[1]) for value in feed.values() if value.ndim == 2)


def _join(feeds: Sequence[Feed], length: int) -> Feed:
    """Returns the inputs of several texts of the same length as one batch; mask positions count through the whole batch."""
    return {
        name: np.concatenate([feed[name] + i * length if name == MASK_INDEX.name else feed[name] for i, feed in enumerate(feeds)])
        for name in feeds[0]
    }


def compute_outputs(path: Path, feeds: Sequence[Feed]) -> list[NDArray[np.float32]]:
    """Returns each output of a graph over all feeds, flattened, float32; the order depends only on the feeds."""
    return [
        output.astype(np.float32, copy=False)
        for output in concatenate_runs(run_each(open_session(path, threads=1), batch_by_length(feeds)))
    ]


def concatenate_runs(runs: Sequence[Sequence[NDArray[Any]]]) -> list[NDArray[Any]]:
    """Returns each output over all runs, flattened."""
    return [np.concatenate([value.ravel() for value in values]) for values in zip(*runs, strict=True)]


def rms_error(expected: Sequence[NDArray[np.float32]], actual: Sequence[NDArray[np.float32]]) -> float:
    """Returns the largest root mean square difference of an output, relative to its standard deviation; empty outputs are skipped."""
    pairs = [pair for pair in zip(expected, actual, strict=True) if pair[0].size]
    return float(np.max([np.sqrt(np.mean((a - b) ** 2)) / max(float(a.std()), 1e-12) for a, b in pairs]))  # Python's max can drop NaN


def open_session(path: Path, *, threads: int = 0) -> Any:
    """Returns a CPU session that runs the graph unchanged, with a number of threads per run; 0 for one per core."""
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_BASIC
    options.intra_op_num_threads = threads
    options.log_severity_level = 3
    return ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
