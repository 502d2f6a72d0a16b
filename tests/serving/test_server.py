"""The real process on a real port: clients side by side, one that hangs up, signals, and what it prints and logs."""

from __future__ import annotations

import json
import signal
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

import raw_http
import slow
import tiny
from application import rejected
from conftest import Served, metric, running, wait_until

pytestmark = pytest.mark.serial

Serve = Callable[..., Any]


@pytest.fixture(name="slow_models", scope="module")
def slow_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A models folder whose model takes tens of milliseconds a text."""
    return slow.bundle(tmp_path_factory.mktemp("slow")).parent


@pytest.fixture(name="slow_service", scope="module")
def service_that_is_slow(slow_models: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A service with this model and one thread, for tests that leave it idle."""
    with running(slow_models, tmp_path_factory.mktemp("log") / "log", "--threads", "1") as served:
        yield served


@pytest.fixture(name="service", scope="module")
def usual_service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A service with the tiny bundle and two threads, for tests that leave it idle."""
    models = tiny.bundle(tmp_path_factory.mktemp("models")).parent
    with running(models, tmp_path_factory.mktemp("log") / "log", "--threads", "2") as served:
        yield served


@contextmanager
def client_of(served: Any, **headers: str) -> Iterator[httpx.Client]:
    """Opens a client with a connection of its own to the service."""
    with httpx.Client(base_url=served.url, timeout=30, headers=headers, trust_env=False) as client:
        yield client


def sample(client: httpx.Client, name: str) -> float:
    return metric(client.get("/metrics").text, name)


def hang_up_on(served: Any, body: Any) -> socket.socket:
    """Sends a request over a plain socket, which is returned, and reads nothing."""
    connection = socket.create_connection(served.address)
    connection.sendall(raw_http.post(body=json.dumps(body).encode()))
    return connection


def test_a_client_that_hangs_up_frees_its_place(slow_service: Served) -> None:
    """The texts of a client that left do not run, and the next client is answered before a fraction of them could have."""
    with client_of(slow_service) as client:
        cancelled, rows = sample(client, "cancelled_total"), sample(client, "batch_rows_sum")
        connection = hang_up_on(slow_service, {"inputs": ["good"] * 400})
        wait_until(lambda: sample(client, "queue_items") > 100)
        time.sleep(0.2)
        connection.close()
        wait_until(lambda: sample(client, "cancelled_total") == cancelled + 1)
        assert (sample(client, "queue_items"), sample(client, "queue_tokens")) == (0, 0)
        assert client.post("/classify", json={"inputs": "good"}).status_code == 200
        assert sample(client, "batch_rows_sum") < rows + 300


def test_a_client_that_hangs_up_at_once_frees_its_place(slow_service: Served) -> None:
    with client_of(slow_service) as client:
        cancelled = sample(client, "cancelled_total")
        hang_up_on(slow_service, {"inputs": ["good"] * 400}).close()
        wait_until(lambda: sample(client, "cancelled_total") == cancelled + 1)
        assert (sample(client, "queue_items"), sample(client, "queue_tokens")) == (0, 0)


def test_a_client_that_hangs_up_while_it_sends_is_gone(service: Served) -> None:
    """A body that never ends because its client left is counted as such, not as an error of the service."""
    with client_of(service) as client:
        with socket.create_connection(service.address) as connection:
            connection.sendall(b"POST /classify HTTP/1.1\r\nhost: test\r\ncontent-length: 100\r\n\r\n{")
            time.sleep(0.1)
        wait_until(lambda: 'status="499"' in client.get("/metrics").text)
        assert client.post("/classify", json={"inputs": "good"}).status_code == 200
    assert "ERROR" not in service.log.read_text()


def test_a_large_body_is_refused_while_it_is_sent(service: Served) -> None:
    """A client that sends far too much gets its 413, and its connection stays usable."""
    with client_of(service) as client:
        rejected(client.post("/classify", content=b" " * 20_000_000), 413, "too_large")
        assert client.post("/classify", json={"inputs": "good"}).status_code == 200


def test_the_service_answers_others_while_a_large_request_runs(slow_service: Served) -> None:
    with client_of(slow_service) as client, ThreadPoolExecutor(1) as pool:
        body = {"inputs": "good film " * 8_000, "parameters": {"window": "mean"}}
        for _ in range(5):  # while this process stands still it sends no probe
            rows = sample(client, "batch_rows_sum")
            busy = pool.submit(httpx.post, f"{slow_service.url}/classify", json=body, timeout=60)
            answered = 0
            while not busy.done():
                assert client.get("/health/live").status_code == 200
                answered += 1
            assert busy.result().status_code == 200
            if answered > 2 * (sample(client, "batch_rows_sum") - rows):
                break
        else:
            raise AssertionError("a loop that waits for a run answers one probe a run")


def test_what_outlasts_the_grace_is_refused(slow_models: Path, serve: Serve) -> None:
    """When the grace is over, what still waits gets a 503 of ours, and the process ends in time with code 0."""
    no_deadline = ("--timeout-ms", "600000", "--max-timeout-ms", "600000")  # on a slow machine the texts take minutes
    with (
        serve(slow_models, "--threads", "1", "--shutdown-timeout-s", "0.3", *no_deadline) as served,
        client_of(served) as client,
        ThreadPoolExecutor(4) as pool,
    ):
        waiting = [pool.submit(httpx.post, f"{served.url}/classify", json={"inputs": ["good"] * 200}, timeout=30) for _ in range(4)]
        wait_until(lambda: sample(client, "queue_items") > 650)  # the first one is far from its end
        served.process.send_signal(signal.SIGTERM)
        for future in waiting:
            rejected(future.result(), 503, "unavailable")
        assert served.process.wait(10) == 0
