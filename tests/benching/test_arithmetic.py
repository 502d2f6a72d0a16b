"""The parts of bert-bench without a clock: arrivals, the ideal queue, percentiles, targets, texts."""

from __future__ import annotations

import itertools
import json
import math
import random
from collections import Counter
from pathlib import Path
from statistics import fmean, median
from typing import Any

import pytest

import tiny
from bench.engine.bare_engine import BareEngine
from bench.errors import BenchError
from bench.experiments import queue_simulation
from bench.load.arrivals import poisson_arrivals
from bench.load.record import Record
from bench.report import measurement, slo
from bench.report.latency import latency_distribution, percentile
from bench.target.address import parse_url
from bench.target.metrics import BatchStats, batch_stats, parse_metrics, read_metrics
from bench.target.target import build_target
from bench.workload import bodies, mixes, sentences
from listening import listening

ROOT = Path(__file__).parent.parent.parent


def test_arrivals_are_a_poisson_process() -> None:
    """Their number is near rate x seconds, and their gaps spread like an exponential: deviation as large as the mean."""
    times = poisson_arrivals(100, 200, seed=1)
    gaps = [b - a for a, b in itertools.pairwise(times)]

    assert 20_000 == pytest.approx(len(times), rel=0.03)
    assert 0.01 == pytest.approx(fmean(gaps), rel=0.03)
    assert 0.01 == pytest.approx(math.sqrt(fmean((gap - 0.01) ** 2 for gap in gaps)), rel=0.05)
    assert sorted(times) == times
    assert 200 > times[-1]


def test_arrivals_are_the_same_for_a_seed() -> None:
    """Another rate stretches them; another seed changes them."""
    times = poisson_arrivals(10, 5, seed=3)

    assert times == poisson_arrivals(10, 5, seed=3)
    assert times != poisson_arrivals(10, 5, seed=4)
    assert [t / 2 for t in times] == pytest.approx(poisson_arrivals(20, 2.5, seed=3))


def test_the_queue_by_hand() -> None:
    """Two servers, four jobs: the third and the fourth wait for whoever is free first."""
    jobs = [[3.0], [1.0], [1.0], [1.0]]

    assert [3.0, 1.0, 1.5, 2.0] == queue_simulation.simulate([0.0, 0.0, 0.5, 1.0], jobs, 2)


def test_parts_of_a_job_run_side_by_side() -> None:
    """A job of three parts on two servers is done when its last part is."""
    assert [2.0, 1.0] == queue_simulation.simulate([0.0, 1.0], [[1.0, 1.0, 1.0], [1.0]], 2)


def test_the_queue_gives_the_known_mean_of_one_exponential_server() -> None:
    """M/M/1 at 50 % load: the mean time in the system is 1 / (mu - lambda)."""
    random_ = random.Random(98)
    times = poisson_arrivals(0.5, 400_000, seed=0)
    latencies = queue_simulation.simulate(times, [[random_.expovariate(1.0)] for _ in times], 1)

    assert 2.0 == pytest.approx(fmean(latencies), rel=0.03)


def test_the_queue_gives_the_known_mean_of_one_steady_server() -> None:
    """M/D/1 at 50 % load: half of the waiting of M/M/1, so 1 + 0.5 of the run time."""
    times = poisson_arrivals(0.5, 400_000, seed=0)

    assert 1.5 == pytest.approx(fmean(queue_simulation.simulate(times, [[1.0]] * len(times), 1)), rel=0.03)


def test_the_queue_gives_the_known_wait_of_two_exponential_servers() -> None:
    """M/M/2 at 70 % load: by Erlang's formula a job is 1 / (1 - 0.7^2) of its run time in the system."""
    random_ = random.Random(99)
    times = poisson_arrivals(1.4, 200_000, seed=1)
    latencies = queue_simulation.simulate(times, [[random_.expovariate(1.0)] for _ in times], 2)

    assert 1 / (1 - 0.49) == pytest.approx(fmean(latencies), rel=0.03)


def test_scaling_gives_the_queue_its_capacity() -> None:
    """Run times keep their proportions, and servers / mean run time is the capacity."""
    jobs = queue_simulation.scale_to_capacity([[1.0], [2.0, 1.0]], 2, 10.0)

    assert 10.0 == pytest.approx(2 / fmean(map(sum, jobs)))
    assert 2.0 == pytest.approx(jobs[1][0] / jobs[0][0])


