"""Text classification: a text, or a pair, to labels and scores, as the Hugging Face pipeline gives them.

Differences from the pipeline, on purpose: text over the model's length is truncated (and said to be) instead of
failing inside the model, or scored window by window when asked.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypedDict

import numpy as np

from service.bundle.manifest import Activation
from service.errors import InvalidValueError
from service.tasks.encoded import Encoded, ModelConfig
from service.tasks.scores import Row, activate, best_first
from service.text.tokenizer import Encoding, Tokenizer, default_stride, estimate_tokens, truncate_longest_first, windows

TASK = "text-classification"


class LabelScore(TypedDict):
    """One label with its score."""

    label: str
    score: float


@dataclass(frozen=True, slots=True)
class Request:
    """One text, or pair of texts, to classify.

    Attributes:
        text: The text, or the first of a pair.
        text_pair: The second text of a pair.
        top_k: How many labels to return; all when None.
        function_to_apply: Activation in place of the model's own.
        truncation: Whether a text over the model's length is cut (else it is an error).
        window: Score every window of a long text and combine them, instead of truncating.
        stride: Tokens that neighboring windows share; 128, at most half a window, when None.
    """

    text: str
    text_pair: str | None = None
    top_k: int | None = None
    function_to_apply: Activation | None = None
    truncation: bool = True
    window: Literal["mean", "max"] | None = None
    stride: int | None = None

    @property
    def chars(self) -> int:
        """Characters that have to be tokenized."""
        return len(self.text) + len(self.text_pair or "")


def estimate(request: Request, max_length: int) -> int:
    """Returns a cheap guess of the tokens that the request will cost, for admission."""
    tokens = estimate_tokens(request.text) + estimate_tokens(request.text_pair or "")
    return tokens if request.window else min(tokens, max_length)


def encode(request: Request, tokenizer: Tokenizer) -> Encoded:
    """Returns one encoding per window, or the one of the (truncated) text.

    Raises:
        InvalidValueError: The text is too long and `truncation` is false, or no window has room for `stride`.
    """
    # an empty second text is none, as for the pipeline
    a, *rest = (tokens.ids for tokens in tokenizer.tokenize([request.text, request.text_pair] if request.text_pair else [request.text]))
    b = rest[0] if rest else None
    room = tokenizer.room(pair=b is not None)
    if request.window is not None:
        return Encoded(encodings=_windows(request, tokenizer, a, b, room))
    total = len(a) + len(b or ())
    if total <= room:
        return Encoded(encodings=[tokenizer.assemble(a, b)])
    if not request.truncation:
        raise InvalidValueError(
            f"the text has {total} tokens and the model takes {room}; shorten it, or set `truncation` to true or `window` "
            "to `mean` or `max`."
        )
    keep_a, keep_b = truncate_longest_first(len(a), len(b or ()), room)
    return Encoded(encodings=[tokenizer.assemble(a[:keep_a], None if b is None else b[:keep_b])], truncated=True)


def decode(request: Request, encoded: Encoded, rows: Sequence[Row], head: ModelConfig) -> list[LabelScore]:
    """Returns labels and scores, best first; equal scores keep the order of the labels.

    Args:
        request: The request.
        encoded: Not needed.
        rows: One row per window with the output `logits`, float32 [labels].
        head: The model's labels and its own activation.
    """
    activation = request.function_to_apply or head.activation
    scores = [activate(row["logits"], activation) for row in rows]
    combine = np.max if request.window == "max" else np.mean
    combined = combine(scores, axis=0) if len(scores) > 1 else scores[0]
    return [{"label": head.labels[i], "score": float(combined[i])} for i in best_first(combined, request.top_k)]


def _windows(request: Request, tokenizer: Tokenizer, a: list[int], b: list[int] | None, room: int) -> list[Encoding]:
    """Windows the text, or the second text of a pair beside the whole first one."""
    text = a if b is None else b
    room -= 0 if b is None else len(a)
    stride = default_stride(max(room, 0)) if request.stride is None else request.stride
    if len(text) > room and room <= stride:
        raise InvalidValueError(
            f"windows of {max(room, 0)} tokens have no room for a `stride` of {stride}"
            + ("" if b is None else f" beside a first text of {len(a)} tokens")
            + "; make `stride` or the first text smaller."
        )
    if len(text) <= room:
        return [tokenizer.assemble(a, b)]
    cuts = [text[window.start : window.stop] for window in windows(len(text), room, stride)]
    return [tokenizer.assemble(cut) if b is None else tokenizer.assemble(a, cut) for cut in cuts]
