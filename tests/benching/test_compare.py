"""`make compare`: ratios within rounds, and the helpers that start services on free ports."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

import compare
import replica
from bertserve.bench.errors import BenchError
from compare import Load, Result
from replica import Replica, free_ports


def test_the_speed_is_the_median_of_the_ratios_within_rounds() -> None:
    """A machine that becomes slower from round to round does not change it. The spread is the lowest and the highest ratio."""
    rounds = [{"base": [Result(rps, 2.0)], "new": [Result(rps * ratio, 1.0)]} for rps, ratio in ((400, 0.9), (200, 1.1), (100, 1.0))]
    [_, _, row] = compare.table("abc", [Load("short", "short", 16)], rounds)

    assert ["short", "16", "200.0", "220.0", "1.000", "0.900 to 1.100", "2.000", "1.000", "0.500"] == row.strip("| ").split(" | ")


def test_an_unknown_commit_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert 2 == compare.main(["no-such-commit"])
    assert "no-such-commit" in capsys.readouterr().err


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
