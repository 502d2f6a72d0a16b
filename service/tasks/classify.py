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

from service.bundle.manifest import Activation, Manifest
from service.errors import InvalidValueError
from service.tasks import occlusion
from service.tasks.body import LIST, PAIR, STOP, TEXT, Closed, Stride, TaskBody, TaskParameters, body_config, lower, one_of
from service.tasks.cost import SCORE_BYTES, Budget, Cost, longest_label
from service.tasks.decoding.scores import Row, activate, best_first
from service.tasks.encoded import Encoded, ModelConfig, ReadSpan, spans_read
from service.tasks.further import Further
from service.tasks.occlusion import Part, WordImportance
from service.tasks.spec import TaskSpec
from service.text.tokenizer import Encoding, Tokenizer, Tokens, estimate_tokens
from service.text.windows import default_stride, truncate_longest_first, windows
from service.text.words import Word, words_of

TASK = "text-classification"
# Names of the texts of a pair.
FIRST, SECOND = "text", "text_pair"
LABEL_BYTES = 24 + SCORE_BYTES  # of a label with its score in an answer, beside its name
# A label that is scored by itself is chosen from this score on; so many of them are explained at most.
CHOSEN, MAX_EXPLAINED = 0.5, 8


class LabelScore(TypedDict):
    """One label with its score."""

    label: Annotated[str, Field(examples=["positive"])]
    score: Annotated[float, Field(examples=[0.997])]


class ClassifiedLabel(LabelScore, total=False):
    """One label with its score, and on request what each word does to the score."""

    explanation: Annotated[list[WordImportance], Field(description="What each word does to the score, where `explain` asks for it.")]


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
    explain: Annotated[
        bool,
        Field(description="Say what each word does to the best label's score, by leaving it out: a text of n words is run n times more."),
    ] = False
    offset_unit: Annotated[
        Literal["code_points", "utf16", "utf8"] | None,
        BeforeValidator(lower),
        Field(
            description="With `explain`, what `start` and `end` count: Python's code points, JavaScript's UTF-16 units, or bytes of UTF-8."
        ),
    ] = None


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


@dataclass(frozen=True, slots=True, kw_only=True)
class ExplainedText(Encoded):
    """A text, or a pair, of which words are left out once its labels are known.

    Attributes:
        parts: The text, or both.
        tokenizer: Puts together what is left of them.
    """

    parts: list[Part]
    tokenizer: Tokenizer


def estimate(request: Request, max_length: int) -> int:
    """Returns a cheap guess of the tokens that the request will cost, for admission."""
    tokens = _estimate_whole(request, max_length)
    return tokens + (occlusion.estimate(tokens, min(tokens, max_length)) if request.parameters.explain else 0)


def _estimate_whole(request: Request, max_length: int) -> int:
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
    a, *rest = tokenizer.tokenize([request.text, request.text_pair] if request.text_pair else [request.text])
    b = rest[0] if rest else None
    room = tokenizer.room(pair=b is not None)
    total = len(a) + len(b or ())
    if request.parameters.window is not None and total > room:
        return _in_windows(request, tokenizer, a, b, room)
    if total > room and not request.parameters.truncation:
        raise InvalidValueError(
            f"the text has {total} tokens and the model takes {room}; shorten it, or set `truncation` to true or `window` "
            "to `mean` or `max`."
        )
    kept = truncate_longest_first(len(a), len(b or ()), room)
    encodings = [tokenizer.assemble(a.ids[: kept[0]], None if b is None else b.ids[: kept[1]])]
    truncated, read = total > room, _read_of_cut(a, b, kept) if total > room else ()
    if not request.parameters.explain:
        return Encoded(encodings=encodings, truncated=truncated, read=read)
    parts = _parts(request, a, b, kept)
    words = sum(len(part.words) for part in parts)
    occlusion.check_count(words, "the text" if b is None else "the pair", "shorten it")
    return ExplainedText(encodings=encodings, truncated=truncated, read=read, parts=parts, tokenizer=tokenizer)


def cost(request: Request, encoded: Encoded, config: ModelConfig) -> Cost:
    """Returns what the labels take, and the runs without a word and the words of an explanation."""
    count = min(request.parameters.top_k or len(config.labels), len(config.labels))
    labels = Cost(
        answer_bytes=count * (LABEL_BYTES + longest_label(config.labels)), steps=count, held=len(encoded.encodings) * len(config.labels)
    )
    if not isinstance(encoded, ExplainedText):
        return labels
    activation = request.parameters.function_to_apply or config.activation
    return labels + occlusion.cost(
        sum(len(part.words) for part in encoded.parts),
        len(encoded.encodings[0]),
        [part.text for part in encoded.parts],
        explained=min(count, MAX_EXPLAINED) if activation == "sigmoid" else 1,
    )


