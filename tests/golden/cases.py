"""Reads and writes the golden files: each line is a case, with its `id`, its `request` body, the answer and the version of the reference.

All texts are original. To add a case, append a line with an `id` and a `request`, and run the script of the task.
"""

import argparse
import json
from collections.abc import Callable, Iterable
from importlib import metadata
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
MIN_CASES = 70
# JSON allows these characters unescaped, but str.splitlines() ends a line at them.
LINE_ENDS = str.maketrans({end: f"\\u{ord(end):04x}" for end in "\u0085\u2028\u2029"})


def load_cases(task: str) -> list[dict[str, Any]]:
    """Returns the cases of a file. Each has an `id` of its own; fewer cases than these would be an incomplete file."""
    cases = [json.loads(line) for line in (FOLDER / f"{task}.jsonl").read_text(encoding="utf-8").split("\n") if line]
    assert MIN_CASES <= len(cases) == len({case["id"] for case in cases}), task
    return cases


def remake(
    task: str,
    description: str | None,
    load: Callable[[Path], Any],
    golden: Callable[[dict[str, Any], Any], dict[str, Any]],
    separators: tuple[str, str] | None = None,
) -> None:
    """Replaces the golden file of a task: `golden` returns the answer to a request and more, given the reference of a checkpoint."""
    parser = argparse.ArgumentParser(description=(description or "").partition("\n")[0])
    parser.add_argument("checkpoint", type=Path, metavar="CHECKPOINT_DIR", help="folder of the fine-tuned model")
    reference = load(parser.parse_args().checkpoint)
    version = {"reference": f"transformers {metadata.version('transformers')}"}
    lines = [{name: case[name] for name in ("id", "request")} | golden(case["request"], reference) | version for case in load_cases(task)]
    write(task, lines, separators)


def write(task: str, cases: Iterable[dict[str, Any]], separators: tuple[str, str] | None = None) -> None:
    lines = [json.dumps(case, ensure_ascii=False, separators=separators).translate(LINE_ENDS) for case in cases]
    (FOLDER / f"{task}.jsonl").write_bytes("".join(f"{line}\n" for line in lines).encode())
