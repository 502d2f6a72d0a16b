"""CostModel: how long a run takes, and whether a batch is worth its padding. Pure arithmetic, no clock of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cache

from bertserve.service.bundle.manifest import Flops

# Runs that the speed of the moment is an average over, and the proportion of the two numbers.
SLOWDOWN_RUNS = 64
PROPORTION_RUNS = 1024
# What the runs of the warm-up count for in that proportion, for good: traffic of one length alone says nothing of it.
WARM_UP_WEIGHT = 2.0
# Least part of the mean run that grows with its work: no model's time is all fixed cost.
LEAST_SLOPE = 1e-3
MOST_RATIO = 4.0
LEAST_RATIO = 1e-3
# Bounds of what is followed, far beyond any machine: a broken clock must not drive predictions to zero or to infinity.
LEAST_SLOWDOWN, MOST_SLOWDOWN = 1e-6, 1e6
LEAST_SECONDS = 1e-9

# Of least squares: weight, work, seconds, work squared, work times seconds.
_Sums = Sequence[float]
_NOTHING: _Sums = (0.0, 0.0, 0.0, 0.0, 0.0)


class CostModel:
    """Seconds of a run of `rows` texts padded to `length` tokens: `slowdown * (fixed_s + rows * flops(length) / rate)`.

    Two numbers are fitted to the warm-up, the fixed cost of a run and the rate in floating point operations per second; the
    shape of the curve comes from the architecture (performance notes: L * (24 H^2 + 4 S H) per token). In service both are
    followed. What runs take, whatever they are, is followed quickly, by `slowdown`: threads share cores, caches and clocks with each
    other and with neighbors. How the two numbers compare, on which depends who shares a run, is followed slowly and by least squares:
    behind other work a run starts with cold caches, so that its fixed cost is up to twice that of a warm-up on a machine at rest.
    """

    def __init__(self, flops: Flops, *, fixed_s: float = 1e-4, rate: float = 5e10) -> None:
        self._work: Callable[[int], float] = cache(lambda length: flops.linear * length + flops.quadratic * length**2)
        self.fixed_s = fixed_s
        self.rate = rate
        self.slowdown = 1.0
        self.fit([(1, length, self.seconds(1, length)) for length in (8, 128)])

    def seconds(self, rows: int, length: int) -> float:
        """Returns the predicted seconds of one run."""
        return self.slowdown * (self.fixed_s + rows * self._work(length) / self.rate)

    def fit(self, runs: Iterable[tuple[int, int, float]]) -> None:
        """Fits both numbers to runs of the warm-up by least squares, neither below zero, and forgets what was followed.

        The relative error is minimized, so that short runs, where the fixed cost shows, weigh as much as long ones.

        Args:
            runs: `(rows, length, seconds)` of at least one run; without two of different work the proportion stays as it is.
        """
        timed = [(rows * self._work(length), max(seconds, LEAST_SECONDS)) for rows, length, seconds in runs]
        points = [_sums(work, seconds, 1 / seconds**2) for work, seconds in timed]
        self._runs: _Sums = _NOTHING
        self._warm_up: _Sums = [WARM_UP_WEIGHT / len(points) * sum(values) for values in zip(*points, strict=True)]
        weight, work, seconds, *_ = self._warm_up
        self._mean = work / weight, seconds / weight
        self._solve(self._warm_up)
        self._first = self.fixed_s, self.rate

    def observe(self, rows: int, length: int, seconds: float, busy_s: float | None = None) -> None:
        """Learns from a run in service; one stall does not mislead, for a run counts as MOST_RATIO times its prediction at most.

        Args:
            rows: Rows of the run.
            length: Tokens that they were padded to.
            seconds: What it took; 0, by a clock too coarse to say, teaches nothing.
            busy_s: Its seconds of processor time, where they are all of its work: what others take of a core says nothing of its cost.
        """
        if seconds <= 0:
            return
        # threads may do this at once; then one of them is lost, which does not matter
        work = rows * self._work(length)
        predicted = self.slowdown * (self.fixed_s + work / self.rate)
        least, most = LEAST_RATIO * predicted, MOST_RATIO * predicted
        slowdown = self.slowdown * (1 + (min(seconds, most) / predicted - 1) / SLOWDOWN_RUNS)
        self.slowdown = min(max(slowdown, LEAST_SLOWDOWN), MOST_SLOWDOWN)
        busy = max(least, min(seconds if busy_s is None else busy_s, most))
        run = _sums(work, busy, 1 / predicted**2)
        self._runs = [(1 - 1 / PROPORTION_RUNS) * earlier + value for earlier, value in zip(self._runs, run, strict=True)]
        # the warm-up at the speed of these runs, so that a machine that is slower now does not look like a dearer start of a run
        fixed_s, rate = self._first
        weight, work, taken, *_ = self._runs
        slower = taken / (weight * fixed_s + work / rate)
        factors = (1.0, 1.0, slower, 1.0, slower)
        self._solve([value * factor + own for value, factor, own in zip(self._warm_up, factors, self._runs, strict=True)])

    def _solve(self, sums: _Sums) -> None:
        """Takes the proportion of the two numbers from the line of least squares through the summed points, if they say one.

        The mean run of the warm-up is predicted as long as it was, whatever the proportion: how long runs take now is the slowdown's matter.
        """
        weight, work, seconds, work_work, work_seconds = sums
        spread = weight * work_work - work * work
        if spread > 1e-9 * work * work:
            # per unit of work, times the spread; where longer runs took no longer, nearly all is fixed
            slope = max(weight * work_seconds - work * seconds, LEAST_SLOPE * seconds / work * spread)
            fixed = max(seconds * spread - work * slope, 0.0) / weight
        else:  # one work alone, and rounding: the proportion stays
            fixed, slope = self.fixed_s, 1 / self.rate
        mean_work, mean_s = self._mean
        unit_s = mean_s / (fixed + mean_work * slope)
        self.fixed_s, self.rate = fixed * unit_s, 1 / (slope * unit_s)


def _sums(work: float, seconds: float, weight: float) -> _Sums:
    """Returns what a point adds to the sums."""
    return weight, weight * work, weight * seconds, weight * work * work, weight * work * seconds
