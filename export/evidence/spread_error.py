"""How far outputs are from the reference's, over what the reference's vary by: how much of an output is lost, whatever its scale. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray


class SpreadError:
    """Errors of a graph's outputs over the standard deviation of the reference's, row by row; of several outputs the worst one's.

    It keeps sums alone: of fill-mask all rows together would be gigabytes.

    Attributes:
        rows: How many were counted in.
    """

    def __init__(self) -> None:
        self.rows = 0
        self._sums: dict[str, _Sums] = {}

    def add(self, expected: Mapping[str, NDArray[np.float32]], actual: Mapping[str, NDArray[np.float32]]) -> None:
        """Counts a row in.

        Args:
            expected: The reference's outputs by name, float32 of any shape.
            actual: The graph's, of the same shapes.
        """
        self.rows += 1
        for name, value in expected.items():
            self._sums.setdefault(name, _Sums()).add(value.astype(np.float64).ravel(), actual[name].astype(np.float64).ravel())

    @property
    def rms(self) -> float:
        """Root mean square difference over the standard deviation; 0 where there is nothing to compare."""
        return _largest([sums.rms for sums in self._sums.values()])

    @property
    def worst(self) -> float:
        """Largest difference over the standard deviation; 0 where there is nothing to compare."""
        return _largest([sums.worst for sums in self._sums.values()])


def _largest(values: list[float]) -> float:
    """Returns the largest value, 0 where there is none; NaN where one is NaN, which `max` may leave out."""
    return float(np.max(values, initial=0.0))


class _Sums:
    """One output's."""

    def __init__(self) -> None:
        self._count, self._total, self._squares, self._errors, self._largest = 0, 0.0, 0.0, 0.0, 0.0

    def add(self, expected: NDArray[np.float64], actual: NDArray[np.float64]) -> None:
        if expected.size:
            difference = actual - expected
            self._count += expected.size
            self._total += float(expected.sum())
            self._squares += float(expected @ expected)
            self._errors += float(difference @ difference)
            # not max(): that would let a NaN pass
            self._largest = float(np.maximum(self._largest, np.abs(difference).max()))

    @property
    def _spread(self) -> float:
        mean = self._total / self._count
        return max(math.sqrt(max(self._squares / self._count - mean**2, 0.0)), 1e-12)

    @property
    def rms(self) -> float:
        return math.sqrt(self._errors / self._count) / self._spread if self._count else 0.0

    @property
    def worst(self) -> float:
        return self._largest / self._spread if self._count else 0.0
