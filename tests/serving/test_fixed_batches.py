"""Fixed batches: the batches of a stage depend only on its own work."""

from __future__ import annotations

import asyncio
from typing import Any

from bertserve.service.scheduling.request_queue import RequestQueue
from bertserve.service.scheduling.scheduler import Scheduler
from bertserve.service.scheduling.stage import Stage, in_fixed_batches


def stage(lengths: list[int], ran: list[list[str]], *, key: Any = "model", finish: Any = list) -> Stage:
    """Returns a stage with one item per length; the result of an item is its name in upper case."""

    def run(payloads: Any) -> list[str]:
        ran.append(list(payloads))
        return [payload.upper() for payload in payloads]

    work = [(length, f"{chr(97 + index)}{length}") for index, length in enumerate(lengths)]
    return Stage(work=work, run=run, finish=finish, key=key, cost=lambda rows, length: 1e-4 * rows * length)


async def run_all(*stages: Stage, threads: int) -> list[Any]:
    scheduler = Scheduler(RequestQueue(max_batch_tokens=64, max_queue_tokens=4096, threads=threads), threads=threads)
    scheduler.start()
    requests = [scheduler.admit(tokens=100, seconds=0.1, timeout_s=20) for _ in stages]
    done = await asyncio.gather(*(scheduler.run(request, each) for request, each in zip(requests, stages, strict=True)))
    await scheduler.stop(0)
    return [each.value for each in done]


def test_batches_depend_on_the_lengths() -> None:
    """Similar lengths share a batch, longest first. An item over the budget runs alone. Results keep the order of the work."""
    ran: list[list[str]] = []
    (value,) = asyncio.run(run_all(in_fixed_batches(stage([3, 9, 4, 30, 10, 3], ran), 20), threads=1))

    assert [["d30"], ["e10", "b9"], ["c4", "a3", "f3"]] == ran
    assert ["A3", "B9", "C4", "D30", "E10", "F3"] == value


def test_other_work_and_more_threads_do_not_change_the_batches() -> None:
    alone: list[list[str]] = []
    asyncio.run(run_all(in_fixed_batches(stage([5, 6, 7, 8] * 4, alone), 24), threads=1))
    beside: list[list[str]] = []
    asyncio.run(run_all(in_fixed_batches(stage([5, 6, 7, 8] * 4, beside), 24), *(stage([5, 6], []) for _ in range(9)), threads=3))

    assert sorted(alone) == sorted(beside)


def test_items_without_a_key_run_alone_and_follow_up_stages_are_fixed() -> None:
    ran: list[list[str]] = []
    follows = stage([4, 4, 4], ran)
    first = stage([2, 3], ran, key=None, finish=lambda results: follows)
    (value,) = asyncio.run(run_all(in_fixed_batches(first, 8), threads=1))

    assert [["b3"], ["a2"], ["a4", "b4"], ["c4"]] == ran
    assert ["A4", "B4", "C4"] == value
