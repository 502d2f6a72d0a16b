"""Named entities (token classification): a text to labeled spans, aggregated like in the Hugging Face pipeline.

There are intended differences from the pipeline. Texts of any length are read in windows, and aggregation runs once over the whole
text, so that an entity at a window's edge is found once. Word pieces are recognized by the vocabulary's prefix, instead of a comparison of
lengths, which fails if the tokenizer normalizes the text. `word` is a slice of the caller's text, without white space at its ends; tokens
and entities of only white space are left out.
"""

from collections.abc import Callable, Iterator, Sequence, Set
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import BaseModel, Field

from bertserve.service.body.task_body import AnyCase, OffsetUnit, Stride, TaskBody, TextOrTexts, body_config
from bertserve.service.bundle.manifest import ModelConfig
from bertserve.service.tasks.classify import logit_widths, missing_labels
from bertserve.service.tasks.cost import ENTRY_BYTES, ENTRY_US, Cost, longest_label, text_bytes
from bertserve.service.tasks.decide import CalibratedDecisionParameters, Decided, decision_rule
from bertserve.service.tasks.decoding import Floats, activate
from bertserve.service.tasks.step import Step, TaskGenerator, TaskModel, TextInput, copy_outputs
from bertserve.service.tasks.task_spec import TaskSpec
from bertserve.service.text.tokenizer import Encoding, Tokenizer, Tokens
from bertserve.service.text.windows import windows
from bertserve.service.text.words import convert_offsets, trimmed

# First letters of tags; the letters that begin an entity, and the letters that end one.
TAG_LETTERS, BEGIN_LETTERS, END_LETTERS = "BIESLU", "BSU", "ESLU"
OUTSIDE = "O"


def split_tag(tag: str) -> tuple[str, str]:
    """Returns a tag's letter and its type; a tag without a letter, or without a type after it, is only a type."""
    return (tag[0], tag[2:]) if tag[1:2] == "-" and tag[2:] and tag[0] in TAG_LETTERS else ("", tag)


TASK = "token-classification"
GROUPED_TOKEN_US = 12  # microseconds to decode a token that is grouped, if each is an entity
Strategy = Literal["none", "simple", "first", "average", "max"]


class TokenClassificationParameters(CalibratedDecisionParameters):
    """Parameters of token classification."""

    aggregation_strategy: Annotated[
        AnyCase[Strategy], Field(description="How tokens are grouped into entities; `none` returns the tokens.")
    ] = "simple"
    ignore_labels: Annotated[
        list[Annotated[str, Field(max_length=1000)]],
        Field(fail_fast=True, max_length=1000, description="Labels and entity groups to leave out."),
    ] = ["O"]  # noqa: RUF012 - pydantic copies it
    stride: Stride = None
    offset_unit: OffsetUnit = "code_points"


def label_tokens(input_: TextInput[TokenClassificationParameters], model: TaskModel) -> TaskGenerator:
    """Returns the entities of a text in order; empty for a text without tokens.

    The rows have the output `logits`, float32 [length, labels]; there is one row per window. An entity is
    `{entity_group, score, word, start, end}`; for the strategy `none`, a token is `{entity, score, index, word, start, end}`. Offsets
    refer to the text, in the request's unit, end exclusive.

    Raises:
        InvalidValueError: Windows are too small for `stride`.
    """
    tokenizer, labels = model.tokenizer, model.config.labels
    tags = model.config.tags or labels
    strategy, ignored = input_.parameters.aggregation_strategy, set(input_.parameters.ignore_labels)
    outside = {OUTSIDE, *(label for label, tag in zip(labels, tags, strict=True) if tag == OUTSIDE)}
    if not ignored.isdisjoint(outside):  # `O` and the model's own spelling of it are the same
        ignored |= outside
    names = (labels if strategy == "none" else entity_groups(model.config)) if input_.parameters.decide else ()
    rule = decision_rule(input_.parameters, model, [name for name in names if name not in ignored])
    (tokens,) = tokenizer.tokenize([input_.text])
    max_tokens = tokenizer.max_text_tokens(pair=False)
    token_ranges = windows(len(tokens), max_tokens, input_.parameters.stride, tokenizer.spec.truncation_side) if len(tokens) else []
    encodings = [tokenizer.assemble(tokens.ids[window.start : window.stop]) for window in token_ranges]
    rows = yield Step(
        encodings,
        Cost(decode_us=(ENTRY_US if strategy == "none" else GROUPED_TOKEN_US) * len(tokens)),
        copy_outputs,
        read_spans=tokens.read_spans(token_ranges) if len(token_ranges) > 1 else (),
    )
    if not rows:
        return rule.answer_or_decision([], [], None, (), left_out=0)
    logits = merge_windows(encodings, token_ranges, [row["logits"] for row in rows])
    scores = activate(rule.calibrated(logits, "none"), "softmax")
    spans = tokens.offsets_with_marks
    if strategy in _WORD_SCORES:  # these strategies label words instead of tokens
        word_tokens = list(pipeline_words(tokens, tokenizer))
        scores = np.stack([_WORD_SCORES[strategy](scores[word]) for word in word_tokens])
        spans = [(spans[word[0]][0], spans[word[-1]][1]) for word in word_tokens]
    if strategy == "none":
        key, all_entities = "entity", list(_tokens(input_.text, spans, scores, labels, ignored, first=encodings[0].start))
    else:
        key, all_entities = "entity_group", list(_entities(input_.text, spans, scores, tags, ignored))
    entities = [entity for entity in all_entities if entity["score"] >= rule.least_score(entity[key])]
    # their number is only known from the outputs
    entity_bytes = sum(ENTRY_BYTES + longest_label(labels) + text_bytes(entity["word"]) for entity in entities)
    yield Step([], Cost(2 + entity_bytes + rule.decision_bytes))
    convert_offsets(entities, input_.text, input_.parameters.offset_unit)
    best = max((entity["score"] for entity in all_entities), default=None)  # includes entities that are left out
    decision = list(dict.fromkeys(entity[key] for entity in entities))
    scored_labels = [([entity[key]], entity["score"]) for entity in all_entities]
    return rule.answer_or_decision(decision, entities, best, scored_labels, left_out=len(all_entities) - len(entities))


