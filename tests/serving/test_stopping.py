"""Shutdown: requests under load, readiness, half-sent requests and further signals."""

import shutil
import signal
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from support import http_messages, metric, slow, tiny, wait_until
from support.app_client import error_of
from support.balanced import load
from support.replica import BERT_SERVE, running

pytestmark = pytest.mark.serial

TWO = ("--workers", "2", "--threads", "2")


def get(server: Any, path: str) -> httpx.Response:
    return httpx.get(server.url + path, trust_env=False, timeout=30)


# during a shutdown on a busy machine, a client can pause for longer than the service waits for its next request by default
LINGERING = f"from bertserve.service.server import limits; limits.LINGER_S = 4; {BERT_SERVE}"


def waits(server: Any) -> float:
    return metric(get(server, "/metrics").text, "queue_items")


@pytest.mark.parametrize("workers", [pytest.param((), id="one", marks=pytest.mark.full_grid), pytest.param(TWO, id="two")])
def test_sigterm_under_load_loses_nothing(models: Path, tmp_path: Path, workers: tuple[str, ...]) -> None:
    """Clients that never pause get answers until the service stops listening. The last requests get 503."""
    with running(models, tmp_path / "log", *workers, program=LINGERING) as server:
        with load(server.url, 48) as outcomes:
            server.process.send_signal(signal.SIGTERM)
            assert server.process.wait(20) == 0
        log = server.lines()
    print(outcomes.outcomes)  # pytest -s shows the counts
    assert {200, 503, "refused", "closed", "unreachable", "interrupted"} >= set(outcomes.outcomes)
    assert outcomes.outcomes["closed"] + outcomes.outcomes["unreachable"] <= 2
    assert outcomes.outcomes[200] > 48
    assert [line for line in log if "503 unavailable" not in line] == []


def test_readiness_fails_while_requests_are_still_answered(models: Path, tmp_path: Path) -> None:
    """During `--pre-stop-delay-s` readiness fails, but requests over new connections are answered. An interrupt ends the delay."""
    new_connections = {"connection": "close"}
    with (
        running(models, tmp_path / "log", "--pre-stop-delay-s", "60") as server,
        httpx.Client(base_url=server.url, headers=new_connections, trust_env=False, timeout=30) as client,
    ):
        server.process.send_signal(signal.SIGTERM)
        wait_until(lambda: client.get("/health/ready").status_code == 503)
        assert client.post("/classify", json={"inputs": "good"}).status_code == 200
        assert client.get("/health/ready").headers["retry-after"] == "1"
        assert client.get("/health/live").status_code == 200
        server.process.send_signal(signal.SIGINT)
        assert server.process.wait(20) == 0


def test_an_idle_connection_is_closed_cleanly(models: Path, tmp_path: Path) -> None:
    """Its client sees the end of the connection, not a reset, and the service does not wait until it would abort the connection."""
    patient = f"from bertserve.service.server import serve; serve.LAST_RESPONSES_S = 600; {BERT_SERVE}"
    with running(models, tmp_path / "log", program=patient) as server, socket.create_connection(server.address, timeout=20) as connection:
        connection.sendall(http_messages.get(start=b"GET /health/live HTTP/1.1"))
        answer = connection.recv(65536)  # one packet
        assert answer.startswith(b"HTTP/1.1 200 OK\r\n")
        assert b"live" in answer
        server.process.send_signal(signal.SIGTERM)
        assert connection.recv(1) == b""
        assert server.process.wait(20) == 0


@pytest.mark.parametrize("workers", [("--threads", "1"), pytest.param(TWO, marks=pytest.mark.full_grid)], ids=["one", "two"])
def test_an_interrupt_during_shutdown_ends_the_service_at_once(tmp_path: Path, workers: tuple[str, ...]) -> None:
    """Ctrl-C after SIGTERM does not wait for accepted requests; a second SIGTERM has no effect."""
    slow.bundle(tmp_path / "slow")
    with running(tmp_path / "slow", tmp_path / "log", *workers, "--shutdown-timeout-s", "600") as server, ThreadPoolExecutor(1) as pool:
        pending = pool.submit(httpx.post, f"{server.url}/classify", json={"inputs": ["good"] * 500}, timeout=60, trust_env=False)
        wait_until(lambda: waits(server) > 400)
        server.process.send_signal(signal.SIGTERM)
        wait_until(lambda: server.log.read_text().count("shutdown started") == (2 if workers == TWO else 1))  # each worker logs it
        assert get(server, "/health/ready").status_code == 503
        server.process.send_signal(signal.SIGTERM)
        error_of(httpx.post(f"{server.url}/classify", json={"inputs": "good"}, trust_env=False), 503, "unavailable")
        assert waits(server) > 0
        server.process.send_signal(signal.SIGINT)
        assert server.process.wait(20) == 0
        with pytest.raises(httpx.TransportError):
            pending.result()
        assert "Traceback" not in server.log.read_text()


