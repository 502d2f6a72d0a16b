"""The record of one request. Every request of a load ends in exactly one of these."""

from __future__ import annotations

from typing import NamedTuple

OK = 200


class Record(NamedTuple):
    """How one request ended. Times are in seconds on the clock of `time.perf_counter`.

    Attributes:
        intended: When it was due; in a closed loop, when it was sent.
        sent: When it was sent; when it ended, if it was never sent.
        ended: When its response was complete, or its failure known.
        outcome: HTTP status, or the kind of the failure: `timeout`, `closed`, `refused`, `unreachable`, `malformed`, `interrupted`.
        body_index: Index of its body among those of the target.
        server_timing: Value of the response's `server-timing` header, empty if there is none.
        retry_after: Whether the response said when to come again.
    """

    intended: float
    sent: float
    ended: float
    outcome: int | str
    body_index: int
    server_timing: bytes
    retry_after: bool = False