@pytest.mark.parametrize(("share", "expected"), [(0.5, 5.0), (0.9, 9.0), (0.99, 10.0), (1.0, 10.0), (0.01, 1.0), (0.1, 1.0)])
def test_percentiles_are_values_that_occurred(share: float, expected: float) -> None:
    """By nearest rank, of 1 to 10."""
    assert expected == percentile([float(i) for i in range(1, 11)], share)


def test_a_distribution_keeps_its_tail() -> None:
    """The curve rises from the least to the greatest value, and the percentiles lie on it."""
    spread = latency_distribution(map(float, range(1000, 0, -1)))
    assert spread is not None

    assert (500.0, 900.0, 990.0, 999.0, 1000.0, 1000) == (
        spread.p50_ms,
        spread.p90_ms,
        spread.p99_ms,
        spread.p999_ms,
        spread.max_ms,
        spread.count,
    )
    assert sorted(spread.curve) == spread.curve
    assert ([0.0, 1.0], [1.0, 1000.0]) == (spread.curve[0], spread.curve[-1])


def test_nothing_has_no_distribution() -> None:
    """Where nothing was answered there is no percentile to pass."""
    assert None is latency_distribution([])


def test_latency_counts_from_when_a_request_was_due() -> None:
    """A request sent 3 s late and answered after 1 s took 4 s; failures are in the error rate, not in the latencies."""
    records = [Record(0.0, 3.0, 4.0, 200, 0, b""), Record(0.5, 0.5, 0.6, "timeout", 0, b""), Record(0.6, 0.6, 0.7, 503, 0, b"")]
    found = measurement.measure("t", records, (0.0, 10.0), texts=[4], tokens=[30])
    assert found.latency is not None

    assert 4000.0 == found.latency.max_ms
    assert ({"200": 1, "503": 1}, {"timeout": 1}) == (found.statuses, found.errors)
    assert 2 / 3 == pytest.approx(found.error_rate)
    assert (0.1, 0.4, 3.0) == (found.rps, found.texts_per_s, found.tokens_per_s)


def test_rates_do_not_come_in_waves() -> None:
    """Three requests at a time of 4 s each are 0.75 a second, wherever the measured time begins and ends."""
    records = [Record(at, at, at + 4.0, 200, 0, b"") for at in (0.0, 4.0, 8.0, 12.0, 16.0) for _ in range(3)]
    for start, end in ((0.0, 20.0), (2.0, 9.0), (3.9, 8.1), (9.0, 10.0)):
        found = measurement.measure("t", records, (start, end), texts=[2], tokens=[8])
        assert pytest.approx((0.75, 1.5, 6.0)) == (found.rps, found.texts_per_s, found.tokens_per_s)


def test_what_is_not_answered_is_no_work() -> None:
    """Rates leave out failures, and answers that took no time count where they came."""
    records = [Record(0.5, 0.5, 0.9, 503, 0, b""), Record(1.0, 1.0, 1.0, 200, 0, b""), Record(2.0, 2.0, 2.0, 200, 0, b"")]
    assert 0.5 == measurement.measure("t", records, (0.0, 2.0), texts=[1]).rps


def test_overhead_is_what_the_service_did_not_spend_in_the_graph() -> None:
    """Median latency less the median of `inference` in the server-timing header."""
    records = [Record(float(i), float(i), i + 0.010, 200, 0, b" tokenize;dur=1.000, inference;dur=7.500") for i in range(3)]
    found = measurement.measure("t", records, (0.0, 5.0), texts=[1])

    assert {"tokenize": 1.0, "inference": 7.5} == found.server_p50_ms
    assert 2.5 == pytest.approx(found.overhead_ms)


