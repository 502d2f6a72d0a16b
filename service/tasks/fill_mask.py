"""Fill-mask: a text with masked words to the tokens that fill them best, as the Hugging Face pipeline gives them.

Differences from the pipeline, on purpose: a text over the model's length is cut to one window around each mask, and of the
special tokens only the mask is one; others spelled in the text are text.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from pydantic import AfterValidator, BaseModel, BeforeValidator, Field
from pydantic_core import PydanticCustomError

from service.bundle.manifest import Manifest
from service.errors import InvalidValueError
from service.tasks.body import TaskBody, TaskParameters, TextOrTexts, body_config
from service.tasks.decoding.scores import Floats, Row, activate
from service.tasks.encoded import Encoded, ModelConfig
from service.tasks.spec import TaskSpec
from service.text.tokenizer import Tokenizer, estimate_tokens

TASK = "fill-mask"
MAX_MASKS = 64
MAX_TARGETS = 1000
# Of one target, which no vocabulary entry is longer than, and of all together.
MAX_TARGET_CHARS = 256
MAX_TARGETS_CHARS = 2**14
# A candidate in the answer is as long, and takes as long, as so many numbers, and one more for each 20 characters of its `sequence`.
CANDIDATE_VALUES = 32
# How other models, and hasty fingers, spell a mask.
_LOOKS_LIKE_A_MASK = re.compile(r"[\[<({]{1,2}\s*mask\s*[\])}>]{1,2}|_{3,}", re.IGNORECASE)


def _listed(value: Any) -> Any:
    """Returns a list of one for a text, anything else as it is."""
    return [value] if isinstance(value, str) else value


def _check_targets(targets: list[str] | None) -> list[str] | None:
    chars = sum(map(len, targets or ()))
    if chars > MAX_TARGETS_CHARS:
        raise PydanticCustomError(
            "targets", "must have {most} characters together at most, not {chars}", {"most": MAX_TARGETS_CHARS, "chars": chars}
        )
    return targets


class FillMaskParameters(TaskParameters):
    """Parameters of fill-mask."""

    top_k: Annotated[int, Field(ge=1, description="How many tokens to return for each mask.")] = 5
    targets: Annotated[
        Annotated[list[Annotated[str, Field(max_length=MAX_TARGET_CHARS)]], Field(fail_fast=True, min_length=1, max_length=MAX_TARGETS)]
        | None,
        BeforeValidator(_listed),
        AfterValidator(_check_targets),
        Field(description="The only words to consider."),
    ] = None


DEFAULTS = FillMaskParameters()


class Targets:
    """The targets of a request body, tokenized once for all of its texts."""

    def __init__(self, words: Sequence[str], *, texts: int = 1) -> None:
        """Keeps the words; `texts` is how many share them."""
        self._words = words
        self._tokenized: tuple[list[int], tuple[str, ...]] | None = None
        self.chars_each = sum(len(word) + 1 for word in words) // texts

    def tokenized(self, tokenizer: Tokenizer) -> tuple[list[int], tuple[str, ...]]:
        """Returns their distinct token ids, and a warning for those that stand for their first piece only.

        Args:
            tokenizer: The model's, the same at each call.
        """
        if self._tokenized is None:
            self._tokenized = _token_ids(self._words, tokenizer)
        return self._tokenized


@dataclass(frozen=True, slots=True)
class Request:
    """One text with masks.

    Attributes:
        text: The text.
        parameters: How.
        shared: The targets, where other texts have the same.
    """

    text: str
    parameters: FillMaskParameters = DEFAULTS
    shared: Targets | None = None

    @property
    def targets(self) -> Targets | None:
        """The only words to consider."""
        return self.shared or (None if self.parameters.targets is None else Targets(self.parameters.targets))

    @property
    def chars(self) -> int:
        """Characters that have to be tokenized, with this text's share of the targets."""
        return len(self.text) + (0 if self.targets is None else self.targets.chars_each)


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedText(Encoded):
    """The windows of one text.

    Attributes:
        ids: Token ids of the whole text.
        masks: Where in them the masks are.
        targets: Token ids to choose from, distinct, or None.
        tokenizer: Turns ids back into text.
    """

    ids: list[int]
    masks: list[int]
    targets: list[int] | None
    tokenizer: Tokenizer


