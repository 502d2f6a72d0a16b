"""`bert-serve score` scores files in each format, refuses invalid input, and resumes an interrupted run."""

from __future__ import annotations

import csv
import errno
import io
import json
import os
import signal
import subprocess
import sys
import threading
import time
import tracemalloc
from collections.abc import Sequence
from datetime import datetime
from decimal import Decimal
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import tiny
from application import LONG, play
from bertserve.service.cli import main, score_command
from bertserve.service.errors import StartError
from bertserve.service.process import logs
from bertserve.service.scoring import part, runner, score, scorer
from bertserve.service.scoring.columns import input_fields
from bertserve.service.scoring.parquet import ParquetReader
from bertserve.service.scoring.part import ScoringProgress
from bertserve.service.scoring.row import Place, Row, RowAnswer, Window
from bertserve.service.scoring.runner import ProgressBar
from bertserve.service.scoring.text_lines import DelimitedReader, JsonLinesReader, JsonLinesWriter
from bertserve.service.serving.build import build
from bertserve.service.settings import ModelSettings, Settings
from bertserve.service.tasks.catalog import TASKS

pytestmark = pytest.mark.usefixtures("logging_of_pytest")

WORDS = "a good bad film very the was book".split()
TEXTS = [" ".join(WORDS[(i * k) % 8] for k in range(1 + i * 7 % 19)) for i in range(90)]


@pytest.fixture(autouse=True)
def small_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scorer, "WINDOW_ROWS", 16)


def write_lines(path: Path, rows: Sequence[Any]) -> Path:
    path.write_text("".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows), encoding="utf-8")
    return path


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def run(models: Path, source: Path, output: Path, *flags: str) -> int:
    return main(["score", "--models", str(models), "--model", "tiny", *flags, str(source), str(output)])


def served(models: Path, path: str, body: dict[str, Any]) -> Any:
    async def ask(client: httpx.AsyncClient) -> Any:
        return (await client.post(path, json=body)).json()

    return play(build(Settings(models=models)), ask)


def test_an_unknown_bundle_is_not_searched_on_the_hub(
    models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logs, "configure_logging", lambda _: None)  # keeps the log handlers of the test run
    source = tmp_path / "in.csv"
    source.write_text("text\ngood\n")
    for folder, name, hint in ((tmp_path / "none", "tiny", "--models"), (models, "tinny", "did you mean `tiny`?")):
        assert 2 == main(["score", "--models", str(folder), "--model", name, str(source), str(tmp_path / "out.csv")])
        assert f"`{name}` in `{folder}`; " in (message := capsys.readouterr().err) and hint in message


def test_the_best_label_has_its_own_columns(models: Path, tmp_path: Path) -> None:
    source = tmp_path / "in.csv"
    source.write_text("label,text\n1,good\n0,bad\n")

    def cells(*flags: str) -> list[dict[str, str]]:
        output = tmp_path / f"out{len(os.listdir(tmp_path))}.csv"
        assert 0 == run(models, source, output, *flags)
        with output.open(newline="") as file:
            return list(csv.DictReader(file))

    whole, flat = cells("--json-cells"), cells()
    assert ["label", "text", "prediction_label", "prediction_score", "warnings"] == list(flat[0])
    best = [json.loads(row["prediction"])[0] for row in whole]
    assert [(each["label"], each["score"]) for each in best] == [(row["prediction_label"], float(row["prediction_score"])) for row in flat]
    assert {"p_label", "p_score"} < set(cells("--prediction-column", "p")[0])
    assert 2 == len(json.loads(cells("--parameters", '{"top_k": 2}')[0]["prediction"]))
    for name in ("sigmoid", "SIGMOID"):
        sigmoid = cells("--parameters", json.dumps({"function_to_apply": name}))
        assert len(json.loads(sigmoid[0]["prediction"])) > 1
    for name in ("prediction_label", "prediction_score"):
        assert 2 == run(models, source, tmp_path / "twice.csv", "--warnings-column", name)

    assert 2 == run(models, source, tmp_path / "out.parquet", "--json-cells")
    source.write_text("prediction_label,text\n1,good\n")
    assert 2 == run(models, source, tmp_path / "out.csv")


@pytest.mark.parametrize(
    ("changes", "parameters"),
    [
        ({"activation": "none", "labels": ("warmth", "length")}, {}),
        ({"activation": "sigmoid", "labels": ("good", "long")}, {"function_to_apply": "none"}),
        ({"activation": "softmax", "labels": ("good", "bad")}, {"function_to_apply": "sigmoid"}),
    ],
)
def test_a_csv_has_all_independent_values(tmp_path: Path, changes: dict[str, Any], parameters: dict[str, Any]) -> None:
    """There is no best one of several regression values, or of labels that exclude no other."""
    tiny.bundle(tmp_path, **changes)
    source = tmp_path / "in.csv"
    source.write_text("text\ngood\n")
    assert 0 == run(tmp_path, source, tmp_path / "out.csv", "--parameters", json.dumps(parameters))
    with (tmp_path / "out.csv").open(newline="") as file:
        [row] = csv.DictReader(file)
    assert set(changes["labels"]) == {item["label"] for item in json.loads(row["prediction"])}


def test_softmax_that_the_caller_requests_has_one_best_label(tmp_path: Path) -> None:
    tiny.bundle(tmp_path, activation="sigmoid", labels=("good", "long"))
    source = tmp_path / "in.csv"
    source.write_text("text\ngood\n")
    assert 0 == run(tmp_path, source, tmp_path / "out.csv", "--parameters", '{"function_to_apply": "softmax"}')
    assert "text,prediction_label,prediction_score,warnings" == (tmp_path / "out.csv").read_text().splitlines()[0]


def test_the_error_of_a_rejected_list_does_not_quote_the_text(tmp_path: Path) -> None:
    tiny.bundle(tmp_path, task="feature-extraction")
    source = write_lines(tmp_path / "in.jsonl", [{"source_sentence": "good", "sentences": '"My secret"'}])
    assert 3 == run(tmp_path, source, tmp_path / "out.jsonl", "--task", "similarity")
    [rejected] = read_lines(tmp_path / "out.jsonl.rejected.jsonl")
    assert "`sentences`" in rejected["error"] and "secret" not in rejected["error"]


def test_a_row_without_a_column_of_a_flag_is_rejected(models: Path, tmp_path: Path) -> None:
    """Such a row would otherwise be answered as a single text. An empty value still means that there is no second text."""
    source = write_lines(tmp_path / "in.jsonl", ['{"a": "good", "b": "bad"}', '{"a": "good"}', '{"a": "good", "b": null}'])
    assert 3 == run(models, source, tmp_path / "out.jsonl", "--text", "a", "--text-pair", "b")
    assert [2] == [row["row"] for row in read_lines(tmp_path / "out.jsonl.rejected.jsonl")]
    assert 2 == len(read_lines(tmp_path / "out.jsonl"))