def test_batches_are_the_growth_of_the_metrics() -> None:
    """Rows, runs, padding and tokens between two readings, of one model."""
    name = "bertserve_batch_rows"
    before = {(f"{name}_count", "m", ""): 10.0, (f"{name}_sum", "m", ""): 10.0, (f"{name}_bucket", "m", "1.0"): 10.0}
    before |= {(f"{name}_bucket", "m", bound): 10.0 for bound in ("2.0", "4.0", "+Inf")}
    after = {
        (f"{name}_count", "m", ""): 14.0,
        (f"{name}_sum", "m", ""): 17.0,
        (f"{name}_bucket", "m", "1.0"): 12.0,
        (f"{name}_bucket", "m", "2.0"): 13.0,
        (f"{name}_bucket", "m", "4.0"): 14.0,
        (f"{name}_bucket", "m", "+Inf"): 14.0,
        ("bertserve_tokens_total", "m", "real"): 90.0,
        ("bertserve_tokens_total", "m", "padded"): 10.0,
    }

    found = batch_stats(before, after, "m")

    assert BatchStats(runs=4, mean_rows=1.75, rows={"1": 2, "2": 1, "4": 1}, real_tokens=90, padding_share=0.1) == found
    assert None is batch_stats(before, after, "another")


def test_metrics_are_read_from_the_page_of_prometheus() -> None:
    """Series of runs and tokens by model; those of several tasks of one model are added up, and all others are left out."""
    page = """# HELP bertserve_batch_rows Rows of a run.
# TYPE bertserve_batch_rows histogram
bertserve_batch_rows_bucket{le="1.0",model="m",task="a"} 2.0
bertserve_batch_rows_bucket{le="1.0",model="m",task="b"} 3.0
bertserve_batch_rows_bucket{le="+Inf",model="odd \\" } name",task="a"} 7.0
bertserve_batch_rows_count{model="m",task="a"} 2.0
bertserve_batch_rows_sum{model="m",task="a"} 4.0
# HELP bertserve_tokens_total Tokens.
# TYPE bertserve_tokens_total counter
bertserve_tokens_total{kind="real",model="m"} 1e+06
# HELP bertserve_queue_seconds Wait.
# TYPE bertserve_queue_seconds summary
bertserve_queue_seconds_count{model="m"} 5.0
"""
    expected = {
        ("bertserve_batch_rows_bucket", "m", "1.0"): 5.0,
        ("bertserve_batch_rows_bucket", 'odd " } name', "+Inf"): 7.0,
        ("bertserve_batch_rows_count", "m", ""): 2.0,
        ("bertserve_batch_rows_sum", "m", ""): 4.0,
        ("bertserve_tokens_total", "m", "real"): 1e6,
    }

    assert expected == parse_metrics(page)


@pytest.mark.parametrize("answer", [b"200 OK", b"404 Not Found"])
def test_a_service_without_metrics_has_none(answer: bytes) -> None:
    """A page that is missing, or is not one of Prometheus, gives no figures and no error."""

    async def page(_: int) -> bytes:
        return b"HTTP/1.1 %s\r\ncontent-length: 9\r\n\r\n{nonsense" % answer

    with listening(page) as server:
        assert {} == read_metrics(parse_url(f"http://127.0.0.1:{server.port}/classify"), {})
    assert {} == read_metrics(parse_url(f"http://127.0.0.1:{server.port}/classify"), {})


@pytest.mark.parametrize(
    ("given", "measured", "passed"),
    [
        ("p99_ms=50", 50.0, True),
        ("p99_ms=50", 50.1, False),
        ("rps=400", 400.0, True),
        ("rps=400", 399.0, False),
        ("ratio=0.8", 0.81, True),
        ("p99_ms=50", None, False),
    ],
)
def test_targets_bound_from_the_right_side(given: str, measured: float | None, passed: bool) -> None:
    """Latencies and errors must not exceed their targets, rates must reach them, and what was not measured misses."""
    condition = slo.parse_objectives([given])[0]

    assert [passed] == [verdict.passed for verdict in slo.evaluate([condition], {condition.figure: measured})]


def test_targets_are_read_from_lists_and_bound_errors_too() -> None:
    """Without a target for errors theirs is 1 %."""
    assert ["p99_ms <= 50", "rps >= 10", "error_rate <= 0.01"] == [str(c) for c in slo.parse_objectives(["p99_ms=50, rps=10"])]
    assert ["error_rate <= 0.5"] == [str(c) for c in slo.parse_objectives(["error_rate=0.5"])]
    assert () == slo.parse_objectives([])


@pytest.mark.parametrize("text", ["p99_ms", "p99=50", "p99_ms=fast", "p99_ms=-1", "p99_ms=nan", ""])
def test_a_wrong_target_is_refused(text: str) -> None:
    """The message lists the figures."""
    with pytest.raises(BenchError, match="p99_ms"):
        slo.parse_objectives([text])


