"""What the backlog must keep, whatever the lanes do. Pure: time is passed in."""

from __future__ import annotations

import gc
import itertools
import operator
import weakref
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bertserve.service.errors import InvalidValueError, RefusedError, TooLargeError
from bertserve.service.scheduling.backlog import KEPT_ENDED, Backlog
from bertserve.service.scheduling.job import Entry, Job, Shape, exact
from bertserve.service.scheduling.share import MAX_ANSWER_BYTES, SHARE_FULL, Share

KEY = "model"


def expensive_start(rows: int, length: int) -> float:
    """Predicts runs whose fixed cost outweighs their rows, as on a GPU: everything that fits is batched."""
    return 1.0 + rows * length * 1e-6


def batches_well(rows: int, length: int) -> float:
    """Predicts short runs, whose entries rank close behind each other."""
    return 0.01 + rows * length * 1e-6


def no_fixed_cost(rows: int, length: int) -> float:
    """Predicts runs where a batch saves nothing, as long texts on a CPU."""
    return rows * length * 1e-3


def backlog(**options: Any) -> Backlog:
    """Returns a backlog with a small budget."""
    return Backlog(**{"max_batch_tokens": 64, "max_queue_tokens": 1000} | options)


def add(
    queue: Backlog,
    *tokens: int,
    now: float = 0.0,
    deadline: float = 100.0,
    key: Any = KEY,
    cost: Callable[[int, int], float] = expensive_start,
    shape: Shape = exact,
) -> Job:
    """Admits and puts a job with an entry per number of tokens, their payloads numbered."""
    job = queue.admit(tokens=sum(tokens), seconds=0.0, deadline=deadline, now=now)
    queue.put(job, key, [(n, i) for i, n in enumerate(tokens)], cost, now, shape=shape)
    return job


def drain(queue: Backlog, now: float = 0.0) -> list[list[Entry]]:
    """Takes batches until nothing waits."""
    batches = []
    while batch := queue.take(now):
        batches.append(batch)
    return batches


def test_an_empty_backlog_gives_nothing() -> None:
    """There is no batch where nothing waits."""
    assert [] == backlog().take(0.0)


def test_a_lone_entry_is_taken_at_once() -> None:
    """No minimum and no timer holds a lone request back."""
    queue = backlog()
    job = add(queue, 8)

    assert [job] == [entry.job for entry in queue.take(0.0)]


def test_likes_share_a_batch() -> None:
    """Entries of one key run together, nearest lengths first."""
    queue = backlog()
    add(queue, 16)
    add(queue, 4)
    add(queue, 15)

    assert [16, 15] == [entry.tokens for entry in queue.take(0.0)][:2]


def test_who_has_waited_much_less_is_not_taken_along() -> None:
    """A companion has waited two thirds as long as the head, whatever its length, or arrived a tenth of a second after it."""
    queue = backlog(max_queue_tokens=10_000)
    arrived = [0.0, 0.05, 1.0, 2.9, 3.1, 8.9]
    for now in arrived:
        add(queue, 8, now=now)

    assert [arrived[:4], arrived[4:5], arrived[5:]] == [[entry.rank for entry in batch] for batch in drain(queue, 9.0)]
    for now in (10.0, 10.05, 10.2):
        add(queue, 8, now=now)
    assert [[10.0, 10.05], [10.2]] == [[entry.rank for entry in batch] for batch in drain(queue, 10.21)]


def test_a_length_whose_first_came_too_late_hides_no_other() -> None:
    """The nearest length is passed over while its texts are too young, and one further away joins."""
    queue = backlog()
    for tokens, now in ((8, 0.0), (9, 8.0), (7, 8.0), (10, 1.0), (6, 1.0)):
        add(queue, tokens, now=now)

    assert [[8, 6, 10], [9, 7]] == [[entry.tokens for entry in batch] for batch in drain(queue, 9.0)]


@pytest.mark.parametrize("key", [None, "other"])
def test_only_equal_keys_share_a_batch(key: str | None) -> None:
    """An entry of another key, or of none, never joins."""
    queue = backlog()
    add(queue, 8, key=key)
    add(queue, 8, key=KEY)
    add(queue, 8, key=key)

    assert ([1, 1, 1] if key is None else [2, 1]) == [len(batch) for batch in drain(queue)]


def test_without_a_fixed_cost_nothing_is_batched() -> None:
    """Where a batch saves nothing, each text runs alone and none waits for another's row."""
    queue = backlog()
    for _ in range(4):
        add(queue, 8, cost=no_fixed_cost)

    assert [1, 1, 1, 1] == [len(batch) for batch in drain(queue)]


