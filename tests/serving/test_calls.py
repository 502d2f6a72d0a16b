"""How many of the service's own functions one `/classify` calls."""

from __future__ import annotations

from pathlib import Path

import tiny
from calls import count_calls

MOST_CALLS = 168  # 166 now, with a text that is cut; lower it whenever there are fewer


def test_a_short_text_takes_no_more_calls(tmp_path: Path) -> None:
    """`make calls` lists them; the number is what each request costs the interpreter."""
    tiny.bundle(tmp_path)

    assert 100 < len(count_calls(tmp_path)) <= MOST_CALLS
