"""Request bodies, from a built-in mix or from the user's file."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bertserve.bench.errors import BenchError
from bertserve.bench.workload import endpoints, mixes

_MAX_BODIES = 512


@dataclass(frozen=True, slots=True)
class Body:
    """One request body.

    Attributes:
        content: The JSON that is sent.
        texts: Number of texts that the model reads, as `endpoints.count_texts` counts them.
    """

    content: bytes
    texts: int


def build_bodies(source: str, *, path: str = "/", texts: int = 1, seed: int = 0, mask: str = mixes.MASK) -> list[Body]:
    """Returns the bodies of a mix or of a file.

    Args:
        source: Name of a mix, or path of a JSON Lines file. Each line of a file is an object, which is sent as it is, or a string.
        path: Path of the endpoint that the bodies are for.
        texts: Texts in each request. Objects of a file are whole requests, so it must be 1 for them.
        seed: Seed of a built-in mix.
        mask: How the model spells a word that it is to fill in; what a file has is sent as it is.

    Raises:
        BenchError: There is no such mix or file, a line of the file is no body, or the endpoint does not take what the mix has.
    """
    if source in mixes.NAMES:
        return _group(path, mixes.mix_inputs(source, seed=seed, mask=mask), texts)
    lines = _read_lines(Path(source))
    if all(isinstance(line, str) for line in lines):
        return _group(path, lines, texts)
    if texts != 1:
        raise BenchError(f"--texts {texts} groups texts, but `{source}` has whole request bodies; leave the flag out.")
    return [_encode(endpoints.request_body(path, [line]) if isinstance(line, str) else line) for line in lines]


def _group(path: str, inputs: Sequence[Any], texts: int) -> list[Body]:
    """Returns bodies of `texts` texts each, in which every input stands equally often."""
    count = min(math.lcm(len(inputs), texts) // texts, max(len(inputs) // texts, _MAX_BODIES))
    return [_encode(endpoints.request_body(path, [inputs[(i * texts + k) % len(inputs)] for k in range(texts)])) for i in range(count)]


def _encode(value: dict[str, Any]) -> Body:
    return Body(json.dumps(value).encode(), endpoints.count_texts(value))


def _read_lines(path: Path) -> list[Any]:
    """Returns the values of a JSON Lines file.

    Raises:
        BenchError: The file cannot be read or has no value, or a line is neither an object nor a string.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not text"
        raise BenchError(
            f"`{path}` is neither a mix nor a file of bodies that can be read ({reason}); mixes are {', '.join(mixes.NAMES)}."
        ) from error
    lines = []
    for number, line in enumerate(text.split("\n"), 1):  # a text may contain other line ends, as U+2028
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
