"""`bert-serve --model CHECKPOINT` with the real exporter, in a process of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from checkpoints import bert

pytestmark = pytest.mark.torch


@pytest.mark.full_grid
def test_a_checkpoint_is_exported_once_and_served(tmp_path: Path) -> None:
    """The first run shows the stages of the export, the second none; both answer as the export did."""
    bert(tmp_path, "reviews")
    command = [Path(sys.executable).with_name("bert-serve"), "check", "--model", "reviews", "--cache-dir", "cache", "--precision", "fp32"]
    first, second = (subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True) for _ in range(2))

    assert "reviews: text-classification, cpu/fp32: ok\n" == first.stdout == second.stdout
    assert "parity    cpu/fp32" in first.stderr
    assert "" == second.stderr
    assert "from dynamo opset 18" in first.stderr  # the tracer of the command itself; other tests have their own default
    assert [".lock", "reviews"] == sorted(path.name for path in tmp_path.glob("cache/*/*"))
