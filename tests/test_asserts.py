"""Finds asserts that cannot fail and that ruff does not report."""

from __future__ import annotations

import ast
from pathlib import Path

TESTS = Path(__file__).parent


def test_no_assert_is_a_conditional_expression() -> None:
    """`assert a if b else c == d` means `a if b else (c == d)`: it passes if `b` and `a` are true, whatever `d` is."""
    found = [
        f"{path.relative_to(TESTS)}:{node.lineno}"
        for path in sorted(TESTS.rglob("*.py"))
        if "node_modules" not in path.parts
        for node in ast.walk(ast.parse(path.read_bytes()))
        if isinstance(node, ast.Assert) and isinstance(node.test, ast.IfExp)
    ]
    assert [] == found
