"""A full disk for logs, or for the metrics of several workers, does not stop requests."""

from __future__ import annotations

import errno
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from bertserve.service.server import serve
from conftest import wait_until

COMMAND = [str(Path(sys.executable).with_name("bert-serve")), "serve", "--port", "0"]
PRIVATE_DISK = ["unshare", "--mount", "/bin/sh", "-c", 'mount -t tmpfs -o size=4m tmpfs /dev/shm && exec "$@"', "sh"]
FULL = Path("/dev/full")  # a device that is always full


def mounts() -> bool:
    """Returns whether this process can mount a private disk."""
    try:
        return subprocess.run([*PRIVATE_DISK, "true"], capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        return False


@contextmanager
def started(command: list[str], **streams: Any) -> Iterator[tuple[subprocess.Popen[str], httpx.Client]]:
    """Runs the service until the block ends, and asserts that it exits with status 0. Yields the process and a client."""
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, **streams) as process:
        assert process.stdout is not None
        line = next(line for line in process.stdout if " listens on " in line)
        with httpx.Client(base_url=line.split(" listens on ")[1].split(",")[0], trust_env=False, timeout=20) as client:
            try:
                yield process, client
            finally:
                process.terminate()
        assert 0 == process.wait(20)


def answers(client: httpx.Client) -> list[int]:
    """Returns the statuses of several kinds of requests, each on its own connection, so that every worker gets some."""
    close = {"connection": "close"}
    bodies = [{"inputs": "good"}, {"inputs": 1}, {"inputs": "good", "model": "none"}, "no body"] * 4
    return [client.post("/classify", json=body, headers=close).status_code for body in bodies]


EXPECTED = [200, 422, 404, 422] * 4


@pytest.mark.skipif(not FULL.exists(), reason="this system has no /dev/full")
def test_an_unwritable_log_does_not_stop_requests(models: Path) -> None:
    with FULL.open("w") as full, started([*COMMAND, "--models", str(models), "--access-log"], stderr=full) as (_, client):
        for _ in range(5):
            assert EXPECTED == answers(client)


@pytest.mark.full_grid
@pytest.mark.skipif(not mounts(), reason="this takes the right to mount a disk")
def test_workers_serve_requests_while_their_metrics_disk_is_full(models: Path) -> None:
    """A worker reserves its space at startup. A replacement worker takes over the space of its predecessor."""
    command = [*PRIVATE_DISK, *COMMAND, "--models", str(models), "--workers", "2", "--threads", "2"]
    with started(command, stderr=subprocess.PIPE) as (process, client):
        fill(Path(f"/proc/{process.pid}/root/dev/shm/fill"))
        assert EXPECTED == answers(client)
        killed = client.get("/info").json()["worker"]["pid"]
        os.kill(killed, signal.SIGKILL)
        assert process.stderr is not None
        lines = [next(process.stderr)]
        while "restarted as process" not in lines[-1]:
            lines.append(next(process.stderr))
        assert [] == [line for line in lines if "cannot write" in line]
        assert [] == [line for line in lines if re.search(rf"process (?!{killed},)\d+, ended", line)]
        wait_until(lambda: len({worker(client) for _ in range(8)}) == 2)
        assert EXPECTED == answers(client)
        page = client.get("/metrics")
        assert (200, True) == (page.status_code, 'status="422"' in page.text)


def worker(client: httpx.Client) -> int:
    return int(client.get("/info", headers={"connection": "close"}).json()["worker"]["pid"])


def fill(path: Path) -> None:
    with path.open("wb", buffering=0) as file, pytest.raises(OSError, match="No space"):
        while file.write(bytes(4096)):
            pass


def test_space_for_metrics_is_reserved_completely_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without enough space, a worker adds no file, keeps the files of its predecessor and counts in its own memory."""
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path))
    serve.reserve(tmp_path, 0)
    assert set(serve.SIZES.values()) == {path.stat().st_size for path in tmp_path.iterdir()}
    assert sum(serve.SIZES.values()) <= sum(path.stat().st_blocks * 512 for path in tmp_path.iterdir())
    assert "PROMETHEUS_MULTIPROC_DIR" in os.environ
    serve.forget(tmp_path, 0)
    kept = {"histogram_0.db", "counter_0.db"}
    assert kept == set(os.listdir(tmp_path))

    def no_room(descriptor: int, offset: int, size: int) -> None:
        if size == serve.SIZES["gauge_livemax"]:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", no_room)
    serve.reserve(tmp_path, 0)
    assert (kept, False) == (set(os.listdir(tmp_path)), "PROMETHEUS_MULTIPROC_DIR" in os.environ)
