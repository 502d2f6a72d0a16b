"""How a sweep searches for the highest rate, with a fake service that meets its objective up to a fixed rate."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest

from bertserve.bench import experiments as module
from bertserve.bench.errors import BenchError
from bertserve.bench.progress import BenchProgress
from bertserve.bench.report.report import BenchReport
from bertserve.bench.report.slo import parse_objectives

CAPACITY = 1000  # requests per second


class Service:
    """A fake load test: the service meets the objective up to CAPACITY, and a closed loop reaches `closed` requests per second."""

    def __init__(self, *, closed: float, late_above: float = float("inf")) -> None:
        self.closed, self.late_above = closed, late_above
        self.stop = threading.Event()
        self.progress = BenchProgress(quiet=True)
        self.rates: list[float] = []

    def run_closed_loop(self, connections: int) -> Any:
        """Returns a run with the rate `closed`."""
        return SimpleNamespace(rate=self.closed, generator=SimpleNamespace(was_late=False))

    def run_open_loop(self, rate: float) -> tuple[Any, None, None]:
        self.rates.append(rate)
        return SimpleNamespace(name=f"open, {rate:g}/s", rate=rate, generator=SimpleNamespace(was_late=rate > self.late_above)), None, None

    def sweep(self, *, steps: int = 6, max_rate: float | None = None) -> BenchReport:
        """Returns the report of a sweep with a p99 objective of 50 ms."""
        report = BenchReport("sweep", {})
        module.sweep(self, report, parse_objectives(["p99_ms=50"]), connections=16, steps=steps, max_rate=max_rate)  # type: ignore[arg-type]
        return report


@pytest.fixture(autouse=True)
def metrics_of_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        module, "run_metrics", lambda run: {"rps": run.rate, "error_rate": 0.0, "p99_ms": 10.0 if run.rate <= CAPACITY else 90.0}
    )


@pytest.mark.parametrize(
    ("closed", "steps", "rates", "found", "bound"),
    [
        pytest.param(200, 6, [220, 440, 880, 1760, 1320, 1100], 880, False, id="a first rate that holds is doubled until one does not"),
        pytest.param(50, 4, [55, 110, 220, 440], 440, True, id="a search upward ends with its steps, and has a lower bound"),
        pytest.param(2000, 4, [2200, 1100, 550, 825], 825, False, id="a first rate that does not hold is halved"),
    ],
)
def test_the_search_goes_up_or_down_from_the_closed_loop(closed: float, steps: int, rates: list[float], found: float, bound: bool) -> None:
    service = Service(closed=closed)
    report = service.sweep(steps=steps)

    assert pytest.approx(rates) == service.rates
    assert (pytest.approx(found), bound, 10.0) == (report.figures["max_rate"], report.is_lower_bound, report.judged["p99_ms"])


@pytest.mark.parametrize(("max_rate", "rates", "found", "bound"), [(400, [400], 400, True), (1600, [1600, 800, 1200], 800, False)])
def test_no_rate_exceeds_max_rate(max_rate: float, rates: list[float], found: float, bound: bool) -> None:
    """The search begins at `--max-rate`, and ends there if that rate holds."""
    service = Service(closed=50)
    report = service.sweep(steps=3, max_rate=max_rate)

    assert (rates, found, bound) == (service.rates, report.figures["max_rate"], report.is_lower_bound)


def test_a_late_generator_ends_the_upward_search() -> None:
    """A rate that the generator cannot send is inconclusive. The search continues at lower rates, and the report names the step."""
    service = Service(closed=200, late_above=500)
    report = service.sweep(steps=4)

    assert pytest.approx([220, 440, 880, 880, 660, 660]) == service.rates
    assert (pytest.approx(440), False, ["open, 880/s", "open, 660/s"]) == (
        report.figures["max_rate"],
        report.is_lower_bound,
        report.inconclusive,
    )


def test_a_closed_loop_without_responses_is_an_error() -> None:
    with pytest.raises(BenchError):
        Service(closed=0).sweep()
