"""Observes the inputs of linear layers on the calibration texts: a sample of rows, and the range of each channel."""

import contextlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from bertserve.export import inference
from bertserve.export.graph import rewrite
from bertserve.export.graph.rewrite import Linear
from bertserve.export.inference import Feed
from bertserve.export.progress import parallel_map
from bertserve.service.tasks.decoding import Floats

ROWS_PER_CHANNEL = 2.1  # sampled rows per channel; GPTQ needs one, and two improve it
MAX_FLOPS = 1.5e12  # maximum operations of an observation, multiplications plus additions: enough for all texts of small models


@dataclass(frozen=True)
class Activations:
    """The observations of a tensor on the calibration texts.

    Attributes:
        path: A file of some of its rows, float32 [n, width], because for large models all samples are larger than the model. Each read maps
            it again, so that memory only holds the rows that are in use.
        width: Number of channels in the file.
        high: Largest value of each channel over all rows, float32 [channels].
        low: Smallest value of each channel, float32 [channels].
        channels: Indices of the remaining channels, int64 [channels]; None for all.
        factors: Factors by which the channels are multiplied, float32 [channels]; None for ones.
    """

    path: Path
    width: int
    high: Floats
    low: Floats
    channels: NDArray[np.int64] | None = None
    factors: Floats | None = None

    @property
    def peak(self) -> Floats:
        """Largest magnitude of each channel, float32 [channels]."""
        return np.maximum(self.high, -self.low)

    def rows(self, count: int | None = None) -> Floats:
        """Returns all rows, or an even selection of fewer than twice `count` rows; float32 [n, channels]."""
        rows = np.asarray(np.memmap(self.path, dtype=np.float32, mode="r")).reshape(-1, self.width)
        rows = rows[:: 1 if count is None else max(1, len(rows) // count)]
        rows = rows if self.channels is None else rows[:, self.channels]
        return rows if self.factors is None else rows * self.factors

    def scaled(self, factors: Floats) -> "Activations":
        """Returns the observations after a multiplication of the channels by positive factors, float32 [channels]."""
        before = 1 if self.factors is None else self.factors
        return replace(self, factors=before * factors, high=self.high * factors, low=self.low * factors)

    def restricted(self, channels: NDArray[np.int64]) -> "Activations":
        """Returns the observations of only these channels, int64."""
        return replace(
            self,
            channels=channels if self.channels is None else self.channels[channels],
            factors=None if self.factors is None else self.factors[channels],
            high=self.high[channels],
            low=self.low[channels],
        )


def observe(model: ir.Model, linears: Mapping[str, Linear], path: Path, feeds: Sequence[Feed], samples: Path) -> dict[str, Activations]:
    """Runs the calibration texts, or fewer for a large model, and returns the observations of each linear layer's input.

    Tensors that are multiplied by the same matrix count as one, so that they get the same scales and the matrix is stored once. Writes a
    graph that returns the tensors to `path`, and samples, which can take gigabytes, to the folder `samples`.
    """
    widest = max(layer.shape[0] for layer in linears.values())
    flops_per_token = 2 * sum(math.prod(layer.shape) for layer in linears.values())
    # without a minimum, the widest tensor would get too few rows for GPTQ
    max_tokens = max(MAX_FLOPS / flops_per_token, 1.3 * ROWS_PER_CHANNEL * widest)
    step = max(1.0, sum(map(inference.token_count, feeds)) / max_tokens)
    feeds = [feeds[int(i * step)] for i in range(int(len(feeds) / step))]
    rewrite.save(model, path, outputs=list(linears))
    observed = observe_tensors(path, list(linears), feeds, samples)
    for number, group in enumerate(rewrite.group_by_weight(linears)):
        parts = [observed[tensor] for tensor in group]
        # takes a part of each layer's sample, so that the joined sample is not larger than others
        joined = samples / f"shared-{number}"
        np.concatenate([part.rows()[i :: len(parts)] for i, part in enumerate(parts)]).tofile(joined)
        high, low = np.max([part.high for part in parts], axis=0), np.min([part.low for part in parts], axis=0)
        observed |= dict.fromkeys(group, Activations(joined, len(high), high, low))
    return observed


def observe_tensors(path: Path, tensors: Sequence[str], feeds: Sequence[Feed], samples: Path) -> dict[str, Activations]:
    """Runs a graph that returns these tensors, [..., width], and returns the observations of each, with its samples in a folder."""
    batches = inference.batch_by_length(feeds)
    text_counts = [len(next(iter(batch.values()))) for batch in batches]
    tokens = sum(map(inference.token_count, feeds))

    session = inference.open_cpu_session(path, threads=1)

    def observe_batch(position: int) -> list[tuple[Floats, Floats, Floats]]:
        rng = np.random.default_rng(position)
        observations = []
        for value in session.run(list(tensors), dict(batches[position])):
            flat = value.reshape(-1, value.shape[-1])
            share = max(6144, ROWS_PER_CHANNEL * flat.shape[1]) / tokens  # 6144: eight rows per channel of BERT base
            observations.append((flat[_select_rows(value.shape, text_counts[position], share, rng)], flat.max(axis=0), flat.min(axis=0)))
        return observations

    bounds: dict[str, tuple[Floats, Floats]] = {}
    with contextlib.ExitStack() as stack:
        samples.mkdir(exist_ok=True)
        files = {name: stack.enter_context((samples / str(number)).open("wb")) for number, name in enumerate(tensors)}
        for batch_observations in parallel_map(observe_batch, range(len(batches)), "observe activations", unit="batches"):
            for name, (rows, high, low) in zip(tensors, batch_observations, strict=True):
                files[name].write(rows.data)
                before = bounds.get(name, (high, low))
                bounds[name] = (np.maximum(before[0], high), np.minimum(before[1], low))
    return {name: Activations(samples / str(number), len(bounds[name][0]), *bounds[name]) for number, name in enumerate(tensors)}


def _select_rows(shape: tuple[int, ...], text_count: int, share: float, rng: np.random.Generator) -> NDArray[np.int64]:
    """Returns the rows of a batch to keep, in order: all if there is one per text, a share of them if there is one per token.

    They include the first and the last row of each text, which are special tokens with the largest values.
    """
    count = math.prod(shape[:-1])
    if len(shape) != 3 or shape[0] != text_count:
        return np.arange(count)
    starts = np.arange(0, count, shape[1])
    ends = np.r_[starts, starts + shape[1] - 1]
    others = rng.permutation(np.setdiff1d(np.arange(count), ends))
    return np.sort(np.unique(np.r_[ends, others[: max(math.ceil(share * count) - len(ends), 0)]]))
