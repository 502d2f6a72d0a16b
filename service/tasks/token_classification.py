"""Named entities (token classification): a text to labeled spans, aggregated like in the Hugging Face pipeline.

There are intended differences from the pipeline. Texts of any length are read in windows, and aggregation runs once over the whole
text, so that an entity at a window's edge is found once. Word pieces are recognized by the vocabulary's prefix, instead of a comparison of
lengths, which fails if the tokenizer normalizes the text. `word` is a slice of the caller's text, without white space at its ends; tokens
and entities of only white space are left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from pydantic import BaseModel, BeforeValidator, Field

from bertserve.service.tasks.batch import Batch, ModelConfig, TaskGenerator, TaskModel, copy_outputs, spans_read
from bertserve.service.tasks.body import OffsetUnit, Stride, TaskBody, TaskParameters, TextOrTexts, body_config, defaults, lower
from bertserve.service.tasks.classify import logit_widths, missing_labels
from bertserve.service.tasks.cost import SCORE_BYTES, Cost, longest_label, text_bytes
from bertserve.service.tasks.decoding import Floats, activate
from bertserve.service.tasks.task_spec import TaskSpec
from bertserve.service.text.tokenizer import Encoding, Tokenizer, Tokens
from bertserve.service.text.windows import windows
from bertserve.service.text.words import rebase, trimmed

# First letters of tags; those that begin an entity, and those that end one.
LETTERS, BEGINS, ENDS = "BIESLU", "BSU", "ESLU"
OUTSIDE = "O"


def split(tag: str) -> tuple[str, str]:
    """Returns a tag's letter and its type; a tag without a letter is only a type."""
    return (tag[0], tag[2:]) if tag[1:2] == "-" and tag[0] in LETTERS else ("", tag)


TASK = "token-classification"
MAX_IGNORED = 1000
MAX_LABEL_CHARS = 1000
# Bytes of an entity in an answer, without its label and text; microseconds of a token.
ENTITY_BYTES, TOKEN_US = 72 + SCORE_BYTES, 4
Strategy = Literal["none", "simple", "first", "average", "max"]


class NerParameters(TaskParameters):
    """Parameters of token classification."""

    aggregation_strategy: Annotated[
        Strategy,
        BeforeValidator(lower),
        Field(description="How tokens are grouped into entities; `none` returns the tokens."),
    ] = "simple"
    ignore_labels: Annotated[
        list[Annotated[str, Field(max_length=MAX_LABEL_CHARS)]],
        Field(fail_fast=True, max_length=MAX_IGNORED, description="Labels and entity groups to leave out."),
    ] = ["O"]  # noqa: RUF012 - pydantic copies it
    stride: Stride = None
    offset_unit: OffsetUnit = "code_points"


@dataclass(slots=True)
class NerRequest:
    """One text whose entities are searched."""

    text: str
    parameters: NerParameters = field(default_factory=NerParameters)

    @property
    def chars(self) -> int:
        """Characters to tokenize."""
        return len(self.text)


@dataclass(slots=True)
class _Token:
    """A token or a word with its tag, before it becomes part of an entity."""

    tag: str
    score: np.float32
    start: int
    end: int


