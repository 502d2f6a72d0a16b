"""End to end over a real port with the embedded models: concurrent clients send valid and invalid requests for all tasks."""

import random
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from application import assert_same
from conftest import ROOT, metric

CLIENTS = 16
TURNS = 1
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


@pytest.mark.full_grid
def test_many_clients_of_all_tasks_get_their_own_answers(serve: Callable[..., Any]) -> None:
    """Concurrent clients get the same answers as a single client, for short texts, texts with several windows, and invalid requests."""
    requests = RIGHT + WRONG
    with serve(ROOT / "models", "--timeout-ms", "120000") as served:

        def client_of(name: str) -> httpx.Client:
            return httpx.Client(base_url=served.url, timeout=120, headers={"x-request-id": name}, trust_env=False)

        with client_of("before") as client:
            expected = [client.post(path, json=body) for path, body in requests]
        assert [200] * len(RIGHT) == [response.status_code for response in expected[: len(RIGHT)]]
        assert [422] * (len(WRONG) - 1) + [404] == [response.status_code for response in expected[len(RIGHT) :]]
        start = threading.Barrier(CLIENTS)

        def ask(number: int) -> int:
            chosen = random.Random(number).sample(range(len(requests)), TURNS)
            with client_of(f"client-{number}") as client:
                start.wait(30)
                for index in chosen:
                    path, body = requests[index]
                    response = client.post(path, json=body)
                    assert f"client-{number}" == response.headers["x-request-id"]
                    assert expected[index].status_code == response.status_code, response.text
                    for header in ("x-model", "x-truncated", "x-hf-warning"):
                        assert expected[index].headers.get(header) == response.headers.get(header)
                    assert_same(expected[index].json(), response.json(), tolerance=1e-4, ignored=["request_id"])
                    if response.status_code != 200:
                        assert f"client-{number}" == response.json()["request_id"]
            return len(chosen)

        with ThreadPoolExecutor(CLIENTS) as pool:
            assert CLIENTS * TURNS == sum(pool.map(ask, range(CLIENTS)))
        with client_of("after") as client:
            page = client.get("/metrics").text
        assert (0, 0) == (metric(page, "queue_items"), metric(page, "queue_tokens"))
        assert "ERROR" not in served.log.read_text()
