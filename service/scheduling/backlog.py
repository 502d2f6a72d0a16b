"""Backlog: what is admitted and what waits, and which entries run next. The heart of the scheduler, and pure.

No threads, no locks and no clock: every call passes `now`, and one caller at a time calls. It sees of an entry an opaque
key (what may share a batch), its cost in tokens and a payload that it never opens.

A **Job** is one request: admitted whole or refused whole, closed exactly once. It has one or more **entries** (texts, or
windows of a text), which run in batches. Invariants: `queue_tokens` is the sum over open jobs of what they still hold,
and a closed job's entries never start.

Every operation is O(log n) amortized over the entries: dead entries are skipped when they come up, each once.
"""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Sequence
from itertools import count
from math import inf
from typing import Any

from bertserve.service.errors import InvalidValueError, RefusedError, TooLargeError
from bertserve.service.scheduling.group import Group
from bertserve.service.scheduling.job import PACE, Cost, Entry, Job, Shape, exact
from bertserve.service.scheduling.later import MAX_PARTS, Later
from bertserve.service.scheduling.share import UNDERESTIMATED, Share

# Jobs and entries that have ended and may be kept beside as many as are alive, so that one in so many lets go of them.
KEPT_ENDED = 64

# Times its prediction that nearly every wait is at most: under overload, and with neighbors, a machine is a tenth slower than it was.
PREDICTION_ERROR = 1.15

# A job is long if its entries before the last one take more predicted seconds of a lane.
LONG_S = 0.05

# The deadline can lower the pace of a job. The limit is LEAST_PACE, the speed of the clock, so that a short deadline gives no priority over
# other requests. For a job of more than HEAVY_S seconds it is PACE, because it would delay others for too long.
HEAVY_S, LEAST_PACE = 1.0, 1.0

# When the queue is full, requests of at most a 64th of it are still admitted, until small requests hold an 8th of it.
SMALL_PARTS, SPARE_PARTS = 64, 8

# Seconds by which a companion may always rank after the head: while waits are this short, the best batch counts for more.
OVERTAKEN_S = 0.1

# Least part of a run that a companion must save. Nobody can interrupt a run, so that one is no longer than what it gains from it.
LEAST_GAIN = 1 / 32


