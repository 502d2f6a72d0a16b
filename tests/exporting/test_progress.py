"""What an export tells while it runs: lines for stages, and bars for long loops on a terminal alone."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from bertserve.export import calibration
from bertserve.export.int8.quantize import quantize
from bertserve.export.progress import stage, track
from staged import Staged

pytestmark = pytest.mark.torch
pytest_plugins = ("export_fixtures",)


class Terminal(io.StringIO):
    """A stream that says that it is a terminal."""

    def isatty(self) -> bool:
        return True


def terminal_on_stderr(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """Puts a terminal in the place of stderr; called in the test, because pytest sets stderr between fixtures and test."""
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    return terminal


def test_a_stage_that_fails_says_nothing() -> None:
    lines: list[str] = []
    with stage(lines.append, "trace", "opset 17"):
        pass
    with pytest.raises(ValueError, match="broken"), stage(lines.append, "optimize", "cpu"):
        raise ValueError("broken")

    assert ["trace     opset 17"] == [line.rpartition("  (")[0] for line in lines]


def test_a_terminal_sees_how_far_a_loop_is(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The bar names step, unit and total, and is erased at the end. Without a terminal, as in a log of CI, nothing is written."""
    assert [1, 2, 3] == list(track([1, 2, 3], "count", unit="numbers"))
    assert ("", "") == capsys.readouterr()
    terminal = terminal_on_stderr(monkeypatch)
    assert [1, 2, 3] == list(track([1, 2, 3], "count", unit="numbers"))

    seen = terminal.getvalue()
    assert "count:   0%|" in seen
    assert "0/3 numbers, 00:00" in seen
    assert seen.endswith("\r")


def test_quantization_tells_of_every_matrix_and_batch(
    all_staged: dict[str, Staged], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its loops are the longest of an export: the texts, and the matrices for scales, for sensitivity, again, and for rounding."""
    staged = all_staged["text-classification"]
    feeds = staged.feeds(calibration.read_texts(calibration.BUILT_IN)[:16])
    terminal = terminal_on_stderr(monkeypatch)
    quantize(staged.packed, tmp_path / "int8.onnx", tmp_path, feeds, feeds, max_error=1.0)

    seen = terminal.getvalue()
    assert [1, 2, 2, 1] == [
        seen.count(f"{step}:   0%|") for step in ("observe activations", "choose scales", "measure sensitivity", "round by GPTQ")
    ]
    assert " batches, 00:00" in seen
    assert "0/10 matrices, 00:00" in seen
