"""`bert-serve score` and its files: runs that are killed continue with the same bytes, and no file is replaced unasked."""

import errno
import os
import resource
import signal
import subprocess
import sys
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from bertserve.service.engine.onnx_engine import OnnxEngine
from bertserve.service.errors import EngineError
from bertserve.service.scoring import predictor
from bertserve.service.scoring.score import Parts
from support import json_lines, tiny
from support.scored import TEXTS, read_rows, run

pytestmark = pytest.mark.usefixtures("logging_of_pytest", "small_blocks")


@contextmanager
def before_each_write(action: Callable[[int], Any]) -> Iterator[None]:
    """Calls an action with the index of each part before the part is written."""
    write = Parts.write

    def act_and_write(self: Parts, index: int, *args: Any) -> None:
        action(index)
        write(self, index, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Parts, "write", act_and_write)
        yield


def failing_at(part: int, error: BaseException) -> AbstractContextManager[None]:
    """Raises an error before a part is written."""

    def fail(index: int) -> None:
        if index == part:
            raise error

    return before_each_write(fail)


class Killed(BaseException):
    """Simulates a killed process."""


@pytest.mark.parametrize(
    ("suffix", "step"),
    [("jsonl", 5), ("parquet", 7), *(pytest.param(kind, 1, marks=pytest.mark.full_grid) for kind in ("jsonl", "csv", "parquet"))],
)
def test_a_run_that_was_killed_at_any_point_continues_with_the_same_bytes(
    models: Path, tmp_path: Path, suffix: str, step: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kill can come before or within each write, sync, rename and removal. The next run can have other threads and another GPU."""
    rows = [{"text": text} if i % 30 else {"text": "x" * 300} for i, text in enumerate(TEXTS[:50])]
    source, output = tmp_path / f"in.{suffix}", tmp_path / f"out.{suffix}"
    if suffix == "parquet":
        pq.write_table(pa.Table.from_pylist(rows), source, row_group_size=20)
    elif suffix == "csv":
        source.write_text("".join(f"{text}\n" for text in ("text", *(row["text"] for row in rows))))
    else:
        json_lines(source, *rows)
    rejections_file = tmp_path / f"{output.name}.rejected.jsonl"
    limit = ("--max-chars", "200")
    assert run(models, source, output, *limit) == 3
    expected = [output.read_bytes(), rejections_file.read_bytes()]
    count, last = 0, 10**6

    def count_call(call: Any) -> Any:
        def count_and_call(*args: Any, **options: Any) -> Any:
            nonlocal count
            count += 1
            if count == last:
                if call is write_bytes:  # writes half of the data
                    call(args[0], args[1][: len(args[1]) // 2])
                raise Killed
            return call(*args, **options)

        return count_and_call

    write_bytes = Path.write_bytes
    monkeypatch.setattr(Path, "write_bytes", count_call(write_bytes))
    for name in ("fsync", "replace", "unlink", "rmdir"):
        monkeypatch.setattr(os, name, count_call(getattr(os, name)))
    points = 0
    for last in range(1, 100, step):
        count = -(10**6)
        output.unlink()
        rejections_file.unlink()
        count = 0
        try:
            run(models, source, output, *limit, "--threads", "1")
            break
        except Killed:
            count = -(10**6)
        points += 1
        if any(tmp_path.glob("*.parts-*")) or not output.exists():  # otherwise the kill came after the end
            assert run(models, source, output, *limit, "--threads", "3", "--device-id", "1", "--gpu-mem-limit-mib", "9") == 3
        assert [output.read_bytes(), rejections_file.read_bytes()] == expected, last
        assert set(os.listdir(tmp_path)) == {source.name, "models", output.name, rejections_file.name}, last
    assert points > 4


def test_the_parts_of_other_options_or_another_input_are_not_used(models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, output = json_lines(tmp_path / "in.jsonl", *({"text": text} for text in TEXTS)), tmp_path / "out.jsonl"
    with failing_at(2, OSError(errno.ENOSPC, "No space left on device")):
        assert run(models, source, output) == 1
    assert "(No space left on device)" in capsys.readouterr().err
    assert not output.exists()
    assert run(models, source, output, "--parameters", '{"top_k": 1}') == 0
    assert {len(row["prediction"]) for row in read_rows(output)} == {1}
    output.unlink()
    with source.open("a") as file:
        file.write('{"text": "good"}\n')
    assert run(models, source, output) == 0
    assert len(read_rows(output)) == 91


@pytest.mark.parametrize("index", [1, 2])
def test_a_resumed_run_rejects_the_same_types_of_predictions(tmp_path: Path, index: int) -> None:
    tiny.bundle(tmp_path / "models", task="fill-mask")
    source, output = tmp_path / "in.parquet", tmp_path / "out.parquet"
    pq.write_table(pa.table({"text": ["a [MASK] [MASK]" if i in (3, 15, 16, 39) else "a [MASK]" for i in range(40)]}), source)
    assert run(tmp_path / "models", source, output) == 3
    files = (output, output.with_name("out.parquet.rejected.jsonl"))
    expected = [path.read_bytes() for path in files]
    assert [row["row"] for row in read_rows(files[1])] == [4, 16, 17, 40]
    for path in files:
        path.unlink()
    with failing_at(index, KeyboardInterrupt()):
        assert run(tmp_path / "models", source, output) == 130
    assert run(tmp_path / "models", source, output) == 3
    assert [path.read_bytes() for path in files] == expected


def test_an_input_that_grows_during_the_run_stops_it(models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, output = json_lines(tmp_path / "in.jsonl", *({"text": text} for text in TEXTS)), tmp_path / "out.jsonl"

    def grow(index: int) -> None:
        if index == 5:
            with source.open("a") as file:
                file.write('{"text": "good"}\n')

    with before_each_write(grow):
        assert run(models, source, output) == 1
    assert str(source) in capsys.readouterr().err
    assert not output.exists()
    assert run(models, source, output) == 0
    assert len(read_rows(output)) == 91


def test_a_run_with_too_many_rejected_rows_stops_and_a_larger_limit_continues_it(
    models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first part of 16 rows has 9 rejected rows. No file prevents another run."""
    source = json_lines(tmp_path / "in.jsonl", *({"text": text} if index % 5 < 2 else {"txt": text} for index, text in enumerate(TEXTS)))
    assert run(models, source, tmp_path / "out.jsonl", "--max-rejected", "5") == 1
    message = capsys.readouterr().err
    assert "row 3 because" in message
    assert "`txt`" in message
    assert set(os.listdir(tmp_path)) == {"in.jsonl", "models"}
    assert run(models, source, tmp_path / "out.jsonl", "--max-rejected", "15") == 1
    assert run(models, source, tmp_path / "out.jsonl", "--max-rejected", "53") == 1
    assert run(models, source, tmp_path / "out.jsonl", "--max-rejected", "54") == 3
    assert tuple(len(read_rows(tmp_path / name)) for name in ("out.jsonl", "out.jsonl.rejected.jsonl")) == (36, 54)
    assert set(os.listdir(tmp_path)) == {"in.jsonl", "models", "out.jsonl", "out.jsonl.rejected.jsonl"}


@pytest.mark.parametrize("kind", ["file", "device", "folder", "input", "link to nothing"])
def test_no_existing_file_is_replaced(models: Path, tmp_path: Path, kind: str) -> None:
    source, other = json_lines(tmp_path / "in.jsonl", {"text": "good"}, {"text": 1}), tmp_path / "other.jsonl"
    if kind == "file":
        other.write_text("mine")
    elif kind == "input":
        other = source
    else:
        other.symlink_to({"device": Path("/dev/null"), "folder": tmp_path}.get(kind, tmp_path / "none"))
    before = set(os.listdir(tmp_path))
    for output, flags in ((other, ()), (tmp_path / "out.jsonl", ("--rejected", str(other)))):
        assert run(models, source, output, *flags) == 2
    assert run(models, source, tmp_path / "new.jsonl", "--rejected", str(tmp_path / "new.jsonl")) == 2
    assert set(os.listdir(tmp_path)) == before
    assert len(read_rows(source)) == 2
    assert kind != "file" or other.read_text() == "mine"


def test_an_output_that_appears_during_the_run_is_not_replaced(models: Path, tmp_path: Path) -> None:
    """After it is moved, the run only joins its parts."""
    source, output = json_lines(tmp_path / "in.jsonl", *({"text": text} for text in TEXTS)), tmp_path / "out.jsonl"
    with before_each_write(lambda index: output.write_text("mine")):
        assert run(models, source, output) == 2
    assert output.read_text() == "mine"
    output.rename(tmp_path / "mine")
    assert run(models, source, output) == 0
    assert len(read_rows(output)) == 90


def test_the_number_of_parts_is_not_limited_by_open_files(models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(predictor, "BLOCK_ROWS", 1)
    pq.write_table(pa.table({"text": TEXTS}), tmp_path / "in.parquet")
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 40, limits[1]))
    try:
        assert run(models, tmp_path / "in.parquet", tmp_path / "out.parquet") == 0
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert pq.read_table(tmp_path / "out.parquet").column("text").to_pylist() == TEXTS