def _read_of_cut(a: Tokens, b: Tokens | None, kept: tuple[int, int]) -> tuple[ReadSpan, ...]:
    if b is None:
        return spans_read(a, [range(kept[0])])
    return (*spans_read(a, [range(kept[0])], FIRST), *spans_read(b, [range(kept[1])], SECOND))


def _parts(request: Request, a: Tokens, b: Tokens | None, kept: tuple[int, int]) -> list[Part]:
    """Returns the text, or both, with the words of what is read."""
    given = [(request.text, a, kept[0])] if b is None else [(request.text, a, kept[0]), (request.text_pair or "", b, kept[1])]
    return [
        Part(field if b is not None else "", text, tokens.ids[:count], 0, words_of(text, tokens, range(count)))
        for field, (text, tokens, count) in zip((FIRST, SECOND), given, strict=False)
    ]


def decode(
    request: Request, encoded: Encoded, rows: Sequence[Row], config: ModelConfig, budget: Budget | None = None
) -> list[ClassifiedLabel] | Further:
    """Returns labels and scores, best first; equal scores keep the order of the labels. Where words are to be left out, that comes first.

    Args:
        request: The request.
        encoded: What `encode` returned.
        rows: One row per window with the output `logits`, float32 [labels].
        config: The model's labels and its own activation.
        budget: Not needed.
    """
    parameters = request.parameters
    activation = parameters.function_to_apply or config.activation
    scores = [activate(row["logits"], activation) for row in rows]
    combine = np.max if parameters.window == "max" else np.mean
    combined = combine(scores, axis=0) if len(scores) > 1 else scores[0]
    order = best_first(combined, parameters.top_k)
    found: list[ClassifiedLabel] = [{"label": config.labels[i], "score": float(combined[i])} for i in order]
    return _explained(request, encoded, found, order, activation) if isinstance(encoded, ExplainedText) else found


def _explained(
    request: Request, encoded: ExplainedText, found: list[ClassifiedLabel], order: Sequence[int], activation: Activation
) -> list[ClassifiedLabel] | Further:
    """Returns what runs each variant and explains the best label; of labels that are scored each by itself, all that are chosen."""
    count = 1
    while activation == "sigmoid" and count < min(len(found), MAX_EXPLAINED) and found[count]["score"] >= CHOSEN:
        count += 1

    def keep(encoding: Encoding, part: Part, word: Word, row: Row) -> Row:
        return {"scores": activate(row["logits"], activation)[list(order[:count])]}

    def finish(words: Sequence[tuple[Part, Word]], kept: Sequence[Row]) -> list[ClassifiedLabel]:
        for place, item in enumerate(found[:count]):
            changes = [item["score"] - float(row["scores"][place]) for row in kept]
            item["explanation"] = occlusion.described(words, changes, request.parameters.offset_unit or "code_points")
        return found

    explained: list[ClassifiedLabel] | Further = occlusion.explain(encoded.parts, tokenizer=encoded.tokenizer, keep=keep, finish=finish)
    return explained


def _in_windows(request: Request, tokenizer: Tokenizer, a: Tokens, b: Tokens | None, room: int) -> Encoded:
    """Windows a long text, or the second text of a pair beside the whole first one."""
    text = a if b is None else b
    room -= 0 if b is None else len(a)
    stride = default_stride(max(room, 0)) if request.parameters.stride is None else request.parameters.stride
    if room <= stride:
        raise InvalidValueError(
            f"windows of {max(room, 0)} tokens have no room for a `stride` of {stride}"
            + ("" if b is None else f" beside a first text of {len(a)} tokens")
            + "; make `stride` or the first text smaller."
        )
    cuts = windows(len(text), room, stride)
    if request.parameters.explain:
        raise InvalidValueError(
            f"`explain` is for a text that the model reads at once, and this one takes {len(cuts)} windows; shorten it, or leave `window` out to "
            "have it cut."
        )
    parts = [text.ids[cut.start : cut.stop] for cut in cuts]
    encodings = [tokenizer.assemble(part) if b is None else tokenizer.assemble(a.ids, part) for part in parts]
    return Encoded(encodings=encodings, read=spans_read(text, cuts, "" if b is None else SECOND))


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
        """Returns the request of a text or a pair.

        Raises:
            InvalidValueError: There is a unit of offsets, and the answer has none.
        """
        if parameters.offset_unit is not None and not parameters.explain:
            raise InvalidValueError("`offset_unit` is for the words of an explanation; set `explain` to true, or leave it out.")
        return Request(item, None, parameters) if isinstance(item, str) else Request(item.text, item.text_pair, parameters)


def require_labels(manifest: Manifest) -> str | None:
    """Returns what a manifest of a classification lacks, or None."""
    return None if manifest.labels else f"`labels` must not be empty for {manifest.task}"


SPEC = TaskSpec(
    name=TASK,
    path="classify",
    title="Classify texts or pairs of texts",
    body=ClassifyBody,
    answer=list[list[ClassifiedLabel]],
    estimate=estimate,
    encode=encode,
    cost=cost,
    decode=decode,
    missing=require_labels,
)
