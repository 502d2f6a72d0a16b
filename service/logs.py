"""Logs: to stderr, as text or as one JSON object per line, written by a separate thread while requests are served."""

import json
import logging
import queue
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from logging.handlers import QueueHandler, QueueListener

from pythonjsonlogger.json import JsonFormatter

MAX_WAITING = 10_000  # lines that can wait if stderr is read too slowly
LAST_LINES_S = 2.0  # maximum wait at the end until they are written


def configure_logging(log_format: str, worker: int | None = None) -> None:
    """Sends all logs to stderr, as `text` or `json`; docs/how-to/monitoring.md lists the fields of a JSON line.

    `worker` is the index of this process, if there are several workers.
    """
    handler = logging.StreamHandler()
    if log_format == "json":
        formatter: logging.Formatter = JsonFormatter(
            "%(levelname)s %(name)s %(process)d %(message)s",
            rename_fields={"levelname": "level", "name": "logger", "process": "pid"},
            static_fields={} if worker is None else {"worker": worker},
            timestamp="time",
            json_serializer=partial(json.dumps, separators=(",", ":")),
        )
    else:
        process = "%(process)d" if worker is None else f"%(process)d worker {worker}"
        formatter = logging.Formatter(f"%(asctime)s.%(msecs)03d+00:00 %(levelname)s [{process}] %(name)s: %(message)s", "%Y-%m-%dT%H:%M:%S")
        formatter.converter = time.gmtime
    handler.setFormatter(formatter)
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    # hides uvicorn's line about a response that ends early: the service has logged its error with its request id
    logging.getLogger("uvicorn.error").addFilter(lambda record: "without completing response" not in record.getMessage())


@contextmanager
def background_logging(max_waiting: int = MAX_WAITING) -> Iterator[None]:
    """Makes a thread write the logs until the block ends, so that a slow reader of stderr never blocks the event loop."""
    root = logging.getLogger()
    handlers = root.handlers
    waiting: queue.Queue[logging.LogRecord] = queue.Queue(max_waiting)
    QueueListener(waiting, *handlers).start()
    root.handlers = [_DroppingHandler(waiting)]
    try:
        yield
    finally:
        root.handlers = handlers
        end = time.monotonic() + LAST_LINES_S
        # the thread of the listener ends with the process: to stop it would wait for a reader of stderr
        while waiting.unfinished_tasks and time.monotonic() < end:
            time.sleep(0.01)


class _DroppingHandler(QueueHandler):
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
