"""The sentence of an error without what the caller sent: as it stands in the source code, each value in it as `{}`."""

from __future__ import annotations

import ast
import linecache
from functools import lru_cache
from pathlib import PurePath
from types import CodeType

from bertserve.service.errors import BertServeError


def sentence_of(error: BertServeError) -> str:
    """Returns what an error says, fit for a log: no value in it comes from a request.

    Where the source code has no sentence at the place, it is that place: file, line and function.
    """
    return _sentence(*error.made_at)


@lru_cache(maxsize=1024)
def _sentence(code: CodeType, instruction: int) -> str:
    """Returns the sentence of the call that an instruction of the code makes, in bytes from its start."""
    line, end_line, start, end = list(code.co_positions())[instruction // 2]
    place = f"{PurePath(code.co_filename).name}:{line} {code.co_name}"
    if line is None or end_line is None:
        return place
    lines = [text.encode() for text in linecache.getlines(code.co_filename)[line - 1 : end_line]]  # columns count bytes of UTF-8
    if not lines:
        return place
    lines[-1] = lines[-1][:end]
    lines[0] = lines[0][start:]
    try:
        call = ast.parse(b"(" + b"".join(lines) + b")", mode="eval").body
    except SyntaxError:
        return place
    said = _constant_parts(call.args[0]) if isinstance(call, ast.Call) and call.args else ""
    return said if any(char.isalpha() for char in said) else place


def _constant_parts(node: ast.expr) -> str:
    """Returns the text of an expression with `{}` for whatever is not written out."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(map(_constant_parts, node.values))
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _constant_parts(node.left) + _constant_parts(node.right)
    return "{}"
