"""The load generator against a tiny server: every request ends in one record, and latency counts from when it was due."""

from __future__ import annotations

import asyncio
import itertools
import socket
import threading
from collections import Counter

import pytest

from bench.errors import BenchError
from bench.load import generator
from bench.load.generator import Durations, LoadResult
from bench.load.record import Record
from bench.progress import Progress
from bench.report import measurement
from bench.target.address import parse_url
from bench.target.target import Target, build_target
from bench.workload.bodies import Body
from listening import BUSY, OK, listening, ok

DURATIONS = Durations(seconds=0.4, warmup_s=0.0, timeout_s=2.0)
BODIES = [Body(b'{"inputs":"a"}', 1), Body(b'{"inputs":["b","c"]}', 2)]


def made(port: int) -> Target:
    """Returns a target on loopback."""
    return build_target(parse_url(f"http://127.0.0.1:{port}/classify"), "test", BODIES, {"x-test": "1"})


def closed(port: int, connections: int = 2, durations: Durations = DURATIONS, stop: threading.Event | None = None) -> LoadResult:
    """Loads in a closed loop."""
    return generator.run_closed_loop([made(port)], connections, durations, stop=stop or threading.Event(), progress=Progress(quiet=True))


def opened(port: int, arrivals: list[float], *, most: int = 64, durations: Durations = DURATIONS) -> LoadResult:
    """Loads in an open loop."""
    return generator.run_open_loop([made(port)], [arrivals], most, durations, stop=threading.Event(), progress=Progress(quiet=True))


def outcomes(load: LoadResult) -> set[int | str]:
    """Returns how the requests ended."""
    return {record.outcome for record in load.records[0]}


def test_a_closed_loop_keeps_its_connections() -> None:
    """Each connection sends request after request, and all bodies take turns."""
    with listening(ok) as server:
        load = closed(server.port)

    assert 2 == server.connections
    assert {200} == outcomes(load)
    assert server.requests == len(load.records[0])
    assert {body.content for body in BODIES} == set(server.bodies)
    assert b"tokenize;dur=0.5, inference;dur=2.0" == load.records[0][0].server_timing


def test_one_connection_has_one_request_in_flight() -> None:
    """A closed loop of one connection never asks for two things at once."""
    with listening(ok) as server:
        load = closed(server.port, connections=1)
    records = sorted(load.records[0])

    assert [] == [pair for pair in itertools.pairwise(records) if pair[1].sent < pair[0].ended]


def test_a_stall_counts_for_all_that_it_delays() -> None:
    """While the only connection waits 200 ms for an answer, requests come due; their latency begins then, not when they are sent."""

    async def stall_first(i: int) -> bytes:
        await asyncio.sleep(0.2 if i == 0 else 0)
        return OK

    with listening(stall_first) as server:
        load = opened(server.port, [0.0, 0.05, 0.1, 0.15], most=1)
    latencies = [record.ended - record.intended for record in sorted(load.records[0])]

    assert [True] * 4 == [latency >= least for latency, least in zip(latencies, (0.2, 0.15, 0.1, 0.05), strict=True)]
    assert 3 == load.capped
    assert 1 == server.connections


def test_an_open_loop_takes_as_many_connections_as_it_needs() -> None:
    """With all connections busy another one is opened, up to the cap, and nothing waits that need not."""
    seen = []

    async def when_all_are_there(i: int) -> bytes:
        seen.append(i)
        while len(seen) < 20:
            await asyncio.sleep(0.01)
        return OK

    with listening(when_all_are_there) as server:
        load = opened(server.port, [i / 1000 for i in range(20)], durations=Durations(seconds=0.4, warmup_s=0, timeout_s=10))

    assert [200] * 20 == [record.outcome for record in load.records[0]]
    assert 20 == server.connections
    assert 0 == load.capped


def test_answers_other_than_200_are_counted_by_status() -> None:
    """Half of the answers are 503."""

    async def alternate(i: int) -> bytes:
        return BUSY if i % 2 else OK

    with listening(alternate) as server:
        load = closed(server.port, connections=1)
    measured = measurement.measure("t", load.records[0], load.measured, texts=[1, 2])

    assert {"200", "503"} == set(measured.statuses)
    assert 0.5 == pytest.approx(measured.error_rate, abs=0.1)


