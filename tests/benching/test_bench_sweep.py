"""A sweep finds the highest rate of a fake service that meets its objective up to a fixed rate."""

import re
import threading
from collections.abc import Callable, Mapping

import pytest

from bertserve.bench import commands
from bertserve.bench.measurement import LoadMetrics, latency_metrics
from bertserve.bench.report import BenchReport, parse_objectives, summary_lines
from bertserve.service.errors import StartError

CAPACITY = 1000  # requests per second


def load_metrics(name: str, rate: float, p99_ms: float, *, late: bool = False) -> LoadMetrics:
    """Returns a load whose latencies are all `p99_ms`."""
    latency = latency_metrics([p99_ms] * 200)
    counts = (1.0, int(rate), {"200": int(rate)}, 0.0, rate, rate, None, {})
    return LoadMetrics(name, name.startswith("open"), *counts, latency, {}, None, 0.1, 9.0 * late, [])


class FakeLoads:
    """Loads without requests. `p99(rate, confirmation)` is the latency of a load; `late(name)` says whether the generator was late."""

    def __init__(
        self,
        *,
        closed: float = 200,
        p99: Callable[[float, bool], float] = lambda rate, confirmation: 10.0 if rate <= CAPACITY else 90.0,
        late: Callable[[str], bool] = lambda name: False,
        interrupted: bool = False,
    ) -> None:
        self.report = BenchReport("sweep", {}, parse_objectives(["p99_ms=50"]))
        self.stop = threading.Event()
        self.closed, self.p99, self.late, self.interrupted = closed, p99, late, interrupted

    def run_closed_loop(self) -> list[LoadMetrics]:
        if self.interrupted:
            self.stop.set()
        return [load_metrics("closed", self.closed, 1.0)]

    def run_open_loop(self, rate: float, *remarks: str) -> list[LoadMetrics]:
        name = ", ".join((f"open, {rate:.4g}/s", *remarks))
        self.report.loads.append(load_metrics(name, rate, self.p99(rate, "confirmation" in remarks), late=self.late(name)))
        return self.report.loads[-1:]

    @property
    def names(self) -> list[str]:
        return [load.name.removeprefix("open, ") for load in self.report.loads]

    def sweep(self, *, steps: int = 6, max_rate: float | None = None) -> Mapping[str, float | None]:
        commands.sweep_rates(self, steps=steps, max_rate=max_rate)
        return self.report.results


@pytest.mark.parametrize(
    ("closed", "steps", "rates", "highest", "above"),
    [
        pytest.param(200, 6, [220, 440, 880, 1760, 1320, 1100], 880, 1100, id="a first rate that holds is doubled until one does not"),
        pytest.param(50, 4, [55, 110, 220, 440], 440, None, id="a search upward ends with its steps, and has a lower bound"),
        pytest.param(2000, 4, [2200, 1100, 550, 825], 825, 1100, id="a first rate that does not hold is halved"),
    ],
)
def test_the_search_goes_up_or_down_from_the_closed_loop(
    closed: float, steps: int, rates: list[float], highest: float, above: float | None
) -> None:
    loads = FakeLoads(closed=closed)
    results = loads.sweep(steps=steps)

    assert [name for name in loads.names if "confirmation" not in name] == [f"{rate}/s" for rate in rates]
    assert [name for name in loads.names if "confirmation" in name] == [f"{rate}/s, confirmation" for rate in rates if rate <= CAPACITY]
    assert (results["max_rate"], results["lowest_rate_not_held"]) == (pytest.approx(highest), above and pytest.approx(above))
    assert ("higher rates may hold" in loads.report.conclusion) == (above is None)
    assert loads.report.metrics["p99_ms"] == 10.0


@pytest.mark.parametrize(("max_rate", "rates", "highest", "bound"), [(400, [400], 400, True), (1600, [1600, 800, 1200], 800, False)])
def test_no_rate_exceeds_max_rate(max_rate: float, rates: list[float], highest: float, bound: bool) -> None:
    loads = FakeLoads()
    results = loads.sweep(steps=3, max_rate=max_rate)

    assert [name for name in loads.names if "confirmation" not in name] == [f"{rate}/s" for rate in rates]
    assert results["max_rate"] == highest
    assert ("higher rates may hold" in loads.report.conclusion) == bound


def test_a_rate_that_only_one_load_held_is_not_the_result() -> None:
    """The second load has other arrivals. The objectives are checked against the worse of both."""
    loads = FakeLoads(p99=lambda rate, confirmation: rate / 10 + 8 * confirmation)
    results = loads.sweep(steps=3, max_rate=480)

    assert loads.names == ["480/s", "480/s, confirmation", "240/s", "240/s, confirmation", "360/s", "360/s, confirmation"]
    assert results["max_rate"] == 360
    assert results["lowest_rate_not_held"] == 480
    assert loads.report.metrics["p99_ms"] == 44.0
    assert re.findall(r"\b\d{3}\b", loads.report.conclusion) == ["360", "480"]


@pytest.mark.parametrize("remark", ["", ", confirmation"])
def test_a_rate_at_which_the_generator_was_late_twice_is_not_measured(remark: str) -> None:
    """The search continues below it. Whether the service holds it stays unknown."""
    loads = FakeLoads(late=lambda name: name.startswith(f"open, 440/s{remark}"))
    results = loads.sweep(steps=3)

    assert [name for name in loads.names if "second try" in name] == [f"440/s{remark}, second try"]
    assert results == {"max_rate": pytest.approx(330), "lowest_rate_not_held": None, "unmeasured_rate": pytest.approx(440)}
    assert "not measured at 440" in loads.report.conclusion


def test_a_load_is_repeated_once_if_the_generator_was_late() -> None:
    loads = FakeLoads(late=lambda name: name == "open, 400/s")
    results = loads.sweep(max_rate=400)

    assert loads.names == ["400/s", "400/s, second try", "400/s, confirmation"]
    assert (results["max_rate"], results["unmeasured_rate"]) == (400, None)


def test_a_closed_loop_without_responses_is_an_error() -> None:
    with pytest.raises(StartError):
        FakeLoads(closed=0).sweep()


@pytest.mark.parametrize("closed", [0, 200])
def test_ctrl_c_in_the_closed_loop_ends_the_sweep(closed: float) -> None:
    """Before the first answer it is not an error, and after it no other load runs."""
    loads = FakeLoads(closed=closed, interrupted=True)
    loads.sweep()

    assert loads.names == []
    assert "no rate" in loads.report.conclusion


def test_a_comparison_without_a_round_has_no_ratio() -> None:
    """Ctrl-C ended it in the first round."""
    report = BenchReport("compare", {}, parse_objectives([]), interrupted=True)

    assert "no round" in report.conclusion
    assert not any("ratio" in line or "nothing" in line for line in summary_lines(report))
