"""Shutdown: requests under load, readiness, half-sent requests, further signals, and workers that hang."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

import slow
import tiny
from application import rejected
from closed_loop import Outcome, ask_until_refused
from conftest import UNTHROTTLED, metric, running, wait_until, without_shutdown

pytestmark = pytest.mark.serial

Serve = Callable[..., Any]
TWO = ("--workers", "2", "--threads", "2")


def get(served: Any, path: str) -> httpx.Response:
    return httpx.get(served.url + path, trust_env=False, timeout=30)


# during a shutdown, a client can pause for longer than the service waits for its next request by default
LINGERING = f"from bertserve.service.server import protocol; protocol.LINGER_S = 4; {UNTHROTTLED}"


def waits(served: Any) -> float:
    return metric(get(served, "/metrics").text, "queue_items")


@pytest.mark.parametrize("workers", [pytest.param((), id="one", marks=pytest.mark.full_grid), pytest.param(TWO, id="two")])
def test_sigterm_under_load_loses_nothing(models: Path, tmp_path: Path, workers: tuple[str, ...]) -> None:
    """Clients that never pause get answers until the service stops listening. The last requests get 503 with `Retry-After`."""
    outcome = Outcome()
    with running(models, tmp_path / "log", *workers, program=LINGERING) as served:

        async def load() -> None:
            asking = asyncio.create_task(ask_until_refused(served.address, 48, outcome=outcome, limit_s=30))
            while outcome.answers[200] < 500 and not asking.done():
                await asyncio.sleep(0.01)
            served.process.send_signal(signal.SIGTERM)
            await asking

        asyncio.run(load())
        assert 0 == served.process.wait(20)
        log = served.lines()
    print(outcome)  # pytest -s shows the counts
    assert outcome.lost <= 2, outcome
    assert {200, 503} >= set(outcome.answers)
    assert outcome.answers[200] > 48
    assert 0 == outcome.hurried
    assert (outcome.answers[503] > 0) == (len(log) > 0)
    assert [] == [line for line in log if "during shutdown" not in line]


def test_readiness_fails_while_requests_are_still_answered(models: Path, serve: Serve) -> None:
    """During `--pre-stop-delay-s` readiness fails, but requests over new connections are answered. No request is refused."""
    new_connections = {"connection": "close"}
    with (
        serve(models, "--pre-stop-delay-s", "3") as served,
        httpx.Client(base_url=served.url, headers=new_connections, trust_env=False, timeout=30) as client,
    ):
        served.process.send_signal(signal.SIGTERM)
        wait_until(lambda: client.get("/health/ready").status_code == 503)
        assert 200 == client.post("/classify", json={"inputs": "good"}).status_code
        assert "1" == client.get("/health/ready").headers["retry-after"]
        assert 200 == client.get("/health/live").status_code
        assert 0 == served.process.wait(20)
        assert [] == served.lines()  # a failed probe is not a refused request


@pytest.mark.parametrize(
    "sent",
    [
        pytest.param(b"POST /classify HTTP/1.1\r\nhost", marks=pytest.mark.full_grid),
        b"POST /classify HTTP/1.1\r\nhost: test\r\ncontent-length: 100\r\n\r\n{",
    ],
)
def test_a_half_sent_request_gets_503_at_shutdown(models: Path, serve: Serve, sent: bytes) -> None:
    """Half a head or half a body is answered with the service's own 503, and the log has no traceback."""
    with serve(models) as served, socket.create_connection(served.address, timeout=20) as connection:
        connection.sendall(sent)
        assert 200 == get(served, "/health/live").status_code  # the half-sent request has been read by now
        served.process.send_signal(signal.SIGTERM)
        answer = connection.makefile("rb").read()
        assert 0 == served.process.wait(20)
        log = served.log.read_text()
    assert answer.startswith(b"HTTP/1.1 503 "), answer
    assert b"retry-after: 1\r\n" in answer.lower()
    assert ("Traceback" in log, "ERROR" in log) == (False, False), log