def test_two_equal_runs_at_once_write_a_complete_output(models: Path, tmp_path: Path) -> None:
    """The second run ends within the first one, and removes the parts. The first one fails, and can be repeated."""
    source, output = json_lines(tmp_path / "in.jsonl", *({"text": text} for text in TEXTS)), tmp_path / "out.jsonl"
    codes: list[int] = []

    def other(index: int) -> None:
        if index == 1 and not codes:
            codes.append(0)
            codes[0] = run(models, source, output)

    with before_each_write(other):
        assert (run(models, source, output), codes) == (1, [0])
    expected = output.read_bytes()
    assert run(models, source, output) == 0
    assert (output.read_bytes(), [row["text"] for row in read_rows(output)]) == (expected, TEXTS)
    assert set(os.listdir(tmp_path)) == {"in.jsonl", "models", "out.jsonl"}


@pytest.mark.parametrize("after", [0, 1])
def test_ctrl_c_keeps_the_complete_parts(models: Path, tmp_path: Path, after: int) -> None:
    source, output = json_lines(tmp_path / "in.jsonl", *({"text": text} for text in TEXTS)), tmp_path / "out.jsonl"
    with failing_at(after, KeyboardInterrupt()):
        assert run(models, source, output) == 130
    assert len(list(tmp_path.glob("out.jsonl.parts-*"))) == after
    assert run(models, source, output) == 0
    assert [row["text"] for row in read_rows(output)] == TEXTS