def test_a_closed_connection_is_an_error_and_replaced() -> None:
    """A request whose connection closes before its answer is counted as `closed`, and the loop goes on."""

    async def close_second(i: int) -> bytes | None:
        return None if i == 1 else OK

    with listening(close_second) as server:
        load = closed(server.port, connections=1)

    assert 1 == Counter(record.outcome for record in load.records[0])["closed"]
    assert 2 == server.connections
    assert 200 == load.records[0][-1].outcome


def test_a_connection_that_the_server_ends_politely_is_no_error() -> None:
    """After `connection: close` the next request takes another connection."""

    async def close_all(_: int) -> bytes:
        return OK.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n")

    with listening(close_all) as server:
        load = closed(server.port, connections=1)

    assert {200} == outcomes(load)
    assert server.connections >= server.requests > 1


def test_no_answer_in_time_is_a_timeout() -> None:
    """A request that gets no answer ends after the timeout, in a closed loop and an open one."""

    async def never(_: int) -> bytes:
        await asyncio.sleep(60)
        return OK

    durations = Durations(seconds=0.3, warmup_s=0.0, timeout_s=0.1)
    with listening(never) as server:
        assert {"timeout"} == outcomes(closed(server.port, durations=durations))
    with listening(never) as server:
        load = opened(server.port, [0.0, 0.01, 0.02], most=1, durations=durations)
        assert ["timeout"] * 3 == [record.outcome for record in load.records[0]]


def test_nonsense_is_malformed() -> None:
    """What is no HTTP is an error of its own kind."""

    async def nonsense(_: int) -> bytes:
        return b"NONSENSE\r\n\r\n"

    with listening(nonsense) as server:
        assert {"malformed"} == outcomes(closed(server.port, connections=1))


@pytest.mark.parametrize(
    ("answer", "status"),
    [
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\n[]\r\n0\r\n\r\n", 200),
        (b"HTTP/1.1 204 No Content\r\n\r\n", 204),
        (b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 503 Service Unavailable\r\nContent-Length: 2\r\n\r\n[]", 503),
    ],
    ids=["chunked", "no content", "interim response"],
)
def test_the_end_of_a_response_is_found(answer: bytes, status: int) -> None:
    """A body may come in chunks or not at all, and an interim response is not the response."""

    async def one(_: int) -> bytes:
        return answer

    with listening(one) as server:
        load = closed(server.port, connections=1)

    assert {status} == outcomes(load)
    assert server.requests == len(load.records[0]) > 1
    assert 1 == server.connections


@pytest.mark.parametrize(("head", "outcome"), [(b"", 200), (b"content-length: 3\r\n", "closed")], ids=["no length", "too short"])
def test_the_end_of_the_connection_ends_only_a_body_without_a_length(head: bytes, outcome: int | str) -> None:
    """A body without a length is complete when the server closes; one that is shorter than its length is an error."""

    async def one(_: int) -> bytes:
        return b"HTTP/1.1 200 OK\r\n" + head + b"\r\n[]"

    with listening(one, requests_per_connection=1) as server:
        load = closed(server.port, connections=1)

    assert {outcome} == outcomes(load)
    assert server.connections >= server.requests > 1


def test_an_answer_in_pieces_is_read_whole() -> None:
    """An answer longer than a read counts once."""
    long = b"x" * 3_000_000

    async def big(_: int) -> bytes:
        return b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%s" % (len(long), long)

    with listening(big) as server:
        load = closed(server.port, connections=1)

    assert {200} == outcomes(load)
    assert server.requests == len(load.records[0])


def test_a_port_without_a_server_is_one_sentence() -> None:
    """Nothing to load is said before anything is measured."""
    with pytest.raises(BenchError, match="nothing listens at"):
        closed(unused_port())


def test_ctrl_c_ends_with_what_there_is() -> None:
    """Once stopped, a load sends nothing more and returns its records."""
    stop = threading.Event()

    async def stop_fifth(i: int) -> bytes:
        if i == 4:
            stop.set()
        return OK

    with listening(stop_fifth) as server:
        load = closed(server.port, connections=1, durations=Durations(seconds=60, warmup_s=0, timeout_s=5), stop=stop)

    assert load.interrupted
    assert len(load.records[0]) >= 5


def test_the_warm_up_is_left_out() -> None:
    """Requests due before the measured time have no latency and no part in rates."""
    records = [Record(at, at, at + 0.01, 200, 0, b"") for at in (0.0, 0.5, 1.0, 1.5)]

    measured = measurement.measure("t", records, (1.0, 2.0), texts=[1])

    assert 2 == measured.requests
    assert 2.0 == measured.rps


def unused_port() -> int:
    """Returns a port on which nothing listens."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])
