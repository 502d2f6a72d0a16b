"""Prediction: the answer to a request, and what it took."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from bertserve.service.tasks.batch import Batch, ReadSpan


@dataclass(slots=True)
class Prediction:
    """The answer to a request, with the seconds of its parts.

    Attributes:
        results: One per input, in order.
        truncated: Indices of inputs of which text was cut off.
        warnings: What else the caller should know, each `topic; message`.
        tokens: What the model read, special tokens included; each mask to be filled counts for one more.
        warned: Index of the input that each of the warnings is about.
        tokenize_s: Seconds to tokenize all inputs.
        queue_s: Seconds until its first run started, without `tokenize_s`.
        inference_s: Seconds from the start of its first run to the end of its last one.
        decode_s: Seconds to decode all inputs.
        answer_bytes: About how long the answer is as JSON, at most.
        read: What the model read of the only input, where it is cut or was read in several windows.
    """

    results: list[Any]
    truncated: list[int]
    warnings: list[str]
    tokens: int = 0
    warned: list[int] = field(default_factory=list)
    tokenize_s: float = 0.0
    queue_s: float = 0.0
    inference_s: float = 0.0
    decode_s: float = 0.0
    answer_bytes: int = 0
    read: Sequence[ReadSpan] = ()


def begun_prediction(batches: Sequence[Batch], tokens: int, *, tokenize_s: float) -> Prediction:
    """Returns what is known of a prediction before it has results.

    Args:
        batches: The first batch of each input.
        tokens: Tokens of all of them.
        tokenize_s: Seconds to make them.
    """
    truncated = [index for index, batch in enumerate(batches) if batch.truncated]
    warnings = [warning for batch in batches for warning in batch.warnings]
    warned = [index for index, batch in enumerate(batches) for _ in batch.warnings]
    prediction = Prediction([], truncated, warnings, tokens, warned=warned, tokenize_s=tokenize_s)
    prediction.read = batches[0].read if len(batches) == 1 else ()
    return prediction
