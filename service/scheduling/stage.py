"""Stage: work of a request for the inference threads, and the function that handles its results; stages with fixed batches. No threads."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
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
        memory: Memory that the request holds until it ends, in numbers of four bytes.
        shape: Rows and longest tokens of a batch -> the shape of its run, or None if it has too many rows.
        delay_s: Predicted seconds of `finish`, if it cannot be interrupted. They count as if the request had already run for so long, so
            short texts start before a long text is tokenized.
        long_step: Whether `finish` can take a long time without interruption. One of several threads starts no such stage; if there is
            only one, another thread serves all others meanwhile.
        expires: Whether the request's deadline ends it while this stage waits; false if only decoding is left.
        answer_bytes: Maximum bytes of the request's answer.
        run_multi_threaded: Does the same as `run` with several threads; it is used while no other run is active or waits.
    """

    work: Sequence[tuple[int, Any]]
    run: Callable[[Sequence[Any]], Sequence[Any]]
    finish: Callable[[Sequence[Any]], Any]
    key: Hashable | None
    cost: RunSeconds
    keep_estimate: bool = False
    reserved_tokens: int = 0
    memory: int = 0
    shape: Shape = exact
    delay_s: float = 0.0
    long_step: bool = False
    expires: bool = True
    answer_bytes: int = 0
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


def in_fixed_batches(stage: Stage, max_tokens: int) -> Stage:
    """Returns a stage with the same result, whose items are batches of the given stage's items.

    Items of similar length share a batch. Items that run alone in the stage also run alone here.

    Args:
        stage: The stage; its later stages are changed in the same way.
        max_tokens: Rows times padded length of a batch; a longer item is a batch of its own.
    """
    if stage.keep_estimate:  # this stage only prepares the stage that runs
        return replace(stage, finish=lambda results: _next(stage.finish(results), max_tokens))
    batches = _batches(stage, max_tokens)

    def run(payloads: Sequence[Sequence[Any]]) -> list[Sequence[Any]]:
        return [stage.run(batch) for batch in payloads]

    def finish(results: Sequence[Sequence[Any]]) -> Any:
        in_order: list[Any] = [None] * len(stage.work)
        for batch, rows in zip(batches, results, strict=True):
            for index, row in zip(batch, rows, strict=True):
                in_order[index] = row
        return _next(stage.finish(in_order), max_tokens)

    return Stage(
        work=[(_tokens(stage, batch), [stage.work[index][1] for index in batch]) for batch in batches],
        run=run,
        finish=finish,
        key=None,
        cost=stage.cost,
        reserved_tokens=stage.reserved_tokens,
        memory=stage.memory,
        answer_bytes=stage.answer_bytes,
    )


def _next(value: Any, max_tokens: int) -> Any:
    return in_fixed_batches(value, max_tokens) if isinstance(value, Stage) else value


def _batches(stage: Stage, max_tokens: int) -> list[list[int]]:
    """Returns indices of the stage's items, batch by batch, the longest first."""
    batches: list[list[int]] = []
    for index in sorted(range(len(stage.work)), key=lambda index: -stage.work[index][0]):
        if batches and stage.key is not None:
            shape = stage.shape(len(batches[-1]) + 1, stage.work[batches[-1][0]][0])
            if shape is not None and shape[0] * shape[1] <= max_tokens:
                batches[-1].append(index)
                continue
        batches.append([index])
    return batches


def _tokens(stage: Stage, batch: Sequence[int]) -> int:
    shape = stage.shape(len(batch), stage.work[batch[0]][0])
    assert shape is not None, "batches must fit"
    return shape[0] * shape[1]