def label_tokens(request: NerRequest, model: TaskModel) -> TaskGenerator:
    """Returns the entities of a text in order; empty for a text without tokens.

    The rows have the output `logits`, float32 [length, labels]; there is one row per window. An entity is
    `{entity_group, score, word, start, end}`; for the strategy `none`, a token is `{entity, score, index, word, start, end}`. Offsets
    refer to the text, in the request's unit, end exclusive.

    Raises:
        InvalidValueError: Windows are too small for `stride`.
    """
    tokenizer, labels = model.tokenizer, model.config.labels
    (tokens,) = tokenizer.tokenize([request.text])
    room = tokenizer.room(pair=False)
    token_ranges = windows(len(tokens), room, request.parameters.stride, tokenizer.truncation_side) if len(tokens) else []
    encodings = [tokenizer.assemble(tokens.ids[window.start : window.stop]) for window in token_ranges]
    rows = yield Batch(
        encodings,
        Cost(decode_us=TOKEN_US * len(tokens)),
        copy_outputs,
        windows_read=spans_read(tokens, token_ranges) if len(token_ranges) > 1 else (),
    )
    if not rows:
        return []
    scores = activate(merge(encodings, token_ranges, [row["logits"] for row in rows]), "softmax")
    tags, strategy = model.config.tags or labels, request.parameters.aggregation_strategy
    spans, ignored = tokens.spans(request.text), _ignored(request, labels, tags)
    if strategy == "none":
        entities = list(_tokens(request.text, spans, scores, labels, ignored, first=encodings[0].start))
    elif strategy == "simple":
        entities = list(_entities(request.text, _labeled_tokens(spans, scores, tags), ignored))
    else:
        labeled = (_label(scores[word], [spans[i] for i in word], strategy, tags) for word in words(request.text, tokens, tokenizer))
        entities = list(_entities(request.text, labeled, ignored))
    # their number is only known from the outputs
    yield Batch([], Cost(2 + sum(ENTITY_BYTES + longest_label(labels) + text_bytes(entity["word"]) for entity in entities)))
    rebase(entities, request.text, request.parameters.offset_unit)
    return entities


def _ignored(request: NerRequest, labels: Sequence[str], tags: Sequence[str]) -> set[str]:
    """Returns the labels and groups to leave out; `O` and the model's own spelling of it are the same."""
    ignored = set(request.parameters.ignore_labels)
    outside = {OUTSIDE, *(label for label, tag in zip(labels, tags, strict=True) if tag == OUTSIDE)}
    return ignored if ignored.isdisjoint(outside) else ignored | outside


def _tokens(
    text: str, spans: Sequence[tuple[int, int]], scores: Floats, labels: Sequence[str], ignored: Set[str], *, first: int
) -> Iterator[dict[str, Any]]:
    """Yields each token with its best label, for the strategy `none`; `first` is the position of the first token in its encoding."""
    for i, label in enumerate(scores.argmax(axis=-1).tolist()):
        start, end = trimmed(text, *spans[i])
        if start < end and labels[label] not in ignored:
            yield {
                "entity": labels[label],
                "score": float(scores[i, label]),
                "index": first + i,
                "word": text[start:end],
                "start": start,
                "end": end,
            }


def _entities(text: str, labeled: Iterator[_Token], ignored: Set[str]) -> Iterator[dict[str, Any]]:
    """Yields the entities, which are groups of tokens or of words."""
    for group in _groups(labeled):
        name = group[0].tag.split("-", 1)[-1]  # also after another prefix than a letter, as in the pipeline
        start, end = trimmed(text, group[0].start, group[-1].end)
        if start < end and name not in ignored:
            mean = np.mean([token.score for token in group], dtype=np.float32)
            yield {"entity_group": name, "score": float(mean), "word": text[start:end], "start": start, "end": end}


def _labeled_tokens(spans: Sequence[tuple[int, int]], scores: Floats, tags: Sequence[str]) -> Iterator[_Token]:
    """Yields each token with its best tag."""
    best = scores.argmax(axis=-1)
    values = np.take_along_axis(scores, best[:, None], axis=-1)[:, 0]
    for label, score, span in zip(best.tolist(), values, spans, strict=True):
        yield _Token(tags[label], score, *span)


def merge(encodings: Sequence[Encoding], token_ranges: Sequence[range], logits: Sequence[Floats]) -> Floats:
    """Returns float32 [tokens, values] of a whole text: the values of each token are from the window in which it is farthest from an edge.

    The ends of the text do not count as edges. If a token has the same distance in two windows, the earlier window counts.
    """
    if len(token_ranges) == 1:
        start = encodings[0].start
        return logits[0][start : start + len(token_ranges[0])]
    count = token_ranges[-1].stop
    merged = np.empty((count, *logits[0].shape[1:]), dtype=np.float32)
    farthest = np.full(count, -1, dtype=np.int64)
    for encoding, window, values in zip(encodings, token_ranges, logits, strict=True):
        position = np.arange(len(window))
        before = position + (count if window.start == 0 else 0)
        after = position[::-1] + (count if window.stop == count else 0)
        distance = np.minimum(before, after)
        better = np.flatnonzero(distance > farthest[window.start : window.stop])
        merged[window.start + better] = values[encoding.start + better]
        farthest[window.start + better] = distance[better]
    return merged