@pytest.mark.parametrize("url", ["localhost:8000", "ftp://a/b", "http://", "http://a:b/", "http://a b/", "http://[::1/x"])
def test_a_wrong_address_is_refused(url: str) -> None:
    """The message shows one that is right."""
    with pytest.raises(BenchError, match=r"http://127\.0\.0\.1:8000/classify"):
        parse_url(url)


def test_a_request_is_whole_http() -> None:
    """Path and query, host with its port, headers, length, body."""
    address = parse_url("http://[::1]:8000/classify?a=b")
    made = build_target(address, "m", [bodies.Body(b"{}", 1)], {"x-a": "1"})
    expected = b"POST /classify?a=b HTTP/1.1\r\nHost: [::1]:8000\r\nContent-Type: application/json\r\nx-a: 1\r\nContent-Length: 2\r\n\r\n{}"

    assert [expected] == made.requests


@pytest.mark.parametrize("name", mixes.NAMES)
def test_mixes_are_the_same_for_a_seed(name: str) -> None:
    """Dozens of distinct inputs; another seed gives others."""
    made = mixes.mix_inputs(name, seed=1)

    assert made == mixes.mix_inputs(name, seed=1)
    assert made != mixes.mix_inputs(name, seed=2)
    assert len(made) == len({str(item) for item in made}) >= 24


@pytest.mark.parametrize(
    ("mix", "low", "mean", "high"), [("short", 15, 23, 30), ("long", 135, 162, 190), ("mixed", 5, 48, 320), ("uniform", 12, 260, 512)]
)
def test_mixes_have_the_lengths_that_they_promise(mix: str, low: int, mean: int, high: int) -> None:
    """In tokens of the sentiment model, special tokens counted; of `mixed` most texts are shorter than its mean."""
    tokens = BareEngine(ROOT / "models/sentiment").encode(bodies.build_bodies(mix)).tokens

    assert mean == pytest.approx(fmean(tokens), rel=0.05)
    assert low <= min(tokens)
    assert high >= max(tokens)
    assert mix != "mixed" or median(tokens) < 40


def test_passages_take_about_five_windows() -> None:
    """Of 384 tokens that share 128, as the service cuts them."""
    work = BareEngine(ROOT / "models/qa").encode(bodies.build_bodies("qa"))

    assert 5 == pytest.approx(fmean(map(len, work.feeds)), abs=0.2)


def test_a_body_of_another_task_that_the_model_can_do_is_run_as_that(tmp_path: Path) -> None:
    """Candidate labels make a pair each, a query and texts a pair for each text."""
    tiny.bundle(tmp_path, "nli", labels=("contradiction", "entailment"))
    tiny.bundle(tmp_path, "ranker", labels=("LABEL_0",))
    zero_shot = bodies.Body(b'{"inputs": "good", "parameters": {"candidate_labels": ["a", "b", "c"]}}', 1)
    rerank = bodies.Body(b'{"query": "good", "texts": ["a film", "bad"]}', 1)

    assert [3] == [len(lengths) for lengths in BareEngine(tmp_path / "nli").encode([zero_shot]).lengths]
    assert [[6, 5]] == BareEngine(tmp_path / "ranker").encode([rerank]).lengths


def test_several_texts_in_a_request_all_take_turns() -> None:
    """Groups of 24 out of 64 use every text equally often."""
    made = bodies.build_bodies("short", texts=24)

    assert {24} == {body.texts for body in made}
    assert 8 == len(made)


@pytest.mark.parametrize(
    ("path", "texts", "expected", "count"),
    [
        ("/embed", 1, {"inputs": "a"}, 1),
        ("/embed", 2, {"inputs": ["a", "b"]}, 2),
        ("/models/rerank", 2, {"inputs": ["a", "b"]}, 2),
        ("/similarity", 1, {"inputs": {"source_sentence": "a", "sentences": ["b"]}}, 2),
        ("/proxy/similarity?x=1", 2, {"inputs": {"source_sentence": "a", "sentences": ["b", "c"]}}, 3),
        ("/rerank", 1, {"query": "Who founded the school?", "texts": ["a"]}, 1),
        ("/proxy/rerank/", 3, {"query": "Who founded the school?", "texts": ["a", "b", "c"]}, 3),
        ("/zero-shot", 1, {"inputs": "a", "parameters": {"candidate_labels": list(sentences.LABELS)}}, 4),
        ("/zero-shot", 2, {"inputs": ["a", "b"], "parameters": {"candidate_labels": list(sentences.LABELS)}}, 8),
    ],
)
def test_texts_stand_in_the_body_of_their_endpoint(path: str, texts: int, expected: dict[str, Any], count: int, tmp_path: Path) -> None:
    """By the last part of the path; counted is what the model has to read."""
    file = tmp_path / "texts.jsonl"
    file.write_text("".join(f'"{letter}"\n' for letter in "abcdef"), encoding="utf-8")
    made = bodies.build_bodies(str(file), path=path, texts=texts)

    assert bodies.Body(json.dumps(expected).encode(), count) == made[0]
    assert {count} == {body.texts for body in made}
    assert len(made) == len({body.content for body in made})


