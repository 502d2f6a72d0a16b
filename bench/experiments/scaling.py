"""The tables of docs/explanation/scaling.md that are simulated: `python -m bertserve.bench.experiments.scaling` prints them, always the same.

They say what balancing by tokens would buy over least connections, and what hedged requests buy and cost. What a request costs follows
from its tokens alone; the figures below are those of the embedded classifier, and only the unit of the milliseconds depends on them.
"""

from __future__ import annotations

import math
import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean

from bertserve.bench.experiments.queue_simulation import simulate as simulate_one_queue
from bertserve.bench.experiments.replica_simulation import (
    Policy,
    Replica,
    Simulated,
    least_connections,
    least_work,
    reported_work,
    round_robin,
    simulate,
    two_choices,
)
from bertserve.bench.load.arrivals import poisson_arrivals
from bertserve.bench.report.latency import percentile

REQUESTS = 20_000
LANES = 2
# Padded tokens a second and lane, and the fixed cost of a run in tokens (bench/results/2026-11-21-workers-memory.md: 40 to 55 texts of 162
# tokens a second and core).
TOKENS_PER_S, FIXED_TOKENS = 8_500, 15
# Lengths of texts, as of bench's mix `mixed`: log-normal.
MEDIAN_TOKENS, SIGMA, SHORTEST, LONGEST = 33, 0.9, 7, 512
# A document, as of bench's mix `qa`: five windows; one request in twenty, where there are some.
WINDOWS, WINDOW_TOKENS, DOCUMENT_EVERY = 5, 384, 20


@dataclass(frozen=True, slots=True)
class Load:
    """What is sent.

    Attributes:
        arrivals: In seconds.
        requests: Of each, the seconds of its runs.
    """

    arrivals: Sequence[float]
    requests: Sequence[Sequence[float]]


def make_load(count: int, servers: int, share: float, *, documents: bool, seed: int = 0) -> Load:
    """Returns some `count` requests that keep `servers` lanes busy for a share of the time."""
    random_ = random.Random(seed)  # noqa: S311  # load, not secrets
    requests = []
    for i in range(count):
        if documents and i % DOCUMENT_EVERY == 0:
            requests.append([_seconds(WINDOW_TOKENS)] * WINDOWS)
        else:
            drawn = random_.lognormvariate(math.log(MEDIAN_TOKENS), SIGMA)
            requests.append([_seconds(min(max(drawn, SHORTEST), LONGEST))])
    random_.shuffle(requests)
    rate = share * servers / fmean(map(sum, requests))
    arrivals = poisson_arrivals(rate, count / rate, seed=seed)[:count]
    return Load(arrivals, requests[: len(arrivals)])


def _seconds(tokens: float) -> float:
    return (FIXED_TOKENS + tokens) / TOKENS_PER_S


def balancing(count: int = REQUESTS) -> str:
    """Returns the table of policies: the p99 of texts in milliseconds, for replicas, load and documents."""
    policies: dict[str, tuple[Callable[[], Policy], int]] = {
        "each in turn": (round_robin, 1),
        "the less busy of two drawn": (lambda: two_choices(0), 1),
        "least connections": (least_connections, 1),
        "least connections, ten balancers": (least_connections, 10),
        "tokens, known at once": (least_work, 1),
        "tokens, as reported each 0.1 s": (lambda: reported_work(0.1), 1),
    }
    cases = [(documents, replicas, share) for documents in (False, True) for replicas, share in ((10, 0.7), (10, 0.9), (100, 0.9))]
    rows: dict[str, list[str]] = {name: [] for name in [*policies, "one queue for all"]}
    for documents, replicas, share in cases:
        load = make_load(count, replicas * LANES, share, documents=documents)
        for name, (policy, balancers) in policies.items():
            found = simulate(load.arrivals, load.requests, _replicas(replicas), policy(), balancers=balancers)
            rows[name].append(_p99_of_texts(load, found.latencies))
        if documents:  # what runs in the order of rank, as a replica does
            best = simulate(load.arrivals, load.requests, [Replica(0, replicas * LANES)], round_robin()).latencies
        else:
            best = simulate_one_queue(load.arrivals, load.requests, replicas * LANES)
        rows["one queue for all"].append(_p99_of_texts(load, best))
    heads = [f"{'documents too, ' if documents else ''}{replicas} at {share:.0%}" for documents, replicas, share in cases]
    return _table(["p99 of texts, ms", *heads], [[name, *cells] for name, cells in rows.items()])


def hedging(count: int = REQUESTS, replicas: int = 100) -> str:
    """Returns the table of hedged requests: p50, p99 and p99.9 in milliseconds without and with them, and the work that they add."""
    faults: dict[str, Callable[[int], Replica]] = {
        "none": lambda number: Replica(number, LANES),
        "one replica is five times slower": lambda number: Replica(number, LANES, slowdown=1.0 if number else 5.0),
        "one answer in 200 comes 0.2 s late": lambda number: Replica(number, LANES, late=(0.005, 0.2)),
    }
    rows = []
    for fault, make in faults.items():
        for share in (0.7, 0.9):
            load = make_load(count, replicas * LANES, share, documents=False)
            plain = _hedged(load, make, replicas, None)
            cells = [fault, f"{share:.0%}", _three(plain)]
            for after_s in (0.1, percentile(sorted(plain.latencies), 0.95)):
                hedged = _hedged(load, make, replicas, after_s)
                cells += [_three(hedged), f"{hedged.hedged:.1%}", f"{hedged.busy_s / plain.busy_s - 1:+.1%}"]
            rows.append(cells)
    after = ["sent twice", "work"]
    return _table(["fault", "busy", "not hedged", "hedged after 100 ms", *after, "hedged after p95", *after], rows)


def _hedged(load: Load, make: Callable[[int], Replica], replicas: int, after_s: float | None) -> Simulated:
    each = [make(number) for number in range(replicas)]
    return simulate(load.arrivals, load.requests, each, least_connections(), hedge_after_s=after_s)


def _replicas(count: int) -> list[Replica]:
    return [Replica(number, LANES) for number in range(count)]


def _p99_of_texts(load: Load, latencies: Sequence[float]) -> str:
    texts = [seconds for seconds, runs in zip(latencies, load.requests, strict=True) if len(runs) == 1]
    return f"{percentile(sorted(texts), 0.99) * 1000:,.0f}"


def _three(simulated: Simulated) -> str:
    ascending = sorted(simulated.latencies)
    return " / ".join(f"{percentile(ascending, share) * 1000:,.0f}" for share in (0.5, 0.99, 0.999))


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


TABLES: dict[str, Callable[[], str]] = {"balancing": balancing, "hedging": hedging}

if __name__ == "__main__":
    for table in TABLES.values():
        sys.stdout.write(f"{table()}\n")
