"""Reads and writes the golden files: each line is a case, with its `id`, its `request` body and the answer of the reference.

All texts are original. To add a case, append a line with an `id` and a `request`, and run the script of the task.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
MIN_CASES = 70
# JSON allows these characters unescaped, but str.splitlines() ends a line at them.
LINE_ENDS = str.maketrans({end: f"\\u{ord(end):04x}" for end in "\u0085\u2028\u2029"})


def read(task: str) -> list[dict[str, Any]]:
    """Returns the cases of a file. Each has an `id` of its own; fewer cases than these would be an incomplete file."""
    found = [json.loads(line) for line in (FOLDER / f"{task}.jsonl").read_text(encoding="utf-8").split("\n") if line]
    assert MIN_CASES <= len(found) == len({case["id"] for case in found}), task
    return found


def remake(
    task: str,
    description: str | None,
    load: Callable[[Path], Any],
    golden: Callable[[dict[str, Any], Any], dict[str, Any]],
    separators: tuple[str, str] | None = None,
) -> None:
    """Replaces the golden file of a task: `golden` returns the line of a case, given the case and the reference of a checkpoint."""
    parser = argparse.ArgumentParser(description=(description or "").partition("\n")[0])
    parser.add_argument("checkpoint", type=Path, metavar="CHECKPOINT_DIR", help="folder of the fine-tuned model")
    reference = load(parser.parse_args().checkpoint)
    write(task, [golden({"id": case["id"], "request": case["request"]}, reference) for case in read(task)], separators)


def source(version: str, count: int, forced: list[int]) -> str:
    """Returns the source of the answer to `count` texts; the texts at the indices `forced` are longer than a window."""
    pipeline = f"transformers {version} pipeline"
    brute_force = f"brute force over transformers {version} windows"
    if forced and len(forced) < count:
        return f"{pipeline}; inputs {forced}: {brute_force}"
    return brute_force if forced else pipeline


def write(task: str, cases: Iterable[dict[str, Any]], separators: tuple[str, str] | None = None) -> None:
    lines = [json.dumps(case, ensure_ascii=False, separators=separators).translate(LINE_ENDS) for case in cases]
    (FOLDER / f"{task}.jsonl").write_bytes("".join(f"{line}\n" for line in lines).encode())