def test_sigterm_stops_a_run_to_stdout_without_leftovers(models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = json_lines(tmp_path / "in.jsonl", *({"text": text} for text in TEXTS))
    stop = before_each_write(lambda index: index == 1 and signal.raise_signal(signal.SIGTERM))
    with stop, pytest.raises(SystemExit, match=str(128 + signal.SIGTERM)):
        run(models, source, Path("-"), "--rejected", str(tmp_path / "rejected.jsonl"))
    assert "stopped after 16 rows; run the same command again" in capsys.readouterr().err
    assert set(os.listdir(tmp_path)) == {"in.jsonl", "models"}


def test_the_outputs_of_a_run_are_freed_before_later_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The logits of all masks of a block would not fit into memory."""
    tiny.bundle(tmp_path / "models", task="fill-mask")
    execute, references, alive = OnnxEngine.run, list[weakref.ref[Any]](), list[int]()

    class Output(np.ndarray):
        """An array with weak references."""

    def count_call(self: OnnxEngine, encodings: Sequence[Any], **options: Any) -> Any:
        rows = [{name: values.view(Output) for name, values in row.items()} for row in execute(self, encodings, **options)]
        references.extend(weakref.ref(values) for row in rows for values in row.values())
        alive.append(sum(reference() is not None for reference in references))
        return rows

    monkeypatch.setattr(OnnxEngine, "run", count_call)
    monkeypatch.setattr(predictor, "BLOCK_ROWS", 64)
    source = json_lines(tmp_path / "in.jsonl", *({"text": "a [MASK] film" + " good" * (index % 20)} for index in range(64)))
    assert run(tmp_path / "models", source, tmp_path / "out.jsonl", "--threads", "1", "--max-batch-tokens", "64") == 0
    assert len(references) > 2 * max(alive)


def test_only_the_row_that_the_graph_cannot_score_is_rejected(models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    execute = OnnxEngine.run

    def fail(self: OnnxEngine, encodings: Sequence[Any], **options: Any) -> Any:
        if any(len(encoding) == 7 for encoding in encodings):
            raise EngineError("the graph failed.")
        return execute(self, encodings, **options)

    monkeypatch.setattr(OnnxEngine, "run", fail)
    texts = ["good", "a good bad film very", "bad film", "good book the"]
    source = json_lines(tmp_path / "in.jsonl", *({"text": text} for text in texts))
    assert run(models, source, tmp_path / "out.jsonl") == 3
    assert [row["row"] for row in read_rows(tmp_path / "out.jsonl.rejected.jsonl")] == [2]
    assert [row["text"] for row in read_rows(tmp_path / "out.jsonl")] == [texts[0], texts[2], texts[3]]


@pytest.mark.full_grid
@pytest.mark.serial
def test_a_run_reads_from_a_pipe_and_resumes_after_a_signal(models: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "bertserve.service.cli", "score", "--models", str(models), "--model", "tiny"]
    lines = b'{"text": "good"}\n' * 3
    subprocess.run([*command, "--input-format", "jsonl", "-", tmp_path / "out.jsonl"], input=lines, capture_output=True, check=True)
    assert len(read_rows(tmp_path / "out.jsonl")) == 3
    (tmp_path / "out.jsonl").unlink()

    source = json_lines(tmp_path / "in.jsonl", *({"text": f"{text} {i}"} for i in range(300) for text in TEXTS))
    subprocess.run([*command, source, tmp_path / "whole.jsonl"], check=True, capture_output=True)
    for number, code in ((signal.SIGKILL, -signal.SIGKILL), (signal.SIGTERM, 128 + signal.SIGTERM)):
        before = set(tmp_path.glob("out.jsonl.parts-*/part-?????"))
        with subprocess.Popen([*command, source, tmp_path / "out.jsonl"], stderr=subprocess.DEVNULL) as process:
            while process.poll() is None and before == set(tmp_path.glob("out.jsonl.parts-*/part-?????")):
                time.sleep(0.01)
            process.send_signal(number)
        assert process.returncode == code
    subprocess.run([*command, "--threads", "1", source, tmp_path / "out.jsonl"], check=True, capture_output=True)
    assert (tmp_path / "out.jsonl").read_bytes() == (tmp_path / "whole.jsonl").read_bytes()
