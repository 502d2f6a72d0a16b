"""Prints the lines and files of each package next to its budget: `python tests/size.py` (`make size`)."""

import subprocess
from pathlib import Path

ROOT = Path(__file__).parent.parent
# package -> maximum lines with docstrings and blank lines; None for a part of one that has a budget
BUDGETS: dict[str, int | None] = {
    "service": 14_000,
    **dict.fromkeys(f"service/{name}" for name in sorted(path.name for path in (ROOT / "service").iterdir() if path.is_dir())),
    "export": 9_500,
    "bench": 1_900,
    "tests": 30_000,
    "docs": 28_000,
}


def main() -> None:
    """Prints the table; for docs it counts words."""
    print(f"{'':24}{'files':>6}{'lines':>8}{'budget':>8}")
    for folder, budget in BUDGETS.items():
        pattern = f"{folder}/*{'.md' if folder == 'docs' else '.py'}"
        names = subprocess.run(["git", "ls-files", pattern], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
        texts = [(ROOT / name).read_text(encoding="utf-8") for name in names if (ROOT / name).exists()]
        count = sum(len(text.split()) if folder == "docs" else text.count("\n") for text in texts)
        if texts:
            print(
                f"{folder + (' (words)' if folder == 'docs' else ''):24}{len(texts):6}{count:8,}{'' if budget is None else f'{budget:8,}'}"
            )


if __name__ == "__main__":
    main()
