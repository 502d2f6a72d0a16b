"""A separate thread writes the logs, so that a slow reader never blocks the event loop."""

from __future__ import annotations

import io
import json
import logging
import threading
from collections.abc import Iterator

import pytest

from bertserve.service.server import logs
from bertserve.service.server.logs import background_logging, configure_logging

logger = logging.getLogger("bertserve.test")


class Stderr(io.StringIO):
    """A stream whose writes block until its gate is open."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = threading.Event()

    def write(self, text: str) -> int:
        assert self.gate.wait(20)
        return super().write(text)


@pytest.fixture(name="stderr")
def blocked_stderr(monkeypatch: pytest.MonkeyPatch) -> Iterator[Stderr]:
    """Yields a stderr that nothing reads, with space for five waiting lines; restores the root logger afterwards."""
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


def test_an_unread_log_does_not_block_logging(stderr: Stderr) -> None:
    """Lines wait up to a limit; further lines are lost, and a later line reports how many."""
    with background_logging():
        for number in range(20):
            logger.info("line %d", number, extra={"number": number})
        stderr.gate.set()
        while "line 4" not in stderr.getvalue():
            threading.Event().wait(0.01)
        logger.info("later")
    lines = [json.loads(line) for line in stderr.getvalue().splitlines()]
    told = [line["message"] for line in lines if " lines were lost " in line["message"]]
    assert [line["number"] for line in lines[:5]] == [0, 1, 2, 3, 4]
    assert set(lines[0]) == {"level", "logger", "message", "number", "pid", "time"}
    assert told  # two reports if the thread took its first line between two lines of the test
    assert sum(int(text.split()[0]) for text in told) == 20 + 1 - (len(lines) - len(told))
    assert lines[-1]["message"] == "later"
