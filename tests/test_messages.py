"""Templates of errors and their values."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from string import Formatter

import pytest

from bertserve.service import errors

ROOT = Path(__file__).parent.parent
KINDS = {name for name, value in vars(errors).items() if isinstance(value, type) and issubclass(value, errors.BertServeError)}
OPTIONS = {"reason", "retry_after_s", "input_index", "key"}  # arguments of errors that are not values of the template


def templates() -> Iterator[tuple[str, set[str], set[str]]]:
    """Yields each error with a template: its place, the template's placeholders, and the names of the given values."""
    for path in sorted((ROOT / "service").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in KINDS and node.args):
                continue
            template, names = node.args[0], {keyword.arg for keyword in node.keywords}
            if isinstance(template, ast.Constant) and names - OPTIONS and None not in names:
                placeholders = {field for _, field, _, _ in Formatter().parse(template.value) if field}
                yield f"{path.relative_to(ROOT)}:{node.lineno}", placeholders, {name for name in names - OPTIONS if name}


@pytest.mark.parametrize(("place", "placeholders", "values"), list(templates()))
def test_each_error_template_gets_its_values(place: str, placeholders: set[str], values: set[str]) -> None:
    assert placeholders == values, place
