"""Offsets in the unit of the caller's language: Python counts code points, JavaScript and Java UTF-16 units, Go and Rust bytes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

OffsetUnit = Literal["code_points", "utf16", "utf8"]
_CODECS = {"utf16": ("utf-16-le", 2), "utf8": ("utf-8", 1)}


def rebase(spans: Sequence[dict[str, Any]], text: str, unit: OffsetUnit) -> None:
    """Turns `start` and `end` of each span from code points of the text into the unit, in place.

    Args:
        spans: In any order; they may overlap.
        text: The text that they lie in.
        unit: What to count in.
    """
    if unit == "code_points" or text.isascii():
        return
    codec, size = _CODECS[unit]
    places: dict[int, int] = {0: 0}
    last = units = 0
    for place in sorted({span[key] for span in spans for key in ("start", "end")}):
        units += len(text[last:place].encode(codec)) // size
        places[place], last = units, place
    for span in spans:
        span["start"], span["end"] = places[span["start"]], places[span["end"]]
