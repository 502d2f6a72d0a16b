"""Services that share a device with its own clock: their sessions sleep as long as runs took on an H200. Everything else is the service's own code.

`PYTHONPATH=.:tests python tests/serving/device.py` writes a table of loads, without and with CUDA graphs, for several workers.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import sys
import tempfile
import time
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
from numpy.typing import NDArray

from bertserve.service.api.endpoint import Endpoint
from bertserve.service.bundle.files import MANIFEST_FILE
from bertserve.service.engine import onnx_engine
from bertserve.service.engine.cuda_graphs import MAX_TOKENS
from bertserve.service.models import loading
from bertserve.service.models.build import AppState, build
from bertserve.service.settings import Settings

MODEL = Path(__file__).parents[2] / "models" / "sentiment"  # its tokenizer and its head; its graph never runs
# Milliseconds of a run of BERT base in fp16 by padded tokens (bench/results/2026-11-27-gpu.md): the whole run from numpy to numpy, and the
# part in which it occupies the device, which is that of a CUDA graph.
RUNS_MS = {1: (1.7, 0.5), 1024: (1.6, 0.8), 4096: (2.28, 1.98), 8192: (4.12, 3.73), 16384: (7.85, 7.4)}
COPIES_MS = 0.1  # of inputs and outputs, of which the replay of a CUDA graph needs the same as another run
# the plan of such an export
_LENGTHS, _ROWS = (
    (16, 32, 64, 96, 128, 192, 256, 384, 512),
    (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024),
)
SHAPES = {"buckets": [{"length": length, "rows": [rows for rows in _ROWS if rows * length <= 16384]} for length in _LENGTHS]}
WORDS = "the film was long and slow but its actors were good so we liked it anyway".split()
LOADS = {
    "single texts of 30 tokens": (24, 1, 64),
    "single texts of 400 words": (400, 1, 64),
    "lists of 64 texts of 30 tokens": (24, 64, 16),
}


@dataclass
class Device:
    """A device that runs one batch at a time, and whose runs are started in parallel.

    Attributes:
        graphs: Whether small runs are started as CUDA graphs.
        free: The time at which it is free, which all processes share.
        slower: Factor of all times, so that a machine with few cores can show what more cores would do.
        runs: Start of each run, and the seconds in which it occupied the device.
        rows: Rows of each run, without those that fill a planned shape.
    """

    graphs: bool
    free: Any
    slower: float = 1.0

    def __post_init__(self) -> None:
        self.runs: list[tuple[float, float]] = []
        self.rows: list[int] = []

    def run(self, names: Sequence[str], feed: dict[str, NDArray[Any]]) -> list[NDArray[np.float32]]:
        """Sleeps as long as a run takes; it is the function of a session."""
        rows, length = feed["input_ids"].shape
        whole, device = (self.slower * each / 1000 for each in times_ms(rows * length))
        time.sleep(self.slower * COPIES_MS / 1000 if self.graphs and rows * length <= MAX_TOKENS else whole - device)
        with self.free.get_lock():  # a late wake-up of this process does not occupy the device
            start = max(time.monotonic(), self.free.value)
            self.free.value = start + device
        time.sleep(max(start + device - time.monotonic(), 0))
        self.runs.append((start, device))
        self.rows.append(rows - int((feed["input_ids"][1:] == feed["input_ids"][0]).all(axis=1).sum()))
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
                    cuda_graphs=False,  # the device has their times
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


@dataclass(frozen=True)
class Measured:
    """What a worker did in the measured time: requests, runs, their rows, seconds of the device and of the processor."""

    requests: int
    runs: int
    rows: int
    device_s: float
    processor_s: float


def _set(shared: tuple[Any, Any]) -> None:
    """Gives a process what all share: when the device is free, and a barrier."""
    global free, ready
    free, ready = shared


def worker(graphs: bool, words: int, texts: int, callers: int, seconds: float, slower: float) -> Measured:
    """Returns the figures of a closed loop of callers in a service of its own, without its first third."""
    device = Device(graphs, free)

    async def load() -> Measured:
        state.scheduler.start()
        device.slower = slower  # after the warm-up
        endpoint = Endpoint(state)
        ready.wait()
        begin = time.monotonic()
        start, end = begin + seconds / 3, begin + seconds
        done: list[float] = []
        processor: list[float] = []

        async def call(caller: int) -> None:
            number = caller
            while (now := time.monotonic()) < end:
                if now >= start and not processor:
                    processor.append(time.process_time())
                inputs = [" ".join([f"{number} {i}", *(WORDS[(number + j) % len(WORDS)] for j in range(words - 2))]) for i in range(texts)]
                number += callers
                await _post(endpoint, json.dumps({"inputs": inputs if texts > 1 else inputs[0]}).encode())
                done.append(time.monotonic())

        await asyncio.gather(*map(call, range(callers)))
        processor_s = time.process_time() - processor[0]
        await state.scheduler.stop(1)
        runs = [(each, rows) for each, rows in zip(device.runs, device.rows, strict=True) if start <= each[0] < end]
        return Measured(
            sum(start <= each < end for each in done),
            len(runs),
            sum(rows for _, rows in runs),
            sum(run[1] for run, _ in runs),
            processor_s,
        )

    with service(device) as state:
        return asyncio.run(load())


def main() -> None:
    """Prints a table of all loads with one, four and eight workers, without and with CUDA graphs."""
    seconds = float(sys.argv[1]) if len(sys.argv) > 1 else 6.0
    context = multiprocessing.get_context("spawn")
    columns = ("load", "graphs", "workers", "requests/s", "texts/s", "device busy", "texts per run", "cores", "ms of processor per request")
    print(f"| {' | '.join(columns)} |\n|" + "---|" * len(columns))
    for name, (words, texts, callers) in LOADS.items():
        for workers in (1, 4, 8):
            for graphs in (False, True):
                slower = 2.0 * workers
                shared = context.Value("d", 0.0), context.Barrier(workers)
                with ProcessPoolExecutor(workers, context, initializer=_set, initargs=(shared,)) as pool:
                    futures = [pool.submit(worker, graphs, words, texts, callers // workers, seconds, slower) for _ in range(workers)]
                    parts = [future.result() for future in futures]
                measured_s = seconds * 2 / 3 / slower
                requests, runs, rows = (sum(getattr(part, field) for part in parts) for field in ("requests", "runs", "rows"))
                cells = [
                    name,
                    "yes" if graphs else "no",
                    workers,
                    f"{requests / measured_s:,.0f}",
                    f"{requests * texts / measured_s:,.0f}",
                    f"{sum(part.device_s for part in parts) / slower / measured_s:.0%}",
                    f"{rows / runs:.1f}",
                    f"{sum(part.processor_s for part in parts) / measured_s:.1f}",
                    f"{1000 * sum(part.processor_s for part in parts) / requests:.2f}",
                ]
                print("|", " | ".join(map(str, cells)), "|", flush=True)


if __name__ == "__main__":
    main()