def estimate(request: Request, max_length: int) -> int:
    """Returns a cheap guess of the tokens that the request will cost."""
    return min(estimate_tokens(request.text), max_length)


def encode(request: Request, tokenizer: Tokenizer) -> EncodedText:
    """Returns one encoding with all masks, or, of a text over the model's length, one around each mask.

    Raises:
        InvalidValueError: There is no mask, or too many, or none of the targets has a token.
    """
    (tokens,) = tokenizer.tokenize([request.text])
    ids, mask = tokens.ids, tokenizer.mask
    assert mask is not None, "a manifest for fill-mask has it"
    masks = [i for i, id_ in enumerate(ids) if id_ == mask.id]
    _check_masks(request.text, len(masks), mask.token)
    targets, warnings = (None, ()) if request.targets is None else request.targets.tokenized(tokenizer)
    room = tokenizer.room(pair=False)
    if len(ids) <= room:
        encodings = [tokenizer.assemble(ids, masks=masks)]
    else:
        starts = [min(max(i - room // 2, 0), len(ids) - room) for i in masks]
        encodings = [tokenizer.assemble(ids[start : start + room], masks=[i - start]) for i, start in zip(masks, starts, strict=True)]
    candidates = len(masks) * min(request.parameters.top_k, tokenizer.vocabulary_size if targets is None else len(targets))
    values = candidates * (CANDIDATE_VALUES + len(request.text) // 20)
    return EncodedText(encodings=encodings, warnings=warnings, values=values, ids=ids, masks=masks, targets=targets, tokenizer=tokenizer)


def decode(request: Request, encoded: EncodedText, rows: Sequence[Row], config: ModelConfig) -> list[Any]:
    """Returns the best tokens for the mask, or a list of those for each of several.

    Args:
        request: The request.
        encoded: What `encode` returned.
        rows: One row per window with the output `logits`, float32 [masks, vocabulary], or what `reduce` kept of it.
        config: Not needed.

    Returns:
        `{score, token, token_str, sequence}` each; `sequence` is the whole text with the token in the mask's place.
    """
    kept = [row if "tokens" in row else reduce(request, encoded, row) for row in rows]
    best = [pair for row in kept for pair in zip(row["tokens"].tolist(), row["scores"].tolist(), strict=True)]
    several = len(encoded.masks) > 1
    filled = [_filled(encoded, mask, tokens, scores, several) for mask, (tokens, scores) in zip(encoded.masks, best, strict=True)]
    return filled if several else filled[0]


def reduce(request: Request, encoded: EncodedText, row: Row) -> Row:
    """Returns of a row's logits the best `tokens` of each mask, int64 [masks, wanted], and their `scores`, float32 [masks, wanted]."""
    best = [_best(request, encoded, logits) for logits in row["logits"]]
    return {"tokens": np.stack([tokens for tokens, _ in best]), "scores": np.stack([scores for _, scores in best])}


def _best(request: Request, encoded: EncodedText, logits: Floats) -> tuple[NDArray[np.int64], Floats]:
    """Returns the best tokens of one mask with their scores, by falling score, equal ones by token id."""
    scores = activate(logits, "softmax")
    candidates = np.arange(len(scores)) if encoded.targets is None else np.array(sorted(encoded.targets))
    # every token as good as the last one wanted, so that ties are not cut
    wanted = min(request.parameters.top_k, len(candidates))
    floor = np.partition(scores[candidates], len(candidates) - wanted)[len(candidates) - wanted]
    best = candidates[scores[candidates] >= floor]
    order = best[np.argsort(-scores[best], kind="stable")][:wanted]
    return order, scores[order]


def _filled(encoded: EncodedText, mask: int, tokens: Sequence[int], scores: Sequence[float], several: bool) -> list[dict[str, Any]]:
    return [
        {
            "score": score,
            "token": token,
            "token_str": encoded.tokenizer.decode([token], skip_special=False),
            "sequence": _sequence(encoded, mask, token, several),
        }
        for token, score in zip(tokens, scores, strict=True)
    ]


def _sequence(encoded: EncodedText, mask: int, token: int, several: bool) -> str:
    """Returns the text with one mask filled; with several, the others and the special tokens stay, as the pipeline has it."""
    ids = encoded.ids.copy()
    ids[mask] = token
    if not several:
        return encoded.tokenizer.decode(ids, skip_special=True)
    return encoded.tokenizer.decode(encoded.tokenizer.assemble(ids).ids.tolist(), skip_special=False)


def _check_masks(text: str, count: int, mask: str) -> None:
    if count > MAX_MASKS:
        raise InvalidValueError(f"the text has {count} masks and {MAX_MASKS} are allowed; split it.")
    if count == 0:
        near = _LOOKS_LIKE_A_MASK.search(text)
        hint = f"`{near.group()[:20]}` is not this model's mask" if near else "the text has no mask"
        raise InvalidValueError(f"{hint}; write `{mask}` for each word to be filled in.")


def _token_ids(targets: Sequence[str], tokenizer: Tokenizer) -> tuple[list[int], tuple[str, ...]]:
    exact = [tokenizer.token_id(target) for target in targets]
    others = iter(tokenizer.tokenize([target for target, id_ in zip(targets, exact, strict=True) if id_ is None]))
    # the first piece of what is no entry; nothing of what has none
    first = [next(others).ids[:1] if id_ is None else [id_] for id_ in exact]
    ids = [id_ for pieces in first for id_ in pieces]
    cut = [tokenizer.decode(pieces, skip_special=False) for pieces, id_ in zip(first, exact, strict=True) if id_ is None and pieces]
    if not ids:
        raise InvalidValueError("`targets` has no word that the vocabulary knows; give at least one.")
    some = ", ".join(piece[:32] for piece in cut[:5])
    warnings = (f"targets; {len(cut)} of {len(targets)} are no vocabulary entries, their first pieces were used: {some}",) if cut else ()
    return list(dict.fromkeys(ids)), warnings


class FillMaskBody(TaskBody):
    """Body of a fill-mask request."""

    model_config = body_config(inputs="The king of [MASK] died in 1066.", parameters={"top_k": 3})
    parameters_type: ClassVar[type[TaskParameters]] = FillMaskParameters

    inputs: Annotated[TextOrTexts, Field(description="A text with one or more masks, or a list of such texts.")]
    parameters: FillMaskParameters | None = None

    def requests(self, config: ModelConfig | None = None) -> list[Any]:
        """Returns one request per text, all with the same targets."""
        parameters = self.parameters or DEFAULTS
        shared = Targets(parameters.targets, texts=len(self.items)) if parameters.targets and self.items else None
        return [Request(text, parameters, shared) for text in self.items]


class Filled(BaseModel):
    """One token in a mask's place."""

    score: float
    token: int
    token_str: str
    sequence: str


def _missing(manifest: Manifest) -> str | None:
    return "`tokenizer.mask` must not be null for fill-mask" if manifest.tokenizer.mask is None else None


SPEC = TaskSpec(
    name=TASK,
    path="fill-mask",
    title="Fill masked words",
    body=FillMaskBody,
    answer=list[Filled] | list[list[Filled]] | list[list[list[Filled]]],
    estimate=estimate,
    encode=encode,
    decode=decode,
    reduce=reduce,
    missing=_missing,
    load_mix="mask",
)
