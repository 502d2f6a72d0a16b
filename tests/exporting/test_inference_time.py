"""`bench/scripts/inference_time.py` rewrites the tables of the results, for tiny models."""

import re
import shutil
from pathlib import Path

import pytest

from support import ROOT

pytestmark = pytest.mark.torch

PAGES = ("2026-11-23-inference-time.md", "2026-11-22-compressed-berts.md")
FORMS = ("teacher", "half of the heads pruned", "every other layer dropped", "the same, distilled", "one layer, shared by all, distilled")


def tables(folder: Path, *arguments: str) -> dict[str, list[list[str]]]:
    """Runs the script on copies of the pages; returns the cells of each changed table, by the name in its comment."""
    import inference_time

    rows_by_title = {}
    for page in PAGES:
        shutil.copy(ROOT / "bench/results" / page, folder)
    inference_time.main(["--seconds", "0.01", "--results", str(folder), *arguments])
    for page in PAGES:
        old, new = ((path / page).read_text(encoding="utf-8").split("<!-- ") for path in (ROOT / "bench/results", folder))
        for before, after in zip(old, new, strict=True):
            if before != after:
                name, *rows = after.strip().splitlines()
                title = name.removesuffix(" -->").rpartition(": ")[2]
                rows_by_title[title] = [[cell.strip() for cell in row.split("|")[1:-1]] for row in rows]
    return rows_by_title


def test_the_tables_of_shapes_are_rewritten(tmp_path: Path) -> None:
    page = tables(tmp_path, "--shapes", "2,2,32 1,2,32", "--lengths", "8,16")

    assert set(page) == {"lengths", "shapes"}
    _, _, *lengths = page["lengths"]
    assert [row[:2] for row in lengths] == [["8", "0.0"], ["16", "0.0"]]
    assert all(re.fullmatch(r"\d+\.\d", cell) for row in lengths for cell in row[2:-1])
    assert all(float(row[-1]) > 0 for row in lengths)  # the ratio of unrounded times
    _, _, base, half = page["shapes"]
    assert base == ["2", "2", "32", "1", "1", "1"]
    assert half[:4] == ["1", "2", "32", "0.50"]
    assert all(float(cell) > 0 for cell in half)


@pytest.mark.full_grid
def test_the_table_of_compressed_models_is_rewritten(tmp_path: Path) -> None:
    """The teacher in fp32 is the reference: ratio and speed 1, no error, and all labels equal."""
    from support.checkpoints import bert

    page = tables(tmp_path, "--teacher", str(bert(tmp_path)))

    assert set(page) == {"compressed models"}
    _, _, *rows = page["compressed models"]
    assert [row[:2] for row in rows] == [[form, precision] for form in FORMS for precision in ("fp32", "int8")]
    assert [rows[0][i] for i in (3, 5, 6, 7)] == ["1.00", "1.00", "0.000", "100.0%"]
    assert all(float(row[6]) > 0 for row in rows[1:])
