"""The example in examples/, run as its page says: from training to the load test."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

from bertserve.service.check import difference

pytestmark = [pytest.mark.torch, pytest.mark.full_grid]

EXAMPLES = Path(__file__).parents[2] / "examples"
PAGE = (EXAMPLES / "README.md").read_text(encoding="utf-8")


def test_the_page_is_true(tmp_path: Path) -> None:
    """Each command ends well; the exported graphs have the accuracy that training printed, and the answer is the one that is shown."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
    commands = [
        command.replace("examples/", f"{EXAMPLES}/").replace("8000", port) for command in re.findall(r"```bash\n(.+?)\n```", PAGE, re.S)
    ]
    train, export, verify, serve, ask, load = commands
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}

    def run(command: str) -> str:
        done = subprocess.run(command, shell=True, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
        assert 0 == done.returncode, done.stderr
        return done.stdout

    trained = re.findall(r"accuracy (\S+) on 720", run(train))
    run(export)
    assert (tmp_path / "my-models/support/README.md").is_file()
    verified = re.findall(r"accuracy cpu/\w+ +(\S+)", run(verify))
    assert trained[0] == verified[0]
    assert float(verified[0]) == pytest.approx(float(verified[1]), abs=0.01)
    with subprocess.Popen(f"exec {serve} --port {port}", shell=True, cwd=tmp_path, env=environment, stdout=subprocess.PIPE) as service:
        try:
            wait_for(f"http://127.0.0.1:{port}/health/ready")
            (shown,) = re.findall(r"```json\n(.+?)\n```", PAGE, re.S)
            answer = json.loads(run(ask))
            assert json.loads(shown)[0][0]["label"] == answer[0][0]["label"]
            assert difference(json.loads(shown), answer, 0.3) is None  # training gives other weights on another machine
            assert "passed: error_rate <= 0" in run(load.replace("--seconds 5", "--seconds 1"))
        finally:
            service.terminate()
    assert (tmp_path / "load.html").is_file()


def wait_for(address: str) -> None:
    """Waits until a service is ready, and fails after a minute."""
    end = time.monotonic() + 60
    while True:
        try:
            if 200 == httpx.get(address, trust_env=False).status_code:
                return
        except httpx.TransportError:
            pass
        assert time.monotonic() < end
        time.sleep(0.1)