def test_padding_that_costs_more_than_a_run_is_not_taken() -> None:
    """A short text does not join a long one when its padding would cost more than a run of its own."""

    def cost(rows: int, length: int) -> float:
        return 0.010 + rows * length * 1e-3

    queue = backlog(max_batch_tokens=4096, max_queue_tokens=10_000)
    add(queue, 8, cost=cost)
    add(queue, 64, cost=cost)
    for _ in range(9):
        add(queue, 8, cost=cost)

    batches = [[entry.tokens for entry in batch] for batch in drain(queue)]
    assert [64] in batches
    assert len(batches[0]) > 1


@given(st.lists(st.integers(1, 64), min_size=1, max_size=40), st.integers(1, 16))
def test_the_padded_budget_is_never_exceeded(lengths: list[int], multiple: int) -> None:
    """Rows times padded length stays within the budget, for any lengths and any padding rule."""

    def padded(n: int) -> int:
        return min(64, -(-n // multiple) * multiple)

    queue = backlog(max_queue_tokens=10_000)
    for length in lengths:
        add(queue, length, shape=lambda rows, tokens: (rows, padded(tokens)))
    batches = drain(queue)

    assert sorted(lengths) == sorted(entry.tokens for batch in batches for entry in batch)
    assert all(len(batch) * max(padded(entry.tokens) for entry in batch) <= 64 for batch in batches)


def test_an_entry_over_the_budget_is_refused_before_it_queues() -> None:
    """What no batch can hold is refused, and leaves nothing behind."""
    queue = backlog()
    job = queue.admit(tokens=65, seconds=0.0, deadline=1.0, now=0.0)

    with pytest.raises(InvalidValueError, match=r"65 tokens .* 64 tokens .* --max-batch-tokens"):
        queue.put(job, KEY, [(1, None), (65, None)], expensive_start, 0.0)

    queue.close(job)
    assert (0, 0, []) == (queue.queue_entries, queue.queue_tokens, queue.take(0.0))


def test_admission_is_all_or_none() -> None:
    """A request that does not fit whole takes no place at all."""
    queue = backlog(max_queue_tokens=100)
    add(queue, 60)

    with pytest.raises(RefusedError) as refused:
        queue.admit(tokens=41, seconds=0.0, deadline=100.0, now=0.0)

    assert "queue_full" == refused.value.reason
    assert 60 == queue.queue_tokens


def test_what_was_refused_is_admitted_when_there_is_room_again() -> None:
    """A start frees the tokens that it takes with it."""
    queue = backlog(max_queue_tokens=100)
    add(queue, 60)
    queue.take(0.0)

    assert queue.admit(tokens=100, seconds=0.0, deadline=100.0, now=0.0).open


def test_a_request_larger_than_the_queue_is_too_large() -> None:
    """What could never be admitted is an error of its own, not a refusal to be tried again."""
    with pytest.raises(TooLargeError, match=r"1001 tokens .* 1000"):
        backlog().admit(tokens=1001, seconds=0.0, deadline=1.0, now=0.0)


def test_a_deadline_that_cannot_be_kept_is_refused() -> None:
    """Admission predicts the wait from what is queued, over all lanes, allows for an error, and says how long to stay away."""
    queue = backlog(lanes=2)
    add(queue, 10, key=None, cost=lambda rows, length: 6.0)

    with pytest.raises(RefusedError) as refused:
        queue.admit(tokens=10, seconds=1.0, deadline=2.0, now=0.0)

    assert ("deadline", pytest.approx(3 - 2 / 1.15)) == (refused.value.reason, refused.value.retry_after_s)
    assert queue.admit(tokens=10, seconds=1.0, deadline=3 * 1.15 + 1e-9, now=0.0).open
    with pytest.raises(RefusedError) as refused:  # its first entry takes four seconds of one of two lanes
        queue.admit(tokens=10, seconds=8.0, deadline=5.4, now=0.0, entries=2)
    assert 3.5 + 4 / 2 - 5.4 == pytest.approx(refused.value.retry_after_s)


def test_what_finds_nothing_before_it_is_admitted() -> None:
    """However long it takes itself: later it would have no better chance."""
    assert backlog().admit(tokens=10, seconds=5.0, deadline=1.0, now=0.0, entries=5).open


def test_the_predicted_wait_counts_on_batches() -> None:
    """Entries that may share a batch are predicted to: the fixed cost of a run is counted once a batch."""
    queue = backlog()
    add(queue, *[8] * 16, cost=lambda rows, length: 1.0)

    assert 2.0 == queue.queue_seconds


def test_retry_after_is_the_time_until_the_excess_has_drained() -> None:
    """A full queue predicts when there will be room, from the seconds that it holds."""
    queue = backlog(max_queue_tokens=100)
    add(queue, 50, 50, key=None, cost=lambda rows, length: 4.0)

    with pytest.raises(RefusedError) as refused:
        queue.admit(tokens=50, seconds=1.0, deadline=100.0, now=0.0)

    assert 4.0 == refused.value.retry_after_s


def test_the_estimate_is_replaced_by_the_real_cost() -> None:
    """After tokenizing, a job holds what its entries really are."""
    queue = backlog()
    job = queue.admit(tokens=500, seconds=9.0, deadline=1.0, now=0.0)
    queue.put(job, KEY, [(10, None), (20, None)], expensive_start, 0.0)

    assert (30, 2) == (queue.queue_tokens, queue.queue_entries)


def test_an_estimate_can_be_kept_while_the_cost_is_unknown() -> None:
    """A job that is still being tokenized holds what it was admitted with."""
    queue = backlog()
    job = queue.admit(tokens=500, seconds=9.0, deadline=1.0, now=0.0)
    queue.put(job, None, [(0, "tokenize")], lambda rows, length: 0.0, 0.0, keep_estimate=True)
    (entry,) = queue.take(0.0)

    assert (500, 9.0) == (queue.queue_tokens, queue.queue_seconds)
    assert queue.finish(entry, None)
    queue.put(job, KEY, [(10, None)], expensive_start, 0.0)
    assert 10 == queue.queue_tokens


def test_a_text_that_is_tokenized_on_a_lane_waits_once() -> None:
    """The rank of all stages is that of the arrival: what was put again goes before what came meanwhile."""
    queue = backlog()
    long = queue.admit(tokens=30, seconds=1.0, deadline=100.0, now=0.0)
    queue.put(long, None, [(0, "tokenize")], lambda rows, length: 0.0, 0.0, keep_estimate=True)
    (entry,) = queue.take(1.0)
    others = [add(queue, 30, now=0.5 + i, key=None) for i in range(2)]
    queue.finish(entry, None)
    queue.put(long, None, [(30, None)], expensive_start, 2.0)

    assert [long, *others] == [batch[0].job for batch in drain(queue, 2.0)]


def test_later_stages_have_room_and_rank_behind_what_came_meanwhile() -> None:
    """A job holds the tokens of its next stages, so that none of them is refused, and none waits for them; each ranks by what ran before."""
    queue = backlog(max_queue_tokens=100)
    search = queue.admit(tokens=90, seconds=9.0, deadline=100.0, now=0.0, entries=9)
    queue.put(search, None, [(10, "first")], lambda rows, length: 1.0, 0.0, reserve=80)
    assert (90, 1.0) == (queue.queue_tokens, queue.queue_seconds)
    (entry,) = queue.take(0.0)
    assert (80, 0.0) == (queue.queue_tokens, queue.wait_s(0.5))
    with pytest.raises(RefusedError):
        queue.admit(tokens=21, seconds=1.0, deadline=100.0, now=0.5)
    soon, late = (add(queue, 10, now=now, key=None) for now in (1.0, 1.6))

    assert queue.finish(entry, None)
    queue.put(search, None, [(40, "second"), (40, "third")], lambda rows, length: 1.0, 1.6)
    assert 100 == queue.queue_tokens
    assert [soon, search, late, search] == [batch[0].job for batch in drain(queue, 1.6)]
    assert 0.0 == search.wait_s


def test_the_predicted_wait_counts_what_comes_before() -> None:
    """What the lanes run counts, and what waits; later windows of a document do not, until their rank has come or the document has ended."""
    queue = backlog(lanes=2)
    document = add(queue, *[60] * 10, now=0.0, cost=lambda rows, length: 1.0, key=None)

    assert [0.5, 0.5 + 1.5, 1.0, 3.5] == [
        queue.wait_s(0.0),
        queue.wait_s(0.0, busy_s=3.0),
        queue.wait_s(2.0),
        queue.wait_s(9.0),
    ]
    queue.take(9.0)
    assert 3.0 == queue.wait_s(9.0)
    queue.close(document)
    assert 0.0 == queue.wait_s(9.0)


def test_nothing_of_a_closed_document_counts() -> None:
    """Its windows whose rank is to come are forgotten with it."""
    queue = backlog(lanes=1)
    document = add(queue, *[60] * 10, now=0.0, cost=lambda rows, length: 1.0, key=None)
    add(queue, 60, now=0.0, cost=lambda rows, length: 1.0, key=None)
    queue.take(0.0)
    queue.close(document)

    assert 1.0 == queue.wait_s(0.0)


def test_a_document_counts_by_its_parts_before_it_is_tokenized() -> None:
    """A request admitted as ten texts or windows holds up who comes after it as much as when they wait."""
    queue = backlog(lanes=2)
    document = queue.admit(tokens=600, seconds=10.0, deadline=100.0, now=0.0, entries=10)

    assert [0.5, 1.0, 3.5] == [queue.wait_s(now) for now in (0.0, 2.0, 9.0)]
    queue.put(document, None, [(60, None)] * 4, lambda rows, length: 1.0, 9.0)
    assert 2.0 == queue.wait_s(9.0)
    queue.close(document)
    assert 0.0 == queue.wait_s(9.0)


def test_a_document_that_ends_before_it_is_tokenized_counts_no_more() -> None:
    """None of its parts holds anyone up."""
    queue = backlog(lanes=1)
    queue.close(queue.admit(tokens=600, seconds=10.0, deadline=100.0, now=0.0, entries=10))
    add(queue, 60, now=0.0, cost=lambda rows, length: 1.0, key=None)

    assert 1.0 == queue.wait_s(0.0)


def test_short_texts_slip_between_the_windows_of_a_long_document() -> None:
    """A job's later entries rank as if they had arrived after its earlier ones had run, at two thirds of the pace of a lane."""
    queue = backlog(max_queue_tokens=10_000)
    document = add(queue, *[60] * 10, now=0.0, cost=lambda rows, length: 1.0, key=None)
    text = add(queue, 5, now=2.5, cost=lambda rows, length: 0.1, key=None)

    order = [batch[0].job for batch in drain(queue)]
    assert [document] * 2 + [text] + [document] * 8 == order


def test_no_entry_starves() -> None:
    """An odd length is served in its turn, however many batches of other lengths keep coming."""
    queue = backlog(max_queue_tokens=10**6)
    odd = add(queue, 64, now=0.0)
    for step in range(1, 40):
        add(queue, *[4] * 16, now=step * 1e-3)
    taken = next(i for i, batch in enumerate(drain(queue)) if any(entry.job is odd for entry in batch))

    assert 0 == taken


@given(st.lists(st.tuples(st.integers(1, 64), st.integers(0, 5)), min_size=1, max_size=30))
def test_the_first_in_rank_leads_every_batch(texts: list[tuple[int, int]]) -> None:
    """The head of a batch is always the oldest entry that waits, so nothing starves."""
    queue = backlog(max_queue_tokens=10_000)
    for tokens, now in sorted(texts, key=lambda text: text[1]):
        add(queue, tokens, now=float(now))
    waiting = len(texts)
    last = -1.0
    while batch := queue.take(10.0):
        assert last <= batch[0].rank
        last = batch[0].rank
        waiting -= len(batch)

    assert 0 == waiting


def test_cancelled_while_queued_takes_no_slot() -> None:
    """Entries of a closed job are skipped, as heads and as companions, and hold no tokens."""
    queue = backlog()
    first, cancelled, last = add(queue, 8), add(queue, 8, 8), add(queue, 8)
    assert queue.close(cancelled)

    assert (2, 16) == (queue.queue_entries, queue.queue_tokens)
    assert [[first, last]] == [[entry.job for entry in batch] for batch in drain(queue)]


def test_a_closed_head_is_skipped() -> None:
    """A closed job at the front does not lead a batch."""
    queue = backlog()
    cancelled, living = add(queue, 8), add(queue, 8)
    queue.close(cancelled)

    assert [living] == [entry.job for entry in queue.take(0.0)]


def test_a_job_closes_once() -> None:
    """Whoever closes a job first ends it; a second answer is refused."""
    queue = backlog()
    job = add(queue, 8)

    assert [True, False] == [queue.close(job), queue.close(job)]


def test_results_come_in_order_and_the_last_one_finishes() -> None:
    """Results are kept by their entry's place, whatever order the entries finish in."""
    queue = backlog()
    job = add(queue, 4, 8, 6)
    entries = {entry.index: entry for batch in drain(queue) for entry in batch}

    assert [False, False, True] == [queue.finish(entries[i], f"r{i}") for i in (2, 0, 1)]
    assert ["r0", "r1", "r2"] == job.results


def test_a_result_for_a_closed_job_is_dropped() -> None:
    """An entry that was in flight when its job ended finishes nothing."""
    queue = backlog()
    job = add(queue, 8)
    (entry,) = queue.take(0.0)
    queue.close(job)

    assert not queue.finish(entry, "late")


def test_expiry_closes_what_still_waits() -> None:
    """A deadline that passes while an entry waits ends the job."""
    queue = backlog()
    late, soon = add(queue, 8, deadline=1.0), add(queue, 8, deadline=3.0)

    assert [[], [late], [], [soon]] == [queue.expire(now) for now in (0.5, 1.0, 2.0, 3.0)]
    assert (0, 0) == (queue.queue_entries, queue.queue_tokens)


def test_the_deadline_applies_until_the_last_entry_has_started() -> None:
    """A job all of whose entries run is past its deadline's reach; one with an entry waiting is not."""
    queue = backlog()
    started = add(queue, 8, deadline=1.0)
    queue.take(0.0)
    half = add(queue, 60, 60, deadline=1.0)
    queue.take(0.0)

    assert [half] == queue.expire(2.0)
    assert started.open


def test_waiting_time_is_that_of_the_last_entry() -> None:
    """`queued_s` runs from the put to the start of the job's last entry."""
    queue = backlog()
    job = add(queue, 60, 60, now=1.0)
    queue.take(2.0)
    queue.take(5.0)

    assert 4.0 == job.queued_s


class Steps:
    """Counts what a backlog does with what it is given: comparisons of times and keys, and predictions of costs and shapes."""

    def __init__(self) -> None:
        self.count = 0

    def of(self, call: Callable[[], Any]) -> int:
        """Returns how many steps a call takes."""
        before = self.count
        call()
        return self.count - before

    def cost(self, rows: int, length: int) -> float:
        """Predicts runs where a batch saves nothing, so that an operation is one of one entry."""
        self.count += 1
        return no_fixed_cost(rows, length)

    def shape(self, rows: int, tokens: int) -> tuple[int, int]:
        """Pads to the longest."""
        self.count += 1
        return rows, tokens


class Time(float):
    """Seconds whose comparisons are steps."""

    def __new__(cls, seconds: float, steps: Steps) -> Time:
        made = super().__new__(cls, seconds)
        made.steps = steps
        return made

    steps: Steps

    def __add__(self, other: float) -> Time:
        return Time(float(self) + other, self.steps)

    def _counted(self, compare: Callable[[float, float], bool], other: Any) -> bool:
        self.steps.count += 1
        return compare(float(self), float(other))

    def __lt__(self, other: Any) -> bool:
        return self._counted(operator.lt, other)

    def __le__(self, other: Any) -> bool:
        return self._counted(operator.le, other)

    def __gt__(self, other: Any) -> bool:
        return self._counted(operator.gt, other)

    def __ge__(self, other: Any) -> bool:
        return self._counted(operator.ge, other)

    def __eq__(self, other: object) -> bool:
        return self._counted(operator.eq, other)

    __hash__ = float.__hash__


class Key:
    """A key whose comparisons are steps; each is another object, as the keys of two requests are."""

    def __init__(self, steps: Steps) -> None:
        self.steps = steps

    def __eq__(self, other: object) -> bool:
        self.steps.count += 1
        return isinstance(other, Key)

    def __hash__(self) -> int:
        return 7


def test_every_operation_is_logarithmic() -> None:
    """With 10,000 entries waiting no operation takes more than twice the steps that it takes with 100."""

    def taken(waiting: int) -> dict[str, int]:
        queue, steps = Backlog(max_batch_tokens=64, max_queue_tokens=10**9), Steps()
        end = 10.0**6

        def enter(i: int) -> Job:
            # ranks and deadlines ascend, and lengths come by turns, so that what is new belongs at the end of each heap
            return add(
                queue, 1 + i * 7 % 60, now=Time(i, steps), deadline=Time(end + i, steps), key=Key(steps), cost=steps.cost, shape=steps.shape
            )

        jobs = [enter(i) for i in range(waiting)]
        now, late = Time(waiting, steps), Time(end + waiting, steps)
        admitted: list[Job] = []
        return {
            "admit": steps.of(lambda: admitted.append(queue.admit(tokens=5, seconds=0.1, deadline=late, now=now))),
            "put": steps.of(lambda: queue.put(admitted[0], Key(steps), [(5, None)], steps.cost, now, shape=steps.shape)),
            "take": steps.of(lambda: queue.take(now)),
            "close": steps.of(lambda: queue.close(jobs[waiting // 2])),
            "take past a closed job": steps.of(lambda: queue.take(now)),
            "expire": steps.of(lambda: queue.expire(Time(end + 1, steps))),
        }

    few, many = taken(100), taken(10_000)

    assert dict.fromkeys(few, True) == {name: many[name] <= 2 * few[name] + 20 for name in few}
    assert [] == [name for name in few if name != "close" and few[name] == 0]  # what has no steps would show nothing


def test_what_hung_up_is_let_go_while_nothing_is_taken() -> None:
    """With every lane busy and a job that waits on, 10,000 others come and go, and what they brought does not gather."""

    class Kept:
        """Something whose life can be watched."""

    queue = backlog(max_queue_tokens=10_000)
    stayer = add(queue, 8)
    payloads = weakref.WeakSet[Kept]()
    most = 0
    for i in range(10_000):
        job = queue.admit(tokens=16, seconds=0.0, deadline=1e9, now=float(i))
        work = [(1 + i % 64, Kept()), (1 + i % 64, Kept())]
        payloads.update(payload for _, payload in work)
        queue.put(job, KEY if i % 2 else None, work, expensive_start, float(i))
        del work
        queue.close(job)
        most = max(most, len(payloads))
    del job

    assert most <= 2 * KEPT_ENDED + 4
    assert [[stayer]] == [[entry.job for entry in batch] for batch in drain(queue, 1e4)]
    queue.close(stayer)
    gc.collect()
    assert 0 == len(payloads)


def test_nothing_is_kept_of_what_has_ended() -> None:
    """After many jobs of many lengths nothing of their entries is alive, and of the jobs no more than a few that had no time to be let go."""

    class Kept:
        """Something whose life can be watched."""

    queue = backlog(max_queue_tokens=10_000)
    keys, owners, payloads, results = (weakref.WeakSet[Kept]() for _ in range(4))
    for i in range(2000):
        if i % 10 == 0:
            keys.add(key := Kept())
        job = queue.admit(tokens=128, seconds=0.0, deadline=1e9, now=float(i))
        work = [(1 + i % 64, Kept()), (1 + i * 3 % 64, Kept())]
        job.owner = Kept()
        owners.add(job.owner)
        payloads.update(payload for _, payload in work)
        queue.put(job, key, work, expensive_start, float(i))
        if i % 3:
            for entry in itertools.chain.from_iterable(drain(queue, float(i))):
                result = Kept()
                results.add(result)
                queue.finish(entry, result)
        queue.close(job)
    drain(queue)
    del key, job, work, entry, result
    gc.collect()

    assert (0, 0, 0.0) == (queue.queue_entries, queue.queue_tokens, queue.queue_seconds)
    assert (0, 0, 0) == (len(keys), len(payloads), len(results))
    assert len(owners) < 100


def test_a_job_knows_the_wait_that_was_predicted_for_it_and_the_real_one() -> None:
    """Of several stages the last one counts, from the arrival until the first of its entries starts."""
    queue = backlog()
    queue.admit(tokens=10, seconds=3.0, deadline=100.0, now=0.0)
    job = queue.admit(tokens=10, seconds=1.0, deadline=100.0, now=1.0)
    queue.put(job, None, [(0, "texts")], no_fixed_cost, 1.0)
    [entry] = queue.take(2.0)
    queue.finish(entry, None)
    queue.put(job, None, [(5, "a"), (5, "b")], no_fixed_cost, 2.5)
    queue.take(5.0)
    queue.take(6.0)

    assert (3.0, 4.0) == (job.predicted_wait_s, job.wait_s)


def test_a_run_is_no_longer_than_what_it_gains_from_its_length() -> None:
    """However many wait, a companion that would save less than a thirty-second part of the run is left to the next one."""
    queue = backlog(max_batch_tokens=10_000, max_queue_tokens=10_000)
    for _ in range(500):
        add(queue, 1, deadline=1e4, cost=lambda rows, length: 1.0 + rows * length)

    assert 31 == len(queue.take(0.0))


def test_a_job_that_runs_leaves_the_last_lane_to_others() -> None:
    """Whoever else waits is taken, without a companion of that job, until nothing of it runs any more; its own entries may go with each other."""
    queue = backlog(max_queue_tokens=10_000)
    listed = add(queue, *[30] * 6, now=0.0, cost=batches_well)
    running = queue.take(0.0, last_lane=True)
    assert [listed, listed] == [entry.job for entry in running]
    assert [] == queue.take(0.0, last_lane=True)
    text = add(queue, 30, now=0.001, cost=batches_well)

    assert [text] == [entry.job for entry in queue.take(0.001, last_lane=True)]
    assert [] == queue.take(0.001, last_lane=True)
    for entry in running:
        queue.finish(entry, None)
    assert [listed, listed] == [entry.job for entry in queue.take(0.001, last_lane=True)]
    assert [listed, listed] == [entry.job for entry in queue.take(0.001)]
    assert [] == queue.take(0.001)


def test_the_jobs_of_a_share_hold_a_quarter_of_the_queue() -> None:
    """Before their tokens are known they count as many as there may be; then as many as there are, and those that start count no more."""
    queue, share = backlog(), Share()

    def admit(tokens: int) -> Job:
        return queue.admit(tokens=tokens, seconds=0.0, deadline=100.0, now=0.0, share=share)

    def refused(tokens: int) -> str:
        with pytest.raises(RefusedError) as error:
            admit(tokens)
        return error.value.reason

    jobs = [admit(20), admit(40)]
    assert (240, 240) == (share.tokens, queue.queue_tokens)
    assert SHARE_FULL == refused(3)
    queue.put(jobs[0], KEY, [(30, None)], no_fixed_cost, 0.0)
    assert 190 == share.tokens
    jobs.append(admit(15))
    queue.put(jobs[1], KEY, [(60, None)], no_fixed_cost, 0.0)
    queue.take(0.0)
    assert 30 + 60 + 60 - 30 == share.tokens
    for job in jobs:
        queue.close(job)
    assert (0, 0) == (share.tokens, queue.queue_tokens)


def test_a_job_larger_than_its_share_is_the_only_one_in_it() -> None:
    """So that no line of a stream is too large for it; others and other shares have the rest of the queue."""
    queue, share = backlog(), Share()
    large = queue.admit(tokens=600, seconds=0.0, deadline=100.0, now=0.0, share=share)
    with pytest.raises(RefusedError):
        queue.admit(tokens=1, seconds=0.0, deadline=100.0, now=0.0, share=share)
    queue.admit(tokens=10, seconds=0.0, deadline=100.0, now=0.0, share=Share())
    queue.admit(tokens=10, seconds=0.0, deadline=100.0, now=0.0)
    queue.close(large)
    queue.admit(tokens=1, seconds=0.0, deadline=100.0, now=0.0, share=share)


# ---- many long jobs


def test_short_texts_do_not_wait_for_the_past_of_many_documents() -> None:
    """Ten documents on two lanes have a fifth of a lane each: their later entries rank so far behind that none is due before a text of now."""
    queue = backlog(max_queue_tokens=10_000, lanes=2)
    documents = [queue.admit(tokens=600, seconds=10.0, deadline=100.0, now=0.0, entries=10) for _ in range(10)]
    for document in documents:
        queue.put(document, None, [(60, None)] * 10, lambda rows, length: 1.0, 0.0)
    for _ in range(10):
        queue.take(0.0)
    for now in (1.0, 2.0, 3.0):  # two documents' entries a second
        text = add(queue, 5, now=now, cost=lambda rows, length: 0.1, key=None)
        assert [text] == [entry.job for entry in queue.take(now)]
        queue.take(now)
        queue.take(now)


def test_a_document_is_refused_if_its_last_entry_would_start_too_late() -> None:
    """It waits for the later entries of other documents; a text does not."""
    queue = backlog(max_queue_tokens=10_000)
    add(queue, *[60] * 10, cost=lambda rows, length: 1.0, key=None)

    with pytest.raises(RefusedError) as error:
        queue.admit(tokens=20, seconds=2.0, deadline=5.0, now=0.0, entries=2)
    assert "deadline" == error.value.reason
    queue.admit(tokens=10, seconds=1.0, deadline=5.0, now=0.0)


def test_time_to_tokenize_and_to_decode_counts_in_the_rank() -> None:
    """What a job took of a lane makes room for others, also where no run was part of it."""
    queue = backlog()
    decoded, long, text = (queue.admit(tokens=9, seconds=0.0, deadline=100.0, now=0.1 * i) for i in range(3))
    decoded.finish_s = 1.0
    long.delay_s = 1.0
    for job in (decoded, long, text):
        queue.put(job, None, [(9, None)], no_fixed_cost, 0.3)

    assert [text, decoded, long] == [batch[0].job for batch in drain(queue, 0.3)]


def test_large_requests_leave_room_for_small_ones() -> None:
    """A part of the queue is for requests that are a small part of it, also where the large ones had more tokens than expected."""
    queue = backlog(max_queue_tokens=640)
    for large in [queue.admit(tokens=320, seconds=0.0, deadline=100.0, now=0.0) for _ in range(2)]:
        queue.put(large, KEY, [(60, None)] * 10, no_fixed_cost, 0.0)
    assert queue.queue_tokens == 1200
    small = [queue.admit(tokens=10, seconds=0.0, deadline=100.0, now=0.0) for _ in range(8)]

    for tokens in (10, 11):
        with pytest.raises(RefusedError):
            queue.admit(tokens=tokens, seconds=0.0, deadline=100.0, now=0.0)
    queue.close(small[0])
    queue.admit(tokens=10, seconds=0.0, deadline=100.0, now=0.0)


def test_the_jobs_of_a_share_rank_behind_each_other() -> None:
    """As the entries of one job do, so that the lines of a stream let others through."""
    queue, share = backlog(), Share()
    lines = [queue.admit(tokens=9, seconds=1.0, deadline=100.0, now=0.0, share=share) for _ in range(3)]
    for line in lines:
        queue.put(line, None, [(9, None)], lambda rows, length: 1.0, 0.0)
    text = add(queue, 5, now=1.0, key=None)

    assert [lines[0], text, *lines[1:]] == [batch[0].job for batch in drain(queue, 1.0)]
    for job in (*lines, text):
        queue.close(job)
    assert (0, 0) == (share.jobs, share.tokens)


def test_the_jobs_of_a_share_make_no_more_answers_than_they_may_hold() -> None:
    """A large one waits for the others, and is made if there are none."""
    queue, share = backlog(), Share()
    jobs = [queue.admit(tokens=9, seconds=0.0, deadline=100.0, now=0.0, share=share) for _ in range(3)]
    queue.expect_answer(jobs[0], MAX_ANSWER_BYTES + 1)
    queue.expect_answer(jobs[0], MAX_ANSWER_BYTES - 1)

    with pytest.raises(RefusedError) as error:
        queue.expect_answer(jobs[1], 2)
    assert SHARE_FULL == error.value.reason
    queue.expect_answer(jobs[2], 1)
    queue.close(jobs[0])
    queue.expect_answer(jobs[1], 2)
    for job in jobs:
        queue.close(job)
    assert 0 == share.answer_bytes


def test_pauses_leave_nothing_behind() -> None:
    """A job that comes back hundreds of times, to tokenize and to decode in slices, has one place in the order and one deadline."""
    queue = backlog(max_queue_tokens=10_000)
    jobs = [add(queue, 5, now=0.0, key=None) for _ in range(20)]
    for i in range(300):
        for entry in [entry for batch in drain(queue, float(i)) for entry in batch]:
            entry.job.finish_s += 0.01
            queue.put(entry.job, None, [(0, None)], no_fixed_cost, float(i))

    assert len(jobs) == len(queue._deadlines)
    assert len(queue._ranked) <= 2 * len(jobs)


def test_a_tokenized_text_no_longer_ranks_behind_others() -> None:
    """The delay for tokenizing ends with it: the next stage has an earlier rank than the one before."""
    queue = backlog()
    job = queue.admit(tokens=9, seconds=0.0, deadline=100.0, now=0.0)
    job.delay_s = 10.0
    queue.put(job, None, [(0, None)], no_fixed_cost, 0.0, keep_estimate=True)
    queue.take(0.0)
    job.delay_s = 0.0
    queue.put(job, None, [(9, None)], no_fixed_cost, 0.0)
    other = add(queue, 9, now=1.0, key=None)

    assert [job, other] == [batch[0].job for batch in drain(queue, 1.0)]


def test_what_has_run_outlives_its_deadline_while_it_is_decoded() -> None:
    """A pause of decoding does not expire, and a stage after it does."""
    queue = backlog()
    job = add(queue, 5, deadline=1.0)
    queue.take(0.0)
    job.expires = False
    queue.put(job, None, [(0, None)], no_fixed_cost, 0.5)

    assert [] == queue.expire(2.0)
    queue.take(2.0)
    job.expires = True
    queue.put(job, KEY, [(5, None)], no_fixed_cost, 2.0)
    assert [job] == queue.expire(2.0)


def test_a_job_of_a_share_is_refused_if_those_before_it_take_too_long() -> None:
    """It starts after the other lines of its stream, whatever the queue of others is."""
    queue, share = backlog(max_queue_tokens=10_000), Share()
    lines = [queue.admit(tokens=9, seconds=1.0, deadline=5.0, now=0.0, share=share) for _ in range(3)]
    for line in lines:
        queue.put(line, None, [(9, None)], lambda rows, length: 1.0, 0.0)

    with pytest.raises(RefusedError) as error:
        queue.admit(tokens=9, seconds=1.0, deadline=3.0, now=0.0, share=share)
    assert "deadline" == error.value.reason
    queue.close(lines[2])  # what will not run makes room
    queue.admit(tokens=9, seconds=1.0, deadline=3.0, now=0.0, share=share)


@pytest.mark.parametrize(("texts", "streams"), [(1, 0), (4, 0), (32, 0), (100, 0), (32, 30)])
def test_what_is_admitted_is_answered_under_overload(texts: int, streams: int) -> None:
    """Twice as much comes as a lane can do; nearly all that is admitted starts in time, lists and the lines of streams too."""
    queue = backlog(max_queue_tokens=100_000, max_batch_tokens=512)
    shares: list[Share | None] = [Share() for _ in range(streams)] or [None]
    now, admitted, expired = 0.0, 0, 0
    run_s = 0.01
    for arrival in range(3000 // texts):
        now = max(now, arrival * texts * run_s / 2)
        size = 1 if streams else texts
        for number in range(texts // size):
            try:
                job = queue.admit(
                    tokens=9 * size,
                    seconds=run_s * size,
                    deadline=now + 2.0,
                    now=now,
                    entries=size,
                    share=shares[(arrival * texts + number) % len(shares)],
                )
            except RefusedError:
                continue
            admitted += 1
            queue.put(job, None, [(9, None)] * size, lambda rows, length: run_s, now)
        while now < (arrival + 1) * texts * run_s / 2 and (batch := queue.take(now)):
            now += run_s
            expired += len(queue.expire(now))
            for entry in batch:
                if queue.finish(entry, None):
                    queue.close(entry.job)
    assert admitted * size > 1000
    assert expired <= admitted / 10
