"""CostModel: how long a run takes, and whether a batch is worth its padding. Pure arithmetic, no clock of its own."""

from __future__ import annotations

from collections.abc import Iterable

from service.manifest import Flops

FOLLOW = 64
MOST_RATIO = 4.0


class CostModel:
    """Seconds of a run of `rows` texts padded to `length` tokens: `fixed_s + rows * flops(length) / rate`.

    Two numbers are fitted, the fixed cost of a run and the rate in floating point operations per second; the
    shape of the curve comes from the architecture (performance notes: L * (24 H^2 + 4 S H) per token). In service both are
    scaled by how much longer runs take than predicted: lanes share caches and clocks with each other and with neighbors.
    """

    def __init__(self, flops: Flops, *, fixed_s: float = 1e-4, rate: float = 5e10) -> None:
        self._flops = flops
        self.fixed_s = fixed_s
        self.rate = rate
        self.slowdown = 1.0

    def seconds(self, rows: int, length: int) -> float:
        """Returns the predicted seconds of one run."""
        return self.slowdown * (self.fixed_s + rows * self._work(length) / self.rate)

    def follow(self, rows: int, length: int, seconds: float) -> None:
        """Learns from a run in service; a run counts for one part in FOLLOW, so that one stall does not mislead.

        Args:
            rows: Rows of the run.
            length: Tokens that they were padded to.
            seconds: What it took.
        """
        # lanes may do this at once; then one of them is lost, which does not matter
        ratio = min(seconds / self.seconds(rows, length), MOST_RATIO)
        self.slowdown += self.slowdown * (ratio - 1) / FOLLOW

    def fit(self, runs: Iterable[tuple[int, int, float]]) -> None:
        """Fits both numbers to measured runs by least squares, neither below zero.

        The relative error is minimized, so that short runs, where the fixed cost shows, weigh as much as long ones.

        Args:
            runs: `(rows, length, seconds)` of at least two runs of different work.
        """
        points = [(rows * self._work(length), seconds) for rows, length, seconds in runs]
        weights = [1 / seconds**2 for _, seconds in points]
        total = sum(weights)
        mean_work = sum(w * work for w, (work, _) in zip(weights, points, strict=True)) / total
        mean_s = sum(w * seconds for w, (_, seconds) in zip(weights, points, strict=True)) / total
        spread = sum(w * (work - mean_work) ** 2 for w, (work, _) in zip(weights, points, strict=True))
        joint = sum(w * (work - mean_work) * (seconds - mean_s) for w, (work, seconds) in zip(weights, points, strict=True))
        slope = joint / spread
        self.fixed_s = max(mean_s - slope * mean_work, 0.0)
        self.rate = mean_work / (mean_s - self.fixed_s) if mean_s > self.fixed_s else self.rate

    def _work(self, length: int) -> float:
        return self._flops.linear * length + self._flops.quadratic * length**2
