"""The overhead comparison: rounds, ratios and thresholds with fake candidates, and the helpers for replicas and ports."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from bertserve.bench.errors import BenchError
from bertserve.bench.load.generator import Durations
from bertserve.bench.progress import BenchProgress
from listening import BUSY, OK, listening
from overhead import commits, replica
from overhead.comparison import CANDIDATES, THRESHOLDS, Candidate, Comparison, Load, Result, Running
from overhead.replica import Replica, free_ports

ONE, TWO = Load("short", 1), Load("short", 2)


def candidate(name: str, answer: bytes = OK, addresses: int = 1) -> Candidate:
    """Returns a candidate that this process serves."""

    async def answers(_: int) -> bytes:
        return answer

    @contextmanager
    def serve(models: Path, threads: int, folder: Path) -> Iterator[Running]:
        assert folder.is_dir()
        with listening(answers) as server:
            yield Running((f"http://127.0.0.1:{server.port}",) * addresses, lambda: (os.getpid(),))

    return Candidate(name, "", serve)


def comparison(*candidates: Candidate) -> Comparison:
    durations = Durations(0.1, 0, 5)  # no warm-up: on a stalled machine, the first requests may be the only ones
    return Comparison(candidates, [ONE, TWO], durations, models=Path(), threads=2, progress=BenchProgress(quiet=True))


def test_each_round_runs_each_load_against_each_candidate() -> None:
    """A load is skipped if its connections cannot be divided equally among the addresses of the candidate."""
    made = comparison(candidate("one"), candidate("two", addresses=2))
    for _ in range(2):
        made.run_round()

    assert {("one", ONE): 2, ("one", TWO): 2, ("two", TWO): 2} == {key: len(results) for key, results in made.results.items()}
    results = [result for found in made.results.values() for result in found]
    assert [True] * 6 == [result.rps > 0 and 0 < result.p50_ms <= result.p99_ms for result in results]
    assert sum(result.cpu_ms for result in results) > 0  # a load of few requests can take less CPU time than one clock tick
    assert {0} == {result.failed for result in results}
    assert made.ratio("two", "one", ONE) is None


def test_the_ratio_is_the_median_over_the_rounds() -> None:
    made = comparison()
    for name, speeds in {"one": (100, 200, 400), "two": (50, 200, 800)}.items():
        made.results[name, ONE] = [Result(speed, 1, 1, 0, 1, 0) for speed in speeds]

    assert 1 == made.ratio("two", "one", ONE)
    assert 200 == made.median("two", ONE, "rps")


def test_a_candidate_without_successful_responses_is_an_error() -> None:
    with pytest.raises(BenchError, match=r"busy .* short texts over 1 connections"):
        comparison(candidate("busy", BUSY)).run_round()


def test_thresholds_name_existing_candidates() -> None:
    assert {threshold.candidate for threshold in THRESHOLDS} | {threshold.of for threshold in THRESHOLDS} == {
        candidate.name for candidate in CANDIDATES
    }


def test_the_haproxy_configuration_takes_ports_and_replicas() -> None:
    text = replica.configuration(1, 2, [3, 4, 5])

    assert ["1", "2"] == [line.split(":")[1].split()[0] for line in text.splitlines() if line.strip().startswith("bind ")]
    assert [f"    server replica{i} 127.0.0.1:{i + 2}" for i in (1, 2, 3)] == [
        line for line in text.splitlines() if line.startswith("    server ")
    ]
    assert replica.CONFIGURATION.read_text() == replica.configuration(8000, 8404, [8001, 8002])


def test_a_replica_that_does_not_start_says_why(tmp_path: Path) -> None:
    with pytest.raises(BenchError, match="nowhere"):
        Replica(tmp_path / "nowhere", free_ports(1)[0], tmp_path / "log").start()


def test_free_ports_are_unused_and_below_the_ephemeral_range(monkeypatch: pytest.MonkeyPatch) -> None:
    """The ports are distinct. The system uses the ephemeral range for connections and for port 0."""
    range_file = Path("/proc/sys/net/ipv4/ip_local_port_range")
    lowest = int(range_file.read_text().split()[0]) if range_file.exists() else 32_768
    assert 1024 < replica.PORTS.start < replica.PORTS.stop <= lowest - 100

    (taken,) = replica.free_ports(1)
    monkeypatch.setattr(replica, "PORTS", range(taken, taken + 100))
    with socket.create_server(("127.0.0.1", taken)):
        found = replica.free_ports(50)

    assert 50 == len(set(found) & set(replica.PORTS))
    assert taken not in found


def test_an_unknown_commit_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert commits.main(["no-such-commit"]) == 2
    assert "no-such-commit" in capsys.readouterr().err
