"""Text classification: a text, or a pair, to labels and scores, as the Hugging Face pipeline gives them.

Differences from the pipeline, on purpose: text over the model's length is truncated (and said to be) instead of
failing inside the model, or scored window by window when asked.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from pydantic import BeforeValidator, Field, Tag
from typing_extensions import TypedDict

from service.bundle.manifest import Manifest
from service.errors import InvalidValueError
from service.tasks.body import LIST, PAIR, STOP, TEXT, Closed, Stride, TaskBody, TaskParameters, body_config, lower, one_of
from service.tasks.decoding.scores import Row, activate, best_first
from service.tasks.encoded import Encoded, ModelConfig
from service.tasks.spec import TaskSpec
from service.text.tokenizer import Encoding, Tokenizer, estimate_tokens
from service.text.windows import default_stride, truncate_longest_first, windows

TASK = "text-classification"


class LabelScore(TypedDict):
    """One label with its score."""

    label: Annotated[str, Field(examples=["positive"])]
    score: Annotated[float, Field(examples=[0.997])]


class ClassifyParameters(TaskParameters):
    """Parameters of text classification."""

    top_k: Annotated[int | None, Field(ge=1, description="How many labels to return; all when absent.")] = None
    function_to_apply: Annotated[
        Literal["softmax", "sigmoid", "none"] | None,
        BeforeValidator(lower),
        Field(description="What turns logits into scores, in place of the model's own."),
    ] = None
    truncation: Annotated[bool, Field(description="Cut a text over the model's length, with a warning; false makes it an error.")] = True
    window: Annotated[
        Literal["mean", "max"] | None,
        Field(description="Score every window of a long text and combine the scores, instead of cutting."),
    ] = None
    stride: Stride = None


DEFAULTS = ClassifyParameters()


@dataclass(frozen=True, slots=True)
class Request:
    """One text, or pair of texts, to classify.

    Attributes:
        text: The text, or the first of a pair.
        text_pair: The second text of a pair.
        parameters: How.
    """

    text: str
    text_pair: str | None = None
    parameters: ClassifyParameters = DEFAULTS

    @property
    def chars(self) -> int:
        """Characters that have to be tokenized."""
        return len(self.text) + len(self.text_pair or "")


def estimate(request: Request, max_length: int) -> int:
    """Returns a cheap guess of the tokens that the request will cost, for admission."""
    first, last = (request.text, request.text_pair) if request.text_pair else ("", request.text)
    beside, tokens = estimate_tokens(first) if first else 0, estimate_tokens(last)
    if request.parameters.window is None:
        return min(beside + tokens, max_length)
    room = max_length - 2 - beside
    stride = default_stride(max(room, 0)) if request.parameters.stride is None else request.parameters.stride
    # without room encode says so, and that is the better error
    return min(beside + tokens, max_length) if tokens <= room or room <= stride else tokens * max_length // (room - stride)


def encode(request: Request, tokenizer: Tokenizer) -> Encoded:
    """Returns one encoding per window, or the one of the (truncated) text.

    Raises:
        InvalidValueError: The text is too long and `truncation` is false, or no window has room for `stride`, or a model that says how two texts
            go together is given one.
    """
    if tokenizer.pairs_only and not request.text_pair:
        raise InvalidValueError(
            "this model says how a second text goes with a first, and there is no second one; give a pair, such as "
            '{"text": "It began to rain.", "text_pair": "We went inside."}.'
        )
    # an empty second text is none, as for the pipeline
    a, *rest = (tokens.ids for tokens in tokenizer.tokenize([request.text, request.text_pair] if request.text_pair else [request.text]))
    b = rest[0] if rest else None
    room = tokenizer.room(pair=b is not None)
    if request.parameters.window is not None:
        return Encoded(encodings=_windows(request, tokenizer, a, b, room))
    total = len(a) + len(b or ())
    if total <= room:
        return Encoded(encodings=[tokenizer.assemble(a, b)])
    if not request.parameters.truncation:
        raise InvalidValueError(
            f"the text has {total} tokens and the model takes {room}; shorten it, or set `truncation` to true or `window` "
            "to `mean` or `max`."
        )
    keep_a, keep_b = truncate_longest_first(len(a), len(b or ()), room)
    return Encoded(encodings=[tokenizer.assemble(a[:keep_a], None if b is None else b[:keep_b])], truncated=True)


def decode(request: Request, encoded: Encoded, rows: Sequence[Row], config: ModelConfig) -> list[LabelScore]:
    """Returns labels and scores, best first; equal scores keep the order of the labels.

    Args:
        request: The request.
        encoded: Not needed.
        rows: One row per window with the output `logits`, float32 [labels].
        config: The model's labels and its own activation.
    """
    parameters = request.parameters
    scores = [activate(row["logits"], parameters.function_to_apply or config.activation) for row in rows]
    combine = np.max if parameters.window == "max" else np.mean
    combined = combine(scores, axis=0) if len(scores) > 1 else scores[0]
    return [{"label": config.labels[i], "score": float(combined[i])} for i in best_first(combined, parameters.top_k)]


def _windows(request: Request, tokenizer: Tokenizer, a: list[int], b: list[int] | None, room: int) -> list[Encoding]:
    """Windows the text, or the second text of a pair beside the whole first one."""
    text = a if b is None else b
    room -= 0 if b is None else len(a)
    stride = default_stride(max(room, 0)) if request.parameters.stride is None else request.parameters.stride
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


class TextPair(Closed):
    """A text and a second text that belongs to it."""

    text: str
    text_pair: str | None = None


_Text = Annotated[str, Tag(TEXT)]
_Pair = Annotated[TextPair, Tag(PAIR)]
_TextOrPair = Annotated[_Text | _Pair, one_of("a text or {text, text_pair}", TEXT, PAIR)]


class ClassifyBody(TaskBody):
    """Body of a text classification request."""

    model_config = body_config(inputs="A warm, funny and thoroughly engaging film.", parameters={"top_k": 1})
    always_list: ClassVar[bool] = True
    parameters_type: ClassVar[type[TaskParameters]] = ClassifyParameters

    inputs: Annotated[
        _Text | _Pair | Annotated[list[_TextOrPair], STOP, Tag(LIST)],
        one_of("a text, {text, text_pair}, or a list of these", TEXT, PAIR, LIST),
        Field(description="A text, a pair, or a list of these."),
    ]
    parameters: ClassifyParameters | None = None

    def request(self, item: Any, parameters: ClassifyParameters) -> Request:
        """Returns the request of a text or a pair."""
        return Request(item, None, parameters) if isinstance(item, str) else Request(item.text, item.text_pair, parameters)


def require_labels(manifest: Manifest) -> str | None:
    """Returns what a manifest of a classification lacks, or None."""
    return None if manifest.labels else f"`labels` must not be empty for {manifest.task}"


SPEC = TaskSpec(
    name=TASK,
    path="classify",
    title="Classify texts or pairs of texts",
    body=ClassifyBody,
    answer=list[list[LabelScore]],
    estimate=estimate,
    encode=encode,
    decode=decode,
    missing=require_labels,
)
