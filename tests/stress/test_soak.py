"""A long load of all tasks, text lengths and invalid requests: memory, file descriptors and threads stay constant."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from conftest import Served
from loads import LONG, assert_each_ended_once, closed_loop, descriptors, memory_mib, models_for, samples, seconds, show, target, threads
from test_mixed import RIGHT, WRONG

pytestmark = pytest.mark.serial

CONNECTIONS = 2  # per endpoint
SETTLED_S = 60.0
EVERY_S = 5.0
MOST_GROWTH = 0.05
# more requests: long lists, long texts and invalid bodies
MORE: list[tuple[str, Any]] = [
    ("/classify", {"inputs": ["A warm, funny film."] * 64}),
    ("/classify", {"inputs": "A poor book. " * 10_000}),
    ("/answer", {"inputs": {"question": "How long is it?", "context": "The river is long and wide. " * 400}}),
    ("/classify", b'{"inputs": '),
    ("/ner", {"inputs": ["good"] * 513}),
    ("/fill-mask", {}),
    ("/fill-mask", {"inputs": "A [MASK].", "model": "nobody"}),
]


class Watch:
    """Records the resources of the service's process every few seconds, while a block runs.

    Attributes:
        readings: (seconds since the start, MiB of memory, number of descriptors, number of threads) of each reading.
    """

    def __init__(self, served: Served) -> None:
        self.readings: list[tuple[float, float, int, int]] = []
        self._served = served
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._read)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _read(self) -> None:
        start = time.monotonic()
        while not self._over.wait(min(EVERY_S, seconds(EVERY_S))):
            self.readings.append((time.monotonic() - start, memory_mib(self._served), descriptors(self._served), threads(self._served)))


@pytest.mark.full_grid
def test_a_long_mixed_load_does_not_leak_resources(tmp_path: Path, serve: Callable[..., Any]) -> None:
    """Each request gets exactly one answer: 200 or a 4xx error. Memory, descriptors and threads do not grow after the first minute."""
    by_path: dict[str, list[Any]] = {}
    for path, body in RIGHT + WRONG[:-1] + MORE:  # without the unknown model's path: as a separate target, it would be most of the load
        by_path.setdefault(path, []).append(body)
    with serve(models_for(tmp_path)) as served:
        everything = [target(served, path, bodies) for path, bodies in by_path.items()]
        before = samples(served)
        with Watch(served) as watch, ThreadPoolExecutor(len(everything)) as pool:
            loads = list(pool.map(lambda path: closed_loop(path, CONNECTIONS, seconds(600)), everything))
        ended = assert_each_ended_once(before, samples(served), *loads)
        assert {200, 422} <= set(ended) <= {200, 400, 404, 413, 422}
        assert_constant(watch.readings)
        show("requests", ", ".join(f"{count} of {status}" for status, count in sorted(ended.items())))
        assert "ERROR" not in served.log.read_text()


def assert_constant(readings: list[tuple[float, float, int, int]]) -> None:
    """Asserts that no resource grew after the first minute. It does nothing for shorter loads."""
    settled = [reading for reading in readings if reading[0] >= SETTLED_S]
    if not (LONG and settled):
        return
    # medians over a minute each, because the threads allocate and free memory with each text
    first = median(reading[1] for reading in settled if reading[0] < 2 * SETTLED_S)
    last = median(reading[1] for reading in settled if reading[0] >= settled[-1][0] - SETTLED_S)
    show("memory in the second and in the last minute, bar +5 %", f"{first:.0f} and {last:.0f} MiB, {last / first - 1:+.1%}")
    show("descriptors and threads, bar constant", f"{sorted({one[2] for one in settled})} and {sorted({one[3] for one in settled})}")
    assert last <= first * (1 + MOST_GROWTH)
    assert 1 == len({one[2] for one in settled})
    assert 1 == len({one[3] for one in settled})
