"""Request bodies that are as expensive as possible, in tokens, candidates or bytes of the answer. Most are just within the limits."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from string import ascii_lowercase
from typing import Any

from attack import Attack, Target
from hostile_values import BATCH_CHARS, MAX_CHARS, MAX_INPUTS, ROOM, any_value, listed, prose, repeated

LABELS = [f"label {number}" for number in range(MAX_INPUTS)]
SYLLABLES = [first + second for first in ascii_lowercase for second in ascii_lowercase]  # each has one or two tokens
ENTITY_GROUPS = ["O", "PER", "ORG", "LOC", "MISC"]

# name -> (path, function that returns the body); each attacker calls the function once, in its own thread
COSTLY: dict[str, tuple[str, Callable[[], Any]]] = {
    "explain the longest text": ("/classify", lambda: {"inputs": repeated("incomprehensibilities "), "parameters": {"explain": True}}),
    "explain texts of the most words": ("/classify", lambda: {"inputs": [repeated("a ", 760)] * 3, "parameters": {"explain": True}}),
    "all windows of many texts": ("/classify", lambda: {"inputs": [prose(MAX_CHARS)] * 5, "parameters": {"window": "mean", "stride": 254}}),
    "pairs of the longest texts": ("/classify", lambda: {"inputs": [{"text": prose(MAX_CHARS), "text_pair": prose(MAX_CHARS)}] * 9}),
    "windows of one word": ("/classify", lambda: {"inputs": repeated("a"), "parameters": {"window": "mean"}}),
    "entities without aggregation": ("/ner", lambda: {"inputs": [repeated("Ada "), "London"], "parameters": {"aggregation_strategy": "none", "ignore_labels": [], "stride": 254}}),
    "entities of letters": ("/ner", lambda: {"inputs": repeated("A "), "parameters": {"ignore_labels": [], "offset_unit": "utf8"}}),
    "punctuation without entities": ("/ner", lambda: {"inputs": repeated("."), "parameters": {"aggregation_strategy": "average", "ignore_labels": ENTITY_GROUPS}}),
    "1,000 answers from a long context": ("/answer", lambda: {"inputs": {"question": "How long is it?", "context": prose(50_000)}, "parameters": {"top_k": 1000, "max_answer_len": 512, "duplicates": "sum", "doc_stride": 191, "offset_unit": "utf16"}}),
    "answers for many questions": ("/answer", lambda: {"inputs": [{"question": "How long?", "context": prose(1500)}] * 490, "parameters": {"top_k": 1000, "max_answer_len": 512}}),
    "answers of long words": ("/answer", lambda: {"inputs": {"question": "Why?", "context": ("\u00e9" * 200 + " ") * 370}, "parameters": {"top_k": 100, "max_answer_len": 99}}),
    "a window of few tokens": ("/answer", lambda: {"inputs": {"question": "Why?", "context": prose(55_000)}, "parameters": {"max_seq_len": 8, "doc_stride": 0}}),
    "explain an answer": ("/answer", lambda: {"inputs": {"question": "How long is it?", "context": prose(20_000)}, "parameters": {"explain": True}}),
    "100 fillings of a long text": ("/fill-mask", lambda: {"inputs": "[MASK] " + repeated("\n", MAX_CHARS - 1000), "parameters": {"top_k": 100}}),
    "fillings of a text with a Greek letter": ("/fill-mask", lambda: {"inputs": "[MASK] \u03b1 " + prose(20_000), "parameters": {"top_k": 660}}),
    "300 fillings of 64 masks": ("/fill-mask", lambda: {"inputs": "[MASK] " * 64, "parameters": {"top_k": 300}}),
    "the widest beam": ("/fill-mask", lambda: {"inputs": ["[MASK] " * 8 + "."] * 64, "parameters": {"joint": True, "beam": 64, "top_k": 60}}),
    "the most targets": ("/fill-mask", lambda: {"inputs": ["a [MASK]."] * MAX_INPUTS, "parameters": {"targets": [f"{number:016}" for number in range(1000)]}}),
    "targets of many mask patterns": ("/fill-mask", lambda: {"inputs": "[MASK]" * 6, "parameters": {"joint": True, "beam": 1, "targets": SYLLABLES}}),
    "joint targets of many texts": ("/fill-mask", lambda: {"inputs": ["[MASK]"] * MAX_INPUTS, "parameters": {"joint": True, "targets": SYLLABLES}}),
    "the most choices": ("/choose", lambda: {"inputs": [{"question": "What?", "context": prose(200), "choices": [f"{number}" for number in range(64)]}] * 8}),
    "a long question before each choice": ("/choose", lambda: {"inputs": {"question": repeated("\U0001f600"), "context": "a", "choices": [f"{number}" for number in range(64)]}}),
    "long words outside the vocabulary": ("/classify", lambda: {"inputs": [repeated("한" * 33 + " ")] * 4}),
    "hypotheses of such words": ("/zero-shot", lambda: {"inputs": "a", "parameters": {"candidate_labels": LABELS, "hypothesis_template": repeated("jq" * 50 + " ", 480) + " {}"}}),
    "the widest beams of the most texts": ("/fill-mask", lambda: {"inputs": ["[MASK] " * 2] * MAX_INPUTS, "parameters": {"joint": True, "beam": 64, "top_k": 1}}),
    "a vector of each token": ("/embed", lambda: {"inputs": [prose(1000)] * 10, "parameters": {"pooling": "none"}}),
    "all tokens, as Text Embeddings Inference": ("/embed_all", lambda: {"inputs": [prose(1000)] * 10}),
    "vectors as base64": ("/v1/embeddings", lambda: {"input": [prose(1200)] * MAX_INPUTS, "encoding_format": "base64"}),
    "many sentences": ("/similarity", lambda: {"inputs": {"source_sentence": prose(MAX_CHARS), "sentences": [prose(1200)] * (MAX_INPUTS - 1)}}),
    "long texts ranked and returned": ("/rerank", lambda: {"query": prose(2000), "texts": [prose(BATCH_CHARS)] * MAX_INPUTS, "return_text": True}),
    "documents with more fields": ("/v1/rerank", lambda: {"query": "a", "documents": [{"text": "a", "more": {"x": [[]] * 900}}] * MAX_INPUTS, "return_documents": True}),
    "the most labels": ("/zero-shot", lambda: {"inputs": "a", "parameters": {"candidate_labels": LABELS}}),
    "one sentence and many empty ones": ("/similarity", lambda: {"inputs": {"source_sentence": "", "sentences": [""] * (MAX_INPUTS - 1)}}),
    "labels of one letter": ("/zero-shot", lambda: {"inputs": "a", "parameters": {"candidate_labels": [chr(0x4E00 + number) for number in range(190)], "hypothesis_template": "{}"}}),
    "joint targets of two lengths": ("/fill-mask", lambda: {"inputs": "[MASK] " * 6, "parameters": {"joint": True, "targets": ["good", "moviez"]}}),
    "labels of a long text": ("/zero-shot", lambda: {"inputs": prose(MAX_CHARS), "parameters": {"candidate_labels": LABELS, "hypothesis_template": prose(990) + " {}"}}),
    "all heads of attention": ("/attention", lambda: {"inputs": repeated("a ", 1000), "parameters": {"output_attentions": True, "layers": [0]}}),
    "containers at the base URL": ("/", lambda: b'{"inputs":' + any_value("empty lists") + b"}"),
    "containers at /invocations": ("/invocations", lambda: b'{"inputs":' + any_value("objects of a key") + b"}"),
    "a body of any task at the base URL": ("/", lambda: {"inputs": ["good film"] * 16_384}),
    "containers for a model": ("/models/sentiment", lambda: b'{"candidate_labels":1,"inputs":' + any_value("lists of empty lists") + b"}"),
    "keys that nobody knows": ("/models/sentiment", lambda: any_value("an object of many keys")),
    "unknown parameters": ("/classify", lambda: b'{"inputs":"a","parameters":' + any_value("an object of many keys") + b"}"),
    "instances of nothing": ("/v1/models/sentiment:predict", lambda: b'{"instances":' + listed(b"{}") + b"}"),
    "nested tensors": ("/v2/models/sentiment/infer", lambda: b'{"inputs":[{"name":"inputs","shape":[1],"datatype":"BYTES","data":' + any_value("lists in lists to the parser's limit") + b"}]}"),
    "no JSON": ("/classify", lambda: b'{"inputs": "' + b"\xff" * ROOM),
    "a key twice": ("/classify", lambda: b"{" + b'"inputs":"a",' * (ROOM // 13) + b'"inputs":"b"}'),
}  # fmt: skip


def _run(path: str, make: Callable[[], Any], target: Target) -> None:
    value = make()
    body = value if isinstance(value, bytes) else json.dumps(value).encode()
    head = target.head("POST", path, b"content-length: %d" % len(body), b"content-type: application/json")
    target.ask_all([head, body] for _ in iter(int, 1))


def _binary_tensors(target: Target) -> None:
    """Sends binary tensors whose sizes, shapes and text lengths contradict each other."""
    requests = []
    for size, shape, text in ((ROOM // 2, [512], 0), (10**30, [1], 0), (ROOM // 2, [2**40], 1), (8, [1], 2**32 - 1), (0, [0], 0)):
        tensor = {"name": "inputs", "shape": shape, "datatype": "BYTES", "parameters": {"binary_data_size": size}}
        described = json.dumps({"inputs": [tensor], "parameters": {"binary_data_output": True}}).encode()
        data = struct.pack("<I", text) * (min(size, ROOM // 2) // 4)
        headers = [b"inference-header-content-length: %d" % len(described), b"content-length: %d" % (len(described) + len(data))]
        requests.append([target.head("POST", "/v2/models/sentiment/infer", *headers), described, data])
    target.ask_all(requests[number % len(requests)] for number, _ in enumerate(iter(int, 1)))


def body_attacks() -> list[Attack]:
    costly = [
        Attack(name, "body", lambda target, path=path, make=make: _run(path, make, target))  # type: ignore[misc]
        for name, (path, make) in COSTLY.items()
    ]
    return [*costly, Attack("binary tensors", "body", _binary_tensors)]