def test_an_idle_connection_is_closed_cleanly(models: Path, serve: Serve) -> None:
    """A client with an open connection and no request sees the end of the connection, not a reset."""
    with serve(models) as served, socket.create_connection(served.address, timeout=20) as connection:
        connection.sendall(b"GET /health/live HTTP/1.1\r\nhost: test\r\n\r\n")
        assert connection.recv(65536).startswith(b"HTTP/1.1 200 OK\r\n")
        served.process.send_signal(signal.SIGTERM)
        assert b"" == connection.recv(1)
        assert 0 == served.process.wait(20)
        log = served.log.read_text()
    started, finished = log.splitlines()
    pid = served.process.pid
    assert re.search(rf" INFO \[{pid}\] bertserve\.server: shutdown started: .* 0 s, .* 30 s .* 0 requests", started)
    # before the remaining connections would be aborted
    assert re.search(rf" INFO \[{pid}\] bertserve\.server: shutdown finished after [0-4]\.", finished)


@pytest.mark.parametrize("workers", [("--threads", "1"), pytest.param(TWO, marks=pytest.mark.full_grid)], ids=["one", "two"])
def test_an_interrupt_during_shutdown_ends_the_service_at_once(tmp_path: Path, serve: Serve, workers: tuple[str, ...]) -> None:
    """Ctrl-C after SIGTERM does not wait for accepted requests; a second SIGTERM has no effect."""
    slow.bundle(tmp_path / "slow")
    with serve(tmp_path / "slow", *workers, "--shutdown-timeout-s", "600") as served, ThreadPoolExecutor(1) as pool:
        cut = pool.submit(httpx.post, f"{served.url}/classify", json={"inputs": ["good"] * 500}, timeout=60, trust_env=False)
        wait_until(lambda: waits(served) > 400)
        served.process.send_signal(signal.SIGTERM)
        wait_until(lambda: get(served, "/health/ready").status_code == 503)
        served.process.send_signal(signal.SIGTERM)
        rejected(httpx.post(f"{served.url}/classify", json={"inputs": "good"}, trust_env=False), 503, "unavailable")
        assert waits(served) > 0
        served.process.send_signal(signal.SIGINT)
        assert 0 == served.process.wait(20)
        with pytest.raises(httpx.TransportError):
            cut.result()
        assert "Traceback" not in served.log.read_text()


@pytest.mark.full_grid
def test_a_worker_that_hangs_during_shutdown_is_killed(tmp_path: Path, serve: Serve) -> None:
    """The worker is killed long before the shutdown timeout. The other worker answers the requests that it has accepted."""
    slow.bundle(tmp_path / "slow")
    with serve(tmp_path / "slow", *TWO, "--shutdown-timeout-s", "600") as served, ThreadPoolExecutor(4) as pool:
        clients = [httpx.Client(base_url=served.url, timeout=60, trust_env=False) for _ in range(4)]
        workers = [client.get("/info").json()["worker"] for client in clients]
        assert {0, 1} == {worker["index"] for worker in workers}
        accepted = [pool.submit(client.post, "/classify", json={"inputs": ["good"] * 40}) for client in clients]
        wait_until(lambda: waits(served) > 120)
        hung = workers[0]["pid"]
        os.kill(hung, signal.SIGSTOP)
        served.process.send_signal(signal.SIGTERM)
        for worker, future in zip(workers, accepted, strict=True):
            if worker["pid"] == hung:
                assert isinstance(future.exception(), httpx.TransportError)
            else:
                assert 200 == future.result().status_code
        assert 0 == served.process.wait(20)
        assert f"process {hung}, has hung for" in served.log.read_text()
        for client in clients:
            client.close()


