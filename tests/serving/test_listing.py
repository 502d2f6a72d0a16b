"""`bert-serve models` lists models as a table or as JSON, and reports bundles that it cannot read."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import tiny
from bertserve.service.cli import main


def listed(capsys: pytest.CaptureFixture[str], *argv: str, code: int = 0) -> str:
    assert code == main(["models", *argv])
    return capsys.readouterr().out


def test_each_model_has_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    header, *lines = listed(capsys, "--models", "models").splitlines()

    assert ["embed", "fill-mask", "ner", "nli", "qa", "rerank", "sentiment"] == [line.split()[0] for line in lines]
    assert ["text-classification", "negative,", "positive", "23.4"] == lines[6].split()[1:5]
    assert "cpu/int8* 100.0% of 269" in lines[6]
    assert lines[6].endswith("models/sentiment/README.md")
    assert {header.index("card")} == {line.index("models/") for line in lines}


def test_json_has_all_fields(models: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """JSON has all labels, sizes in bytes, and null for values that were not measured."""
    [model] = json.loads(listed(capsys, "--models", str(models), "--json"))
    folder = models / "tiny"
    [graph] = model.pop("graphs")

    assert {
        "name": "tiny",
        "path": str(folder),
        "task": "text-classification",
        "labels": list(tiny.LABELS),
        "size_bytes": sum(path.stat().st_size for path in folder.iterdir()),
        "source": {"checkpoint": "tiny", "revision": None, "commit": None},
        "card": None,
    } == model
    assert ("cpu", "fp32", True, 0, None) == tuple(graph[name] for name in ("provider", "precision", "default", "samples", "agreement"))


def test_an_unreadable_bundle_is_reported(models: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (models / "broken").mkdir()
    lines = listed(capsys, "--models", str(models), code=1).splitlines()

    assert 3 == len(lines)
    assert lines[2].startswith(f"broken: `{models}/broken`")
    assert "error" in json.loads(listed(capsys, "--models", str(models), "--json", code=1))[0]
    (models / "tiny/model.cpu.fp32.onnx").unlink()
    assert "model.cpu.fp32.onnx" in listed(capsys, "--models", str(models), code=1)


def test_listing_exports_no_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A checkpoint that is not in the cache is an error; the message names the command that exports it."""
    assert 1 == main(["models", "--model", "org/model", "--cache-dir", str(tmp_path)])
    assert "`bert-serve serve --model org/model`" in capsys.readouterr().err
    assert [] == list(tmp_path.iterdir())


def test_a_closed_output_pipe_causes_no_traceback() -> None:
    """Like `bert-serve models | head -1`, but the pipe is closed before the first line."""
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(
        [sys.executable, "-m", "bertserve.service.cli", "models", "--models", "models"], stdout=write, stderr=subprocess.PIPE, check=False
    )
    os.close(write)

    assert (1, b"") == (done.returncode, done.stderr)
