"""How one request ended."""

from __future__ import annotations

from typing import NamedTuple

OK = 200


class Record(NamedTuple):
    """How one request ended. Times are of `time.perf_counter`.

    Attributes:
        intended: When it was due; in a closed loop when it was sent.
        sent: When it was sent; when it ended, if it never was.
        ended: When its answer was complete, or its failure known.
        outcome: HTTP status, or the kind of the failure: `timeout`, `closed`, `refused`, `malformed`, `interrupted`.
        item: Index of its body.
        timing: The answer's server-timing header, in lower case.
    """

    intended: float
    sent: float
    ended: float
    outcome: int | str
    item: int
    timing: bytes
