"""A thousand clients that hang up while they wait or run: the service stops their work and keeps nothing of them."""

from __future__ import annotations

import json
import socket
import struct
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

import raw_http
import slow
from conftest import Served, wait_until
from loads import LONG, by_status, descriptors, memory_mib, samples, show, threads, total

pytestmark = pytest.mark.serial

CLIENTS, WAVES, HELD_S = (1000, 5, 2) if LONG else (60, 1, 1.5)
THREADS = 2
TRIES = 5
GONE = 499
# of the memory after the first wave: what it took is used again by the next ones
MOST_GROWTH = 1.05
# Python's pool for the metrics page starts another thread where the last one has not quite ended its work
PAGE_THREADS = 6
# half of the clients send 40,000 characters, so that what is kept of a request shows in the memory
TEXTS = [json.dumps({"inputs": text}).encode() for text in ("good", "good film " * 4_000)]
LONG_RUN = json.dumps({"inputs": "dull"}).encode()


def test_clients_that_hang_up_cost_nothing(tmp_path: Path, serve: Callable[..., Any]) -> None:
    slow.hanging_bundle(tmp_path / "models", turns=int(HELD_S * slow.SECOND), batch_invariant=False)
    with serve(tmp_path / "models", "--threads", str(THREADS), "--max-queue-tokens", "4000000") as served:
        samples(served)  # a thread comes with the first page
        held, working = descriptors(served), threads(served)
        waited, memory = [], [memory_mib(served)]
        for _ in range(WAVES):
            waited.append(wave(served))
            memory.append(memory_mib(served))
        wait_until(lambda: descriptors(served) <= held)  # the connection of the page may still have been closing
        assert threads(served) < working + PAGE_THREADS
        assert_threads_live(served)
        show(f"rows run for {WAVES} times {CLIENTS} clients that left while they waited, bar 0", "0")
        show("memory before and after each wave", " ".join(f"{one:.0f}" for one in memory) + " MiB")
        show("memory while they waited", " ".join(f"{one:.0f}" for one in waited) + " MiB")
        assert not LONG or memory[-1] <= MOST_GROWTH * memory[1]
        assert "ERROR" not in served.log.read_text()


def wave(served: Served) -> float:
    """Has clients come and hang up, until all of them were seen to leave while the inference threads still ran; returns the memory in MiB while they waited."""
    for _ in range(TRIES):
        memory = try_wave(served, samples(served))
        if memory is not None:
            return memory
    raise AssertionError(f"of {TRIES} times the runs were over before the clients were seen to leave")


def try_wave(served: Served, before: Any) -> float | None:
    """Has clients come while all inference threads run long, and hang up, those whose texts run too.

    Returns:
        Memory of the service while they waited, in MiB; None where the runs were over too soon, so that others may have run.
    """
    with leaving() as connections:
        connections += [connect(served) for _ in range(CLIENTS)]
        for connection in connections[: THREADS + 1]:
            send(connection, LONG_RUN)
        wait_until(lambda: queued(served) == queued(served) == 1 or runs(served, before) > 0)
        for number, connection in enumerate(connections[THREADS + 1 :]):
            send(connection, TEXTS[number % 2])
        wait_until(lambda: queued(served) == CLIENTS - THREADS or runs(served, before) > 0)
        memory = memory_mib(served)
        all_wait = queued(served) == CLIENTS - THREADS and runs(served, before) == 0
    wait_until(lambda: queued(served) == 0)
    busy = runs(served, before) == 0
    wait_until(lambda: runs(served, before) >= THREADS)
    if not (all_wait and busy):
        return None
    after = samples(served)
    assert {GONE: CLIENTS} == by_status(after) - by_status(before)
    assert CLIENTS == total(after - before, "cancelled_total")
    assert THREADS == total(after - before, "batch_rows_sum")
    return memory


def queued(served: Served) -> float:
    return total(samples(served), "queue_items")


def runs(served: Served, before: Any) -> float:
    """Returns how many runs have ended since some samples were taken."""
    return total(samples(served), "inference_seconds_count") - total(before, "inference_seconds_count")


def assert_threads_live(served: Served) -> None:
    """Asserts that as many runs as there are threads end, side by side."""
    with ThreadPoolExecutor(THREADS) as pool:
        asked = [pool.submit(httpx.post, f"{served.url}/classify", content=LONG_RUN, timeout=60, trust_env=False) for _ in range(THREADS)]
        assert [200] * THREADS == [answer.result().status_code for answer in asked]


def connect(served: Served) -> socket.socket:
    return socket.create_connection(served.address, timeout=30)


def send(connection: socket.socket, body: bytes) -> None:
    connection.sendall(raw_http.post(body=body))


@contextmanager
def leaving() -> Iterator[list[socket.socket]]:
    """Yields a list of connections that all hang up in the end: half of them in order, half with a reset, as of a process that dies."""
    connections: list[socket.socket] = []
    try:
        yield connections
    finally:
        for number, connection in enumerate(connections):
            if number % 2:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            connection.close()