def test_requests_that_outlast_the_shutdown_timeout_are_refused(tmp_path: Path) -> None:
    slow.bundle(tmp_path / "slow")
    no_deadline = ("--timeout-ms", "600000", "--max-timeout-ms", "600000")  # on a slow machine the texts take minutes
    with (
        running(tmp_path / "slow", tmp_path / "log", "--threads", "1", "--shutdown-timeout-s", "0.3", *no_deadline) as server,
        ThreadPoolExecutor(4) as pool,
    ):
        waiting = [pool.submit(httpx.post, f"{server.url}/classify", json={"inputs": ["good"] * 200}, timeout=30) for _ in range(4)]
        wait_until(lambda: waits(server) > 650)  # the first request is far from its end
        server.process.send_signal(signal.SIGTERM)
        for future in waiting:
            error_of(future.result(), 503, "unavailable")
        assert server.process.wait(10) == 0


LOST_GPU = f"""
import numpy as np
from types import SimpleNamespace
from bertserve.service.engine import onnx_engine

def opened(*arguments, **options):
    def run(names, feed):
        if len(feed["input_ids"]) > 1:
            raise RuntimeError("CUDA failure 700: an illegal memory access was encountered ; GPU=0 ; hostname=a")
        return session.run(names, feed)

    session = open_session(*arguments, **options)
    return SimpleNamespace(run=run)

open_session, onnx_engine.open_session = onnx_engine.open_session, opened
onnx_engine.OnnxEngine.time_runs = lambda engine, shapes, repeats: [(*shape, 1e-3) for shape in shapes]
{BERT_SERVE}
"""


@pytest.mark.parametrize("workers", [("--threads", "1"), pytest.param(TWO, marks=pytest.mark.full_grid)], ids=["one", "two"])
def test_a_lost_gpu_ends_the_process(models: Path, tmp_path: Path, workers: tuple[str, ...]) -> None:
    """Its requests get 503, and its supervisor starts another process: with several workers their parent, otherwise that of code 1."""
    with running(models, tmp_path / "log", *workers, program=LOST_GPU) as server:
        assert httpx.post(f"{server.url}/classify", json={"inputs": "good"}, trust_env=False).status_code == 200
        error_of(httpx.post(f"{server.url}/classify", json={"inputs": ["good"] * 9}, trust_env=False), 503, "unavailable")
        if workers == TWO:
            wait_until(lambda: get(server, "/health/ready").status_code == 200)
        else:
            assert server.process.wait(20) == 1
        assert "CUDA failure 700" in server.log.read_text()


LONG_LOADS = f"""
import logging
from bertserve.service.models import loading

load, loads = loading.open_bundle, []

def long_load(*arguments):
    loads.append(1)
    if len(loads) > 1:
        while True:  # only the end of the process ends it
            logging.warning("loading")
            load(*arguments)
    return load(*arguments)

loading.open_bundle = long_load
{BERT_SERVE}
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.full_grid)])
def test_shutdown_does_not_wait_for_a_model_to_load(models: Path, tmp_path: Path, number: int) -> None:
    """The load is abandoned. Exit code and log are the same as for every stop."""
    with running(models, tmp_path / "log", program=LONG_LOADS) as server:
        shutil.rmtree(models / "tiny")
        tiny.bundle(models, "tiny", seed=1)
        server.process.send_signal(signal.SIGHUP)
        wait_until(lambda: "loading" in server.log.read_text())
        server.process.send_signal(number)
        assert server.process.wait(20) == 0
        log = server.log.read_text()
    assert "shutdown finished" in log
    assert "Traceback" not in log