@pytest.mark.parametrize("name", ["query", "model"])
def test_parameters_cannot_replace_a_column(tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    tiny.bundle(tmp_path, labels=("relevant",))
    source = write_lines(tmp_path / "in.jsonl", ['{"query": "a film", "texts": ["a book", "good"]}'])
    assert 2 == run(tmp_path, source, tmp_path / "out.jsonl", "--task", "rerank", "--parameters", json.dumps({name: "tiny"}))
    assert f"`{name}`" in capsys.readouterr().err


def test_an_empty_cell_is_answered_with_a_warning(models: Path, tmp_path: Path) -> None:
    source = tmp_path / "in.csv"
    source.write_text("id,text\n1,good\n2,\n3,  \n")
    assert 0 == run(models, source, tmp_path / "out.csv")
    with (tmp_path / "out.csv").open(newline="") as file:
        warnings = [row["warnings"] for row in csv.DictReader(file)]
    assert ["", True, True] == [warnings[0], *(warning.startswith("empty; ") for warning in warnings[1:])]

    assert 3 == run(models, source, tmp_path / "rest.csv", "--empty", "reject")
    assert 2 == len((tmp_path / "rest.csv").read_text().splitlines())
    rejected = read_lines(tmp_path / "rest.csv.rejected.jsonl")
    assert [(2, "invalid_value"), (3, "invalid_value")] == [(row["row"], row["error_type"]) for row in rejected]


def test_a_prediction_equals_the_answer_of_the_endpoint(models: Path, tmp_path: Path) -> None:
    """Each row keeps its columns and its position, followed by the endpoint's answer to its text."""
    source = write_lines(tmp_path / "in.jsonl", [f'{{"id": {i}.10, "text": "{text}"}}' for i, text in enumerate(TEXTS)])

    assert run(models, source, tmp_path / "out.jsonl", "--parameters", '{"top_k": 2}') == 0

    found = (tmp_path / "out.jsonl").read_text().splitlines()
    expected = served(models, "/classify", {"inputs": TEXTS, "parameters": {"top_k": 2}})
    assert [f'{{"id": {i}.10, "text": "{text}"' for i, text in enumerate(TEXTS)] == [line.split(',"prediction"')[0] for line in found]
    assert [[each["label"] for each in answer] for answer in expected] == [
        [each["label"] for each in json.loads(line)["prediction"]] for line in found
    ]
    assert [answer[0]["score"] for answer in expected] == pytest.approx(
        [json.loads(line)["prediction"][0]["score"] for line in found], abs=1e-6
    )
    assert ["in.jsonl", "models", "out.jsonl"] == sorted(os.listdir(tmp_path))


# task -> columns of a row and parameters
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "attention": ({"text": "good", "text_pair": "bad"}, {"layers": [0]}),
    "text-classification": ({"text": "good", "text_pair": "bad"}, {}),
    "token-classification": ({"text": "a good film"}, {}),
    "question-answering": ({"question": "good?", "context": "a good film"}, {}),
    "fill-mask": ({"text": "a [MASK] film" + " good" * 70}, {"top_k": 2}),
    "multiple-choice": ({"prompt": "the film was", "choices": ["very good", "a book"]}, {}),
    "feature-extraction": ({"text": "a film"}, {"normalize": True}),
    "sentence-similarity": ({"source_sentence": "a film", "sentences": ["a book", "a film"]}, {}),
    "text-ranking": ({"query": "a film", "texts": ["a book", "good"]}, {"return_text": True}),
    "zero-shot-classification": ({"text": "a film"}, {"candidate_labels": ["good", "bad"]}),
}
BASES = {
    "attention": "text-classification",
    "sentence-similarity": "feature-extraction",
    "text-ranking": "text-classification",
    "zero-shot-classification": "text-classification",
}
LABELS = {"text-ranking": ("relevant",), "zero-shot-classification": ("contradiction", "entailment")}


ALL = pytest.mark.full_grid
GRID = [(task, suffix) for task in TASKS for suffix in ("jsonl", "csv", "parquet")]
# each task in one format, and the most different cases of each format
SOME = {(task, "jsonl") for task in TASKS} | {
    ("sentence-similarity", "csv"),
    ("token-classification", "parquet"),
    ("fill-mask", "parquet"),
    ("feature-extraction", "parquet"),
}


@pytest.mark.parametrize(("task", "suffix"), [case if case in SOME else pytest.param(*case, marks=ALL) for case in GRID])
def test_each_task_scores_each_format(task: str, suffix: str, tmp_path: Path) -> None:
    """The columns are the inputs of the task. The answer equals the endpoint's, as JSON or as nested columns."""
    row, parameters = CASES[task]
    body = row | parameters if task == "text-ranking" else {"inputs": row.get("text") if len(row) == 1 else row, "parameters": parameters}
    more = ({"labels": LABELS[task]} if task in LABELS else {}) | ({"attention_heads": (2, 2)} if task == "attention" else {})
    tiny.bundle(tmp_path / "models", task=BASES.get(task, task), **more)
    source, output = tmp_path / f"in.{suffix}", tmp_path / f"out.{suffix}"
    columns = {f"my {name}": value for name, value in row.items()}
    if suffix == "jsonl":
        write_lines(source, [columns])
    elif suffix == "parquet":
        pq.write_table(pa.Table.from_pylist([columns]), source)
    else:
        with source.open("w", newline="") as file:
            csv.writer(file).writerows([columns, [value if isinstance(value, str) else json.dumps(value) for value in columns.values()]])
    flags = [word for name in row for word in (f"--{name.replace('_', '-')}", f"my {name}")]

    flags += ["--json-cells"] if suffix == "csv" else []
    assert run(tmp_path / "models", source, output, *flags, "--parameters", json.dumps(parameters), "--task", TASKS[task].path) == 0

    expected = served(tmp_path / "models", f"/{TASKS[task].path}", body)
    expected = expected[0] if TASKS[task].body.always_list else expected
    if suffix == "jsonl":
        found = read_lines(output)[0]["prediction"]
    elif suffix == "parquet":
        found = without_nulls(pq.read_table(output).to_pylist()[0]["prediction"])
    else:
        with output.open(newline="") as file:
            found = json.loads(next(csv.DictReader(file))["prediction"])
    assert rounded(expected) == rounded(found)


def without_nulls(value: Any) -> Any:
    """Returns a value without null fields of structs, because all rows of a Parquet column have the same fields."""
    if isinstance(value, list):
        return [without_nulls(item) for item in value]
    return {name: without_nulls(item) for name, item in value.items() if item is not None} if isinstance(value, dict) else value


def rounded(value: Any) -> Any:
    if isinstance(value, list):
        return [rounded(item) for item in value]
    if isinstance(value, dict):
        return {name: rounded(item) for name, item in value.items()}
    return round(value, 5) if isinstance(value, float) else value


