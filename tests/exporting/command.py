"""Fixtures of tests of the command bert-export, which name this module as one of their `pytest_plugins`."""

from __future__ import annotations

from pathlib import Path

import pytest

from bertserve.export import cli
from checkpoints import bert
from outputs import Run
from playback import play_back


@pytest.fixture(name="source")
def source_checkpoint(tmp_path: Path) -> Path:
    """The usual checkpoint."""
    return bert(tmp_path)


@pytest.fixture(name="played_back")
def slow_stages_played_back(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An export of the usual checkpoint, unchanged, writes what its slow stages wrote once, and does not run them."""
    play_back(monkeypatch, source)


@pytest.fixture(name="output")
def output_folder(tmp_path: Path) -> Path:
    """A models folder that does not exist yet."""
    return tmp_path / "models"


@pytest.fixture(name="run")
def run_command(output: Path, capsys: pytest.CaptureFixture[str]) -> Run:
    """Returns `run(source, *flags)`, which gives the exit code and the one line that the command itself ended with."""

    def run(source: object, *flags: str) -> tuple[int, str]:
        code = cli.main([str(source), "--output", str(output), *flags])
        own = [line for line in capsys.readouterr().err.splitlines() if line.startswith("bert-export: ")]
        assert len(own) == (code != 0)
        return code, own[0] if own else ""

    return run