def words(text: str, tokens: Tokens, tokenizer: Tokenizer) -> Iterator[list[int]]:
    """Yields the token indices of each word: its first token and the following tokens that continue it.

    An unknown token begins a word, as in the pipeline.
    """
    continues: Callable[[int], bool]
    if (subword_prefix := tokenizer.subword_prefix) is not None:
        spellings = tokens.spellings
        continues = lambda i: spellings[i].startswith(subword_prefix)  # noqa: E731 - one of two rules, chosen once
    else:
        offsets, ids, unknown_id = tokens.offsets, tokens.ids, tokenizer.unknown_id
        continues = lambda i: ids[i] != unknown_id and not any(c.isspace() for c in text[max(offsets[i][0] - 1, 0) : offsets[i][0] + 1])  # noqa: E731
    word: list[int] = []
    for i in range(len(tokens)):
        if word and not continues(i):
            yield word
            word = []
        word.append(i)
    if word:
        yield word


def _label(scores: Floats, offsets: Sequence[tuple[int, int]], strategy: Strategy, tags: Sequence[str]) -> _Token:
    """Returns a word's tag and score by the strategy; `scores` is float32 [tokens of the word, labels]."""
    if strategy == "average":
        values = scores.mean(axis=0)
    elif strategy == "max":
        values = scores[scores.max(axis=1).argmax()]
    else:
        values = scores[0]
    label = int(values.argmax())
    return _Token(tags[label], values[label], offsets[0][0], offsets[-1][1])


def _groups(tokens: Iterator[_Token]) -> Iterator[list[_Token]]:
    """Yields groups of neighbors with the same type. A group ends if a tag begins a new entity, or if the last tag has ended the entity."""
    group: list[_Token] = []
    before, ended = "", True
    for token in tokens:
        letter, type_ = split(token.tag)
        # "" is in every string, but a tag without a letter neither begins nor ends an entity
        if group and (ended or type_ != before or (letter and letter in BEGINS)):
            yield group
            group = []
        group.append(token)
        before, ended = type_, bool(letter) and letter in ENDS
    if group:
        yield group


class NerBody(TaskBody):
    """Body of a token classification request."""

    model_config = body_config(inputs="Ada Lovelace wrote to Charles Babbage from London.")
    parameters_type: ClassVar[type[TaskParameters]] = NerParameters

    inputs: TextOrTexts
    parameters: NerParameters | None = None

    def requests(self, config: ModelConfig) -> list[Any]:
        """Returns one request per text."""
        parameters = self.parameters or defaults(NerParameters)
        return [NerRequest(text, parameters) for text in self.items]


class Entity(BaseModel):
    """One entity; by default offsets count code points; `end` is exclusive. For the strategy `none`, a token with `entity` and `index`."""

    entity_group: Annotated[str | None, Field(examples=["LOC"], description="The label of the entity, if tokens are grouped.")] = None
    entity: Annotated[str | None, Field(examples=["B-LOC"], description="The label of the token, if tokens are not grouped.")] = None
    index: Annotated[int | None, Field(examples=[6], description="The index of the token, if tokens are not grouped.")] = None
    score: Annotated[float, Field(examples=[0.995])]
    word: Annotated[str, Field(examples=["London"])]
    start: Annotated[int, Field(examples=[22])]
    end: Annotated[int, Field(examples=[28])]


SPEC = TaskSpec(
    name=TASK,
    path="ner",
    title="Find named entities, or label tokens",
    body=NerBody,
    answer=list[Entity] | list[list[Entity]],
    function=label_tokens,
    missing_field=missing_labels,
    widths=logit_widths,
)
