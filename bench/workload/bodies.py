"""Request bodies: from a built-in mix, or from the caller's own file."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.errors import BenchError
from bench.workload import endpoints, mixes

_MOST_BODIES = 512


@dataclass(frozen=True, slots=True)
class Body:
    """One request body.

    Attributes:
        content: JSON, as it is sent.
        texts: Texts in it, as `endpoints.count` counts them.
    """

    content: bytes
    texts: int


def bodies(source: str, *, path: str = "/", texts: int = 1, seed: int = 0) -> list[Body]:
    """Returns the bodies of a mix or of a file.

    Args:
        source: The name of a mix, or the path of a JSON Lines file: each line an object, which is sent as it is, or a string.
        path: Of the endpoint that they are for.
        texts: Inputs of each request. Objects of a file are whole requests, so there it must be 1.
        seed: Of a built-in mix.

    Raises:
        BenchError: There is no such mix or file, a line of it is no body, or the endpoint does not take what the mix has.
    """
    if source in mixes.NAMES:
        return _group(path, mixes.inputs(source, seed=seed), texts)
    lines = _read(Path(source))
    if all(isinstance(line, str) for line in lines):
        return _group(path, lines, texts)
    if texts != 1:
        raise BenchError(f"--texts {texts} groups texts, but `{source}` has whole request bodies; leave the flag out.")
    if any(isinstance(line, str) for line in lines) and endpoints.take(path, 1) != 1:
        raise BenchError(f"`{source}` mixes texts and whole request bodies, which {path} cannot be sent; give one or the other.")
    return [_body(endpoints.body(path, i, [line]) if isinstance(line, str) else line) for i, line in enumerate(lines)]


def _group(path: str, inputs: Sequence[Any], texts: int) -> list[Body]:
    """Puts `texts` inputs into each body, every input equally often."""
    taken = endpoints.take(path, texts)
    count = min(math.lcm(len(inputs), taken) // taken, max(len(inputs) // taken, _MOST_BODIES))
    return [_body(endpoints.body(path, i, [inputs[(i * taken + k) % len(inputs)] for k in range(taken)])) for i in range(count)]


def _body(value: dict[str, Any]) -> Body:
    return Body(json.dumps(value).encode(), endpoints.count(value))


def _read(path: Path) -> list[Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not text"
        raise BenchError(
            f"`{path}` is neither a mix nor a file of bodies that can be read ({reason}); mixes are {', '.join(mixes.NAMES)}."
        ) from error
    lines = []
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip():
            try:
                value = json.loads(line)
            except ValueError as error:
                raise BenchError(f"line {number} of `{path}` is not JSON; give an object or a string on each line.") from error
            if not isinstance(value, str | dict):
                raise BenchError(f"line {number} of `{path}` is neither an object nor a string; a body is one of them.")
            lines.append(value)
    if not lines:
        raise BenchError(f"`{path}` has no body; give an object or a string on each line.")
    return lines
