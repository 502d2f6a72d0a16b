"""Stage: work of a request for the inference threads, and the function that handles its results. No threads."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

from bertserve.service.scheduling.scheduled_request import RunSeconds, Shape, exact


@dataclass(frozen=True, slots=True)
class Stage:
    """Work of a request, with the function that continues the request afterwards.

    Attributes:
        work: Tokens and payload of each item; without items, the stage is finished at once.
        run: Payloads of a batch -> one result per payload, in order. Called on an inference thread.
        finish: Results of all items, in order -> the request's value, or its next Stage. Called on an inference thread.
        key: Items with equal keys can share a batch; None for items that run alone. All work of a key has the same `run` and
            `run_multi_threaded`.
        cost: Predicted seconds of a batch of `rows` padded to `length`.
        keep_estimate: Whether the estimate of admission stays reserved, because the real cost is not known yet.
        reserved_tokens: Maximum tokens of the following stages, which stay reserved.
        shape: Rows and longest tokens of a batch -> the shape of its run, or None if it has too many rows.
        delay_s: Predicted seconds of `finish`, if it cannot be interrupted. They count as if the request had already run for so long, so
            short texts start before a long text is tokenized.
        long_step: Whether `finish` can take a long time without interruption. One of several threads starts no such stage; if there is
            only one, another thread serves all others meanwhile.
        expires: Whether the request's deadline ends it while this stage waits; false if only decoding is left.
        run_multi_threaded: Does the same as `run` with several threads; it is used while no other run is active or waits.
    """

    work: Sequence[tuple[int, Any]]
    run: Callable[[Sequence[Any]], Sequence[Any]]
    finish: Callable[[Sequence[Any]], Any]
    key: Hashable | None
    cost: RunSeconds
    keep_estimate: bool = False
    reserved_tokens: int = 0
    shape: Shape = exact
    delay_s: float = 0.0
    long_step: bool = False
    expires: bool = True
    run_multi_threaded: Callable[[Sequence[Any]], Sequence[Any]] | None = None


@dataclass(frozen=True, slots=True)
class RequestResult:
    """A request's value, with its waiting and running times in seconds.

    Attributes:
        value: The value of its last stage.
        queue_s: Seconds until its last item started, summed over stages.
        runs_s: Seconds from the start of its first run to the end of its last one.
        predicted_wait_s: Predicted seconds until its first item starts, from its admission.
        wait_s: Actual seconds until its first item started.
    """

    value: Any
    queue_s: float
    runs_s: float
    predicted_wait_s: float = 0.0
    wait_s: float = 0.0
