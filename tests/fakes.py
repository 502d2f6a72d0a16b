"""Test doubles: a clock that is moved by hand, and an engine that can block and fail."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from service.backend.onnx_engine import Row
from service.bundle.manifest import Activation, Embedding
from service.errors import EngineError
from service.text.tokenizer import Encoding


class ManualClock:
    """Monotonic seconds that move only when told."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class FakeEngine:
    """Answers each text with logits of its first text token and its length; waits at `gate` while that is cleared."""

    def __init__(self, labels: int = 3, *, guilty_token: int | None = None) -> None:
        self.labels = labels
        self.guilty_token = guilty_token
        self.gate = threading.Event()
        self.gate.set()
        self.entered = threading.Semaphore(0)
        self.batches: list[int] = []

    def run(self, encodings: Sequence[Encoding]) -> list[Row]:
        """Returns `logits` float32 [labels] of each encoding."""
        self.entered.release()
        assert self.gate.wait(20), "the test never opened the gate"
        self.batches.append(len(encodings))
        if any(self.guilty_token in encoding.ids.tolist() for encoding in encodings):
            raise EngineError("the graph failed with GuiltyToken.")
        return [self.row(encoding) for encoding in encodings]

    def row(self, encoding: Encoding) -> Row:
        """Returns the row of one encoding."""
        logits = np.zeros(self.labels, dtype=np.float32)
        logits[int(encoding.ids[1]) % self.labels] = len(encoding) / 10
        return {"logits": logits}


@dataclass(frozen=True)
class Head:
    """What decoding needs of a manifest."""

    labels: tuple[str, ...] = ()
    activation: Activation = "softmax"
    embedding: Embedding | None = None
