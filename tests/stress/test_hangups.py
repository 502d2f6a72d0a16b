"""Clients that disconnect while their requests wait or run: the service cancels the requests and frees their resources."""

import json
import socket
import struct
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from support import http_messages, metric, slow, wait_until
from support.loads import LONG, by_status, descriptors, metrics, queue_items, show, threads
from support.replica import ServeProcess, running

pytestmark = pytest.mark.serial

CLIENTS, WAVES, HELD_S = (1000, 5, 3) if LONG else (60, 1, 1.5)  # on a machine of half the speed, 3 would count as a run that hangs
THREADS = 2
TRIES = 5
GONE = 499
# maximum ratio to the memory after the first wave, because later waves reuse that memory; only `make stress` has later waves
MOST_GROWTH = 1.05
# Python's thread pool for the metrics page starts another thread if the last one has not finished
PAGE_THREADS = 6
# half of the clients send 4,000 characters, so that leaked requests are visible in the memory
TEXTS = [json.dumps({"inputs": text}).encode() for text in ("good", "good film " * 400)]
LONG_RUN = json.dumps({"inputs": "dull"}).encode()


def test_requests_of_disconnected_clients_release_all_resources(tmp_path: Path) -> None:
    slow.hanging_bundle(tmp_path / "models", turns=int(HELD_S * slow.SECOND), batch_invariant=False)
    with running(tmp_path / "models", tmp_path / "log", "--threads", str(THREADS), "--max-queue-tokens", "4000000") as server:
        metrics(server)  # the first metrics page starts a thread
        num_descriptors, num_threads = descriptors(server), threads(server)
        waits, memory = [], [server.memory_mib()]
        for _ in range(WAVES):
            waits.append(wave(server))
            memory.append(server.memory_mib())
        wait_until(lambda: descriptors(server) <= num_descriptors)  # the connection of the metrics page can still be closing
        assert threads(server) < num_threads + PAGE_THREADS
        assert_threads_live(server)
        show("memory before and after each wave", " ".join(f"{one:.0f}" for one in memory) + " MiB")
        show("memory while they waited", " ".join(f"{one:.0f}" for one in waits) + " MiB")
        assert memory[-1] <= MOST_GROWTH * memory[1]
        assert "ERROR" not in server.log.read_text()


def wave(server: ServeProcess) -> float:
    """Repeats `try_wave` until all disconnects were seen while the inference threads were busy. Returns the memory of the last try."""
    for _ in range(TRIES):
        memory = try_wave(server, metrics(server))
        if memory is not None:
            return memory
    raise AssertionError(f"of {TRIES} times the runs were over before the clients were seen to leave")


def try_wave(server: ServeProcess, before: str) -> float | None:
    """Connects all clients while each inference thread has a long run, and disconnects all of them, including clients with a run.

    Returns:
        Memory of the service in MiB while the clients waited; None if the runs ended too soon, because other texts can have run then.
    """
    with open_and_leave() as connections:
        connections += [socket.create_connection(server.address, timeout=30) for _ in range(CLIENTS)]
        for connection in connections[: THREADS + 1]:
            send(connection, LONG_RUN)
        wait_until(lambda: queue_items(server) == 1 or runs(server, before) > 0)
        for number, connection in enumerate(connections[THREADS + 1 :]):
            send(connection, TEXTS[number % 2])
        wait_until(lambda: queue_items(server) == CLIENTS - THREADS or runs(server, before) > 0)
        memory = server.memory_mib()
        all_wait = queue_items(server) == CLIENTS - THREADS and runs(server, before) == 0
    wait_until(lambda: queue_items(server) == 0)
    busy = runs(server, before) == 0
    wait_until(lambda: runs(server, before) >= THREADS)
    if not (all_wait and busy):
        return None
    after = metrics(server)
    assert by_status(after) - by_status(before) == {GONE: CLIENTS}
    assert metric(after, "cancelled_total") - metric(before, "cancelled_total") == CLIENTS
    assert metric(after, "batch_rows_sum") - metric(before, "batch_rows_sum") == THREADS
    return memory


def runs(server: ServeProcess, before: str) -> float:
    """Returns the number of runs that have ended since the metrics `before`."""
    return metric(metrics(server), "inference_seconds_count") - metric(before, "inference_seconds_count")


def assert_threads_live(server: ServeProcess) -> None:
    """Asserts that parallel requests are answered, one per inference thread."""
    with ThreadPoolExecutor(THREADS) as pool:
        posts = [pool.submit(httpx.post, f"{server.url}/classify", content=LONG_RUN, timeout=60, trust_env=False) for _ in range(THREADS)]
        assert [answer.result().status_code for answer in posts] == [200] * THREADS


def send(connection: socket.socket, body: bytes) -> None:
    connection.sendall(http_messages.post(body=body))


@contextmanager
def open_and_leave() -> Iterator[list[socket.socket]]:
    """Yields a list of connections. At the end half of them close normally, and half with a reset, as when a process dies."""
    connections: list[socket.socket] = []
    try:
        yield connections
    finally:
        for number, connection in enumerate(connections):
            if number % 2:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            connection.close()
