"""A full disk for logs, or for the metrics of several workers, does not stop requests."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

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
