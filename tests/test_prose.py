"""Messages and documents are in plain English: they have none of the patterns that read like a translation."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
MESSAGES = ROOT / "tests" / "golden" / "messages.txt"
FILES = (
    MESSAGES,
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md", "examples/README.md")),
    *sorted((ROOT / "docs").glob("**/*.md")),
)
# pattern -> what to write
PATTERNS = {
    r"\bnobody\b": "the passive, or what is disabled",
    r"\bmend(s|ed|ing)?\b": "fix",
    r"(?<!there )\b(is|are) no (?!longer\b|more\b|fewer\b)[a-z]": "is not a, or unknown",
    r"\b(cannot|is not to|are not to) be had\b": "is not available, or is not supported",
    r"\b(goes|go|went) (by|on)\b": "depends on, or continues",
    r"\b(comes?|came) again\b": "a retry",
    r"\bbeside\b": "next to, or in addition to",
    r"\bthat which\b|\bthose (that|which|who)\b": "the noun",
    r"\bas RFC \d+ has it\b": "the plain claim",
    r"\bone of this service's\b": "unknown",
    r"(?:^|[.:] )(Of|From) (a|an|the|each|all|several|one|two)\b[^.]*? (on|of)\b[^.]*,": "the subject first",
    r"(?:^|\. )(Who|Whoever) [^?.]*\.": "the noun as the subject",
    r"\b(bytes|cores?|MB|MiB|ms|requests|rows|runs|s|texts|tokens|us) an? (batch|core|line|matrix|request|row|run|second|test|text|token)\b": "per",
    r", for (it|its|there|they|this|what) [a-z]": "because",
    r"\b(make|makes) room\b": "free disk space, or wait",
}
# Parts of lines that have a pattern and are right: texts of examples.
EXCEPTIONS = ("Nobody had seen it before.", "Nobody had been inside for years.")


def findings(path: Path) -> Iterator[str]:
    """Yields each match in the prose of a file, with its line and what to write instead."""
    is_code = False
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        if line.lstrip().startswith("```"):
            is_code = not is_code
        if is_code or any(exception in line for exception in EXCEPTIONS):
            continue
        text = re.sub(r"`[^`]*`|\{[^{}]*\}", "`code`", line.partition(": ")[2] if path == MESSAGES else line)
        for pattern, better in PATTERNS.items():
            if found := re.search(pattern, text, re.IGNORECASE if pattern.islower() else 0):
                yield f"{path.relative_to(ROOT)}:{number}: `{found[0]}`; write {better}"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_prose_is_plain(path: Path) -> None:
    assert [] == list(findings(path))


@pytest.mark.parametrize(
    "text",
    [
        "nobody may change the models.",
        "fix it, or mend it.",
        "the variable is no setting.",
        "int8 cannot be had.",
        "this is not HTTP/1.1 as RFC 9112 has it.",
        "Of a regression of one value, the value is explained.",
        "Who comes late is refused.",
        "it takes 30 s a test.",
    ],
)
def test_patterns_find_what_they_are_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setattr("test_prose.ROOT", tmp_path)
    page = tmp_path / "page.md"
    page.write_text(f"{text}\n", encoding="utf-8")

    assert list(findings(page))
