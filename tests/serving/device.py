"""A service with a device of its own clock: its sessions sleep as long as runs took on an H200. Everything else is the service's own code."""

import asyncio
import json
import tempfile
import threading
import time
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
from numpy.typing import NDArray

from bertserve.service.api.endpoint import Endpoint
from bertserve.service.bundle.files import MANIFEST_FILE
from bertserve.service.engine import onnx_engine
from bertserve.service.models import loading
from bertserve.service.models.build import AppState, build
from bertserve.service.settings import Settings

MODEL = Path(__file__).parents[2] / "models" / "sentiment"  # its tokenizer and its head; its graph never runs
# Milliseconds of a run of BERT base in fp16 by padded tokens (bench/results/2026-11-27-gpu.md): the whole run from numpy to numpy, and the
# part in which it occupies the device.
RUNS_MS = {1: (1.7, 0.5), 1024: (1.6, 0.8), 4096: (2.28, 1.98), 8192: (4.12, 3.73), 16384: (7.85, 7.4)}
# the plan of such an export, without batches over 8,192 tokens
_LENGTHS, _ROWS = (16, 32, 64, 96, 128, 192, 256, 384, 512), (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
SHAPES = {"buckets": [{"length": length, "rows": [rows for rows in _ROWS if rows * length <= 8192]} for length in _LENGTHS]}
WORDS = "the film was long and slow but its actors were good so we liked it anyway".split()


@dataclass
class Device:
    """A device that runs one batch at a time, and whose runs are started in parallel.

    Attributes:
        slower: Factor of all times; a slow device waits for no processor, so tests do not depend on that of the machine.
        runs: Start of each run, and its rows without padding.
    """

    slower: float = field(default=1.0, init=False)
    runs: list[tuple[float, int]] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def run(self, names: Sequence[str], feed: dict[str, NDArray[Any]]) -> list[NDArray[np.float32]]:
        """Sleeps as long as a run takes; it is the function of a session."""
        start = time.perf_counter()
        rows, length = feed["input_ids"].shape
        whole, device = (self.slower * each / 1000 for each in times_ms(rows * length))
        time.sleep(whole - device)
        with self._lock:
            time.sleep(device)
        repeated = int((feed["input_ids"][1:] == feed["input_ids"][0]).all(axis=1).sum())  # they fill a planned shape
        self.runs.append((start, rows - repeated))
        return [np.zeros((rows, 2), dtype=np.float32)]


def times_ms(tokens: int) -> tuple[float, float]:
    """Returns milliseconds of a run and of its part on the device, interpolated between the measured ones."""
    sizes = list(RUNS_MS)
    place = min(max(bisect_left(sizes, tokens), 1), len(sizes) - 1)
    (below, above), share = sizes[place - 1 : place + 1], (tokens - sizes[place - 1]) / (sizes[place] - sizes[place - 1])
    whole, device = (one + (other - one) * share for one, other in zip(RUNS_MS[below], RUNS_MS[above], strict=True))
    return whole, device


@contextmanager
def service(device: Device, **settings: Any) -> Iterator[AppState]:
    """Yields a service with one classifier on a device."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "sentiment"
        path.mkdir()
        for file in MODEL.iterdir():
            (path / file.name).symlink_to(file)
        manifest = json.loads((path / MANIFEST_FILE).read_text())
        (path / MANIFEST_FILE).unlink()
        manifest["graphs"][0] |= {"provider": "cuda", "precision": "fp16", "shapes": SHAPES}
        (path / MANIFEST_FILE).write_text(json.dumps(manifest))
        with (
            mock.patch.object(onnx_engine, "open_session", lambda path, graph, **options: device),
            mock.patch.object(loading, "why_not", lambda provider, device_id: None),
        ):
            yield build(
                Settings(
                    models=[Path(folder)],
                    provider="cuda",
                    precision="fp16",
                    require_validation="no",
                    allow_implicit_default=True,
                    **settings,
                )
            )


async def _post(endpoint: Endpoint, body: bytes) -> None:
    """Sends a request as a server does, and checks its status."""
    messages = iter([{"type": "http.request", "body": body, "more_body": False}])
    status = []

    async def receive() -> Any:
        return next(messages, None) or await asyncio.Event().wait()

    async def send(message: Any) -> None:
        status.append(message.get("status"))

    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    scope = {"type": "http", "method": "POST", "path": "/classify", "raw_path": b"/classify", "query_string": b"", "headers": headers}
    await endpoint(scope | {"http_version": "1.1", "scheme": "http", "client": None, "server": None}, receive, send)
    assert status[0] == 200, status


def texts_per_run(device: Device, state: AppState, *, words: int, callers: int, seconds: float, slower: float) -> float:
    """Returns the texts per run of a closed loop of callers with one text each, without its first third.

    After the warm-up, the device is `slower`.
    """

    async def load() -> float:
        state.scheduler.start()
        device.slower = slower
        endpoint, end = Endpoint(state), time.perf_counter() + seconds

        async def call(caller: int) -> None:
            number = caller
            while time.perf_counter() < end:
                text = " ".join([f"{number}", *(WORDS[(number + j) % len(WORDS)] for j in range(words - 1))])
                number += callers
                await _post(endpoint, json.dumps({"inputs": text}).encode())

        await asyncio.gather(*map(call, range(callers)))
        await state.scheduler.stop(1)
        rows = [each for began, each in device.runs if end - seconds * 2 / 3 <= began < end]
        return sum(rows) / len(rows)

    return asyncio.run(load())