EARLY = """
import os, signal, sys

import uvicorn

run, parent, install = uvicorn.Server.run, os.getpid(), signal.signal

def stopped_before_the_loop(self, sockets=None):
    if WORKERS == 1:
        signal.raise_signal(signal.SIGTERM)
    run(self, sockets)

def stopped_at_once(number, handler):
    before = install(number, handler)
    if WORKERS > 1 and number == signal.SIGTERM and os.getpid() == parent:
        signal.raise_signal(signal.SIGTERM)
    return before

uvicorn.Server.run, signal.signal = stopped_before_the_loop, stopped_at_once
from bertserve.service.cli import main
sys.exit(main(["serve", "--port", "0", "--workers", "WORKERS", "--threads", "WORKERS", "--models", sys.argv[1]]))
"""


@pytest.mark.parametrize("workers", [1, 2])
def test_no_signal_is_lost_while_the_service_starts(models: Path, workers: int) -> None:
    """A signal right after the first handler is installed, or before uvicorn installs its own, stops the service cleanly."""
    command = [sys.executable, "-c", EARLY.replace("WORKERS", str(workers)), str(models)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    assert 0 == done.returncode
    assert [] == without_shutdown(done.stderr)


LONG_LOADS = f"""
import logging
from bertserve.service.models import loading

load, loads = loading._load, []

def long_load(*arguments):
    loads.append(1)
    if len(loads) > 1:
        while True:  # only the end of the process ends it
            logging.warning("loading")
            load(*arguments)
    return load(*arguments)

loading._load = long_load
{UNTHROTTLED}
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_shutdown_does_not_wait_for_a_model_to_load(models: Path, tmp_path: Path, number: int) -> None:
    """The load is abandoned. Exit code, log and PID file are the same as for every stop."""
    pid_file = tmp_path / "pid"
    with running(models, tmp_path / "log", "--pid-file", str(pid_file), program=LONG_LOADS) as served:
        shutil.rmtree(models / "tiny")
        tiny.bundle(models, "tiny", seed=1)
        served.process.send_signal(signal.SIGHUP)
        wait_until(lambda: "loading" in served.log.read_text())
        served.process.send_signal(number)
        assert 0 == served.process.wait(20)
        log = served.log.read_text()
    assert not pid_file.exists()
    assert ("shutdown finished" in log, "Traceback" in log) == (True, False), log


STARTS = """
import time
from bertserve.service.server import supervisor
from bertserve.service.server.server import shared_counts

supervisor.START_FACTOR, supervisor.HUNG_S = 0.0, 60.0
beats, starts, hangs, announced = shared_counts(2), *(shared_counts(1, 0) for _ in range(3))

class Supervisor(supervisor.Supervisor):
    def _patience_s(self, worker):
        supervisor.START_S = 0.5 if hangs[0] else 60.0  # a start that is only slow must not be given up
        return super()._patience_s(worker)

def work(index, pipe):
    if index == 1:
        starts[0] += 1
        if starts[0] in HANGS:
            hangs[0] = 1
            time.sleep(600)
    pipe.send(index)
    while not pipe.poll(0.1):
        beats[index] = time.monotonic_ns()
        if index == 1 and starts[0] + 1 in HANGS and announced[0]:
            return

def on_ready(_):
    announced[0] = 1
    print("ready", flush=True)

def on_end(index, reason):
    hangs[0] = 0
    print("ended", index, flush=True)

Supervisor(
    work, workers=2, shutdown_timeout_s=5, heartbeats=beats, on_ready=on_ready, on_end=on_end
).run()
"""


@pytest.mark.parametrize(("hangs", "said"), [("[1]", ["ended 1", "ready"]), ("[2]", ["ready", "ended 1", "ended 1"])])
def test_a_worker_that_hangs_while_it_starts_is_replaced(hangs: str, said: list[str]) -> None:
    """A worker whose start takes many times longer than another's is killed, at the first start or as a replacement."""
    command = [sys.executable, "-c", STARTS.replace("HANGS", hangs)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        assert process.stdout is not None
        assert said == [process.stdout.readline().strip() for _ in said]
        process.send_signal(signal.SIGTERM)
        assert 0 == process.wait(20)
