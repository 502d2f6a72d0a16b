"""Prints the lines and files of each package next to its budget (`make size`), and fails if anything is too long (`make lint`)."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from itertools import chain, starmap
from pathlib import Path

ROOT = Path(__file__).parent.parent
# folder -> maximum lines with docstrings and blank lines, words for docs; None for a part without its own budget
BUDGETS: dict[str, int | None] = {
    "service": 14_000,
    **dict.fromkeys(f"service/{name}" for name in sorted(path.name for path in (ROOT / "service").iterdir() if path.is_dir())),
    "service/api": 2_400,
    "service/scheduling": 800,
    "service/scoring": 700,
    "service/server": 600,
    "service/tasks": 4_000,
    "export": 9_500,
    "bench": 1_900,
    "tests": 30_000,
    "docs": 28_000,
}
MAX_FILE, MAX_TEST_FILE, MAX_FUNCTION = 400, 500, 60  # lines


def main() -> str | None:
    """Prints the table; returns the messages about what is too long, for `sys.exit`."""
    messages: list[str] = []
    print(f"{'':24}{'files':>6}{'lines':>8}{'budget':>8}")
    for folder, budget in BUDGETS.items():
        texts = tracked_texts(f"{folder}/*{'.md' if folder == 'docs' else '.py'}").values()
        count = sum(len(text.split()) if folder == "docs" else text.count("\n") for text in texts)
        title = folder + (" (words)" if folder == "docs" else "")
        if texts:
            print(f"{title:24}{len(texts):6}{count:8,}{'' if budget is None else f'{budget:8,}'}")
        if budget is not None and count > budget:
            messages.append(f"{title}: {count:,}, but at most {budget:,} are allowed")
    messages += chain.from_iterable(starmap(too_long, tracked_texts("*.py").items()))
    return "\n".join(messages) or None


def tracked_texts(pattern: str) -> dict[str, str]:
    """Returns the text of each file that git tracks, by its path."""
    names = subprocess.run(["git", "ls-files", pattern], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    return {name: (ROOT / name).read_text(encoding="utf-8") for name in names if (ROOT / name).exists()}


def too_long(name: str, text: str) -> Iterator[str]:
    """Yields a message if a file is too long, and for each of its functions that is."""
    limit = MAX_TEST_FILE if name.startswith("tests/") else MAX_FILE
    if (lines := text.count("\n")) > limit:
        yield f"{name}: {lines} lines, but at most {limit} are allowed"
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and (lines := node.end_lineno - node.lineno + 1) > MAX_FUNCTION:
            yield f"{name}:{node.lineno}: `{node.name}` has {lines} lines, but at most {MAX_FUNCTION} are allowed"


if __name__ == "__main__":
    sys.exit(main())
