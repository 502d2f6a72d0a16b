"""Progress of an export: a line for each stage, and bars for long loops, which are only shown on a terminal."""

from __future__ import annotations

import io

import pytest

from bertserve.export.progress import track

pytestmark = pytest.mark.torch


class Terminal(io.StringIO):
    """A stream that claims to be a terminal."""

    def isatty(self) -> bool:
        return True


def test_a_terminal_shows_the_progress_of_a_loop(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The bar has the step, unit and total, and is erased at the end. Without a terminal, as in a CI log, nothing is written."""
    assert [1, 2, 3] == list(track([1, 2, 3], "count", unit="numbers"))
    assert ("", "") == capsys.readouterr()
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    assert [1, 2, 3] == list(track([1, 2, 3], "count", unit="numbers"))

    seen = terminal.getvalue()
    assert "count:   0%|" in seen
    assert "0/3 numbers, 00:00" in seen
    assert seen.endswith("\r")
