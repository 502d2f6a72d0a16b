"""A long load of all tasks, text lengths and invalid requests: memory, file descriptors and threads stay constant."""

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from conftest import Served
from loads import assert_each_ended_once, closed_loop, descriptors, memory_mib, models_for, samples, seconds, show, target, threads

pytestmark = pytest.mark.serial

CONNECTIONS = 2  # per endpoint
ROUNDS = 6
MOST_GROWTH = 0.1
FILLER = "The river is long and the valley is wide. "
TEXT = "Ada Lovelace wrote to Charles Babbage from London."
PASSAGE = "The bridge was built in Porto in 1886 by a company of engineers."
BUILT = {"question": "Where was the bridge built?", "context": PASSAGE}

# (path, body)
RIGHT: list[tuple[str, Any]] = [
    ("/classify", {"inputs": "A warm, funny film."}),
    ("/classify", {"inputs": ["", "Dull.", {"text": "good", "text_pair": "bad"}], "parameters": {"top_k": 1}}),
    ("/classify", {"inputs": "A poor book. " * 140}),
    ("/classify", {"inputs": "A poor book, a fine film. " * 80, "parameters": {"window": "mean"}}),
    ("/models/sentiment", {"inputs": ["A great day.", "A bad day."], "parameters": {"function_to_apply": "none"}}),
    ("/models/nli", {"inputs": {"text": "A man plays a guitar on stage.", "text_pair": "A man makes music."}}),
    ("/zero-shot", {"inputs": ["A new phone.", FILLER * 20], "parameters": {"candidate_labels": ["technology", "politics"]}}),
    ("/rerank", {"query": "Where was the bridge built?", "texts": [FILLER * 20, PASSAGE, "", TEXT]}),
    ("/embed", {"inputs": ["A warm, funny film.", FILLER * 20]}),
    ("/similarity", {"inputs": {"source_sentence": TEXT, "sentences": ["Berlin is a city.", "A bad day."]}}),
    ("/ner", {"inputs": TEXT}),
    ("/ner", {"inputs": ["", TEXT, "\U0001f600 Jose\u0301 lives in Berlin."], "parameters": {"aggregation_strategy": "max"}}),
    ("/ner", {"inputs": FILLER * 60 + TEXT}),
    ("/models/ner", {"inputs": TEXT, "parameters": {"aggregation_strategy": "none", "ignore_labels": []}}),
    ("/answer", {"inputs": BUILT}),
    ("/answer", {"inputs": [BUILT, {"question": "When?", "context": PASSAGE}], "parameters": {"top_k": 3}}),
    ("/answer", {"inputs": {**BUILT, "context": FILLER * 60 + PASSAGE}}),
    ("/models/qa", {"inputs": BUILT, "parameters": {"max_seq_len": 24, "doc_stride": 4, "handle_impossible_answer": True}}),
    ("/fill-mask", {"inputs": "The king of [MASK] died in 1066."}),
    ("/fill-mask", {"inputs": ["The [MASK] of England [MASK].", "A [MASK]."], "parameters": {"top_k": 2}}),
    ("/fill-mask", {"inputs": f"The [MASK] is long. {FILLER * 60} The king of [MASK] died.", "parameters": {"top_k": 1}}),
    ("/models/fill-mask", {"inputs": "The king of [MASK] died.", "parameters": {"targets": ["france", "Zwickau"]}}),
]
WRONG: list[tuple[str, Any]] = [
    ("/classify", {"inputs": 5}),
    ("/classify", {"inputs": ["good", "A poor book. " * 140], "parameters": {"truncation": False}}),
    ("/ner", {"inputs": ["good", FILLER * 60], "parameters": {"stride": 510}}),
    ("/ner", {"inputs": "good", "model": "qa"}),
    ("/answer", {"inputs": [BUILT, {"question": "", "context": "good"}]}),
    ("/answer", {"inputs": BUILT, "parameters": {"topk": 1}}),
    ("/fill-mask", {"inputs": ["A [MASK].", "A <mask>."]}),
    ("/embed", {"inputs": "good", "layers": "last_four"}),
    ("/models/nobody", {"inputs": "good"}),
]
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
