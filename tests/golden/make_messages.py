"""Writes all messages of the three packages to `messages.txt`, so that a change of wording is one diff.

    python tests/golden/make_messages.py

The lines are sorted; each has a source file and one template. A template is a string literal, or an f-string with its expressions in
braces, that is

- an argument of an exception, of a `BundleCheck`, of a log call, of `parser.error` or of `print(..., file=...)`;
- or at least four words long, and returned, yielded or assigned, because many messages consist of such parts.

Sample texts and the HTML of the report are left out.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FILE = Path(__file__).with_name("messages.txt")
PACKAGES = ("service", "export", "bench")
LOG_CALLS = frozenset({"debug", "info", "warning", "error", "exception", "critical"})
# Files and module variables whose texts are not messages: samples, headers, documents and progress bars.
OTHER_FILES = frozenset({"bench/workloads.py", "bench/report/html.py", "export/validation/samples.py", "export/tasks/spec.py"})
OTHER_TEXTS = frozenset(
    {"DESCRIPTION", "POLICY", "TAGS", "TEMPLATE", "_BAR", "_ENDLESS", "_EXAMPLE", "_PASSAGE", "_REVIEW", "_SENTENCE", "_START", "_TOWNS"}
)


def messages() -> list[str]:
    """Returns the lines of `messages.txt`."""
    return [
        f"{name}: {text}"
        for package in PACKAGES
        for path in sorted((ROOT / package).rglob("*.py"))
        if (name := path.relative_to(ROOT).as_posix()) not in OTHER_FILES
        for text in sorted({text.replace("\n", "\\n") for text in _templates(ast.parse(path.read_bytes()))})
    ]


def _templates(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            yield from _texts_of_call(node.exc)
        elif isinstance(node, ast.Call) and _takes_message(node):
            yield from _texts_of_call(node)
        elif isinstance(node, ast.Return | ast.Yield | ast.Assign | ast.AnnAssign) and _assigned(node).isdisjoint(OTHER_TEXTS):
            yield from _texts(node.value, least_words=4)


def _assigned(node: ast.AST) -> set[str]:
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return {target.id for target in targets if isinstance(target, ast.Name)}


def _texts_of_call(call: ast.Call) -> Iterator[str]:
    for argument in [*call.args, *(keyword.value for keyword in call.keywords)]:
        yield from _texts(argument, least_words=2)


def _takes_message(call: ast.Call) -> bool:
    """Returns whether a call creates an exception or a check result, logs, or prints to a file."""
    if isinstance(call.func, ast.Attribute):
        return call.func.attr in LOG_CALLS or call.func.attr.endswith("Error")
    if isinstance(call.func, ast.Name):
        return call.func.id.endswith(("Error", "Check", "did_you_mean")) or (
            call.func.id == "print" and any(keyword.arg == "file" for keyword in call.keywords)
        )
    return False


def _texts(value: ast.expr | None, least_words: int) -> Iterator[str]:
    """Yields the possible texts of an expression: itself, the sides of a conditional or a sum, and the items of a list or a dictionary."""
    if isinstance(value, ast.IfExp):
        parts: list[ast.expr | None] = [value.body, value.orelse]
    elif isinstance(value, ast.BoolOp):
        parts = [*value.values]
    elif isinstance(value, ast.BinOp):
        parts = [value.left, value.right]
    elif isinstance(value, ast.Tuple | ast.List):
        parts = [*value.elts]
    elif isinstance(value, ast.Dict):
        parts = [*value.keys, *value.values]
    else:
        parts = []
        if len((text := _template(value)).split()) >= least_words:
            yield text
    for part in parts:
        yield from _texts(part, least_words)


def _template(value: ast.expr | None) -> str:
    """Returns the text of a literal or an f-string, or an empty string for other expressions."""
    if isinstance(value, ast.JoinedStr):
        return "".join(_template(part) for part in value.values)
    if isinstance(value, ast.FormattedValue):
        return "{" + ast.unparse(value.value) + "}"
    return value.value if isinstance(value, ast.Constant) and isinstance(value.value, str) else ""


if __name__ == "__main__":
    FILE.write_text("".join(f"{line}\n" for line in messages()), encoding="utf-8")
