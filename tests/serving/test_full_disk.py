"""A full disk for logs does not stop requests."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import httpx
import pytest

FULL = Path("/dev/full")  # a device that is always full


@pytest.mark.skipif(not FULL.exists(), reason="this system has no /dev/full")
def test_an_unwritable_log_does_not_stop_requests(models: Path) -> None:
    command = [str(Path(sys.executable).with_name("bert-serve")), "serve", "--port", "0", "--models", str(models), "--access-log"]
    bodies = [{"inputs": "good"}, {"inputs": 1}, {"inputs": "good", "model": "none"}, "no body"]
    with FULL.open("w") as full, subprocess.Popen(command, stdout=subprocess.PIPE, stderr=full, text=True) as process:
        assert process.stdout is not None
        line = next(line for line in process.stdout if " listens on " in line)
        with httpx.Client(base_url=line.split(" listens on ")[1].split(",")[0], trust_env=False, timeout=20) as client:
            for _ in range(20):
                assert [200, 422, 404, 422] == [client.post("/classify", json=body).status_code for body in bodies]
        process.terminate()
        assert 0 == process.wait(20)