def test_each_input_of_a_task_has_a_flag() -> None:
    assert {name for spec in TASKS.values() for name in input_fields(spec)} <= score_command().model_fields.keys()


@pytest.mark.parametrize("flag", [("--port", "1"), ("--workers", "2"), ("--skip-broken",), ("--otlp-endpoint", "http://a")])
def test_a_setting_without_effect_is_refused(
    models: Path, tmp_path: Path, flag: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    source = write_lines(tmp_path / "in.jsonl", [{"text": "good"}])
    assert 2 == run(models, source, tmp_path / "out.jsonl", *flag)
    assert f"{flag[0]} is a flag" in capsys.readouterr().err
    monkeypatch.setenv("BERT_SERVE_PORT", "1")
    assert 0 == run(models, source, tmp_path / "out.jsonl")


def test_each_accepted_setting_is_used(models: Path, tmp_path: Path) -> None:
    """An option without effect is refused, because the user would not notice it."""
    used: set[str] = set()

    class Watched(Settings):
        def __getattribute__(self, name: str) -> Any:
            used.add(name)
            return super().__getattribute__(name)

    settings = Watched(models=(models,))
    used.clear()
    source = write_lines(tmp_path / "in.jsonl", [{"text": "good"}])
    spec = scorer.ScoringSpec(str(source), str(tmp_path / "out.jsonl"), None, {}, "{}", ("prediction", "warnings"), 0, False)
    assert 0 == score.score(settings, spec)
    # these are used earlier: for the settings file, the source of the model, and the log
    assert {"config", "model", "cache_dir", "log_format"} == set(ModelSettings.model_fields) - used


def test_a_truncated_text_gets_a_warning(models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = write_lines(tmp_path / "in.jsonl", [{"text": "good"}, {"text": LONG}])
    assert run(models, source, tmp_path / "out.jsonl") == 0
    assert [[], [True]] == [["32 tokens" in each for each in row["warnings"]] for row in read_lines(tmp_path / "out.jsonl")]
    assert "2 rows: 2 answered, 1 of them " in capsys.readouterr().err


BAD = [
    ("nope", "valid JSON"),
    ("[1]", "not an object"),
    ({"txt": "good"}, "`text`; it has `txt`"),
    ({"text": 5}, "must be a text"),
    ({"text": ["good", "bad"]}, "`text` must be a text"),
    ({"text": ["good"]}, "`text` must be a text"),
    ({"text": []}, "`text` must be a text"),
    ({"text": "good", "prediction": 1}, "`prediction`"),
    ({"text": LONG}, "`truncation`"),
    ('{"text": "\udcff"}', "UTF-8"),
    ({"text": "g" * 5000}, "4096 bytes"),
    ('{"text": "good", "id": [1, -Infinity, NaN]}', "`NaN` or `Infinity`"),
]


def test_rejected_rows_are_written_to_a_separate_file(models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each rejected row is listed with its number and reason. The other rows are answered, and the exit code is 3."""
    rows: list[Any] = [row for bad, _ in BAD for row in (bad, {"text": "good"})]
    text = "".join(f"{row if isinstance(row, str) else json.dumps(row)}\n\n" for row in rows)
    (tmp_path / "in.jsonl").write_bytes(text.encode(errors="surrogateescape"))
    flags = ["--parameters", '{"truncation": false}', "--max-body-bytes", "4096", "--max-chars", "4000"]

    assert run(models, tmp_path / "in.jsonl", tmp_path / "out.jsonl", *flags) == 3

    rejected = read_lines(tmp_path / "out.jsonl.rejected.jsonl")
    assert [(2 * i + 1, 4 * i + 1) for i in range(len(BAD))] == [(row["row"], row["line"]) for row in rejected]
    assert [] == [(words, row["error"]) for (_, words), row in zip(BAD, rejected, strict=True) if words not in row["error"]]
    assert len(BAD) == len(read_lines(tmp_path / "out.jsonl"))
    assert f"{len(BAD)} rejected" in capsys.readouterr().err


def test_a_run_without_an_answer_replaces_no_output(models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The old output and the new reasons stay. A later run with an answer replaces the output."""
    output = tmp_path / "out.jsonl"
    source = write_lines(tmp_path / "in.jsonl", [{"text": "good"}] * 3)
    assert run(models, source, output) == 0
    before = output.read_bytes()
    write_lines(source, [{"txt": "good"}] * 3)
    assert run(models, source, output, "--restart") == 1
    assert f"`{output}.rejected.jsonl`" in capsys.readouterr().err
    assert (before, 3) == (output.read_bytes(), len(read_lines(Path(f"{output}.rejected.jsonl"))))
    write_lines(source, [{"text": "bad"}, {"txt": "good"}])
    assert run(models, source, output, "--restart") == 3
    assert ["bad"] == [row["text"] for row in read_lines(output)]


def test_too_many_bad_rows_end_the_run_until_the_limit_is_raised(models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A run over `--max-rejected` ends. The same command with a higher limit continues."""
    source = write_lines(tmp_path / "in.jsonl", [*({"text": "good"} for _ in range(20)), *({"txt": 1} for _ in range(3))])
    assert run(models, source, tmp_path / "out.jsonl", "--max-rejected", "2") == 1
    assert "3 rows up to row 23 " in capsys.readouterr().err
    assert run(models, source, tmp_path / "out.jsonl", "--max-rejected", "3") == 3
    assert "7 scored" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "flags", "words"),
    [
        (b"", [], "no header"),
        (b"text,text\na,b\n", [], "`text` twice"),
        (b"texts\na\n", [], "did you mean `texts`?"),
        (b"text,warnings\na,b\n", [], "--warnings-column"),
        (b'text\n"a\nb\n', [], "line 2: "),
        (b"text\na\n", ["--question", "text"], "--question is for"),
        (b"text\na\n", ["--text-pair", "text"], "--text is missing"),
        (b"text\na\n", ["--parameters", '{"topk": 1}'], "did you mean `top_k`?"),
        (b"text\na\n", ["--parameters", "{"], "--parameters is not JSON"),
        (b"text\na\n", ["--task", "ner"], "--task is `ner`, "),
        (b"text\na\n", ["--max-rejected", "-1"], "--max-rejected is `-1`: "),
        (b"text\na\n", ["--model", "other"], "names 2 models"),
    ],
)
def test_an_invalid_file_or_flag_is_refused(
    models: Path, tmp_path: Path, content: bytes, flags: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A broken file or an invalid flag ends the run with an error, and the run leaves no files."""
    (tmp_path / "in.csv").write_bytes(content)
    assert run(models, tmp_path / "in.csv", tmp_path / "out.csv", *flags) in (1, 2)
    assert words in capsys.readouterr().err
    assert ["in.csv", "models"] == sorted(os.listdir(tmp_path))


def test_csv_rows_with_too_many_fields_or_invalid_bytes_are_rejected(models: Path, tmp_path: Path) -> None:
    """A row with too many fields, or that is not UTF-8, is rejected. Delimiters, quotes and line ends in fields are allowed."""
    (tmp_path / "in.csv").write_bytes(b'\xef\xbb\xbfid,text\r\n1,"good,\n""film"""\r\n2,bad,x\r\n3,\xff\r\n\r\n4,bad\r\n')
    assert run(models, tmp_path / "in.csv", tmp_path / "out.csv") == 3
    with (tmp_path / "out.csv").open(newline="") as file:
        assert [("1", 'good,\n"film"'), ("4", "bad")] == [(row["id"], row["text"]) for row in csv.DictReader(file)]
    rejected = [(row["row"], row["line"]) for row in read_lines(tmp_path / "out.csv.rejected.jsonl")]
    assert [(2, 4), (3, 5)] == rejected


def test_parquet_keeps_the_columns_and_their_types(models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Nulls and types that JSON lacks are kept over several row groups. A file without the input column is refused."""
    columns = {"when": pa.array([i * 10**9 for i in range(90)], pa.timestamp("ns")), "kind": pa.array(["x", None] * 45).dictionary_encode()}
    table = pa.table({"text": TEXTS, **columns})
    pq.write_table(table, tmp_path / "in.parquet", row_group_size=40)

    assert run(models, tmp_path / "in.parquet", tmp_path / "out.parquet") == 0

    found = pq.read_table(tmp_path / "out.parquet")
    assert table.cast(pa.schema([found.schema.field(name) for name in table.column_names])).equals(found.select(table.column_names))
    assert "list<element: struct<label: string, score: double>>" == str(found.schema.field("prediction").type)
    assert run(models, tmp_path / "in.parquet", tmp_path / "2.parquet", "--text", "txt") == 2
    assert "`txt`; did you mean `text`?" in capsys.readouterr().err
    (tmp_path / "bad.parquet").write_bytes(b"PAR1 no")
    assert run(models, tmp_path / "bad.parquet", tmp_path / "2.parquet") == 1
    assert "as Parquet" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("task", "parameters", "rows"),
    [
        ("attention", {"layers": [0]}, 1),  # two heads of 32 x 32 numbers; each number takes 14 bytes
        ("attention", {"layers": [0], "heads": [0]}, 2),
        ("attention", {"layers": [100]}, 16),  # each row is rejected
        ("feature-extraction", {"pooling": "none", "dimensions": 4}, 8),  # 32 vectors with 4 numbers and 64 bytes each
        ("feature-extraction", {"pooling": "mean"}, 16),
        ("text-classification", {"explain": True}, 1),
        ("text-classification", {}, 16),
        ("zero-shot-classification", {"candidate_labels": [str(i) for i in range(100)]}, 6),
        ("zero-shot-classification", {"candidate_labels": ["good", "bad"]}, 16),
    ],
)
def test_windows_of_large_answers_have_fewer_rows(
    tmp_path: Path, task: str, parameters: dict[str, Any], rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    more = ({"labels": LABELS[task]} if task in LABELS else {}) | ({"attention_heads": (2, 2)} if task == "attention" else {})
    tiny.bundle(tmp_path / "models", task=BASES.get(task, task), **more)
    source, ends = write_lines(tmp_path / "in.jsonl", [{"text": "good"}] * 20), [0]
    append = part.PartialOutput.append

    def appended(self: part.PartialOutput, data: bytes, rejected: bytes, progress: ScoringProgress) -> ScoringProgress:
        ends.append(progress.place.row)
        return append(self, data, rejected, progress)

    monkeypatch.setattr(part.PartialOutput, "append", appended)
    monkeypatch.setattr(scorer, "WINDOW_ANSWER_BYTES", 2**15)
    flags = ("--parameters", json.dumps(parameters), "--task", task)
    assert run(tmp_path / "models", source, tmp_path / "out.jsonl", *flags) in (0, 1, 3)
    assert rows == ends[1]


@pytest.mark.parametrize("delimiter", [",", "\t"])
def test_each_line_end_within_a_field_is_quoted(models: Path, tmp_path: Path, delimiter: str) -> None:
    """Also a single carriage return, which the csv module does not quote. The output has the rows and fields of the input."""
    rows = [["text", "no\rte"], ["good\rfilm", "a\r"], ["bad", "\r\n"], ["film", 'x"\n']]
    suffix = {",": "csv", "\t": "tsv"}[delimiter]
    with (tmp_path / f"in.{suffix}").open("w", newline="") as file:
        csv.writer(file, delimiter=delimiter, quoting=csv.QUOTE_ALL).writerows(rows)

    assert 0 == run(models, tmp_path / f"in.{suffix}", tmp_path / f"out.{suffix}")

    with (tmp_path / f"out.{suffix}").open(newline="") as file:
        assert rows == [row[:2] for row in csv.reader(file, delimiter=delimiter, strict=True)]


def test_a_line_of_csv_that_is_too_long_ends_the_run(models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "in.csv").write_text("text,id\n" + "a," * 1000 + "\ngood,2\n")
    assert 1 == run(models, tmp_path / "in.csv", tmp_path / "out.csv", "--max-chars", "100", "--max-body-bytes", "1024")
    assert "line 2 " in (message := capsys.readouterr().err) and " 1024 bytes" in message


def columns_of_each_type() -> dict[str, tuple[Any, Any]]:
    """Returns name -> an Arrow array of a value and null, and the value in JSON."""
    codes = pa.array(["x"]).dictionary_encode()
    return {
        "decimal": (pa.array([Decimal("-1.50"), None], pa.decimal128(38, 2)), "-1.50"),
        "wide decimal": (pa.array([Decimal("0.0000000000"), None], pa.decimal256(60, 10)), "0.0000000000"),
        "binary": (pa.array([b"\xff\x00", None]), "/wA="),
        "large binary": (pa.array([b"a", None], pa.large_binary()), "YQ=="),
        "fixed binary": (pa.array([b"ab", None], pa.binary(2)), "YWI="),
        "binary view": (pa.array([b"a", None], pa.binary_view()), "YQ=="),
        "string view": (pa.array(["a", None], pa.string_view()), "a"),
        "large string": (pa.array(["a", None], pa.large_string()), "a"),
        "duration": (pa.array([-1_500, None], pa.duration("ms")), "-PT1.5S"),
        "nanoseconds": (pa.array([90_000_000_001, None], pa.duration("ns")), "PT90.000000001S"),
        "timestamp": (pa.array([1, None], pa.timestamp("us")), "1970-01-01T00:00:00.000001"),
        "timestamp ns": (pa.array([1_001, None], pa.timestamp("ns")), "1970-01-01T00:00:00.000001001"),
        "timestamp of a zone": (pa.array([1, None], pa.timestamp("ns", "Europe/Berlin")), "1970-01-01T01:00:00.000000001+01:00"),
        "time": (pa.array([1_000, None], pa.time32("ms")), "00:00:01"),
        "time ns": (pa.array([1, None], pa.time64("ns")), "00:00:00.000000001"),
        "date": (pa.array([1, None], pa.date32()), "1970-01-02"),
        "nothing": (pa.nulls(2), None),
        "half": (pa.array([1.5, None], pa.float16()), 1.5),
        "not a number": (pa.array([float("nan"), None]), "NaN"),
        "infinity": (pa.array([float("-inf"), None]), "-Infinity"),
        "unsigned": (pa.array([2**64 - 1, None], pa.uint64()), 2**64 - 1),
        "list": (pa.array([[Decimal("1.5"), None], None], pa.list_(pa.decimal128(5, 1))), ["1.5", None]),
        "list view": (pa.array([[1], None], pa.list_view(pa.timestamp("ns"))), ["1970-01-01T00:00:00.000000001"]),
        "fixed list": (pa.array([[1.0, float("inf")], None], pa.list_(pa.float64(), 2)), [1.0, "Infinity"]),
        "struct": (pa.array([{"a": b"a", "b": 1}, None], pa.struct({"a": pa.binary(), "b": pa.duration("s")})), {"a": "YQ==", "b": "PT1S"}),
        "map": (pa.array([[("k", 1), ("l", None)], None], pa.map_(pa.string(), pa.duration("s"))), [["k", "PT1S"], ["l", None]]),
        "dictionary": (pa.array(["x", None]).dictionary_encode(), "x"),
        "list of a dictionary": (pa.ListArray.from_arrays(pa.array([0, 1, 1]), codes, mask=pa.array([False, True])), ["x"]),
        "uuid": (pa.array([bytes(range(16)), None], pa.uuid()), "00010203-0405-0607-0809-0a0b0c0d0e0f"),
        "byte for a truth value": (pa.array([1, None], pa.bool8()), True),
        "json": (pa.array(["{}", None], pa.json_()), "{}"),
    }


@pytest.mark.parametrize("suffix", ["jsonl", "csv", "parquet"])
def test_each_parquet_type_is_written_in_each_format(models: Path, tmp_path: Path, suffix: str) -> None:
    columns = columns_of_each_type()
    table = pa.table({"text": ["good", "bad"]} | {name: array for name, (array, _) in columns.items()})
    pq.write_table(table, tmp_path / "in.parquet")

    assert 0 == run(models, tmp_path / "in.parquet", tmp_path / f"out.{suffix}")

    expected = {name: value for name, (_, value) in columns.items()}
    if suffix == "jsonl":
        first, second = read_lines(tmp_path / "out.jsonl")
        assert [expected, dict.fromkeys(expected)] == [{name: row[name] for name in expected} for row in (first, second)]
    elif suffix == "csv":
        with (tmp_path / "out.csv").open(newline="") as file:
            first, second = csv.DictReader(file)
        cells = {
            name: value if isinstance(value, str) else "" if value is None else json.loads(first[name]) for name, value in expected.items()
        }
        assert expected | {"nothing": ""} == cells | {name: value for name, value in first.items() if isinstance(expected.get(name), str)}
        assert {""} == {second[name] for name in expected}
    else:
        before, after = pq.read_table(tmp_path / "in.parquet"), pq.read_table(tmp_path / "out.parquet")
        same = {name for name in expected if before.schema.field(name).type == after.schema.field(name).type}
        # Parquet lacks these types, and stores their values as texts and bytes
        assert {"binary view", "string view", "dictionary", "list of a dictionary"} == set(expected) - same
        assert before.select(sorted(same - {"not a number"})).equals(after.select(sorted(same - {"not a number"})))
        assert ["x", None] == after.column("dictionary").to_pylist()


@pytest.mark.parametrize("column", ["text", "name"])
def test_a_row_of_parquet_that_is_not_utf8_is_rejected(models: Path, tmp_path: Path, column: str) -> None:
    columns = {"text": pa.array(TEXTS), "name": pa.array(TEXTS)}
    texts = [b"\xff" if i in (0, 40, 41) else text.encode() for i, text in enumerate(TEXTS)]
    pq.write_table(pa.table(columns | {column: pa.array(texts).view(pa.string())}), tmp_path / "in.parquet")
    assert 3 == run(models, tmp_path / "in.parquet", tmp_path / "out.jsonl")
    assert [1, 41, 42] == [row["row"] for row in read_lines(tmp_path / "out.jsonl.rejected.jsonl")]
    assert [text for i, text in enumerate(TEXTS) if i not in (0, 40, 41)] == [row["text"] for row in read_lines(tmp_path / "out.jsonl")]
    assert (column == "text") == (3 == run(models, tmp_path / "in.parquet", tmp_path / "out.parquet"))


@pytest.mark.parametrize("dictionary", [False, True])
def test_windows_of_parquet_have_a_limit_of_bytes(tmp_path: Path, dictionary: bool) -> None:
    """The limit also applies to dictionary-encoded values. Reading can resume after any window."""
    texts = [f"{'' if dictionary else i}{'x' * 10_000}" for i in range(100)]
    table = pa.table({"text": texts})
    pq.write_table(table, tmp_path / "in.parquet", row_group_size=40, use_dictionary=dictionary, compression="none")

    def windows(place: Place) -> list[Window]:
        reader = ParquetReader(tmp_path / "in.parquet", place, inputs=["text"])
        try:
            return list(iter(lambda: reader.window(4096, 100_000), None))
        finally:
            reader.close()

    found = windows(Place())
    assert texts == [row.values["text"] for window in found for row in window.rows]
    assert max(len(window.rows) for window in found) <= 10
    for index, window in enumerate(found):
        assert [later.after for later in found[index + 1 :]] == [later.after for later in windows(window.after)]


def test_old_timestamps_of_parquet_keep_their_year(models: Path, tmp_path: Path) -> None:
    times = [datetime(1000, 1, 1), datetime(9999, 12, 31, 23, 59, 59, 999999)]
    table = pa.table({"text": ["good", "bad"], "when": pa.array(times, pa.timestamp("us"))})
    pq.write_table(table, tmp_path / "in.parquet", use_deprecated_int96_timestamps=True)
    assert 0 == run(models, tmp_path / "in.parquet", tmp_path / "out.parquet")
    assert times == pq.read_table(tmp_path / "out.parquet").column("when").to_pylist()


@pytest.mark.parametrize(
    ("columns", "word"),
    [
        ({"text": pa.array([b"good"])}, "`text` has the type binary"),
        ({"text": pa.array([1])}, "`text` has the type int64"),
        ({"text": pa.array(["good"]), "when": pa.array([1], pa.timestamp("ns", "Mars/Base"))}, "`when` has the type timestamp[ns, tz=Mars"),
        ({"text": pa.array(["good"]), "when": pa.array([1], pa.timestamp("us", "Mars/Base"))}, "`when` has the type timestamp[us, tz=Mars"),
        ({"text": pa.array(["good"]), "when": pa.array([2**60], pa.timestamp("ms"))}, "`when` (timestamp[ms]) has a value"),
        ({"text": pa.array(["good"]), "when": pa.array([2**30], pa.date32())}, "`when` (date32[day]) has a value"),
    ],
)
def test_the_error_for_an_unsupported_column_names_the_column(
    models: Path, tmp_path: Path, columns: dict[str, Any], word: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The run ends with an error, not a traceback. Columns that are not inputs are copied to Parquet unchanged."""
    pq.write_table(pa.table(columns), tmp_path / "in.parquet")
    assert run(models, tmp_path / "in.parquet", tmp_path / "out.jsonl") in (1, 2)
    assert word in capsys.readouterr().err
    assert (len(columns) > 1) == (run(models, tmp_path / "in.parquet", tmp_path / "out.parquet") == 0)


def test_columns_with_the_same_name_are_refused(models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pq.write_table(pa.table([pa.array(["good"]), pa.array([1]), pa.array([2])], ["text", "a", "a"]), tmp_path / "in.parquet")
    assert 2 == run(models, tmp_path / "in.parquet", tmp_path / "out.parquet")
    assert "`a` twice" in capsys.readouterr().err
    names = [f"column {number}" for number in range(100_000)]  # comparing each name with all others would take minutes
    (tmp_path / "in.csv").write_text(",".join(names) + "\n")
    assert 2 == run(models, tmp_path / "in.csv", tmp_path / "out.csv")


def test_a_run_to_stdout_ends_at_a_bad_row_unless_rejected_names_a_file(
    models: Path, tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    source = write_lines(tmp_path / "in.jsonl", [{"text": "good"}, {"text": 1}])
    assert run(models, source, Path("-")) == 1
    assert b"row 2 cannot" in capfdbinary.readouterr().err
    assert run(models, source, Path("-"), "--rejected", str(tmp_path / "bad.jsonl")) == 3
    assert 1 == len(capfdbinary.readouterr().out.splitlines())
    assert [2] == [row["row"] for row in read_lines(tmp_path / "bad.jsonl")]
    assert run(models, source, Path("-"), "--output-format", "csv", "--rejected", str(tmp_path / "2.jsonl")) == 2
    assert b"written as csv" in capfdbinary.readouterr().err


class Killed(BaseException):
    """Simulates a killed process."""


def test_no_file_is_truncated_deleted_or_replaced_without_restart(models: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    source = write_lines(tmp_path / "in.jsonl", [{"text": "good"}, {"text": 1}])
    before = source.read_bytes()
    other = tmp_path / "other"
    for name, flags in (
        ("other", ("--rejected", str(other))),
        ("out.jsonl.rejected.jsonl", ()),
        ("out.jsonl.part", ()),
        ("out.jsonl.made", ()),
        ("out.jsonl", ()),
    ):
        (tmp_path / name).write_text("mine")
        assert 2 == run(models, source, tmp_path / "out.jsonl", *flags)
        assert f"`{tmp_path / name}` exists already" in capfd.readouterr().err
        assert ("mine", {"in.jsonl", "models", name}) == ((tmp_path / name).read_text(), set(os.listdir(tmp_path)))
        (tmp_path / name).unlink()
    other.write_text("mine")
    assert 2 == run(models, source, Path("-"), "--rejected", str(other))
    assert "mine" == other.read_text()
    assert 3 == run(models, source, Path("-"), "--rejected", str(other), "--restart")
    assert 3 == run(models, source, tmp_path / "out.jsonl", "--rejected", str(other), "--restart")
    assert [[2], before] == [[row["row"] for row in read_lines(other)], source.read_bytes()]


@pytest.mark.parametrize("kind", ["device", "folder"])
def test_only_regular_files_are_replaced_or_removed(models: Path, tmp_path: Path, kind: str) -> None:
    """This also applies with `--restart`; otherwise a run by root would remove /dev/null."""
    source = write_lines(tmp_path / "in.jsonl", [{"text": "good"}])
    special = tmp_path / "special.jsonl"
    special.symlink_to("/dev/null" if kind == "device" else tmp_path)
    for output, flags in ((special, ()), (tmp_path / "out.jsonl", ("--rejected", str(special)))):
        assert 2 == run(models, source, output, *flags, "--restart")
        assert special.is_symlink()
        assert {"in.jsonl", "models", "special.jsonl"} == set(os.listdir(tmp_path))


def test_a_pipe_is_accepted_only_as_stdin(models: Path, tmp_path: Path) -> None:
    """A pipe can be read only once, and opening a named pipe without a writer would block forever."""
    os.mkfifo(tmp_path / "in.jsonl")
    (tmp_path / "out.jsonl").write_text("mine")
    reading, writing = os.pipe()
    try:
        os.write(writing, b'{"text": "good"}\n')
        os.close(writing)
        for source in (tmp_path / "in.jsonl", Path(f"/dev/fd/{reading}")):
            assert 2 == run(models, source, tmp_path / "out.jsonl", "--input-format", "jsonl", "--restart")
        assert b'{"text": "good"}\n' == os.read(reading, 100)
    finally:
        os.close(reading)
    assert "mine" == (tmp_path / "out.jsonl").read_text()


@pytest.mark.parametrize("restart", [(), ("--restart",)])
def test_files_of_a_run_must_be_different_files(
    models: Path, tmp_path: Path, restart: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    source = write_lines(tmp_path / "in.jsonl", [{"text": "good"}])
    before = source.read_bytes()
    (tmp_path / "link.jsonl").symlink_to(source)
    (tmp_path / "hard.jsonl").hardlink_to(source)
    (tmp_path / "folder").symlink_to(tmp_path)
    names = set(os.listdir(tmp_path))
    same = [source, tmp_path / "link.jsonl", tmp_path / "hard.jsonl", tmp_path / "folder/in.jsonl"]
    for path in same:
        assert 2 == run(models, source, path, *restart)
        assert 2 == run(models, source, tmp_path / "out.jsonl", "--rejected", str(path), *restart)
        assert 2 == run(models, source, Path("-"), "--rejected", str(path), *restart)
    for name in ("out.jsonl", "out.jsonl.part", "out.jsonl.state", "out.jsonl.made"):
        assert 2 == run(models, source, tmp_path / "out.jsonl", "--rejected", str(tmp_path / "folder" / name), *restart)
    source.rename(tmp_path / "out.jsonl.part")
    assert 2 == run(models, tmp_path / "out.jsonl.part", tmp_path / "out.jsonl", "--input-format", "jsonl", *restart)
    assert "the same file" in capsys.readouterr().err
    assert before == (tmp_path / "out.jsonl.part").read_bytes()
    assert names - {"in.jsonl"} | {"out.jsonl.part"} == set(os.listdir(tmp_path))


def test_ctrl_c_ends_a_run_whose_stdout_is_not_read(models: Path, tmp_path: Path) -> None:
    source = write_lines(tmp_path / "in.jsonl", [{"text": "good", "note": "n" * 10_000}] * 100)
    command = [sys.executable, "-m", "bertserve.service.cli", "score", "--models", str(models), "--model", "tiny", str(source), "-"]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment) as process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.read(1)  # reads no more
        process.send_signal(signal.SIGINT)
        assert 130 == process.wait(60)
        assert b"Fatal" not in process.stderr.read()


def test_stdout_must_not_be_the_input(models: Path, tmp_path: Path) -> None:
    """Otherwise `score in.jsonl - >> in.jsonl` would never end."""
    source = write_lines(tmp_path / "in.jsonl", [{"text": "good"}])
    with source.open("ab") as stdout:
        command = [sys.executable, "-m", "bertserve.service.cli", "score", "--models", str(models), "--model", "tiny", str(source), "-"]
        assert 2 == subprocess.run(command, stdout=stdout, stderr=subprocess.DEVNULL, timeout=60, check=False).returncode
    assert [{"text": "good"}] == read_lines(source)


def test_an_output_that_appears_during_the_run_is_not_replaced(
    models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file can appear during a run or between runs. After it is moved, the run continues."""
    source, output = write_lines(tmp_path / "in.jsonl", [{"text": text} for text in TEXTS]), tmp_path / "out.jsonl"
    append = part.PartialOutput.append

    def appended(self: part.PartialOutput, data: bytes, rejected: bytes, progress: ScoringProgress) -> ScoringProgress:
        output.write_text("mine")
        return append(self, data, rejected, progress)

    with monkeypatch.context() as patch:
        patch.setattr(part.PartialOutput, "append", appended)
        assert 2 == run(models, source, output)
    assert 2 == run(models, source, output)
    assert "was written after" in capsys.readouterr().err
    assert "mine" == output.read_text()
    output.rename(tmp_path / "mine")
    assert 0 == run(models, source, output)
    assert 90 == len(read_lines(output))


def test_a_run_that_is_interrupted_while_it_writes_can_resume(models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C waits for the current write, then leaves a matching part and state. Before the first write, it leaves nothing."""
    source, output = write_lines(tmp_path / "in.jsonl", [{"text": text} for text in TEXTS]), tmp_path / "out.jsonl"
    write, close, closing = part.write_all, part.PartialOutput.close, threading.Event()

    def interrupted(file: Any, data: bytes) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        assert closing.wait(20)
        write(file, data)

    def noted(self: part.PartialOutput) -> None:
        closing.set()
        close(self)

    monkeypatch.setattr(part.PartialOutput, "close", noted)
    monkeypatch.setattr(part, "write_all", interrupted)
    assert 130 == run(models, source, output)
    monkeypatch.setattr(part, "write_all", write)
    assert {"out.jsonl.part", "out.jsonl.state"} <= set(os.listdir(tmp_path))
    assert 0 == run(models, source, output)
    assert TEXTS == [row["text"] for row in read_lines(output)]

    def stopped(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(scorer, "build", stopped)
    assert 130 == run(models, source, tmp_path / "2.jsonl")
    assert {"in.jsonl", "models", "out.jsonl"} == set(os.listdir(tmp_path))


@pytest.mark.parametrize(
    ("suffix", "step"), [("jsonl", 7), ("parquet", 11), *(pytest.param(kind, 1, marks=ALL) for kind in ("jsonl", "parquet"))]
)
def test_a_run_that_was_killed_at_any_point_can_resume(
    models: Path, tmp_path: Path, suffix: str, step: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kill can come before any write, sync, rename or removal. The same command then gives byte-identical outputs."""
    rows = [{"text": text} if i % 30 else {"txt": text} for i, text in enumerate(TEXTS[:50])]
    source = tmp_path / f"in.{suffix}"
    if suffix == "jsonl":
        write_lines(source, rows)
    else:
        pq.write_table(pa.Table.from_pylist([{"text": row.get("text")} for row in rows]), source, row_group_size=20)
    output = tmp_path / f"out.{suffix}"
    assert run(models, source, output) == 3
    expected = [output.read_bytes(), (rejected := tmp_path / f"{output.name}.rejected.jsonl").read_bytes()]
    count, last = 0, 10**6

    def counted(call: Any) -> Any:
        def replaced(*args: Any, **options: Any) -> Any:
            nonlocal count
            count += 1
            if count == last:
                if call is part.write_all:  # writes half of the data
                    call(args[0], args[1][: len(args[1]) // 2])
                raise Killed
            return call(*args, **options)

        return replaced

    monkeypatch.setattr(part, "write_all", counted(part.write_all))
    for name in ("fsync", "replace"):
        monkeypatch.setattr(part.os, name, counted(getattr(os, name)))
    monkeypatch.setattr(Path, "unlink", counted(Path.unlink))
    outcomes = []
    for last in range(1, 60, step):  # noqa: B007 - the calls that are counted look at it
        for path in (output, rejected):
            if path.exists():
                os.remove(path)
        count = 0
        try:
            run(models, source, output)
            break
        except Killed:
            count = -(10**6)
        if output.exists() and not (tmp_path / f"{output.name}.state").exists():
            break
        run(models, source, output)
        outcomes.append([output.read_bytes(), rejected.read_bytes()] == expected)
    assert len(outcomes) > 1
    assert all(outcomes)


def test_a_run_resumes_only_with_the_same_input_and_options(
    models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error says what differs, and `--restart` starts again. A complete output is not replaced."""
    source, output = write_lines(tmp_path / "in.jsonl", [{"text": text} for text in TEXTS]), tmp_path / "out.jsonl"
    with monkeypatch.context() as patch:
        patch.setattr(part.os, "replace", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
        assert run(models, source, output) == 1
    assert "(No space left on device)" in capsys.readouterr().err
    assert ["in.jsonl", "models"] == sorted(os.listdir(tmp_path))
    for flags in ((), ("--restart",)):
        with monkeypatch.context() as patch:
            patch.setattr(part, "write_all", full_after(2, part.write_all))
            assert run(models, source, output, *flags) == 1
        assert "32 rows" in (message := capsys.readouterr().err)
        assert bool(flags) == ("without --restart" in message)  # with it, the rows would be lost
    for difference, option in (
        ("parameters", ("--parameters", '{"top_k": 1}')),
        ("--max-queue-tokens", ("--max-queue-tokens", "100000")),
        ("--batch-variant-graphs", ("--batch-variant-graphs",)),
    ):
        assert run(models, source, output, *option) == 2
        assert f"different {difference};" in capsys.readouterr().err
    with source.open("a") as file:
        file.write('{"text": "good"}\n')
    assert run(models, source, output) == 2
    assert "different input" in capsys.readouterr().err
    assert run(models, source, output, "--restart") == 0
    assert "91 rows: 91 answered" in capsys.readouterr().err
    assert run(models, source, output) == 2
    assert f"`{output}` exists already" in capsys.readouterr().err


def test_an_input_that_changes_during_the_run_gets_no_output(models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, output = write_lines(tmp_path / "in.jsonl", [{"text": text} for text in TEXTS]), tmp_path / "out.jsonl"
    append = part.PartialOutput.append

    def appended(self: part.PartialOutput, data: bytes, rejected: bytes, progress: ScoringProgress) -> ScoringProgress:
        if progress.place.row < 20:
            with source.open("a") as file:
                file.write('{"text": "good"}\n')
        return append(self, data, rejected, progress)

    with monkeypatch.context() as patch:
        patch.setattr(part.PartialOutput, "append", appended)
        assert 1 == run(models, source, output)
    assert 2 == run(models, source, output)
    assert not output.exists()
    assert 0 == run(models, source, output, "--restart")
    assert len(read_lines(source)) == len(read_lines(output))


def full_after(writes: int, write: Any) -> Any:
    """Returns a write function for a disk that is full after a number of writes."""

    def replaced(file: Any, data: bytes) -> None:
        nonlocal writes
        if writes == 0:
            write(file, data[:10])
            raise OSError(28, "No space left on device")
        writes -= 1
        write(file, data)

    return replaced


class Echo:
    """A scorer without a model."""

    async def answer(self, rows: Sequence[Row], on_done: Any) -> list[RowAnswer]:
        return [RowAnswer(len(row.values["text"])) for row in rows]


class Nowhere:
    """A sink that only counts bytes."""

    def append(self, data: bytes, rejected: bytes, progress: ScoringProgress) -> ScoringProgress:
        return ScoringProgress(progress.place, output_bytes=progress.output_bytes + len(data))


def peak_bytes(path: Path, rows: int) -> int:
    """Returns the peak memory of Python while it scores a number of rows."""
    import asyncio

    path.write_text('{"text": "a good film and a bad book"}\n' * rows)
    bar = ProgressBar(None, 0)
    with path.open("rb") as file:
        reader = JsonLinesReader(file, Place(), max_bytes=4096)
        scoring = runner.ScoringRun(reader, Echo(), JsonLinesWriter("p", "w"), Nowhere(), ScoringProgress(), bar, 0, None, window_rows=256)  # type: ignore[arg-type]
        tracemalloc.start()
        asyncio.run(scoring())
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    bar.close()
    assert rows == scoring.progress.place.row
    return peak


def test_memory_does_not_grow_with_the_rows(tmp_path: Path) -> None:
    """Eight times as many rows need about the same memory."""
    few = peak_bytes(tmp_path / "in.jsonl", 1500)
    assert peak_bytes(tmp_path / "in.jsonl", 12000) < 1.3 * few


def test_a_disk_error_while_reading_is_an_error_message() -> None:
    class Failing(io.BytesIO):
        def readline(self, size: int | None = -1, /) -> bytes:
            if self.tell():
                raise OSError(errno.EIO, "Input/output error")
            return super().readline(size)

    for line, kind in ((b'{"text": "good"}\n', JsonLinesReader), (b"text\n", partial(DelimitedReader, delimiter=","))):
        with pytest.raises(StartError, match=r"after line 1 \(Input/output error\)"):
            kind(Failing(line), Place(), max_bytes=4096).window(16, 2**20)


def test_a_folder_without_permission_is_an_error_message(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The error is simulated, because root can search every folder."""
    source, closed, stat = write_lines(tmp_path / "in.jsonl", [{"text": "good"}]), tmp_path / "closed", Path.stat

    def denied(self: Path, **options: Any) -> os.stat_result:
        if self.parent == closed:
            raise PermissionError(errno.EACCES, "Permission denied", str(self))
        return stat(self, **options)

    monkeypatch.setattr(Path, "stat", denied)
    assert 1 == run(models, source, closed / "out.jsonl")
    assert 1 == run(models, source, Path("-"), "--rejected", str(closed / "bad.jsonl"))
    assert 2 == capfd.readouterr().err.count("(Permission denied)")


def test_a_closed_stdout_is_refused(models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write_lines(tmp_path / "in.jsonl", [{"text": "good"}])
    monkeypatch.setattr(sys, "stdout", None)
    assert 2 == run(models, source, Path("-"))
    assert 0 == run(models, source, tmp_path / "out.jsonl")


def test_a_run_with_a_large_schema_can_resume(models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The schema takes more than the first MiB of the partial file."""
    source, output = tmp_path / "in.parquet", tmp_path / "out.parquet"
    pq.write_table(pa.table({"text": TEXTS}).replace_schema_metadata({"note": "n" * 2**21}), source)
    with monkeypatch.context() as patch:
        patch.setattr(part, "write_all", full_after(2, part.write_all))
        assert 1 == run(models, source, output)
    assert 0 == run(models, source, output)
    assert TEXTS == pq.read_table(output).column("text").to_pylist()


@ALL
@pytest.mark.serial
def test_streams_and_signals(models: Path, tmp_path: Path) -> None:
    """Rows from stdin are written to stdout. After SIGKILL or SIGTERM, the same command completes a byte-identical output."""
    command = [str(Path(sys.executable).with_name("bert-serve")), "score", "--models", str(models), "--model", "tiny"]
    lines = b'{"text": "good"}\n' * 3
    done = subprocess.run([*command, "--input-format", "jsonl", "-", "-"], input=lines, capture_output=True, check=True)
    assert 3 == len(done.stdout.splitlines())
    assert b"3 rows: 3 answered" in done.stderr

    source = write_lines(tmp_path / "in.jsonl", [{"text": f"{text} {i}"} for i in range(300) for text in TEXTS])
    subprocess.run([*command, source, tmp_path / "whole.jsonl"], check=True, capture_output=True)
    output, state = tmp_path / "out.jsonl", tmp_path / "out.jsonl.state"
    for number, code in ((signal.SIGKILL, -9), (signal.SIGTERM, 143)):
        process = subprocess.Popen([*command, source, output], stderr=subprocess.PIPE)
        before = state.stat().st_mtime_ns if state.exists() else 0
        while process.poll() is None and (not state.exists() or state.stat().st_mtime_ns == before):
            time.sleep(0.01)
        process.send_signal(number)
        said = process.communicate()[1]
        assert code == process.returncode, said
    assert b"the same command" in said
    subprocess.run([*command, source, output], check=True, capture_output=True)
    assert (tmp_path / "whole.jsonl").read_bytes() == output.read_bytes()


def test_an_unknown_column_replaces_no_file(models: Path, tmp_path: Path) -> None:
    source, output = tmp_path / "in.csv", tmp_path / "out.csv"
    source.write_text("text\ngood\n")
    assert 0 == run(models, source, output)
    rejected = tmp_path / "out.csv.rejected.jsonl"
    rejected.write_text("kept")
    before = output.read_bytes()

    assert 2 == run(models, source, output, "--restart", "--text", "nope")
    assert (before, "kept") == (output.read_bytes(), rejected.read_text())
