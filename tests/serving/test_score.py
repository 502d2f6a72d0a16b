"""`bert-serve score` scores files in each format, refuses invalid input, and resumes an interrupted run."""

import csv
import json
import math
import os
import sys
import tempfile
from datetime import datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from bertserve.service.cli import main
from bertserve.service.scoring import rows
from bertserve.service.tasks.catalog import TASKS
from support import json_lines, tiny
from support.app_client import LONG, assert_same, result, result_of
from support.scored import TEXTS, read_rows, run

pytestmark = pytest.mark.usefixtures("logging_of_pytest", "small_blocks")


def test_an_unknown_bundle_is_not_searched_on_the_hub(models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = json_lines(tmp_path / "in.csv", "text\ngood\n")
    for folder, name, hint in ((tmp_path / "none", "tiny", "--models"), (models, "tinny", "did you mean `tiny`?")):
        assert main(["score", "--models", str(folder), "--model", name, str(source), str(tmp_path / "out.csv")]) == 2
        message = capsys.readouterr().err
        assert f"`{name}` in `{folder}`; " in message
        assert hint in message


def test_the_best_label_has_its_own_columns(models: Path, tmp_path: Path) -> None:
    source = tmp_path / "in.csv"
    source.write_text("label,text\n1,good\n0,bad\n")

    def cells(*flags: str) -> list[dict[str, Any]]:
        output = tmp_path / f"out{len(os.listdir(tmp_path))}.csv"
        assert run(models, source, output, *flags) == 0
        return read_rows(output)

    whole, flat = cells("--parameters", '{"top_k": 9}'), cells()
    assert list(flat[0]) == ["label", "text", "prediction_label", "prediction_score", "warnings"]
    best = [json.loads(row["prediction"])[0] for row in whole]
    assert [(row["prediction_label"], float(row["prediction_score"])) for row in flat] == [(item["label"], item["score"]) for item in best]
    assert {"p_label", "p_score"} < set(cells("--prediction-column", "p")[0])
    assert len(json.loads(cells("--parameters", '{"top_k": 2}')[0]["prediction"])) == 2
    for name in ("prediction_label", "prediction_score"):
        assert run(models, source, tmp_path / "twice.csv", "--warnings-column", name) == 2

    source.write_text("prediction_label,text\n1,good\n")
    assert run(models, source, tmp_path / "out.csv") == 2


def test_cells_can_be_json(models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = json_lines(tmp_path / "in.csv", "text,id\ngood,1\n ,2\n")
    assert run(models, source, tmp_path / "out.csv", "--json-cells") == 0
    good, empty = read_rows(tmp_path / "out.csv")
    assert list(good) == ["text", "id", "prediction", "warnings"]
    assert json.loads(good["prediction"])[0].keys() == {"label", "score"}
    assert json.loads(good["warnings"]) == []
    assert json.loads(empty["warnings"])[0].startswith("empty; ")
    assert run(models, source, tmp_path / "out.jsonl", "--json-cells") == 2
    assert "--json-cells" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("activation", "labels", "parameters", "columns"),
    [
        ("none", ("warmth", "length"), {}, ["prediction"]),
        ("sigmoid", ("good", "long"), {"function_to_apply": "none"}, ["prediction"]),
        ("softmax", ("good", "bad"), {"function_to_apply": "sigmoid"}, ["prediction"]),
        ("sigmoid", ("good", "long"), {"function_to_apply": "softmax"}, ["prediction_label", "prediction_score"]),
    ],
)
def test_a_csv_has_all_independent_values(
    tmp_path: Path, activation: str, labels: tuple[str, ...], parameters: dict[str, Any], columns: list[str]
) -> None:
    """There is no best one of several regression values, or of labels that exclude no other."""
    tiny.bundle(tmp_path, activation=activation, labels=labels)
    source = json_lines(tmp_path / "in.csv", "text\ngood\n")
    assert run(tmp_path, source, tmp_path / "out.csv", "--parameters", json.dumps(parameters)) == 0
    [row] = read_rows(tmp_path / "out.csv")
    assert list(row) == ["text", *columns, "warnings"]
    assert len(columns) == 2 or set(labels) == {item["label"] for item in json.loads(row["prediction"])}


def test_the_error_of_a_rejected_list_does_not_quote_the_text(tmp_path: Path) -> None:
    tiny.bundle(tmp_path, task="feature-extraction")
    source = json_lines(tmp_path / "in.jsonl", {"source_sentence": "good", "sentences": '"My secret"'})
    assert run(tmp_path, source, tmp_path / "out.jsonl", "--task", "similarity") == 3
    [rejection] = read_rows(tmp_path / "out.jsonl.rejected.jsonl")
    assert "`sentences`" in rejection["error"]
    assert "secret" not in rejection["error"]


def test_a_row_without_a_column_of_a_flag_is_rejected(models: Path, tmp_path: Path) -> None:
    """Such a row would otherwise be answered as a single text. An empty value still means that there is no second text."""
    source = json_lines(tmp_path / "in.jsonl", {"a": "good", "b": "bad"}, {"a": "good"}, {"a": "good", "b": None})
    assert run(models, source, tmp_path / "out.jsonl", "--columns", '{"text": "a", "text_pair": "b"}') == 3
    assert [row["row"] for row in read_rows(tmp_path / "out.jsonl.rejected.jsonl")] == [2]
    assert len(read_rows(tmp_path / "out.jsonl")) == 2


@pytest.mark.parametrize("name", ["query", "model"])
def test_parameters_cannot_replace_a_column(tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    tiny.bundle(tmp_path, labels=("relevant",))
    source = json_lines(tmp_path / "in.jsonl", {"query": "a film", "texts": ["a book", "good"]})
    assert run(tmp_path, source, tmp_path / "out.jsonl", "--task", "rerank", "--parameters", json.dumps({name: "tiny"})) == 2
    assert f"`{name}`" in capsys.readouterr().err


def test_a_prediction_equals_the_answer_of_the_endpoint(models: Path, tmp_path: Path) -> None:
    source = json_lines(tmp_path / "in.jsonl", *(f'{{"id": {i}.10, "text": "{text}"}}\n' for i, text in enumerate(TEXTS)))

    assert run(models, source, tmp_path / "out.jsonl", "--parameters", '{"top_k": 2}') == 0

    actual = (tmp_path / "out.jsonl").read_text().splitlines()
    assert [line.split(',"prediction"')[0] for line in actual] == [f'{{"id": {i}.10, "text": "{text}"' for i, text in enumerate(TEXTS)]
    expected = result_of(models, "/classify", TEXTS, top_k=2)
    assert_same([row["prediction"] for row in read_rows(tmp_path / "out.jsonl")], expected)
    assert sorted(os.listdir(tmp_path)) == ["in.jsonl", "models", "out.jsonl"]


# task -> columns of a row and parameters
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "attention": ({"text": "good", "text_pair": "bad"}, {"layers": [0]}),
    "text-classification": ({"text": "good", "text_pair": "bad"}, {"top_k": 2}),
    "token-classification": ({"text": "a good film"}, {}),
    "question-answering": ({"question": "good?", "context": "a good film"}, {}),
    "fill-mask": ({"text": "a [MASK] film" + " good" * 70}, {"top_k": 2}),
    "multiple-choice": ({"prompt": "the film was", "choices": ["very good", "a book"]}, {}),
    "feature-extraction": ({"text": "a film"}, {"normalize": True}),
    "sentence-similarity": ({"source_sentence": "a film", "sentences": ["a book", "a film"]}, {}),
    "text-ranking": ({"query": "a film", "texts": ["a book", "good"]}, {"return_text": True}),
    "zero-shot-classification": ({"text": "a film"}, {"candidate_labels": ["good", "bad"], "multi_label": True}),
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
    derivation = TASKS[task].derivation
    tiny.bundle(tmp_path / "models", task=task if derivation is None else derivation.base or "text-classification", **more)
    source, output = tmp_path / f"in.{suffix}", tmp_path / f"out.{suffix}"
    columns = {f"my {name}": value for name, value in row.items()}
    if suffix == "jsonl":
        json_lines(source, columns)
    elif suffix == "parquet":
        pq.write_table(pa.Table.from_pylist([columns]), source)
    else:
        with source.open("w", newline="") as file:
            csv.writer(file).writerows([columns, [value if isinstance(value, str) else json.dumps(value) for value in columns.values()]])
    flags = ["--columns", json.dumps({name: f"my {name}" for name in row})]

    assert run(tmp_path / "models", source, output, *flags, "--parameters", json.dumps(parameters), "--task", TASKS[task].path) == 0

    expected = result(tmp_path / "models", f"/{TASKS[task].path}", **body)
    expected = expected[0] if TASKS[task].body.always_list else expected
    [actual] = [row["prediction"] for row in read_rows(output)]
    assert_same(json.loads(actual) if suffix == "csv" else without_nulls(actual), expected)


def without_nulls(value: Any) -> Any:
    """Returns a value without null fields of structs, because all rows of a Parquet column have the same fields."""
    if isinstance(value, list):
        return [without_nulls(item) for item in value]
    return {name: without_nulls(item) for name, item in value.items() if item is not None} if isinstance(value, dict) else value


@pytest.mark.parametrize("flag", [("--port", "1"), ("--workers", "2"), ("--skip-broken",), ("--max-body-bytes", "4096")])
def test_a_setting_without_effect_is_refused(
    models: Path, tmp_path: Path, flag: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    source = json_lines(tmp_path / "in.jsonl", {"text": "good"})
    with pytest.raises(SystemExit) as exit_info:
        run(models, source, tmp_path / "out.jsonl", *flag)
    assert exit_info.value.code == 2
    assert f"unknown argument `{flag[0]}`" in capsys.readouterr().err
    monkeypatch.setenv("BERT_SERVE_PORT", "1")
    assert run(models, source, tmp_path / "out.jsonl") == 0


def test_a_truncated_or_empty_text_gets_a_warning(models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = json_lines(tmp_path / "in.jsonl", {"text": "good"}, {"text": LONG}, {"text": " "})
    assert run(models, source, tmp_path / "out.jsonl") == 0
    good, truncated, empty = (row["warnings"] for row in read_rows(tmp_path / "out.jsonl"))
    assert good == []
    assert "32 tokens" in truncated[0]
    assert empty[0].startswith("empty; ")
    assert ", 2 with warnings" in capsys.readouterr().err


BAD = [
    ("nope", "valid JSON"),
    ("[1]", "not an object"),
    ({"txt": "good"}, "`text` must be a text; the row has `txt`"),
    ({"text": 5}, "`text` must be a text; it is 5."),
    ({"text": None}, "`text` must be a text; it is null."),
    ({"text": ["good", "bad"]}, "`text` must be a text; it is a list of 2."),
    ({"text": ["good"]}, "`text` must be a text"),
    ({"text": []}, "`text` must be a text"),
    ({"text": "good", "prediction": 1}, "`prediction`"),
    ({"text": LONG}, "`truncation`"),
    ('{"text": "\udcff"}', "UTF-8"),
    ('{"text": "good", "id": [1, -Infinity, NaN]}', "valid JSON"),
]


def test_rejected_rows_are_written_to_a_separate_file(models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines: list[Any] = [line for bad, _ in BAD for line in (bad, {"text": "good"})]
    text = "".join(f"{line if isinstance(line, str) else json.dumps(line)}\n\n" for line in lines)
    (tmp_path / "in.jsonl").write_bytes(text.encode(errors="surrogateescape"))
    flags = ["--parameters", '{"truncation": false}']

    assert run(models, tmp_path / "in.jsonl", tmp_path / "out.jsonl", *flags) == 3

    rejections = read_rows(tmp_path / "out.jsonl.rejected.jsonl")
    assert [(row["row"], row["line"]) for row in rejections] == [(2 * i + 1, 4 * i + 1) for i in range(len(BAD))]
    assert [(words, row["error"]) for (_, words), row in zip(BAD, rejections, strict=True) if words not in row["error"]] == []
    assert len(read_rows(tmp_path / "out.jsonl")) == len(BAD)
    assert f"{len(BAD)} rejected" in (output := capsys.readouterr().err)
    assert f"row 1: {rejections[0]['error']}" in output


@pytest.mark.parametrize(
    ("content", "flags", "words"),
    [
        (b"", [], "no header"),
        (b"text,text\na,b\n", [], "`text` twice"),
        (b"texts\na\n", [], "did you mean `texts`?"),
        (b"text,warnings\na,b\n", [], "--warnings-column"),
        (b'text\n"a\nb\n', [], "line 2: "),
        (b"text\na\n", ["--columns", '{"question": "text"}'], "--columns has `question`"),
        (b"text\na\n", ["--parameters", '{"topk": 1}'], "did you mean `top_k`?"),
        (b"text\na\n", ["--parameters", "{"], "--parameters "),
        (b"text\na\n", ["--columns", '{"text": 5}'], "must be a valid string"),
        (b"text\na\n", ["--task", "ner"], "`token-classification`, but "),
        (b"text\na\n", ["--warnings-column", "prediction"], "are the same"),
        (b"text\na\n", ["--model", "other"], "names 2 models"),
        (b"text\na\n", ["--ray", "local", "--threads", "2"], "--threads"),
        (b"text\na\n", ["--actors", "2"], "need --ray"),
    ],
)
def test_an_invalid_file_or_flag_is_refused(
    models: Path, tmp_path: Path, content: bytes, flags: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "in.csv").write_bytes(content)
    assert run(models, tmp_path / "in.csv", tmp_path / "out.csv", *flags) in (1, 2)
    assert words in capsys.readouterr().err
    assert sorted(os.listdir(tmp_path)) == ["in.csv", "models"]


@pytest.mark.parametrize("suffix", ["csv", "parquet"])
def test_csv_rows_with_too_many_fields_or_invalid_bytes_are_rejected(models: Path, tmp_path: Path, suffix: str) -> None:
    """A row with too many fields, or that is not UTF-8, is rejected. Delimiters, quotes and line ends in fields are allowed."""
    (tmp_path / "in.csv").write_bytes(b'\xef\xbb\xbfid,text\r\n1,"good,\n""film"""\r\n2,bad,x\r\n3,\xff\r\n\r\n4,bad\r\n')
    output = tmp_path / f"out.{suffix}"
    assert run(models, tmp_path / "in.csv", output) == 3
    assert [(row["id"], row["text"]) for row in read_rows(output)] == [("1", 'good,\n"film"'), ("4", "bad")]
    rejections = [(row["row"], row["line"]) for row in read_rows(tmp_path / f"out.{suffix}.rejected.jsonl")]
    assert rejections == [(2, 4), (3, 5)]


def test_parquet_keeps_the_columns_and_their_types(models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Nulls and types that JSON lacks are kept over several row groups. A file without the input column is refused."""
    columns = {"when": pa.array([i * 10**9 for i in range(90)], pa.timestamp("ns")), "kind": pa.array(["x", None] * 45).dictionary_encode()}
    table = pa.table({"text": TEXTS, **columns})
    pq.write_table(table, tmp_path / "in.parquet", row_group_size=40)

    assert run(models, tmp_path / "in.parquet", tmp_path / "out.parquet") == 0

    actual = pq.read_table(tmp_path / "out.parquet")
    assert table.cast(pa.schema([actual.schema.field(name) for name in table.column_names])).equals(actual.select(table.column_names))
    assert str(actual.schema.field("prediction").type) == "list<element: struct<label: string, score: double>>"
    assert run(models, tmp_path / "in.parquet", tmp_path / "2.parquet", "--columns", "text=txt") == 2
    assert "did you mean `text`?" in capsys.readouterr().err
    (tmp_path / "bad.parquet").write_bytes(b"PAR1 no")
    assert run(models, tmp_path / "bad.parquet", tmp_path / "2.parquet") == 1
    assert "as Parquet" in capsys.readouterr().err


@pytest.mark.parametrize("delimiter", [",", "\t"])
def test_each_line_end_within_a_field_is_quoted(models: Path, tmp_path: Path, delimiter: str) -> None:
    """Also a single carriage return, which the csv module does not quote. The output has the rows and fields of the input."""
    names, rows = ("text", "no\rte"), [("good\rfilm", "a\r"), ("bad", "\r\n"), ("film", 'x"\n')]
    suffix = {",": "csv", "\t": "tsv"}[delimiter]
    with (tmp_path / f"in.{suffix}").open("w", newline="") as file:
        csv.writer(file, delimiter=delimiter, quoting=csv.QUOTE_ALL).writerows([names, *rows])

    assert run(models, tmp_path / f"in.{suffix}", tmp_path / f"out.{suffix}") == 0

    assert [tuple(row[name] for name in names) for row in read_rows(tmp_path / f"out.{suffix}")] == rows


def test_a_field_of_csv_that_is_too_long_ends_the_run(
    models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as all the rest of the file after a quote that is never closed."""
    monkeypatch.setattr(rows, "BLOCK_BYTES", 1024)
    (tmp_path / "in.csv").write_text('text,id\n"' + "a\n" * 1000)
    assert run(models, tmp_path / "in.csv", tmp_path / "out.csv") == 1
    message = capsys.readouterr().err
    assert "line 2: " in message
    assert "(1024)" in message


@pytest.mark.parametrize(("column", "code", "count"), [("text", 3, 1), ("name", 0, 2)])
def test_a_row_of_parquet_that_is_not_utf8_is_rejected(models: Path, tmp_path: Path, column: str, code: int, count: int) -> None:
    """Parquet keeps the bytes of a column that the model does not read."""
    columns = {"text": pa.array(["good", "bad"]), "name": pa.array(["good", "bad"])}
    pq.write_table(pa.table(columns | {column: pa.array([b"\xff", b"bad"]).view(pa.string())}), tmp_path / "in.parquet")
    assert run(models, tmp_path / "in.parquet", tmp_path / "out.parquet") == code
    assert pq.read_metadata(tmp_path / "out.parquet").num_rows == count
    assert run(models, tmp_path / "in.parquet", tmp_path / "out.jsonl") == 3
    [rejection] = read_rows(tmp_path / "out.jsonl.rejected.jsonl")
    assert rejection["row"] == 1
    assert "UTF-8" in rejection["error"]
    assert [row["text"] for row in read_rows(tmp_path / "out.jsonl")] == ["bad"]


@pytest.mark.parametrize("value", [math.nan, math.inf, None])
def test_numbers_that_json_lacks_become_null_or_an_empty_cell(models: Path, tmp_path: Path, value: float | None) -> None:
    pq.write_table(pa.table({"text": ["good", "null"], "x": pa.array([value, 0.5])}), tmp_path / "in.parquet")
    assert run(models, tmp_path / "in.parquet", tmp_path / "out.csv") == 0
    assert [(row["text"], row["x"]) for row in read_rows(tmp_path / "out.csv")] == [("good", ""), ("null", "0.5")]
    assert run(models, tmp_path / "in.parquet", tmp_path / "out.jsonl") == 0
    assert [row["x"] for row in read_rows(tmp_path / "out.jsonl")] == [None, 0.5]


@pytest.mark.parametrize("count", [9, 40])
def test_a_row_whose_prediction_has_another_type_is_not_written_to_parquet(tmp_path: Path, count: int) -> None:
    """Several masks have a list each. The row can also be in a later block than the first one."""
    tiny.bundle(tmp_path / "models", task="fill-mask")
    pq.write_table(pa.table({"text": [*["a [MASK] film"] * (count - 1), "a [MASK] [MASK]"]}), tmp_path / "in.parquet")
    assert run(tmp_path / "models", tmp_path / "in.parquet", tmp_path / "out.parquet") == 3
    [rejection] = read_rows(tmp_path / "out.parquet.rejected.jsonl")
    assert rejection["row"] == count
    assert "type" in rejection["error"]
    assert pq.read_table(tmp_path / "out.parquet").column("text").to_pylist() == ["a [MASK] film"] * (count - 1)


@pytest.mark.parametrize("column", [pa.array([Decimal("1.5")]), pa.array([1]), pa.array([[("a", 1)]], pa.map_(pa.string(), pa.int64()))])
def test_a_column_without_texts_is_copied_or_named(models: Path, tmp_path: Path, column: Any, capsys: pytest.CaptureFixture[str]) -> None:
    table = pa.table({"text": ["good"], "odd": column})
    pq.write_table(table, tmp_path / "in.parquet")
    assert run(models, tmp_path / "in.parquet", tmp_path / "out.parquet") == 0
    assert pq.read_table(tmp_path / "out.parquet").select(["text", "odd"]).equals(table)
    assert run(models, tmp_path / "in.parquet", tmp_path / "2.parquet", "--columns", "text=odd") == 3
    assert "`odd`" in read_rows(tmp_path / "2.parquet.rejected.jsonl")[0]["error"]
    is_number = column.type == pa.int64()
    assert run(models, tmp_path / "in.parquet", tmp_path / "out.jsonl") == (0 if is_number else 2)
    assert is_number or "`odd`" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("column", "text"),
    [
        (pa.array([b"\xfb\xff"]), "+/8="),
        (pa.array([b"\xfb"], pa.large_binary()), "+w=="),
        (pa.array([timedelta(days=1, microseconds=1)]), "PT86400.000001S"),
        (pa.array([-timedelta(seconds=60)], pa.duration("s")), "-PT60S"),
        (pa.array([1_500_000_001], pa.duration("ns")), "PT1.5S"),
    ],
)
def test_bytes_and_durations_of_parquet_become_text(models: Path, tmp_path: Path, column: Any, text: str) -> None:
    pq.write_table(pa.table({"text": ["good"], "odd": column, "list": pa.ListArray.from_arrays([0, 1], column)}), tmp_path / "in.parquet")
    for output in (tmp_path / "out.jsonl", tmp_path / "out.csv"):
        assert run(models, tmp_path / "in.parquet", output) == 0
        [row] = read_rows(output)
        assert row["odd"] == text
        assert row["list"] in ([text], json.dumps([text]))


@pytest.mark.parametrize(
    ("source", "suffix"), [*(("csv", suffix) for suffix in ("tsv", "jsonl")), *(("parquet", suffix) for suffix in ("csv", "tsv", "jsonl"))]
)
def test_a_table_becomes_another_format(models: Path, tmp_path: Path, source: str, suffix: str) -> None:
    when, path, output = "2026-11-29T01:02:03", tmp_path / f"in.{source}", tmp_path / f"out.{suffix}"
    if source == "csv":
        path.write_text(f"when,text,more\n{when},good,\n")
    else:
        times = pa.array([datetime.fromisoformat(when)], pa.timestamp("ns"))
        pq.write_table(pa.table({"when": times, "text": ["good"], "more": pa.array([None], pa.string())}), path)
    assert run(models, path, output) == 0
    [row] = read_rows(output)
    assert (row["when"], row["text"], row["more"] or "") == (when, "good", "")
    assert {"prediction", "prediction_label"} & row.keys()


@pytest.mark.parametrize("count", [0, 20, 32])
def test_the_columns_of_a_csv_are_texts_in_parquet(models: Path, tmp_path: Path, count: int) -> None:
    """Also without rows, and if the last block is full."""
    texts, output = TEXTS[:count], tmp_path / "out.parquet"
    (tmp_path / "in.csv").write_text("".join(["id,text,more\n", *(f"{index},{text},\n" for index, text in enumerate(texts))]))
    assert run(models, tmp_path / "in.csv", output) == 0
    table = pq.read_table(output)
    assert table.column_names == ["id", "text", "more", "prediction", "warnings"]
    expected = {"id": [str(index) for index in range(count)], "text": texts, "more": [""] * count}
    assert pa.table(expected, pa.schema([(name, pa.string()) for name in expected])).equals(table.select(list(expected)))
    assert [isinstance(prediction[0]["score"], float) for prediction in table.column("prediction").to_pylist()] == [True] * count


def test_parquet_needs_pyarrow(models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bertserve.service.cli.find_spec", lambda name: None)
    (tmp_path / "in.csv").write_text("text\ngood\n")
    assert run(models, tmp_path / "in.csv", tmp_path / "out.parquet") == 2
    assert run(models, tmp_path / "in.csv", tmp_path / "out.csv") == 0


@pytest.mark.parametrize(("source", "output"), [("jsonl", "csv"), ("jsonl", "parquet"), ("csv", "txt")])
def test_a_file_that_cannot_become_a_format_is_refused(models: Path, tmp_path: Path, source: str, output: str) -> None:
    """Rows of JSON Lines can have different fields."""
    path = tmp_path / f"in.{source}"
    path.write_text({"jsonl": '{"text": "good"}\n', "csv": "text\ngood\n"}[source])
    assert run(models, path, tmp_path / f"out.{output}") == 2


def test_the_format_of_the_output_can_differ_from_its_name(models: Path, tmp_path: Path) -> None:
    (tmp_path / "in.csv").write_text("text\ngood\n")
    assert run(models, tmp_path / "in.csv", tmp_path / "out.txt", "--output-format", "jsonl") == 0
    assert json.loads((tmp_path / "out.txt").read_text())["text"] == "good"


def test_the_output_can_be_stdout_and_rejected_rows_stop_it_unless_they_have_a_file(
    models: Path, tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    source = json_lines(tmp_path / "in.jsonl", {"text": "good"}, {"text": 1})
    assert run(models, source, Path("-")) == 1
    assert b"--rejected" in capfdbinary.readouterr().err
    assert run(models, source, tmp_path / "out.jsonl") == 3
    capfdbinary.readouterr()
    monkeypatch.setattr(tempfile, "tempdir", "/dev/shm")  # another file system
    assert run(models, source, Path("-"), "--rejected", str(tmp_path / "rejected.jsonl")) == 3

    assert capfdbinary.readouterr().out == (tmp_path / "out.jsonl").read_bytes()
    assert (tmp_path / "rejected.jsonl").read_bytes() == (tmp_path / "out.jsonl.rejected.jsonl").read_bytes()
    assert run(models, source, Path("-"), "--rejected", str(tmp_path / "none/rejected.jsonl")) == 1
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        assert run(models, source, Path("-"), "--rejected", str(tmp_path / "rejected2.jsonl")) == 1


def test_rows_with_an_empty_text_are_rejected_on_request(models: Path, tmp_path: Path) -> None:
    source = json_lines(tmp_path / "in.jsonl", {"text": "good"}, {"text": " "}, {"text": ""})
    assert run(models, source, tmp_path / "out.jsonl", "--empty", "reject") == 3

    assert [line["text"] for line in read_rows(tmp_path / "out.jsonl")] == ["good"]
    assert [line["row"] for line in read_rows(tmp_path / "out.jsonl.rejected.jsonl")] == [2, 3]


def test_old_timestamps_of_parquet_keep_their_year(models: Path, tmp_path: Path) -> None:
    times = [datetime(1000, 1, 1), datetime(9999, 12, 31, 23, 59, 59, 999999)]
    table = pa.table({"text": ["good", "bad"], "when": pa.array(times, pa.timestamp("us"))})
    pq.write_table(table, tmp_path / "in.parquet", use_deprecated_int96_timestamps=True)
    assert run(models, tmp_path / "in.parquet", tmp_path / "out.parquet") == 0
    assert pq.read_table(tmp_path / "out.parquet").column("when").to_pylist() == times


def test_columns_with_the_same_name_are_refused(models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pq.write_table(pa.table([pa.array(["good"]), pa.array([1]), pa.array([2])], ["text", "a", "a"]), tmp_path / "in.parquet")
    assert run(models, tmp_path / "in.parquet", tmp_path / "out.parquet") == 2
    assert "`a` twice" in capsys.readouterr().err


def test_blocks_without_an_entity_do_not_decide_the_type_of_predictions(tmp_path: Path) -> None:
    """The first block has only empty lists, and a later one has entities; an input without rows has an output, too."""
    tiny.bundle(tmp_path / "models", task="token-classification")
    texts = [""] * 16 + ["a good film"] * 3
    pq.write_table(pa.table({"text": texts}), tmp_path / "in.parquet")
    assert run(tmp_path / "models", tmp_path / "in.parquet", tmp_path / "out.parquet") == 0
    predictions = pq.read_table(tmp_path / "out.parquet").column("prediction")
    assert [value == [] for value in predictions.to_pylist()[:16]] == [True] * 16
    assert pa.types.is_struct(predictions.type.value_type)
    pq.write_table(pa.table({"text": pa.array([], pa.string())}), tmp_path / "in.parquet")
    assert run(tmp_path / "models", tmp_path / "in.parquet", tmp_path / "none.parquet") == 0
    assert pq.read_table(tmp_path / "none.parquet").column_names == ["text", "prediction", "warnings"]
