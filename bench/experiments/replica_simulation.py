"""The simulation of replicas behind a balancer, with hedged requests: what `queue_simulation` is to one service, for many.

Each replica is one queue in front of equal lanes. What waits runs in the order of its rank, as in the service: its arrival plus one and a
half times what the earlier runs of its request cost. Nothing shares a run, and nothing takes time but runs. It is pure arithmetic without
a clock, and the same seed gives the same figures.
"""

from __future__ import annotations

import heapq
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

# Of the cost of a request's earlier runs in the rank of the next one (docs/explanation/scheduling.md).
_RANK_FACTOR = 1.5


@dataclass(slots=True, eq=False)
class Copy:
    """A request at a replica; a hedged request has two of them."""

    request: int
    replica: Replica
    balancer: int
    left: int
    cancelled: bool = False
    answered: bool = False


@dataclass(slots=True, eq=False)
class Replica:
    """A queue and its lanes.

    Attributes:
        number: Its place in the list.
        free: Lanes without a run.
        slowdown: What runs take here, relative to other replicas.
        late: Share of its answers that come late, as after a lost packet, and by how many seconds; its lanes are free meanwhile.
        waiting: Runs that wait, as a heap by rank: rank, order of arrival, seconds, copy.
        connections: Requests that it has and has not answered, by the balancer that sent them.
        work_s: Seconds of runs of these: what waits, and all of what runs.
        chosen: When each balancer last sent it a request, in requests.
    """

    number: int
    free: int
    slowdown: float = 1.0
    late: tuple[float, float] = (0.0, 0.0)
    waiting: list[tuple[float, int, float, Copy]] = field(default_factory=list)
    connections: Counter[int] = field(default_factory=Counter)
    work_s: float = 0.0
    chosen: Counter[int] = field(default_factory=Counter)


# Chooses a replica among several, for a balancer that knows its own connections alone, at a time in seconds.
Policy = Callable[[Sequence[Replica], int, float], Replica]


def round_robin() -> Policy:
    """Returns the policy that takes each replica in turn."""
    return lambda replicas, balancer, now: min(replicas, key=lambda replica: replica.chosen[balancer])


def least_connections() -> Policy:
    """Returns the policy that takes the replica with the fewest open requests, of several the one that was not taken for longest."""
    return lambda replicas, balancer, now: min(replicas, key=lambda replica: (replica.connections[balancer], replica.chosen[balancer]))


def least_work() -> Policy:
    """Returns the policy that takes a replica with a free lane, or else the one with the least work: what knows lanes and tokens can do."""
    return lambda replicas, balancer, now: min(replicas, key=lambda replica: (not replica.free, replica.work_s, replica.chosen[balancer]))


def reported_work(interval_s: float) -> Policy:
    """Returns the policy that takes the replica that had the least work when all were last asked, every `interval_s` seconds."""
    reported: dict[int, float] = {}
    asked = -1

    def choose(replicas: Sequence[Replica], balancer: int, now: float) -> Replica:
        nonlocal asked
        if asked != int(now / interval_s):
            asked = int(now / interval_s)
            reported.update({replica.number: replica.work_s for replica in replicas})
        return min(replicas, key=lambda replica: (reported[replica.number], replica.chosen[balancer]))

    return choose


def two_choices(seed: int) -> Policy:
    """Returns the policy that draws two replicas, and takes the one with fewer open requests."""
    random_ = random.Random(seed)  # noqa: S311  # load, not secrets
    return lambda replicas, balancer, now: min(
        random_.sample(replicas, min(2, len(replicas))), key=lambda replica: replica.connections[balancer]
    )


@dataclass(frozen=True, slots=True)
class Simulated:
    """What a simulation gave.

    Attributes:
        latencies: Of each request in seconds, from its arrival to the end of its last run.
        hedged: Share of requests that were sent twice.
        busy_s: Seconds that lanes ran, second copies included.
    """

    latencies: list[float]
    hedged: float
    busy_s: float


