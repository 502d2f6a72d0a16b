"""Percentiles, measurements and objectives: arithmetic on records, without a load."""

import pytest

from bertserve.bench.generator import Load, RequestRecord
from bertserve.bench.measurement import LoadMetrics, latency_metrics, summarize
from bertserve.bench.report import parse_objectives
from bertserve.bench.target import Body, Target, parse_url
from bertserve.service.errors import StartError

# the load has 8 texts, and a run 2
TOTALS = {"bertserve_batch_rows_count": 4, "bertserve_batch_rows_sum": 8, "real": 80, "padded": 20}


def summary(records: list[RequestRecord], start: float, end: float, *, texts: int = 1, cpu_s: float = 0.0) -> LoadMetrics:
    target = Target(parse_url("http://127.0.0.1:1/classify"), [Body(b"{}", texts)], {})
    load = Load(target, 1, seconds=end - start, warmup_s=0, timeout_s=1)
    load.records, load.measured, load.cpu_s = records, (start, end), cpu_s
    return summarize("t", load, TOTALS, open_loop=True)


def test_a_distribution_keeps_its_tail() -> None:
    times = [float(i) for i in range(1000, 0, -1)]

    assert latency_metrics(times) == {"mean_ms": 500.5, "p50_ms": 500, "p90_ms": 900, "p99_ms": 990, "p999_ms": 999, "max_ms": 1000}


def test_latency_counts_from_the_scheduled_time() -> None:
    """A request sent 3 s late and answered 1 s later took 4 s. Failures count in the error rate, not in the latencies."""
    records = [
        RequestRecord(0.0, 3.0, 4.0, 200, 0, b""),
        RequestRecord(0.5, 0.5, 0.6, "timeout", 0, b""),
        RequestRecord(0.6, 0.6, 0.7, 503, 0, b""),
    ]
    metrics = summary(records, 0.0, 10.0, texts=4)

    assert metrics.latency["max_ms"] == 4000.0
    assert metrics.outcomes == {"200": 1, "503": 1, "timeout": 1}
    assert metrics.error_rate == pytest.approx(2 / 3)
    assert (metrics.rps, metrics.texts_per_s) == (0.1, 0.4)


def test_rates_do_not_depend_on_the_measured_interval() -> None:
    """Three concurrent requests of 4 s each are 0.75 requests per second in every interval."""
    records = [RequestRecord(at, at, at + 4.0, 200, 0, b"") for at in (0.0, 4.0, 8.0, 12.0, 16.0) for _ in range(3)]
    for start, end in ((0.0, 20.0), (2.0, 9.0), (3.9, 8.1), (9.0, 10.0)):
        metrics = summary(records, start, end, texts=2)
        assert (metrics.rps, metrics.texts_per_s) == pytest.approx((0.75, 1.5))


def test_overhead_is_the_time_outside_inference() -> None:
    records = [RequestRecord(float(i), float(i), i + 0.010, 200, 0, b" tokenize;dur=1.000, inference;dur=7.500") for i in range(3)]
    metrics = summary(records, 0.0, 5.0)

    assert metrics.server_p50_ms == {"tokenize": 1.0, "inference": 7.5}
    assert metrics.overhead_ms == pytest.approx(2.5)


@pytest.mark.parametrize("cpu_s", [3.4, 3.6])
def test_a_generator_that_uses_most_of_a_core_is_a_warning(cpu_s: float) -> None:
    metrics = summary([RequestRecord(0.0, 0.0, 0.1, 200, 0, b"")], 0.0, 5.0, cpu_s=cpu_s)

    assert (metrics.cpu_share, bool(metrics.warnings)) == (cpu_s / 5, cpu_s > 3.5)


@pytest.mark.parametrize(
    ("objective", "value", "passed"),
    [
        ("p99_ms=50", 50.0, True),
        ("p99_ms=50", 50.1, False),
        ("rps=400", 400.0, True),
        ("rps=400", 399.0, False),
        ("ratio=0.8", 0.81, True),
        ("p99_ms=50", None, False),
    ],
)
def test_objectives_are_upper_or_lower_limits(objective: str, value: float | None, passed: bool) -> None:
    assert parse_objectives([objective])[0].is_met(value) == passed


def test_parsed_objectives_include_a_default_error_rate() -> None:
    assert [str(c) for c in parse_objectives(["p99_ms=50, rps=10"])] == ["p99_ms <= 50", "rps >= 10", "error_rate <= 0.01"]
    assert [str(c) for c in parse_objectives(["error_rate=0.5"])] == ["error_rate <= 0.5"]
    assert [str(c) for c in parse_objectives([])] == ["error_rate <= 0.01"]


@pytest.mark.parametrize("text", ["p99_ms", "p99=50", "p99_ms=fast", "p99_ms=-1", "p99_ms=nan", ""])
def test_an_invalid_objective_is_refused(text: str) -> None:
    with pytest.raises(StartError, match="p99_ms"):
        parse_objectives([text])


def test_the_warm_up_is_left_out() -> None:
    records = [RequestRecord(at, at, at + 0.01, 200, 0, b"") for at in (0.0, 0.5, 1.0, 1.5)]
    metrics = summary(records, 1.0, 2.0)

    assert metrics.requests == 2
    assert metrics.rps == 2.0
    # each of the 4 requests has 20 tokens
    assert metrics.tokens_per_s == pytest.approx(40)
    assert metrics.batches == {"runs": 4, "mean_rows": 2, "padding_share": 0.2}
