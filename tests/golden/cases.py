"""Reads and writes the golden files: a line is a case, with its `id`, its `request` body and the answer of the reference.

All texts are original. To add a case, append a line with an `id` and a `request`, and run the script of the task.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
# JSON may hold these as they are, but str.splitlines() ends a line at them.
LINE_ENDS = str.maketrans({end: f"\\u{ord(end):04x}" for end in "\u0085\u2028\u2029"})


def read(task: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (FOLDER / f"{task}.jsonl").read_text(encoding="utf-8").split("\n") if line]


def checkpoint(description: str | None) -> Path:
    """Returns the folder of the checkpoint that a command of this description is given."""
    parser = argparse.ArgumentParser(description=(description or "").partition("\n")[0])
    parser.add_argument("checkpoint", type=Path, metavar="CHECKPOINT_DIR", help="folder of the fine-tuned model")
    folder: Path = parser.parse_args().checkpoint
    return folder


def source(version: str, count: int, forced: list[int]) -> str:
    """Returns what made the answer to `count` texts, of which those at `forced` are longer than a window."""
    pipeline = f"transformers {version} pipeline"
    brute_force = f"brute force over transformers {version} windows"
    if forced and len(forced) < count:
        return f"{pipeline}; inputs {forced}: {brute_force}"
    return brute_force if forced else pipeline


def requests(task: str) -> list[dict[str, Any]]:
    """Returns the `id` and `request` of each case, without the answer."""
    return [{"id": case["id"], "request": case["request"]} for case in read(task)]


def write(task: str, cases: Iterable[dict[str, Any]], separators: tuple[str, str] | None = None) -> None:
    lines = [json.dumps(case, ensure_ascii=False, separators=separators).translate(LINE_ENDS) for case in cases]
    (FOLDER / f"{task}.jsonl").write_bytes("".join(f"{line}\n" for line in lines).encode())
