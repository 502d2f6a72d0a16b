"""The load generator against a small server: each request gives one record, and latency counts from the scheduled time.

A load ends after a number of requests, not after a number of seconds, so that results do not depend on the machine's speed.
"""

import asyncio
import itertools
import threading
from collections import Counter
from statistics import fmean, pstdev

import pytest

from bertserve.bench.generator import Load, poisson_arrivals, send_loads
from bertserve.bench.target import Body, Target, parse_url
from support.listening import OK, Answer, Server, always, http_server, never, ok

BODIES = [Body(b'{"inputs":"a"}', 1), Body(b'{"inputs":["b","c"]}', 2)]


def target(port: int) -> Target:
    return Target(parse_url(f"http://127.0.0.1:{port}/classify"), BODIES, {"x-test": "1"})


def load_until(requests: int, answer: Answer, *, connections: int = 1, arrivals: list[float] | None = None) -> tuple[Load, Server]:
    """Loads a server until it has received `requests` requests: in a closed loop, or in an open loop with these arrivals."""
    stop = threading.Event()

    async def counted(i: int) -> bytes | None:
        if i + 1 >= requests:
            stop.set()
        return await answer(i)

    with http_server(counted) as server:
        load = Load(target(server.port), connections, seconds=60, warmup_s=0.0, timeout_s=10.0)
        send_loads([load], stop, [] if arrivals is None else [arrivals])
        return load, server


def outcomes(load: Load) -> set[int | str]:
    return {record.outcome for record in load.records}


def test_a_closed_loop_keeps_its_connections() -> None:
    load, server = load_until(20, ok, connections=2)

    assert server.connections == 2
    assert outcomes(load) == {200}
    assert len(load.records) == server.requests
    assert set(server.bodies) == {body.content for body in BODIES}
    assert load.records[0].server_timing == b"tokenize;dur=0.5, inference;dur=2.0"


def test_a_stall_adds_to_the_latency_of_all_delayed_requests() -> None:
    """Requests that are due while the only connection is busy are sent late. Their latency starts at the scheduled time."""
    arrivals = [0.0, 0.001, 0.002, 0.003]

    async def stall_first(i: int) -> bytes:
        await asyncio.sleep(0.2 if i == 0 else 0)
        return OK

    load, server = load_until(4, stall_first, arrivals=arrivals)
    first, *others = sorted(load.records)

    assert [record.intended - first.intended for record in (first, *others)] == pytest.approx(arrivals, abs=0.002)
    assert [record for record in others if record.sent < first.ended] == []
    assert load.capped == 3
    assert load.cpu_s > 0
    assert server.connections == 1


def test_an_open_loop_opens_connections_as_needed() -> None:
    requests = []

    async def when_all_are_there(i: int) -> bytes:
        requests.append(i)
        while len(requests) < 20:
            await asyncio.sleep(0.001)
        return OK

    load, server = load_until(20, when_all_are_there, connections=64, arrivals=[i / 1000 for i in range(20)])

    assert [record.outcome for record in load.records] == [200] * 20
    assert server.connections == 20
    assert load.capped == 0


def test_a_closed_connection_is_an_error_and_replaced() -> None:
    async def close_second(i: int) -> bytes | None:
        return None if i == 1 else OK

    load, server = load_until(10, close_second)

    assert Counter(record.outcome for record in load.records)["closed"] == 1
    assert server.connections == 2
    assert load.records[-1].outcome == 200


def test_a_connection_close_header_is_not_an_error() -> None:
    load, server = load_until(5, always(OK.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n")))

    assert outcomes(load) == {200}
    assert server.connections >= server.requests >= 5


def test_a_request_without_a_response_times_out() -> None:
    """The timeout applies in closed and open loops, and also while a request waits for a connection."""
    with http_server(never) as server:
        closed, opened = (Load(target(server.port), count, seconds=0.3, warmup_s=0.0, timeout_s=0.05) for count in (2, 1))
        send_loads([closed], threading.Event())
        send_loads([opened], threading.Event(), [[0.0, 0.0, 0.0]])
    assert outcomes(closed) == {"timeout"}
    assert [record.outcome for record in opened.records] == ["timeout"] * 3


def test_a_response_that_is_not_http_is_malformed() -> None:
    assert outcomes(load_until(3, always(b"NONSENSE\r\n\r\n"))[0]) == {"malformed"}


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
    load, server = load_until(3, always(answer))

    assert outcomes(load) == {status}
    assert server.requests == len(load.records) >= 3
    assert server.connections == 1


def test_a_stop_ends_requests_that_wait_for_a_response_or_a_connection() -> None:
    load, _ = load_until(1, never, arrivals=[0.0, 0.0, 0.0])

    assert [record.outcome for record in load.records] == ["interrupted"] * 3


def test_arrivals_are_a_poisson_process() -> None:
    """Their number is near rate x seconds. The gaps have a standard deviation equal to their mean. A seed gives the same times."""
    times = poisson_arrivals(100, 200, seed=1)
    gaps = [b - a for a, b in itertools.pairwise(times)]

    assert len(times) == pytest.approx(20_000, rel=0.03)
    assert fmean(gaps) == pytest.approx(0.01, rel=0.03)
    assert pstdev(gaps) == pytest.approx(0.01, rel=0.05)
    assert times == sorted(times)
    assert times[-1] < 200
    assert times == poisson_arrivals(100, 200, seed=1) != poisson_arrivals(100, 200, seed=2)
    assert poisson_arrivals(200, 100, seed=1) == pytest.approx([t / 2 for t in times])
