"""The number of calls of the service's own functions in one `/classify` request."""

from pathlib import Path

import tiny
from calls import count_calls

MAX_CALLS = 119  # with a truncated text; lower the limit when the number falls


def test_a_request_makes_no_more_calls_than_the_limit(tmp_path: Path) -> None:
    """`make calls` lists the calls. Their number determines the interpreter's time per request."""
    tiny.bundle(tmp_path)

    assert 0 < len(count_calls(tmp_path)) <= MAX_CALLS
