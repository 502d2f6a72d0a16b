"""Engines: the sessions of one graph, that of the lanes and one with more threads for runs beside which nothing runs or waits.

Lanes give throughput: a run of one thread each. A caller who is alone would leave all lanes but one idle, so a lone run of enough
tokens takes several cores. Short ones do not gain: waking threads costs more than they save. It costs the weights once more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from service.engine import Engine

# More threads save less and less of a run, and the next caller finds all their cores taken.
MOST_THREADS = 4
# What a lone run must gain, as a ratio and in seconds, so that it is worth the cores: below, noise decides.
GAIN = 1.15
SAVED_S = 5e-4
LENGTHS = (16, 32, 64, 128)

Run = tuple[int, int, float]


@dataclass(frozen=True, slots=True)
class IdleEngine:
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
        idle: With several, for a batch beside which nothing runs or waits, where that pays.
    """

    lane: Engine
    idle: IdleEngine | None = None

    def alone(self, tokens: int) -> Engine:
        """Returns what runs a batch of so many padded tokens beside which nothing runs or waits."""
        return self.lane if self.idle is None or tokens < self.idle.min_tokens else self.idle.engine


def lengths(longest: int) -> list[tuple[int, int]]:
    """Returns the shapes to time both engines at, one text each: LENGTHS, as far as the model's longest text goes."""
    return [(1, min(length, longest)) for length in LENGTHS if length <= longest or length == LENGTHS[0]]


def pays_from(alone: Sequence[Run], together: Sequence[Run]) -> int | None:
    """Returns the tokens from which on the runs with more threads are faster by GAIN and SAVED_S, at this length and all longer ones.

    Args:
        alone: `(rows, length, seconds)` of runs with one thread, by rising length.
        together: The same runs with more threads.

    Returns:
        The shortest such length, or None where even the longest run does not gain.
    """
    found = None
    for (rows, length, seconds), (_, _, less) in zip(reversed(alone), reversed(together), strict=True):
        if seconds < GAIN * less or seconds - less < SAVED_S:
            break
        found = rows * length
    return found
