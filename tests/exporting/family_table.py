"""Writes the table of families in bench/results/model-families.md for `make families`."""

import math
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from support.families import CASES
from support.grid import Measured, measure

DOCUMENT = Path(__file__).parents[2] / "bench" / "results" / "model-families.md"
BEGIN, END = "<!-- families: written by `make families` -->", "<!-- end of families -->"
HEADER = (
    "| family | head | fp32: worst logit error | int8: error / standard deviation, validation texts | int8: the same, other texts | layers with fused attention |",
    "|---|---|---|---|---|---|",
)
# a smaller error is rounding and differs between machines
ROUNDING = 1e-6


def rounded_up(error: float) -> float:
    """Returns the error rounded up to 1, 2 or 5 times a power of ten, which hides small differences between measurements."""
    power = 10.0 ** math.floor(math.log10(max(error, ROUNDING)))
    return next(step * power for step in (1, 2, 5, 10) if max(error, ROUNDING) <= step * power * (1 + 1e-9))


def line(family: str, task: str, measured: Measured) -> str:
    errors = " | ".join(f"{rounded_up(error):.0e}" for error in measured.errors)
    return f"| {family} | {task} | {errors} | {measured.fused_attentions} |"


def write(document: str, rows: Sequence[str]) -> str:
    """Returns the document with these rows as its table."""
    before, rest = document.split(BEGIN)
    return "\n".join([before + BEGIN, *HEADER, *rows, END]) + rest.split(END)[1]


def main() -> int:
    """Measures every family with every head and rewrites the table."""
    rows = []
    for family, task in CASES:
        with tempfile.TemporaryDirectory() as folder:
            rows.append(line(family, task, measure(family, task, Path(folder))))
        print(rows[-1], flush=True)
    DOCUMENT.write_text(write(DOCUMENT.read_text(encoding="utf-8"), rows), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
