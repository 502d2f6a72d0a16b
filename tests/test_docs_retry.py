"""Runs the program that retries, of docs/how-to/clients.md, against a service that first refuses requests."""

import json
import re
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from support.listening import http_server

PAGE = (Path(__file__).parent.parent / "docs/how-to/clients.md").read_text(encoding="utf-8").partition("## Retries")[2]
ANSWER = b'[[{"label": "positive", "score": 1.0}]]'
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


def run(*statuses: int) -> tuple[int, str, list[float], list[tuple[Any, int]]]:
    """Runs the page's program with a service that answers once with each of `statuses`, then with 200.

    429 and 503 have `Retry-After: 2`; 0 closes the connection.

    Returns:
        The exit code, the output, the pauses in seconds, and the body and the timeout in milliseconds of each request.
    """

    async def answer(i: int) -> bytes | None:
        status = statuses[i] if i < len(statuses) else 200
        retry_after = b"retry-after: 2\r\n" if status in (429, 503) else b""
        return b"HTTP/1.1 %d Any\r\n%scontent-length: %d\r\n\r\n%s" % (status, retry_after, len(ANSWER), ANSWER) if status else None

    [program] = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    with http_server(answer) as server:
        program = program.replace("http://127.0.0.1:8000", f"http://127.0.0.1:{server.port}")
        result = subprocess.run([sys.executable, "-c", BEFORE + program], capture_output=True, text=True, timeout=60, check=False)
    [pauses] = re.findall(r"^pauses (.*)$", result.stderr, re.MULTILINE)
    timeouts = [int(head.partition(b"x-request-timeout-ms: ")[2].partition(b"\r\n")[0]) for head in server.heads]
    return result.returncode, result.stdout, json.loads(pauses), list(zip(map(json.loads, server.bodies), timeouts, strict=True))


def test_requests_to_a_busy_service_are_retried() -> None:
    """A pause takes `Retry-After`, or 1 s after a lost connection, plus at most 50 %. Each retry sends the remaining time as timeout."""
    code, output, pauses, requests = run(429, 503, 0, 429)

    assert code == 0
    assert "positive" in output
    assert [body for body, _ in requests] == [{"inputs": "A warm, funny film."}] * 5
    assert [least <= pause <= 1.5 * least for least, pause in zip([2, 2, 1, 2], pauses, strict=True)] == [True] * 4
    timeouts = [timeout for _, timeout in requests]
    assert 30000 >= timeouts[0] > 1000
    assert [before - after >= 1000 for before, after in pairwise(timeouts)] == [True] * 4


@pytest.mark.parametrize("status", [422, 504, 500])
def test_errors_without_retry_after_are_not_retried(status: int) -> None:
    code, _, pauses, requests = run(status)

    assert code == 1
    assert pauses == []
    assert len(requests) == 1


def test_retries_end_at_the_deadline() -> None:
    """All pauses together take less than the program's deadline of 30 s, and a request follows each pause."""
    code, _, pauses, requests = run(*[429] * 40)

    assert code == 1
    assert sum(pauses) < 30
    assert len(requests) == len(pauses) + 1