def simulate(
    arrivals: Sequence[float],
    requests: Sequence[Sequence[float]],
    replicas: Sequence[Replica],
    policy: Policy,
    *,
    balancers: int = 1,
    hedge_after_s: float | None = None,
    seed: int = 0,
) -> Simulated:
    """Returns the latencies of requests that a policy deals to replicas.

    Args:
        arrivals: Arrival times in seconds, ascending.
        requests: For each request, the seconds of its runs.
        replicas: Idle ones.
        policy: Chooses one for each request.
        balancers: How many there are; each gets its share of the requests at random.
        hedge_after_s: A request without an answer after so many seconds is sent to another replica too. The first answer counts, and what
            then still waits of the other copy never runs.
        seed: Seed of which balancer gets which request, and of which answers come late.
    """
    random_ = random.Random(seed)  # noqa: S311  # load, not secrets
    through = [random_.randrange(balancers) for _ in arrivals]
    return _Simulation(arrivals, requests, replicas, policy, through, hedge_after_s, random_).run()


class _Simulation:
    """Events in their order: arrivals, ends of runs, times to hedge."""

    def __init__(
        self,
        arrivals: Sequence[float],
        requests: Sequence[Sequence[float]],
        replicas: Sequence[Replica],
        policy: Policy,
        through: Sequence[int],
        hedge_after_s: float | None,
        random_: random.Random,
    ) -> None:
        self._arrivals, self._requests, self._replicas, self._policy = arrivals, requests, replicas, policy
        self._through, self._hedge_after_s, self._random = through, hedge_after_s, random_
        self._copies: list[list[Copy]] = [[] for _ in requests]
        self._latencies = [0.0] * len(requests)
        self._events: list[tuple[float, int, Callable[[float], None]]] = []
        self._order = self._hedges = self._sent = 0
        self._busy_s = 0.0

    def run(self) -> Simulated:
        for request, arrival in enumerate(self._arrivals):
            # whatever ends or is due until then
            while self._events and self._events[0][0] <= arrival:
                self._next()
            self._send(arrival, request, self._replicas)
            if self._hedge_after_s is not None:
                self._at(arrival + self._hedge_after_s, partial(self._hedge, request=request))
        while self._events:
            self._next()
        return Simulated(self._latencies, self._hedges / max(1, len(self._requests)), self._busy_s)

    def _next(self) -> None:
        now, _, event = heapq.heappop(self._events)
        event(now)

    def _at(self, time: float, event: Callable[[float], None]) -> None:
        self._order += 1
        heapq.heappush(self._events, (time, self._order, event))

    def _send(self, now: float, request: int, among: Sequence[Replica]) -> None:
        balancer = self._through[request]
        replica = self._policy(among, balancer, now)
        runs = [seconds * replica.slowdown for seconds in self._requests[request]]
        self._sent += 1
        replica.chosen[balancer] = self._sent
        replica.connections[balancer] += 1
        replica.work_s += sum(runs)
        copy = Copy(request, replica, balancer, len(runs))
        self._copies[request].append(copy)
        rank = now
        for seconds in runs:
            self._order += 1
            heapq.heappush(replica.waiting, (rank, self._order, seconds, copy))
            rank += _RANK_FACTOR * seconds
        self._start(now, replica)

    def _hedge(self, now: float, request: int) -> None:
        (copy,) = self._copies[request]
        if copy.answered or len(self._replicas) == 1:
            return
        self._hedges += 1
        self._send(now, request, [replica for replica in self._replicas if replica is not copy.replica])

    def _start(self, now: float, replica: Replica) -> None:
        while replica.free and replica.waiting:
            _, _, seconds, copy = heapq.heappop(replica.waiting)
            if copy.cancelled:
                continue  # its work is no longer counted
            replica.free -= 1
            self._busy_s += seconds
            self._at(now + seconds, partial(self._end, copy=copy, seconds=seconds))

    def _end(self, now: float, copy: Copy, seconds: float) -> None:
        replica = copy.replica
        replica.free += 1
        replica.work_s -= seconds
        if not copy.cancelled:
            copy.left -= 1
            if not copy.left:
                share, late_s = replica.late
                self._at(now + (late_s if self._random.random() < share else 0.0), partial(self._answer, copy=copy))
        self._start(now, replica)

    def _answer(self, now: float, copy: Copy) -> None:
        if copy.cancelled:
            return
        copy.answered = True
        copy.replica.connections[copy.balancer] -= 1
        self._latencies[copy.request] = now - self._arrivals[copy.request]
        for other in self._copies[copy.request]:
            if other is not copy:
                other.cancelled = True
                other.replica.connections[other.balancer] -= 1
                other.replica.work_s -= sum(seconds for _, _, seconds, waiting in other.replica.waiting if waiting is other)
