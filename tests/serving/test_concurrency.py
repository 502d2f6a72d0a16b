"""How many runs wanted a core at once, of late."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from bertserve.service.scheduling.inference_thread import PeakConcurrency


def test_a_peak_lasts_for_a_window_and_at_most_two() -> None:
    """One burst is remembered for a second at least; then it is as if it had not been."""
    demand = PeakConcurrency(1.0)
    demand.record(3, 10.0)
    for now in (10.4, 10.9, 11.3, 11.9):
        demand.record(1, now)
        assert 3 == demand.peak(now)
    demand.record(1, 12.5)
    assert 1 == demand.peak(12.5)


def test_what_was_long_ago_counts_no_more() -> None:
    demand = PeakConcurrency(1.0)
    demand.record(8, 10.0)

    assert 0 == demand.peak(100.0)


@given(st.lists(st.tuples(st.floats(0.0, 0.7), st.integers(1, 9)), min_size=1, max_size=60))
def test_it_is_the_most_of_one_to_two_windows(steps: list[tuple[float, int]]) -> None:
    """Never less than the most of the last window, never more than that of the last two."""
    demand, now = PeakConcurrency(1.0), 0.0
    seen: list[tuple[float, int]] = []
    for step, runs in steps:
        now += step
        demand.record(runs, now)
        seen.append((now, runs))
        least = max(count for when, count in seen if now - when < 1.0)
        most = max(count for when, count in seen if now - when <= 2.0)
        assert least <= demand.peak(now) <= most
