"""Test doubles: a manual clock, an engine that blocks or fails, and a recorder of runs."""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from bertserve.service.bundle.graph_spec import Outputs
from bertserve.service.bundle.manifest import Activation, Embedding
from bertserve.service.engine import onnx_engine
from bertserve.service.engine.sessions import open_session
from bertserve.service.errors import EngineError
from bertserve.service.scheduling.records import Item
from bertserve.service.text.tokenizer import Encoding


class ManualClock:
    """A monotonic clock that changes only when a test sets `now`."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@dataclass(slots=True, eq=False, repr=False)
class FakeItem(Item):
    """An item with anything."""

    payload: Any = None


def fake_work(held_tokens: int = 0, *, chars: int = 1, prepare: Any = tuple, proceed: Any = lambda rows: ()) -> Any:
    """Returns the work of a request; by default it has no items."""
    return SimpleNamespace(held_tokens=held_tokens, chars=chars, prepare=prepare, proceed=proceed)


class FakeRunner:
    """A runner of fake items with given predictions; its results are their payloads, unless `run` is given."""

    def __init__(
        self,
        predict_seconds: Callable[[int, int], float],
        *,
        max_batch_tokens: int = 64,
        shares_batches: bool = True,
        shape: Callable[[int, int], tuple[int, int] | None] = lambda rows, length: (rows, length),
        run: Callable[[Sequence[Any]], Sequence[Any]] = list,
        run_multi_threaded: Callable[[Sequence[Any]], Sequence[Any]] | None = None,
    ) -> None:
        self.predict_seconds = predict_seconds
        self.max_batch_tokens = max_batch_tokens
        self.shares_batches = shares_batches
        self.padded_shape = shape
        self._run = {False: run, True: run_multi_threaded or run}

    def run(self, items: Sequence[FakeItem], *, multi_threaded: bool) -> Sequence[Any]:
        return self._run[multi_threaded]([item.payload for item in items])


class FakeEngine:
    """Returns logits that depend on the first token and the length of each text; waits while `gate` is cleared."""

    def __init__(self, *, guilty_token: int | None = None) -> None:
        self.guilty_token = guilty_token
        self.gate = threading.Event()
        self.gate.set()
        self.entered = threading.Semaphore(0)
        self.batches: list[int] = []
        self.small_outputs = False  # the argument of the last run

    def run(self, encodings: Sequence[Encoding], *, small_outputs: bool = False) -> list[Outputs]:
        self.entered.release()
        assert self.gate.wait(20), "the test never opened the gate"
        self.batches.append(len(encodings))
        self.small_outputs = small_outputs
        if any(self.guilty_token in encoding.ids.tolist() for encoding in encodings):
            raise EngineError("the graph failed with GuiltyToken.")
        return [self.row(encoding) for encoding in encodings]

    def row(self, encoding: Encoding) -> Outputs:
        logits = np.zeros(3, dtype=np.float32)
        logits[int(encoding.ids[1]) % 3] = len(encoding) / 10
        return {"logits": logits}


@dataclass(frozen=True)
class Head:
    """The fields of a manifest that decoding needs."""

    labels: tuple[str, ...] = ()
    tags: tuple[str, ...] = ()
    activation: Activation = "softmax"
    embedding: Embedding | None = None
    attention_heads: tuple[int, ...] = ()


def wrap_sessions(patch: pytest.MonkeyPatch, wrap: Callable[[Any], Any], **options: Any) -> None:
    """Replaces each session that is opened from now on by `wrap(session)`; `options` are those of `open_session`."""
    patch.setattr(onnx_engine, "open_session", lambda *arguments, **keywords: wrap(open_session(*arguments, **keywords | options)))


def record_runs(patch: pytest.MonkeyPatch, record: Callable[[dict[str, NDArray[Any]]], Any], **options: Any) -> None:
    """Calls `record` with the inputs of each run of each session that is opened from now on; `options` are those of `open_session`."""
    wrap_sessions(patch, lambda session: SimpleNamespace(run=lambda names, feed: (record(feed), session.run(names, feed))[1]), **options)
