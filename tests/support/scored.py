"""Helpers of the tests of `bert-serve score`."""

import csv
import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from bertserve.service.cli import main

WORDS = "a good bad film very the was book".split()
TEXTS = [" ".join(WORDS[(i * k) % 8] for k in range(1 + i * 7 % 19)) for i in range(90)]


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Returns the rows of a file in the format of its suffix."""
    if path.suffix == ".parquet":
        rows: list[dict[str, Any]] = pq.read_table(path).to_pylist()
        return rows
    with path.open(newline="", encoding="utf-8") as file:
        if path.suffix == ".jsonl":
            return [json.loads(line) for line in file]
        return list(csv.DictReader(file, delimiter="," if path.suffix == ".csv" else "\t", strict=True))


def run(models: Path, source: Path, output: Path, *flags: str) -> int:
    """Scores a file with the model `tiny`; returns the exit code."""
    return main(["score", "--models", str(models), "--model", "tiny", *flags, str(source), str(output)])
