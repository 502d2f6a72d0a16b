"""PeakConcurrency: the number of runs that recently needed a core at the same time."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from bertserve.service.scheduling.inference_thread import PeakConcurrency


@given(st.lists(st.tuples(st.floats(0.0, 0.7), st.integers(1, 9)), min_size=1, max_size=60))
def test_the_peak_is_the_maximum_of_the_last_one_to_two_windows(steps: list[tuple[float, int]]) -> None:
    """The peak is at least the maximum of the last window, and at most the maximum of the last two windows."""
    demand, now = PeakConcurrency(), 0.0
    seen: list[tuple[float, int]] = []
    for step, runs in steps:
        now += step
        demand.record(runs, now)
        seen.append((now, runs))
        least = max(count for when, count in seen if now - when < 1.0)
        most = max(count for when, count in seen if now - when <= 2.0)
        assert least <= demand.record(0, now) <= most
