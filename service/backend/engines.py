"""Engines: the sessions of one graph. One is for the lanes; the other has more threads, for solo runs.

A solo run is one beside which no other runs or waits. Lanes give throughput: each run has one thread. A caller who is alone would
leave all lanes but one without work, so a solo run of enough tokens takes several cores. Short runs do not gain: waking threads
costs more than they save. The second session costs the memory of the weights once more.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

from service.backend.cost import CostModel
from service.backend.onnx_engine import Engine

# More threads save less and less of a run, and the next caller finds all their cores taken.
MAX_SOLO_THREADS = 4
# Seconds on a lane, for each node of the graph, from which on threads pay: they are woken for every node. Measured with two threads
# on the four embedded models: 0.9 of the speed at 20 us a node, 1.0 at 30, 1.15 to 1.25 at 47, 1.3 at 75, 1.4 to 1.6 at 170.
SOLO_SECONDS_PER_NODE = 5e-5


@dataclass(frozen=True, slots=True)
class SoloEngine:
    """An engine whose runs take several cores.

    Attributes:
        engine: The same graph as the lanes run, with more threads.
        threads: How many.
        min_tokens: Padded tokens of a run from which on it is faster.
    """

    engine: Engine
    threads: int
    min_tokens: int


@dataclass(frozen=True, slots=True)
class Engines:
    """What runs a model's batches.

    Attributes:
        lane: With one thread, for all lanes.
        solo: With several threads, for solo runs, where some text is worth it.
    """

    lane: Engine
    solo: SoloEngine | None = None

    def for_solo_run(self, tokens: int) -> Engine:
        """Returns what makes a solo run of so many padded tokens."""
        return self.lane if self.solo is None or tokens < self.solo.min_tokens else self.solo.engine


def min_solo_tokens(cost: CostModel, *, nodes: int, longest: int) -> int | None:
    """Returns the length from which on a text is worth several threads, by what the cost model predicts for a lane.

    A rule, and no measurement of the moment: whatever else the machine does while the service starts would decide for its lifetime.

    Args:
        cost: Fitted, and not yet following.
        nodes: Of the graph; 0 where they are not known.
        longest: Tokens of the longest text.

    Returns:
        The length in tokens, or None where no text is worth it, or it is not known.
    """
    if not nodes:
        return None
    found = 1 + bisect_left(range(1, longest + 1), SOLO_SECONDS_PER_NODE * nodes, key=lambda length: cost.seconds(1, length))
    return found if found <= longest else None
