"""Limits the lines of functions; ruff limits only their statements."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).parent.parent
MAX_LINES = 60


def test_no_function_is_too_long() -> None:
    """All lines from `def` to the end of the body count, including docstrings and inner functions. Decorators do not count."""
    found = [
        f"{path.relative_to(ROOT)}:{node.lineno} {node.name}"
        for folder in ("service", "export", "bench", "tests")
        for path in sorted((ROOT / folder).rglob("*.py"))
        if "node_modules" not in path.parts
        for node in ast.walk(ast.parse(path.read_bytes()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno - node.lineno + 1 > MAX_LINES
    ]
    assert [] == found
