"""CostModel: predicts the seconds of a run, which also decide whether a batch is worth its padding. It uses no clock."""

from collections.abc import Callable, Iterable, Sequence
from functools import cache

from bertserve.service.bundle.manifest import Flops

# Sums for least squares: weight, work, seconds, work squared, work times seconds.
_Sums = Sequence[float]


class CostModel:
    """Seconds of a run of `rows` texts padded to `length` tokens: `slowdown * (fixed_s + rows * flops(length) / rate)`.

    Two parameters are fitted to the warm-up: the fixed cost of a run, and the rate in floating point operations per second. The
    shape of the curve follows from the architecture: L * (24 H^2 + 4 S H) per token. During service both are
    updated. `slowdown` adapts quickly to the general speed of runs: threads share cores, caches and clocks with each other and
    with other processes. The proportion of the two parameters, which decides about batches, adapts slowly by least squares:
    after other work a run starts with cold caches, so its fixed cost is up to twice that of a warm-up on an idle machine.
    """

    def __init__(self, flops: Flops, runs: Iterable[tuple[int, int, float]]) -> None:
        """Fits both parameters to the `(rows, length, seconds)` of at least one run of the warm-up by least squares, neither below zero.

        It minimizes the relative error, so that short runs, which show the fixed cost, count as much as long ones. Without two different
        amounts of work, the ratio of the parameters is that of their start values.
        """
        self._work: Callable[[int], float] = cache(lambda length: flops.linear * length + flops.quadratic * length**2)
        # Start values: an eighth of the lowest measured fixed cost (bench/results/2026-11-22-fixed-run-cost.md), and half of the rate in
        # fp32 on one core (bench/results/2026-11-23-inference-time.md).
        self.fixed_s, self.rate = 1e-4, 5e10
        self.slowdown = 1.0
        timed = [(rows * self._work(length), max(seconds, 1e-9)) for rows, length, seconds in runs]  # a coarse clock can measure 0 s
        points = [_sums(work, seconds, 1 / seconds**2) for work, seconds in timed]
        self._runs: _Sums = (0.0,) * 5
        # with the constant weight of two runs, because traffic of one length would not determine the proportion
        self._warm_up: _Sums = [2 / len(points) * sum(values) for values in zip(*points, strict=True)]
        weight, work, seconds, *_ = self._warm_up
        self._mean = work / weight, seconds / weight
        self._solve(self._warm_up)
        self._first = self.fixed_s, self.rate

    def predict_seconds(self, rows: int, length: int) -> float:
        """Returns the predicted seconds of one run."""
        return self.slowdown * (self.fixed_s + rows * self._work(length) / self.rate)

    def observe(self, rows: int, length: int, seconds: float) -> None:
        """Learns from a run of `rows` padded to `length` tokens during service."""
        # if threads do this at the same time, one of the runs is lost, which does not matter
        work = rows * self._work(length)
        predicted = self.slowdown * (self.fixed_s + work / self.rate)
        seconds = max(1e-3 * predicted, min(seconds, 4 * predicted))  # so that a single stall has little effect
        self.slowdown *= 1 + (seconds / predicted - 1) / 64
        run = _sums(work, seconds, 1 / predicted**2)
        self._runs = [(1 - 1 / 1024) * earlier + value for earlier, value in zip(self._runs, run, strict=True)]
        # scales the warm-up to the speed of these runs, so that a slower machine does not look like a higher fixed cost
        fixed_s, rate = self._first
        weight, work, run_seconds, *_ = self._runs
        slower = run_seconds / (weight * fixed_s + work / rate)
        factors = (1.0, 1.0, slower, 1.0, slower)
        self._solve([value * factor + observed for value, factor, observed in zip(self._warm_up, factors, self._runs, strict=True)])

    def _solve(self, sums: _Sums) -> None:
        """Sets the proportion of the two parameters by a least-squares line through the summed points, if they determine one.

        The prediction for the mean warm-up run never changes: the general speed is only in `slowdown`.
        """
        weight, work, seconds, work_work, work_seconds = sums
        spread = weight * work_work - work * work
        if spread > 1e-9 * work * work:
            # per unit of work, times the spread; if longer runs take no longer, nearly all cost is fixed, but never all of it
            slope = max(weight * work_seconds - work * seconds, 1e-3 * seconds / work * spread)
            fixed = max(seconds * spread - work * slope, 0.0) / weight
        else:  # only one amount of work, apart from rounding: the proportion stays
            fixed, slope = self.fixed_s, 1 / self.rate
        mean_work, mean_s = self._mean
        unit_s = mean_s / (fixed + mean_work * slope)
        self.fixed_s, self.rate = fixed * unit_s, 1 / (slope * unit_s)


def _sums(work: float, seconds: float, weight: float) -> _Sums:
    """Returns the summands of a point."""
    return weight, weight * work, weight * seconds, weight * work * work, weight * work * seconds