@pytest.mark.parametrize("path", ["/rerank", "/similarity", "/zero-shot"])
def test_every_text_of_a_mix_is_sent_equally_often(path: str) -> None:
    """Also where a body takes one more to compare with; queries take turns."""
    made = [json.loads(body.content) for body in bodies.build_bodies("short", path=path, texts=5)]
    given = [body.get("texts") or body["inputs"] for body in made]
    flat = [text for item in given for text in (item if isinstance(item, list) else [item["source_sentence"], *item["sentences"]])]

    assert 1 == len(set(Counter(flat).values()))
    assert 64 == len(set(flat))


def test_questions_with_passages_are_no_texts_to_rank() -> None:
    """The mix and the endpoint do not fit, which is said before anything is sent."""
    with pytest.raises(BenchError, match="/rerank takes texts, not questions with passages"):
        bodies.build_bodies("qa", path="/rerank")


def test_whole_bodies_count_what_the_model_reads(tmp_path: Path) -> None:
    """Texts of a query, sentences with the one they are compared with, and a pair for each label."""
    file = tmp_path / "bodies.jsonl"
    lines: list[dict[str, Any]] = [
        {"query": "a", "texts": ["b", "c", "d"]},
        {"inputs": {"source_sentence": "a", "sentences": ["b", "c"]}},
        {"inputs": "a", "parameters": {"candidate_labels": "b, c,"}},
        {"inputs": ["a", "b"], "parameters": {"candidate_labels": ["c", "d", "e"]}},
        {"inputs": {"question": "a", "context": "b"}, "parameters": None},
    ]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")

    assert [3, 3, 2, 6, 1] == [body.texts for body in bodies.build_bodies(str(file), path="/rerank")]


def test_a_long_file_is_sent_whole(tmp_path: Path) -> None:
    """However many texts it has, one or several to a request."""
    file = tmp_path / "texts.jsonl"
    file.write_text("".join(f'"text {i}"\n' for i in range(2001)), encoding="utf-8")

    assert [2001, 1000] == [len(bodies.build_bodies(str(file), texts=texts)) for texts in (1, 2)]


def test_a_file_of_bodies(tmp_path: Path) -> None:
    """Objects are sent as they are, strings are inputs, empty lines nothing."""
    file = tmp_path / "bodies.jsonl"
    file.write_text('{"inputs": ["a", "b"], "parameters": {}}\n\n"c"\n', encoding="utf-8")

    assert [bodies.Body(b'{"inputs": ["a", "b"], "parameters": {}}', 2), bodies.Body(b'{"inputs": "c"}', 1)] == bodies.build_bodies(
        str(file)
    )


@pytest.mark.parametrize(("content", "message"), [("", "no body"), ("{", "line 1"), ("1", "neither"), (None, "neither a mix")])
def test_a_wrong_file_is_refused(tmp_path: Path, content: str | None, message: str) -> None:
    """The message says which line, or that there is no such mix."""
    file = tmp_path / "bodies.jsonl"
    if content is not None:
        file.write_text(content, encoding="utf-8")

    with pytest.raises(BenchError, match=message):
        bodies.build_bodies(str(file))


def test_whole_bodies_are_not_grouped(tmp_path: Path) -> None:
    """--texts is for texts."""
    file = tmp_path / "bodies.jsonl"
    file.write_text('{"inputs": "a"}\n', encoding="utf-8")

    with pytest.raises(BenchError, match="--texts 2"):
        bodies.build_bodies(str(file), texts=2)
