"""What the tensors that linear layers read are on the calibration texts: a sample of their rows, and the range of each channel."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from bertserve.export import inference, progress
from bertserve.export.graph import rewrite
from bertserve.export.graph.rewrite import Floats, Linear
from bertserve.export.inference import Feed
from bertserve.export.progress import track

# rows of each tensor, and for each of its channels: GPTQ needs one, and does better with two
MIN_ROWS = 6144
ROWS_PER_CHANNEL = 2.1
# What the products of an observation may cost, in multiplications and additions; it is enough for all texts of small models. The widest
# tensor gets the tokens that its rows are drawn from, whatever they cost.
FLOPS = 1.5e12
TOKENS_PER_ROW = 1.3


@dataclass(frozen=True)
class Sample:
    """Rows of a tensor as they were observed, float32 [n, channels], in files: those of a large model are larger than the model.

    Attributes:
        path: The file; what is read of it is mapped anew each time, so that memory holds those rows alone that someone has.
        channels: Of each row.
    """

    path: Path
    channels: int

    def rows(self, step: int = 1) -> Floats:
        """Returns every so many-th row, float32 [n, channels]."""
        return np.asarray(np.memmap(self.path, dtype=np.float32, mode="r")).reshape(-1, self.channels)[::step]

    def __len__(self) -> int:
        return self.path.stat().st_size // (4 * self.channels)


@dataclass(frozen=True)
class Activations:
    """What one tensor was on the calibration texts.

    Attributes:
        sample: Some of its rows.
        high: Largest value of each channel over all rows, float32 [channels].
        low: Smallest value of each channel, float32 [channels].
        channels: Which of the observed channels are left, int64 [channels]; None for all.
        factors: What the channels are multiplied with, float32 [channels]; None for ones.
    """

    sample: Sample
    high: Floats
    low: Floats
    channels: NDArray[np.int64] | None = None
    factors: Floats | None = None

    @property
    def peak(self) -> Floats:
        """Largest magnitude of each channel, float32 [channels]."""
        return np.maximum(self.high, -self.low)

    def rows(self, most: int | None = None) -> Floats:
        """Returns all rows, or fewer than twice `most` of them, evenly; float32 [n, channels]."""
        rows = self.sample.rows(1 if most is None else max(1, len(self.sample) // most))
        rows = rows if self.channels is None else rows[:, self.channels]
        return rows if self.factors is None else rows * self.factors

    def scaled(self, factors: Floats) -> Activations:
        """Returns what the tensor is when its channels are multiplied with these positive factors, float32 [channels]."""
        before = 1 if self.factors is None else self.factors
        return replace(self, factors=before * factors, high=self.high * factors, low=self.low * factors)

    def restricted(self, channels: NDArray[np.int64]) -> Activations:
        """Returns what is left of the tensor with these channels alone, int64."""
        return replace(
            self,
            channels=channels if self.channels is None else self.channels[channels],
            factors=None if self.factors is None else self.factors[channels],
            high=self.high[channels],
            low=self.low[channels],
        )


def observe(model: ir.Model, linears: Mapping[str, Linear], path: Path, feeds: Sequence[Feed], samples: Path) -> dict[str, Activations]:
    """Runs the calibration texts, or as many as a large model needs, and returns what each tensor was that a linear layer reads.

    Tensors that are multiplied with the same matrix count as one, so that they get the same scales and their matrix is stored once.

    Args:
        model: The float32 model.
        linears: Its linear layers, by the tensor that they read.
        path: A file for a graph that gives out these tensors.
        feeds: The calibration texts as the graph's inputs.
        samples: A folder for samples, of some gigabytes where the model has them too.
    """
    widest = max(layer.shape[0] for layer in linears.values())
    flops_per_token = 2 * sum(math.prod(layer.shape) for layer in linears.values())
    feeds = _first_tokens(feeds, max(FLOPS / flops_per_token, TOKENS_PER_ROW * ROWS_PER_CHANNEL * widest))
    rewrite.save(model, path, outputs=list(linears))
    observed = observe_tensors(path, list(linears), feeds, samples)
    for number, group in enumerate(rewrite.sharing_weights(linears)):
        parts = [observed[x] for x in group]
        # a part of each layer's sample, so that together they are no larger than another matrix's
        joined = Sample(samples / f"shared-{number}", parts[0].sample.channels)
        np.concatenate([part.sample.rows()[i :: len(parts)] for i, part in enumerate(parts)]).tofile(joined.path)
        high, low = np.max([part.high for part in parts], axis=0), np.min([part.low for part in parts], axis=0)
        observed |= dict.fromkeys(group, Activations(joined, high, low))
    return observed


def observe_tensors(path: Path, tensors: Sequence[str], feeds: Sequence[Feed], samples: Path) -> dict[str, Activations]:
    """Runs a graph that gives out these tensors, and returns what each of them was.

    Args:
        path: The graph; each tensor is one of its outputs, [..., width].
        tensors: Their names.
        feeds: Its inputs.
        samples: A folder for samples.
    """
    batches = inference.batches(feeds)
    texts = [len(next(iter(batch.values()))) for batch in batches]
    tokens = sum(map(inference.tokens, feeds))

    session = inference.open_session(path, threads=1)

    def seen(place: int) -> list[tuple[Floats, Floats, Floats]]:
        rng = np.random.default_rng(place)
        found = []
        for value in session.run(list(tensors), dict(batches[place])):
            flat = value.reshape(-1, value.shape[-1])
            share = max(MIN_ROWS, ROWS_PER_CHANNEL * flat.shape[1]) / tokens
            found.append((flat[_chosen(value.shape, texts[place], share, rng)], flat.max(axis=0), flat.min(axis=0)))
        return found

    bounds: dict[str, tuple[Floats, Floats]] = {}
    with contextlib.ExitStack() as stack:
        samples.mkdir(exist_ok=True)
        files = {name: stack.enter_context((samples / str(number)).open("wb")) for number, name in enumerate(tensors)}
        found = progress.each(seen, range(len(batches)))
        for of_batch in track(found, "observe activations", unit="batches", total=len(batches)):
            for name, (rows, high, low) in zip(tensors, of_batch, strict=True):
                files[name].write(rows.data)
                before = bounds.get(name, (high, low))
                bounds[name] = (np.maximum(before[0], high), np.minimum(before[1], low))
    return {name: Activations(Sample(samples / str(number), len(bounds[name][0])), *bounds[name]) for number, name in enumerate(tensors)}


def _chosen(shape: tuple[int, ...], texts: int, share: float, rng: np.random.Generator) -> NDArray[np.int64]:
    """Returns which rows of a batch are kept, in order: all where there are few for each text, and where there is one for each token a share.

    Among these are the first and the last of each text, which are special tokens and carry the largest values of all.
    """
    count = math.prod(shape[:-1])
    if len(shape) != 3 or shape[0] != texts:
        return np.arange(count)
    starts = np.arange(0, count, shape[1])
    ends = np.r_[starts, starts + shape[1] - 1]
    others = rng.permutation(np.setdiff1d(np.arange(count), ends))
    chosen: NDArray[np.int64] = np.sort(np.unique(np.r_[ends, others[: max(math.ceil(share * count) - len(ends), 0)]]))
    return chosen


def _first_tokens(feeds: Sequence[Feed], tokens: float) -> Sequence[Feed]:
    """Returns texts of about so many tokens, evenly from all; all where there are no more."""
    step = max(1.0, sum(map(inference.tokens, feeds)) / tokens)
    return [feeds[int(i * step)] for i in range(int(len(feeds) / step))]