def entity_groups(config: ModelConfig) -> list[str]:
    """Returns the possible names of an entity; the names of a token are the labels."""
    return sorted({*map(_group_name, config.tags or config.labels)})


def _group_name(tag: str) -> str:
    """Returns the name of the group of a tag, also after another prefix than a letter, as in the pipeline."""
    return tag.split("-", 1)[-1]


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


def _entities(
    text: str, spans: Sequence[tuple[int, int]], scores: Floats, tags: Sequence[str], ignored: Set[str]
) -> Iterator[dict[str, Any]]:
    """Yields the entities, which are groups of tokens or of words; each of these comes with a span and scores, float32 [spans, labels]."""
    best = scores.argmax(axis=-1)
    best_scores = np.take_along_axis(scores, best[:, None], axis=-1)[:, 0]
    best_tags = [tags[label] for label in best.tolist()]
    for group in _groups(best_tags):
        name = _group_name(best_tags[group.start])
        start, end = trimmed(text, spans[group.start][0], spans[group.stop - 1][1])
        if start < end and name not in ignored:
            mean = best_scores[group.start : group.stop].mean(dtype=np.float32)
            yield {"entity_group": name, "score": float(mean), "word": text[start:end], "start": start, "end": end}


def merge_windows(encodings: Sequence[Encoding], token_ranges: Sequence[range], logits: Sequence[Floats]) -> Floats:
    """Returns float32 [tokens, values] of a whole text: the values of each token are from the window in which it is farthest from an edge.

    The ends of the text do not count as edges. If its distance is the same in two windows, the earlier window counts.
    """
    parts, start = [], 0
    for index, (encoding, window, values) in enumerate(zip(encodings, token_ranges, logits, strict=True)):
        stop = window.stop
        if index + 1 < len(token_ranges):  # the middle of the tokens that are also in the next window
            stop = (token_ranges[index + 1].start + window.stop + 1) // 2
        first = encoding.start - window.start
        parts.append(values[first + start : first + stop])
        start = stop
    return np.concatenate(parts)


def pipeline_words(tokens: Tokens, tokenizer: Tokenizer) -> Iterator[list[int]]:
    """Yields the token indices of each word: its first token and the following tokens that continue it.

    An unknown token begins a word, as in the pipeline.
    """
    subword_prefix, spellings = tokenizer.spec.subword_prefix, tokens.library_encoding.tokens
    ids, offsets, unknown_id = tokens.ids, tokens.offsets, tokenizer.unknown_id
    word: list[int] = []
    for i in range(len(tokens)):
        if subword_prefix is not None:
            continues = spellings[i].startswith(subword_prefix)
        else:
            around = tokens.text[max(offsets[i][0] - 1, 0) : offsets[i][0] + 1]
            continues = ids[i] != unknown_id and not any(map(str.isspace, around))
        if word and not continues:
            yield word
            word = []
        word.append(i)
    if word:
        yield word


# each returns the scores of a word, float32 [labels], from its tokens' scores, float32 [tokens, labels]
_WORD_SCORES: dict[Strategy, Callable[[Floats], Floats]] = {
    "first": lambda scores: scores[0],
    "average": lambda scores: scores.mean(axis=0),
    "max": lambda scores: scores[scores.max(axis=1).argmax()],
}


def _groups(tags: Sequence[str]) -> Iterator[range]:
    """Yields groups of neighbors with the same type. A group ends if a tag begins a new entity, or if the last tag has ended the entity."""
    first, before, ended = 0, "", False
    for i, tag in enumerate(tags):
        letter, type_ = split_tag(tag)
        # "" is in every string, but a tag without a letter neither begins nor ends an entity
        if i > 0 and (ended or type_ != before or (letter and letter in BEGIN_LETTERS)):
            yield range(first, i)
            first = i
        before, ended = type_, bool(letter) and letter in END_LETTERS
    yield range(first, len(tags))


class TokenClassificationBody(TaskBody):
    """Body of a token classification request."""

    model_config = body_config(inputs="Ada Lovelace wrote to Charles Babbage from London.")

    inputs: TextOrTexts
    parameters: TokenClassificationParameters | None = None

    def task_inputs(self, config: ModelConfig) -> list[Any]:
        """Returns one input per text."""
        parameters: TokenClassificationParameters = self.parameters or self.default_parameters
        return [TextInput(text, parameters) for text in self.items]


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
    body=TokenClassificationBody,
    response_type=list[Entity] | list[list[Entity]] | Decided | list[Decided],
    function=label_tokens,
    missing_field=missing_labels,
    widths=logit_widths,
)
