"""Fixed batches: a stage whose work runs in batches that follow from its lengths alone, not from what else waits or from the time.

A row's numbers may differ in their last digits with the other rows of a batch, so work that must give the same bytes twice runs in these.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from bertserve.service.scheduling.stage import Stage


def in_fixed_batches(stage: Stage, max_tokens: int) -> Stage:
    """Returns a stage that gives what a stage gives, and whose items are batches of the stage's items.

    Items of similar length share a batch. Items that run alone in the stage also run alone here.

    Args:
        stage: The stage; its later stages are changed in the same way.
        max_tokens: Rows times padded length of a batch; a longer item is a batch of its own.
    """
    if stage.keep_estimate:  # its work is the making of the stage that runs
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
    assert shape is not None, "batches were made to fit"
    return shape[0] * shape[1]
