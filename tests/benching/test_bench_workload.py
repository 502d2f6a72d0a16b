"""The data that a load test sends: workloads, the bodies of each endpoint, and files of the user."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from bertserve.bench import target, workloads
from bertserve.service.errors import StartError


@pytest.mark.parametrize("name", workloads.NAMES)
def test_workloads_are_the_same_for_a_seed(name: str) -> None:
    inputs = workloads.workload_inputs(name, seed=1)

    assert workloads.workload_inputs(name, seed=1) == inputs
    assert inputs != workloads.workload_inputs(name, seed=2)
    assert len(inputs) == len({str(item) for item in inputs}) >= 24


@pytest.mark.parametrize("path", ["/proxy/rerank/", "/proxy/similarity?x=1", "/zero-shot"])
def test_every_text_of_a_workload_is_sent_equally_often(path: str) -> None:
    bodies = [json.loads(body.content) for body in target.build_bodies("short", path=path, texts=5)]
    inputs = [body.get("texts") or body["inputs"] for body in bodies]
    flat = [text for item in inputs for text in (item if isinstance(item, list) else item["sentences"])]

    assert len(set(Counter(flat).values())) == 1
    assert len(set(flat)) == 64


def test_a_question_workload_cannot_be_sent_to_rerank() -> None:
    with pytest.raises(StartError, match="/rerank"):
        target.build_bodies("qa", path="/rerank")


def test_bodies_of_a_file_count_the_texts_that_the_model_reads(tmp_path: Path) -> None:
    file = tmp_path / "bodies.jsonl"
    lines: list[dict[str, Any]] = [
        {"query": "a", "texts": ["b", "c", "d"]},
        {"inputs": {"source_sentence": "a", "sentences": ["b", "c"]}},
        {"inputs": "a", "parameters": {"candidate_labels": "b, c,"}},
        {"inputs": ["a", "b"], "parameters": {"candidate_labels": ["c", "d", "e"]}},
        {"inputs": [{"question": "a", "choices": ["b", "c", "d"], "context": "e"}]},
        {"inputs": {"question": "a", "context": "b"}, "parameters": None},
    ]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")

    assert [body.texts for body in target.build_bodies(str(file), path="/rerank")] == [3, 3, 2, 6, 3, 1]


@pytest.mark.parametrize("character", ["\u2028", "\u2029", "\u0085"])
def test_only_a_newline_ends_a_line(tmp_path: Path, character: str) -> None:
    file = tmp_path / "bodies.jsonl"
    text = f"a{character}b"
    line = json.dumps(text, ensure_ascii=False)
    file.write_bytes(f"{line}\r\n\n{line}\n".encode())

    assert [json.loads(body.content)["inputs"] for body in target.build_bodies(str(file))] == [text, text]


@pytest.mark.parametrize(
    ("content", "texts", "message"),
    [
        ("", 1, "JSON string"),
        ("{", 1, "neither a workload"),
        ("1", 1, "JSON string"),
        ('"a"\n{}', 1, "JSON string"),
        (None, 1, "neither a workload"),
        ('{"inputs": "a"}\n', 2, "--texts 2"),  # complete bodies cannot be grouped
    ],
)
def test_a_file_that_cannot_be_sent_is_refused(tmp_path: Path, content: str | None, texts: int, message: str) -> None:
    file = tmp_path / "bodies.jsonl"
    if content is not None:
        file.write_text(content, encoding="utf-8")

    with pytest.raises(StartError, match=message):
        target.build_bodies(str(file), texts=texts)
