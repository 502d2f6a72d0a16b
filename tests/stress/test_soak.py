"""A long load of all tasks, text lengths and invalid requests: memory, file descriptors and threads stay constant."""

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from bertserve.service.tasks.catalog import TASKS
from support.loads import assert_each_ended_once, descriptors, load, metrics, models_for, seconds, show, target, threads
from support.replica import ServeProcess, running

pytestmark = pytest.mark.serial

CONNECTIONS = 2  # per endpoint
ROUNDS = 6
MOST_GROWTH = 0.1
FILLER = "The river is long and the valley is wide. "
LONG = FILLER * 60
PASSAGE = "The bridge was built in Porto in 1886 by a company of engineers."
QUESTION = "Where was the bridge built?"

# (path, body)
BODIES: list[tuple[str, Any]] = [(f"/{spec.path}", body) for spec in TASKS.values() for body in spec.body.model_json_schema()["examples"]]
BODIES += [
    # several texts and windows
    ("/classify", {"inputs": ["", "Dull.", {"text": "good", "text_pair": "bad"}], "parameters": {"top_k": 1}}),
    ("/classify", {"inputs": LONG, "parameters": {"window": "mean"}}),
    ("/classify", {"inputs": ["A warm, funny film."] * 64}),
    ("/classify", {"inputs": "A poor book. " * 10_000}),
    ("/ner", {"inputs": ["", PASSAGE, "\U0001f600 Jose\u0301 lives in Berlin."], "parameters": {"aggregation_strategy": "max"}}),
    ("/ner", {"inputs": LONG + PASSAGE, "parameters": {"ignore_labels": []}}),
    ("/answer", {"inputs": {"question": QUESTION, "context": LONG + PASSAGE}, "parameters": {"top_k": 3}}),
    ("/models/qa", {"inputs": {"question": QUESTION, "context": PASSAGE}, "parameters": {"max_seq_len": 24, "doc_stride": 4}}),
    ("/fill-mask", {"inputs": f"The [MASK] is long. {LONG} The king of [MASK] died.", "parameters": {"top_k": 1}}),
    ("/models/fill-mask", {"inputs": "The king of [MASK] died.", "parameters": {"targets": ["france", "Zwickau"]}}),
    # wrong ones
    ("/classify", b'{"inputs": '),
    ("/classify", {"inputs": 5}),
    ("/classify", {"inputs": ["good", LONG], "parameters": {"truncation": False}}),
    ("/ner", {"inputs": ["good", LONG], "parameters": {"stride": 510}}),
    ("/ner", {"inputs": ["good"] * 513}),
    ("/answer", {"inputs": [{"question": "", "context": "good"}], "parameters": {"topk": 1}}),
    ("/fill-mask", {"inputs": ["A [MASK].", "A <mask>."]}),
    ("/fill-mask", {"inputs": "A [MASK].", "model": "nobody"}),
    ("/fill-mask", {}),
]


@pytest.mark.full_grid
def test_a_long_mixed_load_does_not_leak_resources(tmp_path: Path) -> None:
    """Each request gets exactly one answer: 200 or a 4xx error. Memory, descriptors and threads do not grow after the first rounds."""
    by_path: dict[str, list[Any]] = {}
    for path, body in BODIES:
        by_path.setdefault(path, []).append(body)
    with running(models_for(tmp_path), tmp_path / "log") as server:
        everything = [target(server, path, bodies) for path, bodies in by_path.items()]
        before, loads, readings = metrics(server), [], []
        for _ in range(ROUNDS):
            with ThreadPoolExecutor(len(everything)) as pool:
                loads += pool.map(lambda path: load(path, CONNECTIONS, max(seconds(600) / ROUNDS, 0.5)), everything)
            readings.append(settled_usage(server))
        outcomes = assert_each_ended_once(before, metrics(server), *loads)
        assert {200, 422} <= set(outcomes) <= {200, 400, 404, 413, 422}
        assert "ERROR" not in server.log.read_text()
    memory, files, counts = zip(*readings, strict=True)
    show("memory in MiB, descriptors and threads after each round", str(readings))
    assert memory[-1] <= memory[ROUNDS // 2 - 1] * (1 + MOST_GROWTH)
    assert max(files[ROUNDS // 2 :]) <= max(files[: ROUNDS // 2])
    assert max(counts[ROUNDS // 2 :]) <= max(counts[: ROUNDS // 2])


def settled_usage(server: ServeProcess) -> tuple[float, int, int]:
    """Returns MiB of memory, descriptors and threads: the minimum of a second, because connections of the last load are still closing."""
    readings = []
    for _ in range(10):
        readings.append((server.memory_mib(), descriptors(server), threads(server)))
        time.sleep(0.1)
    memory, files, counts = zip(*readings, strict=True)
    return min(memory), min(files), min(counts)
