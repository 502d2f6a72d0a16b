"""A long load of all tasks, text lengths and invalid requests: memory, file descriptors and threads stay constant."""

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from conftest import Served
from loads import assert_each_ended_once, closed_loop, descriptors, memory_mib, models_for, samples, seconds, show, target, threads
from test_mixed import RIGHT, WRONG

pytestmark = pytest.mark.serial

CONNECTIONS = 2  # per endpoint
ROUNDS = 6
MOST_GROWTH = 0.1
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


@pytest.mark.full_grid
def test_a_long_mixed_load_does_not_leak_resources(tmp_path: Path, serve: Callable[..., Any]) -> None:
    """Each request gets exactly one answer: 200 or a 4xx error. Memory, descriptors and threads do not grow after the first rounds."""
    by_path: dict[str, list[Any]] = {}
    for path, body in RIGHT + WRONG[:-1] + MORE:  # without the unknown model's path: as a separate target, it would be most of the load
        by_path.setdefault(path, []).append(body)
    with serve(models_for(tmp_path)) as served:
        everything = [target(served, path, bodies) for path, bodies in by_path.items()]
        before, loads, readings = samples(served), [], []
        for _ in range(ROUNDS):
            with ThreadPoolExecutor(len(everything)) as pool:
                loads += pool.map(lambda path: closed_loop(path, CONNECTIONS, max(seconds(600) / ROUNDS, 0.5)), everything)
            readings.append(settled(served))
        ended = assert_each_ended_once(before, samples(served), *loads)
        assert {200, 422} <= set(ended) <= {200, 400, 404, 413, 422}
        assert "ERROR" not in served.log.read_text()
    memory, files, running = zip(*readings, strict=True)
    show("memory in MiB, descriptors and threads after each round", str(readings))
    assert memory[-1] <= memory[ROUNDS // 2 - 1] * (1 + MOST_GROWTH)
    assert max(files[ROUNDS // 2 :]) <= max(files[: ROUNDS // 2])
    assert max(running[ROUNDS // 2 :]) <= max(running[: ROUNDS // 2])


def settled(served: Served) -> tuple[float, int, int]:
    """Returns MiB of memory, descriptors and threads: the minimum of a second, because connections of the last load are still closing."""
    readings = []
    for _ in range(10):
        readings.append((memory_mib(served), descriptors(served), threads(served)))
        time.sleep(0.1)
    memory, files, running = zip(*readings, strict=True)
    return min(memory), min(files), min(running)
