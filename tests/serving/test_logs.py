"""What writes the logs: a thread of its own, which a slow reader stops and the event loop never waits for."""

from __future__ import annotations

import io
import json
import logging
import threading
from collections.abc import Iterator

import pytest

from bertserve.service.process import logs
from bertserve.service.process.logs import background_logging, configure_logging

logger = logging.getLogger("bertserve.test")


class Stderr(io.StringIO):
    """A stream that takes nothing until its gate is open."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = threading.Event()

    def write(self, text: str) -> int:
        assert self.gate.wait(20)
        return super().write(text)


@pytest.fixture(name="stderr")
def blocked_stderr(monkeypatch: pytest.MonkeyPatch) -> Iterator[Stderr]:
    """A stderr without a reader, with room for five lines; the root logger is restored afterwards."""
    root = logging.getLogger()
    before = (root.level, list(root.handlers))
    stderr = Stderr()
    monkeypatch.setattr("sys.stderr", stderr)
    monkeypatch.setattr(logs, "MAX_WAITING", 5)
    configure_logging("json")
    yield stderr
    stderr.gate.set()
    root.handlers = before[1]
    root.setLevel(before[0])


def test_a_log_that_nobody_reads_stops_nobody(stderr: Stderr) -> None:
    """Lines wait up to a bound; those beyond it are lost, and a line says how many once there is room."""
    with background_logging():
        for number in range(20):
            logger.info("line %d", number, extra={"number": number})
        stderr.gate.set()
    with background_logging():
        logger.info("later")
    lines = [json.loads(line) for line in stderr.getvalue().splitlines()]
    assert [line["number"] for line in lines[:5]] == [0, 1, 2, 3, 4]
    assert len(lines) <= 8
    assert lines[-1]["message"] == "later"
    assert set(lines[0]) == {"level", "logger", "message", "number", "pid", "time"}


def test_lost_lines_are_told(stderr: Stderr) -> None:
    with background_logging():
        for number in range(20):
            logger.info("line %d", number)
        stderr.gate.set()
        while "line 4" not in stderr.getvalue():
            threading.Event().wait(0.01)
        logger.info("later")
    lines = [json.loads(line)["message"] for line in stderr.getvalue().splitlines()]
    told = [line for line in lines if " lines were lost " in line]
    assert told  # twice if the thread took its first line between two of ours
    assert sum(int(line.split()[0]) for line in told) == 20 + 1 - (len(lines) - len(told))
    assert lines[-1] == "later"
