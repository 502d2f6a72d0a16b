"""Messages, documents, docstrings and comments are in plain English: they have none of the patterns that read like a translation."""

from __future__ import annotations

import ast
import re
import tokenize
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
CODE = [path for folder in ("service", "export", "bench", "tests") for path in sorted((ROOT / folder).rglob("*.py"))]
DOCUMENTED = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
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
# Parts of lines that match a pattern but are correct: example texts.
EXCEPTIONS = ("Nobody had seen it before.", "Nobody had been inside for years.")


def findings(path: Path) -> Iterator[str]:
    """Yields each match in the prose of a file, with its line and what to write instead."""
    for number, line in sentences_of_code(path) if path.suffix == ".py" else lines_of_prose(path):
        if any(exception in line for exception in EXCEPTIONS):
            continue
        text = re.sub(r"`[^`]*`|\{[^{}]*\}", "`code`", line)
        for pattern, better in PATTERNS.items():
            if found := re.search(pattern, text, re.IGNORECASE if pattern.islower() else 0):
                yield f"{path.relative_to(ROOT)}:{number}: `{found[0]}`; write {better}"


def lines_of_prose(path: Path) -> Iterator[tuple[int, str]]:
    """Yields the lines of a page outside its code blocks, or the messages, each with its line number."""
    is_code = False
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        if line.lstrip().startswith("```"):
            is_code = not is_code
        if not is_code:
            yield number, line.partition(": ")[2] if path == MESSAGES else line


def sentences_of_code(path: Path) -> Iterator[tuple[int, str]]:
    """Yields the docstrings and comments of a module, each as one line, with its first line number."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, DOCUMENTED) and (docstring := ast.get_docstring(node)):
            yield node.body[0].lineno, " ".join(docstring.split())
    with tokenize.open(path) as file:
        for token in tokenize.generate_tokens(file.readline):
            if token.type == tokenize.COMMENT:
                yield token.start[0], token.string.lstrip("# ")


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_prose_is_plain(path: Path) -> None:
    assert [] == list(findings(path))


def test_docstrings_and_comments_are_plain() -> None:
    assert [] == [finding for path in CODE for finding in findings(path)]


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
def test_patterns_match_unclear_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setattr("test_prose.ROOT", tmp_path)
    page = tmp_path / "page.md"
    page.write_text(f"{text}\n", encoding="utf-8")

    assert list(findings(page))
    module = tmp_path / "module.py"
    module.write_text(f'"""{text}"""\n', encoding="utf-8")
    assert list(findings(module))
    module.write_text(f"# {text}\n", encoding="utf-8")
    assert list(findings(module))
