"""Stage: work that a request has for the inference threads, and what follows from its results: the request's value, or another stage. Records, without a thread."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

from bertserve.service.scheduling.scheduled_request import Cost, Shape, exact


@dataclass(frozen=True, slots=True)
class Stage:
    """Work of a request, and what to do when all of it is done.

    Attributes:
        work: Tokens and payload of each item; without any the stage is finished at once.
        run: Payloads of one batch -> one result each, in order. Called on an inference thread.
        finish: Results of all items, in order -> the request's value, or its next Stage. Called on an inference thread.
        key: What may share a batch; None for items that run alone. All work of a key has the same `run` and `run_multi_threaded`.
        cost: Predicted seconds of a batch of `rows` padded to `length`.
        keep_estimate: Whether the estimate of admission stays reserved, because the real cost is not known yet.
        reserved_tokens: Maximum tokens of the following stages, which stay reserved.
        memory: Numbers of four bytes that the request holds until it ends.
        shape: Rows and longest tokens of a batch -> what it is run at, or None where it has too many rows.
        delay_s: Seconds that `finish` takes, if it cannot be interrupted. They count as if the request had run so long already, so a text that is to be
            tokenized makes room for short ones.
        expires: Whether the request's deadline ends it while this stage waits: not while only decoding is left.
        answer_bytes: Bytes of the request's answer, at most.
        run_multi_threaded: The same as `run` with several threads, for a multi-threaded run: no other run is active or waits.
    """

    work: Sequence[tuple[int, Any]]
    run: Callable[[Sequence[Any]], Sequence[Any]]
    finish: Callable[[Sequence[Any]], Any]
    key: Hashable | None
    cost: Cost
    keep_estimate: bool = False
    reserved_tokens: int = 0
    memory: int = 0
    shape: Shape = exact
    delay_s: float = 0.0
    expires: bool = True
    answer_bytes: int = 0
    run_multi_threaded: Callable[[Sequence[Any]], Sequence[Any]] | None = None


@dataclass(frozen=True, slots=True)
class RequestResult:
    """A request's value, with the seconds that it waited and that its runs took.

    Attributes:
        value: What its last stage made of all results.
        queue_s: Seconds until its last item started, summed over stages.
        runs_s: Seconds from the start of its first run to the end of its last one.
        predicted_wait_s: Seconds until its first item would start, as predicted when it was admitted.
        wait_s: What these were.
    """

    value: Any
    queue_s: float
    runs_s: float
    predicted_wait_s: float = 0.0
    wait_s: float = 0.0


def skip_empty(value: Any) -> Any:
    """Returns the next stage that has work, or the final value."""
    while isinstance(value, Stage) and not value.work:
        value = value.finish([])
    return value