class Backlog:
    """Jobs and entries that wait, in fair order, within a token budget."""

    def __init__(self, *, max_batch_tokens: int, max_queue_tokens: int, lanes: int = 1) -> None:
        """Creates an empty backlog.

        Args:
            max_batch_tokens: Budget of a batch: rows times padded length.
            max_queue_tokens: Most tokens that admitted jobs may hold together.
            lanes: How many batches run at once, for predicted waits.
        """
        self.max_batch_tokens = max_batch_tokens
        self.max_queue_tokens = max_queue_tokens
        self.queue_tokens = 0
        self.queue_entries = 0
        self.queue_seconds = 0.0
        self.lanes = lanes
        self._later = Later()
        self._tie = count()
        # Jobs by a rank that is at most that of their first waiting entry, which is corrected when it comes up. Each stage of a job has its own
        # item; an earlier one is dropped.
        self._ranked: list[tuple[float, int, Job]] = []
        self._groups: dict[Hashable, Group] = {}
        self._deadlines: list[tuple[float, int, Job]] = []
        self._open_jobs = 0
        self._long_jobs = 0
        self._small_tokens = 0
        self._ended = 0  # entries in groups that will never start

    def admit(
        self,
        *,
        tokens: int,
        seconds: float,
        deadline: float,
        now: float,
        busy_s: float = 0.0,
        entries: int = 1,
        share: Share | None = None,
    ) -> Job:
        """Admits a whole request by its estimated cost.

        Args:
            tokens: About how many it has.
            seconds: About how many it takes of a lane.
            deadline: Time by which its last entry must have started.
            now: The time.
            busy_s: Seconds that the lanes still need for what they run, together; 0 where one is free.
            entries: About how many entries it will have.
            share: The share of the queue that it counts in.

        Raises:
            TooLargeError: It is larger than the queue and would never fit.
            RefusedError: It does not fit now, into the queue or its share, or would probably not start before its deadline.
        """
        if tokens > self.max_queue_tokens:
            raise TooLargeError(
                "the request has about {tokens} tokens and the queue holds {max_queue_tokens}; split it, or raise --max-queue-tokens.",
                tokens=tokens,
                max_queue_tokens=self.max_queue_tokens,
            )
        if share is not None:
            tokens = share.reservation(tokens, self.max_queue_tokens)
        is_small = share is None and tokens * SMALL_PARTS <= self.max_queue_tokens
        self._check_room(tokens, busy_s, is_small=is_small)
        wait = self.wait_s(now, busy_s)
        before = _before_last(seconds, entries)
        # the last entry of a long job, and a job of a share, wait for the later entries of others too
        last_wait = max(wait, (self.queue_seconds + busy_s) / self.lanes) if before > LONG_S or share is not None else wait
        # its own entries count within the error only: otherwise a queue that is always as long as allowed would admit nothing but short texts
        left, own = deadline - now, before / self.lanes
        if now + (max(PREDICTION_ERROR * last_wait, last_wait + own) if last_wait else 0.0) > deadline:
            raise RefusedError(
                "the queue is about {wait:.1f} s long, so the request would probably expire before it could start; try again "
                "later, or allow more time.",
                wait=last_wait,
                reason="deadline",
                retry_after_s=last_wait - min(left / PREDICTION_ERROR, left - own),
            )
        job = Job(
            deadline=deadline,
            tokens=tokens,
            seconds=seconds,
            arrived=now,
            rank=now,
            slack_s=max(left - PREDICTION_ERROR * last_wait - own, 0.0),
            is_small=is_small,
            predicted_wait_s=wait,
            share=share,
        )
        self._open_jobs += 1
        self._hold(job, tokens, seconds)
        self._enter_share(job, seconds, before)
        self._later.expect(job, entries)
        return job

    def _check_room(self, tokens: int, busy_s: float, *, is_small: bool) -> None:
        """Refuses a request for which the queue has no room."""
        has_room = is_small and self._small_tokens + tokens <= self.max_queue_tokens // SPARE_PARTS
        if self.queue_tokens + tokens > self.max_queue_tokens and not has_room:
            excess = (self.queue_tokens + tokens - self.max_queue_tokens) / self.queue_tokens
            raise RefusedError(
                "the queue is full: it holds {queue_tokens} of {max_queue_tokens} tokens and the request has about {tokens}; "
                "try again later.",
                queue_tokens=self.queue_tokens,
                max_queue_tokens=self.max_queue_tokens,
                tokens=tokens,
                reason="queue_full",
                retry_after_s=max(busy_s + self.queue_seconds * excess, 0.0) / self.lanes,  # room comes with starts, after the runs of now
            )

    def wait_s(self, now: float, busy_s: float = 0.0) -> float:
        """Returns the predicted seconds until an entry that arrives now starts: what ranks before it, over all lanes."""
        return max(self.queue_seconds - self._later.seconds_after(now) + busy_s, 0.0) / self.lanes

    def put(
        self,
        job: Job,
        key: Hashable | None,
        work: Sequence[tuple[int, Any]],
        cost: Cost,
        now: float,
        *,
        keep_estimate: bool = False,
        reserve: int = 0,
        shape: Shape = exact,
    ) -> None:
        """Queues an admitted job's entries, in place of what it held before; a closed job's are dropped.

        Args:
            job: An open job none of whose entries wait.
            key: What may share a batch; None for entries that run alone.
            work: Tokens and payload of each entry, at least one.
            cost: Predicted seconds of a batch of `rows` padded to `length`.
            now: The time.
            keep_estimate: Go on holding the estimate of admission beside these entries.
            reserve: Tokens to hold beside these entries, for those of later calls. They rank after what arrives until then, so that they take
                room and make nobody wait.
            shape: What a batch of this key is run at; a longer one of as many rows is never smaller, and one row always runs.

        Raises:
            InvalidValueError: An entry is over the budget of a batch.
            RefusedError: They are many times what was admitted, and do not fit now.
        """
        longest = max(tokens for tokens, _ in work)
        if _area(shape(1, longest)) > self.max_batch_tokens:
            raise InvalidValueError(
                "a text of {longest} tokens is over the {max_batch_tokens} tokens of a batch; raise --max-batch-tokens.",
                longest=longest,
                max_batch_tokens=self.max_batch_tokens,
            )
        if not job.open:
            return
        self._check_underestimated(job, reserve + sum(tokens for tokens, _ in work))
        self._hold(job, -job.tokens, -job.seconds)
        if not keep_estimate:
            job.tokens, job.seconds, job.estimated = reserve, 0.0, False
            self._later.drop_all(job)
        job.results = [None] * len(work)
        job.waiting = job.remaining = len(work)
        job.queued_at = now
        each = [self._share(key, tokens, cost, shape) for tokens, _ in work]
        self._pace(job, _before_last(sum(each), len(each)))
        rank = first = job.rank + job.pace * (job.started_s + job.finish_s + job.delay_s)
        for index, ((tokens, payload), seconds) in enumerate(zip(work, each, strict=True)):
            job.entries.append(entry := Entry(job, index, tokens, payload, key, cost, shape, seconds, rank))
            self._group(entry)
            if rank > now:
                self._later.add(entry)
            rank += job.pace * seconds
            job.tokens += tokens
            job.seconds += seconds
        self._hold(job, job.tokens, job.seconds)
        self.queue_entries += len(work)
        job.place = next(self._tie)
        heapq.heappush(self._ranked, (first, job.place, job))
        self._watch(job)

    def _check_underestimated(self, job: Job, tokens: int) -> None:
        """Refuses what was let in by an estimate far too low and would overfill the queue; what is nearer to it is only charged."""
        held = self.queue_tokens - job.tokens
        if tokens > UNDERESTIMATED * job.tokens and held + tokens > self.max_queue_tokens:
            raise RefusedError(
                "the request has {tokens} tokens where about {estimate} were expected, and the queue holds {held} of "
                "{max_queue_tokens}; try again later, or split it.",
                tokens=tokens,
                estimate=job.tokens,
                held=held,
                max_queue_tokens=self.max_queue_tokens,
                reason="queue_full",
                retry_after_s=self.queue_seconds / self.lanes,
            )

    def expect_answer(self, job: Job, size: int) -> None:
        """Counts the bytes of a job's answer in its share.

        Raises:
            RefusedError: The jobs of its share would make too large answers at once.
        """
        if job.share is not None and job.open:
            job.share.check_answer(job.answer_bytes, size)
            job.share.answer_bytes += size - job.answer_bytes
            job.answer_bytes = size

    def take(self, now: float, *, last_lane: bool = False) -> list[Entry]:
        """Takes the best batch there is: the first entry in rank and its best companions; empty if nothing waits.

        Companions have the head's key, and have waited nearly as long. The nearest lengths come first, and one joins as long as the batch
        stays within the budget and the fixed cost that it saves everyone who waits outweighs the delay to those already in the batch.
        It is not too small a part of the run either.

        Args:
            now: The time.
            last_lane: Whether no other lane is free and others may come: then only jobs of which nothing runs may start, so that none has all lanes.
        """
        head = self._first(last_lane)
        if head is None:
            return []
        batch = [head]
        length = _length(head.shape(1, head.tokens))
        group = self._groups.get(head.key) if head.key is not None else None
        # who has waited less than two thirds as long as the head waits on, so that waits can be predicted
        last_rank = head.rank + max((now - head.rank) / 3, OVERTAKEN_S)
        self._start(head, now)
        while group is not None and (companion := self._companion(group, len(batch), length, head, last_rank, last_lane)) is not None:
            length = max(length, _length(head.shape(1, companion.tokens)))
            batch.append(companion)
            self._start(companion, now)
        return batch

    def finish(self, entry: Entry, result: Any) -> bool:
        """Records an entry's result; returns whether it was the last one of an open job.

        The caller then puts the job's next entries, or closes it.
        """
        job = entry.job
        if not job.open:
            return False
        job.results[entry.index] = result
        job.running -= 1
        job.remaining -= 1
        return job.remaining == 0

    def close(self, job: Job) -> bool:
        """Ends a job, whatever its state; true for the first call only. Its waiting entries will never start."""
        if not job.open:
            return False
        job.open = False
        self._later.drop_all(job)
        job.results = []  # the deadline heap may hold the job for a while longer
        self._ended += sum(entry.key is not None for entry in job.entries if entry.waiting)
        job.entries.clear()
        self._open_jobs -= 1
        self._long_jobs -= job.is_long
        if job.share is not None:
            job.share.jobs -= 1
            job.share.rank -= job.pace * job.seconds  # of what will not run
            job.share.answer_bytes -= job.answer_bytes
            self._long_jobs -= job.share.jobs == 0
        self._hold(job, -job.tokens, -job.seconds)
        self.queue_entries -= job.waiting
        self._let_go()
        return True

    def expire(self, now: float) -> list[Job]:
        """Closes and returns the jobs whose deadline has passed while an entry of theirs still waits."""
        expired = []
        while self._deadlines and self._deadlines[0][0] <= now:
            job = heapq.heappop(self._deadlines)[2]
            job.watched = False
            if job.waiting and job.expires and self.close(job):
                expired.append(job)
        return expired

    def _enter_share(self, job: Job, seconds: float, before: float) -> None:
        """Ranks a new job behind those of its share, if it has one, and sets its pace."""
        share = job.share
        if share is not None:
            share.jobs += 1
            self._long_jobs += share.jobs == 1
        self._pace(job, before)
        if share is not None:
            job.rank = min(max(job.rank, share.rank), job.rank + job.slack_s)
            share.rank = job.rank + job.pace * seconds

    def _pace(self, job: Job, before: float) -> None:
        """Sets the pace of a job by how many long jobs share the lanes: all of them together must not fall behind the time.

        The last entry must rank early enough to start before the deadline, even if the requests that rank before it keep the lanes busy.

        Args:
            job: An open job.
            before: Predicted seconds of what it still has to do before its last entry.
        """
        before += job.started_s + job.finish_s
        if before > LONG_S and not job.is_long and job.share is None:  # all jobs of a share together count as a long one
            job.is_long = True
            self._long_jobs += 1
        job.pace = PACE * max(1.0, self._long_jobs / self.lanes)
        if before * job.pace > job.slack_s:
            job.pace = max(job.slack_s / before, PACE if before > HEAVY_S else LEAST_PACE)

    def _watch(self, job: Job) -> None:
        """Makes `expire` check a job when its deadline has passed; a job with several stages has one item."""
        if job.expires and not job.watched:
            job.watched = True
            heapq.heappush(self._deadlines, (job.deadline, next(self._tie), job))

    def _let_go(self) -> None:
        """Forgets entries and jobs that have ended, before they are most of what is kept: all lanes may be busy, and nobody else comes by."""
        slack = KEPT_ENDED if self._open_jobs else 0
        if len(self._deadlines) > 2 * self._open_jobs + slack:
            self._deadlines = [item for item in self._deadlines if item[2].open]
            heapq.heapify(self._deadlines)
        if len(self._ranked) > 2 * self._open_jobs + slack:
            self._ranked = [item for item in self._ranked if item[2].open and item[1] == item[2].place]
            heapq.heapify(self._ranked)
        if self._ended > self.queue_entries + slack:
            self._ended = 0
            self._groups.clear()
            for job in dict.fromkeys(item[2] for item in self._ranked):
                for entry in job.entries:
                    if entry.waiting:
                        self._group(entry)
        if len(self._later) > 2 * (self.queue_entries + MAX_PARTS * self._open_jobs) + slack:
            self._later.let_go()

    def _hold(self, job: Job, tokens: int, seconds: float) -> None:
        self.queue_tokens += tokens
        if job.is_small:
            self._small_tokens += tokens
        if job.share is not None:
            job.share.tokens += tokens
        # float sums drift; an empty queue takes no time
        self.queue_seconds = self.queue_seconds + seconds if self.queue_tokens else 0.0

    def _share(self, key: Hashable | None, tokens: int, cost: Cost, shape: Shape) -> float:
        """Returns the predicted seconds of an entry, in a full batch of its like where it may share one."""
        length = _length(shape(1, tokens))
        rows = 1 if key is None else max(1, self.max_batch_tokens // max(1, length))
        return cost(rows, length) / rows

    def _group(self, entry: Entry) -> None:
        if entry.key is not None:
            self._groups.setdefault(entry.key, Group()).push(entry.tokens, (entry.rank, next(self._tie), entry))

    def _start(self, entry: Entry, now: float) -> None:
        job = entry.job
        entry.waiting = False
        if not job.started_s:
            job.wait_s = now - job.arrived
        job.started_s += entry.seconds
        job.waiting -= 1
        job.running += 1
        job.tokens -= entry.tokens
        job.seconds -= entry.seconds
        self.queue_entries -= 1
        self._later.drop(entry)
        self._hold(job, -entry.tokens, -entry.seconds)
        if not job.waiting:
            job.queued_s += now - job.queued_at
        self._clean(entry)

    def _first(self, last_lane: bool) -> Entry | None:
        """Returns the first waiting entry in rank of a job that may start one; a job stays in the heap for as long as any of its waits."""
        passed: list[tuple[float, int, Job]] = []
        found = None
        while self._ranked and found is None:
            rank, tie, job = self._ranked[0]
            while job.entries and not job.entries[0].waiting:  # it has started as a companion
                job.entries.popleft()
            if tie != job.place or not job.entries:
                heapq.heappop(self._ranked)
            elif job.entries[0].rank > rank:
                heapq.heapreplace(self._ranked, (job.entries[0].rank, tie, job))
            elif last_lane and job.running:
                passed.append(heapq.heappop(self._ranked))
            else:
                found = job.entries[0]
        for item in passed:
            heapq.heappush(self._ranked, item)
        return found

    def _clean(self, entry: Entry) -> None:
        """Lets go of a dead entry that has the first rank of its length, so that no group grows without end."""
        if entry.key is not None and (group := self._groups.get(entry.key)) is not None:
            group.first(entry.tokens)
            if not group.lengths:
                del self._groups[entry.key]

    def _companion(self, group: Group, rows: int, length: int, head: Entry, last_rank: float, last_lane: bool) -> Entry | None:
        """Returns the best entry to add to a batch of `rows` padded to `length`, or None if none is worth it."""
        for entry in (group.longest_within(length, last_rank), group.shortest_over(length, last_rank)):
            if entry is None or (last_lane and entry.job.running and entry.job is not head.job):
                continue
            alone = _length(head.shape(1, entry.tokens))
            longer = max(length, alone)
            # by the rows that are worth something: rows that fill up a planned shape are there for the next companion
            run_s = head.cost(rows + 1, longer)
            delay = run_s - head.cost(rows, length)
            saved = head.cost(1, alone) - delay
            if _area(head.shape(rows + 1, longer)) > self.max_batch_tokens:
                continue
            if saved * self.queue_entries > delay * rows and saved >= LEAST_GAIN * run_s:
                return entry
        return None


def _before_last(seconds: float, entries: int) -> float:
    """Returns the predicted seconds of a job before its last entry, of `entries` about equal ones."""
    return seconds - seconds / max(entries, 1)


def predicted_s(batch: Sequence[Entry]) -> float:
    """Returns the predicted seconds of a run of a batch, or of a part of one."""
    head, rows = batch[0], len(batch)
    return head.cost(rows, _length(head.shape(1, max(entry.tokens for entry in batch))))


def _length(shape: tuple[int, int] | None) -> int:
    """Returns the length of the shape of one row, which there always is."""
    assert shape is not None
    return shape[1]


def _area(shape: tuple[int, int] | None) -> float:
    """Returns the padded tokens of a shape; endless where there is none."""
    return inf if shape is None else shape[0] * shape[1]
