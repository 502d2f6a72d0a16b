"""Progress of an export: a line for each stage, and bars for long loops, which are only shown on a terminal."""

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
    """A stream that claims to be a terminal."""

    def isatty(self) -> bool:
        return True


def terminal_on_stderr(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """Replaces stderr with a terminal. Tests call it directly, because pytest sets stderr after the fixtures."""
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    return terminal


def test_a_failed_stage_prints_no_line(capsys: pytest.CaptureFixture[str]) -> None:
    with stage("trace", "opset 17"):
        pass
    with pytest.raises(ValueError, match="broken"), stage("optimize", "cpu"):
        raise ValueError("broken")

    assert ["trace     opset 17"] == [line.rpartition("  (")[0] for line in capsys.readouterr().err.splitlines()]


def test_a_terminal_shows_the_progress_of_a_loop(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The bar has the step, unit and total, and is erased at the end. Without a terminal, as in a CI log, nothing is written."""
    assert [1, 2, 3] == list(track([1, 2, 3], "count", unit="numbers"))
    assert ("", "") == capsys.readouterr()
    terminal = terminal_on_stderr(monkeypatch)
    assert [1, 2, 3] == list(track([1, 2, 3], "count", unit="numbers"))

    seen = terminal.getvalue()
    assert "count:   0%|" in seen
    assert "0/3 numbers, 00:00" in seen
    assert seen.endswith("\r")


def test_quantization_shows_progress_by_batches_and_matrices(
    all_staged: dict[str, Staged], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The longest loops of an export have bars: over texts for activations, and over matrices for scales, sensitivity and rounding."""
    staged = all_staged["text-classification"]
    feeds = staged.feeds(calibration.read_texts(calibration.BUILT_IN)[:16])
    terminal = terminal_on_stderr(monkeypatch)
    quantize(staged.packed, tmp_path / "int8.onnx", tmp_path, feeds, feeds, max_error=1.0, quick=False)

    seen = terminal.getvalue()
    assert [1, 2, 2, 1] == [
        seen.count(f"{step}:   0%|") for step in ("observe activations", "choose scales", "measure sensitivity", "round by GPTQ")
    ]
    assert " batches, 00:00" in seen
    assert "0/10 matrices, 00:00" in seen
