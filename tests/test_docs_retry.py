"""Runs the program that retries, of docs/how-to/clients.md, against a service that first refuses requests."""

import json
import re
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise
from pathlib import Path

import pytest

PAGE = (Path(__file__).parent.parent / "docs/how-to/clients.md").read_text(encoding="utf-8").partition("## Retries")[2]
ANSWER = [[{"label": "positive", "score": 1.0}]]
# Code before the program: it records and skips the pauses.
BEFORE = """
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


class Refusing(ThreadingHTTPServer):
    """A service that answers once with each of `statuses`, then with 200. 429 and 503 have `Retry-After: 2`; 0 closes the connection."""

    def __init__(self, statuses: Sequence[int]) -> None:
        super().__init__(("127.0.0.1", 0), Answering)
        self.statuses = list(statuses)
        self.asked: list[tuple[object, int]] = []


class Answering(BaseHTTPRequestHandler):
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
        """Logs nothing."""


@pytest.fixture(name="refusing")
def refusing_service(request: pytest.FixtureRequest) -> Iterator[Refusing]:
    with Refusing(request.param) as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}).start()
        yield server
        server.shutdown()


def run(server: Refusing) -> tuple[int, str, list[float]]:
    """Runs the page's program. Returns its exit code, its output, and its pauses in seconds."""
    [program] = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    program = program.replace("http://127.0.0.1:8000", f"http://127.0.0.1:{server.server_port}")
    done = subprocess.run([sys.executable, "-c", BEFORE + program], capture_output=True, text=True, timeout=60, check=False)
    [pauses] = re.findall(r"^pauses (.*)$", done.stderr, re.MULTILINE)
    return done.returncode, done.stdout, json.loads(pauses)


@pytest.mark.parametrize("refusing", [[429, 503, 0, 429]], indirect=True, ids=["busy"])
def test_requests_to_a_busy_service_are_retried(refusing: Refusing) -> None:
    """A pause takes `Retry-After`, or 1 s after a lost connection, plus at most 50 %. Each retry sends the remaining time as timeout."""
    code, printed, pauses = run(refusing)

    assert (0, True) == (code, "positive" in printed)
    assert [{"inputs": "A warm, funny film."}] * 5 == [body for body, _ in refusing.asked]
    assert [True] * 4 == [least <= pause <= 1.5 * least for least, pause in zip([2, 2, 1, 2], pauses, strict=True)]
    times = [left for _, left in refusing.asked]
    assert 30000 >= times[0] > 1000
    assert [True] * 4 == [before - after >= 1000 for before, after in pairwise(times)]


@pytest.mark.parametrize("refusing", [[422], [504], [500]], indirect=True, ids=str)
def test_errors_without_retry_after_are_not_retried(refusing: Refusing) -> None:
    code, _, pauses = run(refusing)

    assert (1, [], 1) == (code, pauses, len(refusing.asked))


@pytest.mark.parametrize("refusing", [[429] * 40], indirect=True, ids=["always"])
def test_retries_end_at_the_deadline(refusing: Refusing) -> None:
    """All pauses together take less than the program's deadline of 30 s, and a request follows each pause."""
    code, _, pauses = run(refusing)

    assert 1 == code
    assert sum(pauses) < 30
    assert len(pauses) + 1 == len(refusing.asked)
