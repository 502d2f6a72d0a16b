"""`bench/inference_time.py` rewrites the tables of the results, for tiny encoders."""

import re
import shutil
from pathlib import Path

import pytest

from conftest import ROOT

pytestmark = pytest.mark.torch

PAGE = "2026-11-23-inference-time.md"


def tables(folder: Path, *arguments: str) -> dict[str, list[list[str]]]:
    """Runs the script on a copy of the page; returns the cells of each changed table, by the name in its comment."""
    from bertserve.bench import inference_time

    shutil.copy(ROOT / "bench/results" / PAGE, folder)
    inference_time.main(["--seconds", "0.01", "--results", str(folder), *arguments])
    old, new = ((path / PAGE).read_text(encoding="utf-8").split("<!-- ") for path in (ROOT / "bench/results", folder))
    changed = {}
    for before, after in zip(old, new, strict=True):
        if before != after:
            name, *rows = after.strip().splitlines()
            changed[name.removesuffix(" -->").rpartition(": ")[2]] = [[cell.strip() for cell in row.split("|")[1:-1]] for row in rows]
    return changed


def test_the_tables_of_shapes_are_rewritten(tmp_path: Path) -> None:
    written = tables(tmp_path, "--shapes", "2,2,32 1,2,32", "--lengths", "8,16")

    assert {"lengths", "shapes"} == set(written)
    _, _, *lengths = written["lengths"]
    assert [["8", "0.0"], ["16", "0.0"]] == [row[:2] for row in lengths]
    assert all(re.fullmatch(r"\d+\.\d", cell) for row in lengths for cell in row[2:-1])
    assert all(float(row[-1]) > 0 for row in lengths)  # the ratio of unrounded times
    _, _, base, half = written["shapes"]
    assert ["2", "2", "32", "1", "1", "1"] == base
    assert ["1", "2", "32", "0.50"] == half[:4]
    assert all(float(cell) > 0 for cell in half)
