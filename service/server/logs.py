"""Logs: to stderr, as text or as one JSON object per line, written by a separate thread while requests are served."""

from __future__ import annotations

import json
import logging
import logging.handlers
import queue
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

from pythonjsonlogger.json import JsonFormatter

MAX_WAITING = 10_000  # lines that can wait if stderr is read too slowly
FLUSH_S = 2.0  # maximum wait for the last lines at the end


def configure_logging(log_format: str, *, worker: int | None = None) -> None:
    """Sends all logs to stderr.

    Args:
        log_format: `text` or `json`; docs/reference/logs.md has the fields of a JSON line.
        worker: Index of this process among several workers.
    """
    handler = logging.StreamHandler()
    handler.setFormatter(_formatter(log_format, worker))
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
    logging.getLogger("uvicorn").setLevel(logging.WARNING)


def as_printed(line: str, log_format: str, **fields: Any) -> str:
    """Returns a line for stdout: unchanged for a text log, which a person reads, or as JSON with `fields` for a program that reads both."""
    if log_format != "json":
        return line
    record = logging.LogRecord("bertserve", logging.INFO, "", 0, line, None, None)
    record.__dict__.update(fields)
    return _formatter(log_format).format(record)


def _formatter(log_format: str, worker: int | None = None) -> logging.Formatter:
    if log_format == "json":
        renamed = {"levelname": "level", "name": "logger", "process": "pid"}
        fields = {} if worker is None else {"worker": worker}
        return JsonFormatter(
            "%(levelname)s %(name)s %(process)d %(message)s",
            rename_fields=renamed,
            static_fields=fields,
            timestamp="time",
            json_serializer=partial(json.dumps, separators=(",", ":")),
        )
    place = "" if worker is None else f" worker {worker}"
    formatter = logging.Formatter(
        f"%(asctime)s.%(msecs)03d+00:00 %(levelname)s [%(process)d{place}] %(name)s: %(message)s", "%Y-%m-%dT%H:%M:%S"
    )
    formatter.converter = time.gmtime
    return formatter


@contextmanager
def background_logging() -> Iterator[None]:
    """Makes a thread write the logs until the block ends, so that a slow reader of stderr never blocks the event loop."""
    root = logging.getLogger()
    written_by = list(root.handlers)
    waiting: queue.Queue[logging.LogRecord | None] = queue.Queue(MAX_WAITING)

    def write() -> None:
        while (record := waiting.get()) is not None:
            for handler in written_by:
                handler.handle(record)

    # not logging's QueueListener, which cannot end while its queue is full, and would wait forever if stderr is not read
    writer = threading.Thread(target=write, name="logs", daemon=True)
    root.handlers = [_QueueHandler(waiting)]
    writer.start()
    try:
        yield
    finally:
        root.handlers = written_by
        with suppress(queue.Full):
            waiting.put(None, timeout=FLUSH_S)
        writer.join(FLUSH_S)


class _QueueHandler(logging.handlers.QueueHandler):
    """Puts lines into a queue; if the queue is full, it counts lost lines."""

    lost = 0

    def enqueue(self, record: logging.LogRecord) -> None:
        try:
            if self.lost:
                text = f"{self.lost} log lines were lost because stderr is read too slowly"
                self.queue.put_nowait(logging.LogRecord("bertserve", logging.WARNING, "", 0, text, None, None))
                self.lost = 0
            self.queue.put_nowait(record)
        except queue.Full:
            self.lost += 1
