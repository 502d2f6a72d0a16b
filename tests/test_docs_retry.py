"""The programs of docs/how-to/retry.md, run as they stand there, against a service that refuses first."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise
from pathlib import Path

import pytest

PAGE = (Path(__file__).parent.parent / "docs/how-to/retry.md").read_text(encoding="utf-8")
NODE = shutil.which("node")
ANSWER = [[{"label": "positive", "score": 1.0}]]
# Before each program: its pauses are noted, and take no time. In JavaScript for the program alone: fetch has timers of its own.
PYTHON = """
import json, time
pauses, moved = [], 0.0
clock = time.monotonic
def sleep(seconds):
    global moved
    pauses.append(seconds)
    moved += seconds
time.sleep, time.monotonic = sleep, lambda: clock() + moved
import atexit, sys
atexit.register(lambda: print("pauses", json.dumps(pauses), file=sys.stderr))
"""
JAVASCRIPT = """
const pauses = [];
let moved = 0;
const Date = { now: () => globalThis.Date.now() + Math.round(moved) };
const setTimeout = (done, ms) => { pauses.push(ms / 1000); moved += ms; done(); };
process.on("exit", () => console.error("pauses " + JSON.stringify(pauses)));
"""

each_language = pytest.mark.parametrize(
    "language", ["python", pytest.param("javascript", marks=pytest.mark.skipif(NODE is None, reason="needs node"))]
)


class Refusing(ThreadingHTTPServer):
    """A service that gives each of some statuses once, with `Retry-After: 2` where it is busy, and then the answer; 0 hangs up."""

    def __init__(self, statuses: Sequence[int]) -> None:
        super().__init__(("127.0.0.1", 0), Answering)
        self.statuses = list(statuses)
        self.asked: list[tuple[object, int]] = []


class Answering(BaseHTTPRequestHandler):
    """Answers one request."""

    server: Refusing

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.server.asked.append((body, int(self.headers["x-request-timeout-ms"])))
        status = self.server.statuses.pop(0) if self.server.statuses else 200
        if status:
            answer = json.dumps(ANSWER if status == 200 else {"error": "no", "error_type": "x", "request_id": "1"}).encode()
            self.send_response(status)
            if status in (429, 503):
                self.send_header("Retry-After", "2")
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

    def log_message(self, *_: object) -> None:
        """Says nothing."""


@pytest.fixture(name="refusing")
def refusing_service(request: pytest.FixtureRequest) -> Iterator[Refusing]:
    with Refusing(request.param) as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}).start()
        yield server
        server.shutdown()


def run(language: str, server: Refusing) -> tuple[int, str, list[float]]:
    """Runs the page's program; returns its exit code, what it printed, and its pauses in seconds."""
    [program] = re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)
    program = program.replace("http://127.0.0.1:8000", f"http://127.0.0.1:{server.server_port}")
    if language == "python":
        command = [sys.executable, "-c", PYTHON + program]
    else:
        command = [str(NODE), "--input-type=module", "--eval", JAVASCRIPT + program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    [pauses] = re.findall(r"^pauses (.*)$", done.stderr, re.MULTILINE)
    return done.returncode, done.stdout, json.loads(pauses)


@each_language
@pytest.mark.parametrize("refusing", [[429, 503, 0, 429]], indirect=True, ids=["busy"])
def test_a_busy_service_is_asked_again(language: str, refusing: Refusing) -> None:
    """After its `Retry-After`, or a pause that grows where the connection broke, and at most half as long again; with the time that is left."""
    code, printed, pauses = run(language, refusing)

    assert (0, True) == (code, "positive" in printed)
    assert [{"inputs": "A warm, funny film."}] * 5 == [body for body, _ in refusing.asked]
    assert [True] * 4 == [least <= pause <= 1.5 * least for least, pause in zip([2, 2, 1, 2], pauses, strict=True)]
    times = [left for _, left in refusing.asked]
    assert 30000 >= times[0] > 1000
    assert [True] * 4 == [before - after >= 1000 for before, after in pairwise(times)]


@each_language
@pytest.mark.parametrize("refusing", [[422], [504], [500]], indirect=True, ids=str)
def test_what_would_fail_again_is_not_repeated(language: str, refusing: Refusing) -> None:
    code, _, pauses = run(language, refusing)

    assert (1, [], 1) == (code, pauses, len(refusing.asked))


@each_language
@pytest.mark.parametrize("refusing", [[429] * 40], indirect=True, ids=["always"])
def test_patience_ends(language: str, refusing: Refusing) -> None:
    """Within the 30 seconds that the program has, none of which it waits for in vain at the end."""
    code, _, pauses = run(language, refusing)

    assert 1 == code
    assert sum(pauses) < 30
    assert len(pauses) + 1 == len(refusing.asked)
