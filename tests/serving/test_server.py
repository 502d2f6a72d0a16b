"""A real process on a real port handles concurrent clients, disconnects, large requests and a shutdown signal."""

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
    """Returns a models folder whose model needs tens of milliseconds per text."""
    return slow.bundle(tmp_path_factory.mktemp("slow")).parent


@pytest.fixture(name="slow_service", scope="module")
def service_that_is_slow(slow_models: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Yields a service with the slow model and one thread, for tests that leave it idle."""
    with running(slow_models, tmp_path_factory.mktemp("log") / "log", "--threads", "1") as served:
        yield served


@pytest.fixture(name="service", scope="module")
def usual_service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Yields a service with the tiny bundle and two threads, for tests that leave it idle."""
    models = tiny.bundle(tmp_path_factory.mktemp("models")).parent
    with running(models, tmp_path_factory.mktemp("log") / "log", "--threads", "2") as served:
        yield served


@contextmanager
def client_of(served: Served) -> Iterator[httpx.Client]:
    """Yields a client with its own connections to the service."""
    with httpx.Client(base_url=served.url, timeout=30, trust_env=False) as client:
        yield client


def sample(client: httpx.Client, name: str) -> float:
    return metric(client.get("/metrics").text, name)


@pytest.mark.parametrize("pause_s", [0, 0.2])
def test_a_client_that_disconnects_frees_its_place_in_the_queue(slow_service: Served, pause_s: float) -> None:
    """Its waiting texts do not run, and the next client gets an answer before they could have run."""
    with client_of(slow_service) as client:
        cancelled, rows = sample(client, "cancelled_total"), sample(client, "batch_rows_sum")
        with socket.create_connection(slow_service.address) as connection:
            connection.sendall(raw_http.post(body=json.dumps({"inputs": ["good"] * 400}).encode()))
            if pause_s:
                wait_until(lambda: sample(client, "queue_items") > 100)
                time.sleep(pause_s)
        wait_until(lambda: sample(client, "cancelled_total") == cancelled + 1)
        assert (sample(client, "queue_items"), sample(client, "queue_tokens")) == (0, 0)
        assert client.post("/classify", json={"inputs": "good"}).status_code == 200
        assert sample(client, "batch_rows_sum") < rows + 300


def test_a_client_that_disconnects_while_it_sends_is_counted_as_499(service: Served) -> None:
    """An incomplete body is not an error of the service if its client has disconnected."""
    with client_of(service) as client:
        with socket.create_connection(service.address) as connection:
            connection.sendall(b"POST /classify HTTP/1.1\r\nhost: test\r\ncontent-length: 100\r\n\r\n{")
            time.sleep(0.1)
        wait_until(lambda: 'status="499"' in client.get("/metrics").text)
        assert client.post("/classify", json={"inputs": "good"}).status_code == 200
    assert "ERROR" not in service.log.read_text()


def test_a_large_body_is_refused_while_it_is_sent(service: Served) -> None:
    """The client gets status 413, and its next request is answered."""
    with client_of(service) as client:
        rejected(client.post("/classify", content=b" " * 20_000_000), 413, "too_large")
        assert client.post("/classify", json={"inputs": "good"}).status_code == 200


def test_the_service_answers_other_requests_while_a_large_one_runs(slow_service: Served) -> None:
    with client_of(slow_service) as client, ThreadPoolExecutor(1) as pool:
        body = {"inputs": "good film " * 8_000, "parameters": {"window": "mean"}}
        for _ in range(5):  # retries, because a stalled test process sends no probes
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


def test_requests_that_outlast_the_shutdown_timeout_are_refused(slow_models: Path, serve: Serve) -> None:
    """After the timeout, waiting requests get status 503, and the process exits with code 0."""
    no_deadline = ("--timeout-ms", "600000", "--max-timeout-ms", "600000")  # on a slow machine the texts take minutes
    with (
        serve(slow_models, "--threads", "1", "--shutdown-timeout-s", "0.3", *no_deadline) as served,
        client_of(served) as client,
        ThreadPoolExecutor(4) as pool,
    ):
        waiting = [pool.submit(httpx.post, f"{served.url}/classify", json={"inputs": ["good"] * 200}, timeout=30) for _ in range(4)]
        wait_until(lambda: sample(client, "queue_items") > 650)  # the first request is far from its end
        served.process.send_signal(signal.SIGTERM)
        for future in waiting:
            rejected(future.result(), 503, "unavailable")
        assert served.process.wait(10) == 0
