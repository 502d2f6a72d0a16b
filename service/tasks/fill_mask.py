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
from service.tasks.body import JAVASCRIPT, TaskBody, TaskParameters, TextOrTexts, body_config
from service.tasks.decoding.scores import Floats, Row, activate
from service.tasks.encoded import Encoded, ModelConfig
from service.tasks.further import Further
from service.tasks.joint_masks import DEFAULT_BEAM, MAX_BEAM, MAX_JOINT_MASKS, JointText, Pieces, prepare, search
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
    joint: Annotated[
        bool, Field(description="Fill several masks together: the best fillings of all of them, in place of each one's best tokens.")
    ] = False
    beam: Annotated[
        int | None,
        Field(
            ge=1,
            le=MAX_BEAM,
            description=f"With `joint`, how many fillings of the first masks are followed to the next; {DEFAULT_BEAM} by default.",
        ),
    ] = None


DEFAULTS = FillMaskParameters()


class Targets:
    """The targets of a request body, tokenized once for all of its texts."""

    def __init__(self, words: Sequence[str], *, texts: int = 1) -> None:
        """Keeps the words; `texts` is how many share them."""
        self._words = words
        self._tokenized: tuple[list[int], tuple[str, ...]] | None = None
        self._pieces: tuple[dict[Pieces, str], tuple[str, ...]] | None = None
        self.chars_each = sum(len(word) + 1 for word in words) // texts

    def tokenized(self, tokenizer: Tokenizer) -> tuple[list[int], tuple[str, ...]]:
        """Returns their distinct token ids, and a warning for those that stand for their first piece only.

        Args:
            tokenizer: The model's, the same at each call.
        """
        if self._tokenized is None:
            self._tokenized = _token_ids(self._words, tokenizer)
        return self._tokenized

    def pieces(self, tokenizer: Tokenizer) -> tuple[dict[Pieces, str], tuple[str, ...]]:
        """Returns the targets by all of their pieces, and a warning for those that the vocabulary does not know.

        Args:
            tokenizer: The model's, the same at each call.
        """
        if self._pieces is None:
            self._pieces = _all_pieces(self._words, tokenizer)
        return self._pieces


@dataclass(frozen=True, slots=True)
class Request:
    """One text with masks.

    Attributes:
        text: The text.
        parameters: How.
        shared: The targets, where other texts have the same.
        mask: The model's mask as a text spells it, where that is known.
    """

    text: str
    parameters: FillMaskParameters = DEFAULTS
    shared: Targets | None = None
    mask: str | None = None

    @property
    def targets(self) -> Targets | None:
        """The only words to consider."""
        return self.shared or (None if self.parameters.targets is None else Targets(self.parameters.targets))

    @property
    def beam(self) -> int:
        """Fillings that are followed, of masks that are filled together."""
        return self.parameters.beam or DEFAULT_BEAM

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
    tokens = min(estimate_tokens(request.text), max_length)
    if not request.parameters.joint:
        return tokens
    # a piece a target, as words of the vocabulary have; where there are more, tokenizing finds that out before anything runs
    masks = min(request.text.count(request.mask) if request.mask else 1, MAX_JOINT_MASKS)
    wide = request.beam if request.parameters.targets is None else min(request.beam, len(request.parameters.targets))
    return tokens * (1 + max(masks - 1, 0) * wide)


def encode(request: Request, tokenizer: Tokenizer) -> EncodedText | JointText:
    """Returns one encoding with all masks, or, of a text over the model's length, one around each mask; of joint masks none yet.

    Raises:
        InvalidValueError: There is no mask, or too many, or none of the targets has a token.
    """
    (tokens,) = tokenizer.tokenize([request.text])
    ids, mask = tokens.ids, tokenizer.mask
    assert mask is not None, "a manifest for fill-mask has it"
    masks = [i for i, id_ in enumerate(ids) if id_ == mask.id]
    _check_masks(request.text, len(masks), mask.token)
    if request.parameters.joint:
        return _joint(request, ids, masks, tokenizer)
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


def _joint(request: Request, ids: list[int], masks: list[int], tokenizer: Tokenizer) -> JointText:
    """Returns the texts whose masks are filled together."""
    targets, warnings = (None, ()) if request.targets is None else request.targets.pieces(tokenizer)
    top_k = request.parameters.top_k
    patterns, tokens, cut = prepare(ids, masks, targets, beam=request.beam, top_k=top_k, tokenizer=tokenizer)
    pieces = max(len(pattern.masks) for pattern in patterns)
    choices = tokenizer.vocabulary_size if targets is None else len(targets)
    most = sum(pattern.runs(request.beam, tokenizer.vocabulary_size)[-1] for pattern in patterns) * choices
    return JointText(
        encodings=[],
        truncated=cut,
        warnings=warnings,
        values=min(top_k, most) * (CANDIDATE_VALUES * pieces + len(request.text) // 20),
        reserve=tokens,
        patterns=patterns,
        beam=request.beam,
        top_k=top_k,
        tokenizer=tokenizer,
    )


def decode(request: Request, encoded: EncodedText | JointText, rows: Sequence[Row], config: ModelConfig) -> list[Any] | Further:
    """Returns the best tokens for the mask, or a list of those for each of several; of joint masks what runs first.

    Args:
        request: The request.
        encoded: What `encode` returned.
        rows: One row per window with the output `logits`, float32 [masks, vocabulary], or what `reduce` kept of it.
        config: Not needed.

    Returns:
        `{score, token, token_str, sequence}` each; `sequence` is the whole text with the token in the mask's place.
    """
    if isinstance(encoded, JointText):
        return search(encoded)
    kept = [row if "tokens" in row else reduce(request, encoded, row) for row in rows]
    best = [pair for row in kept for pair in zip(row["tokens"].tolist(), row["scores"].tolist(), strict=True)]
    several = len(encoded.masks) > 1
    filled = [_filled(encoded, mask, tokens, scores, several) for mask, (tokens, scores) in zip(encoded.masks, best, strict=True)]
    return filled if several else filled[0]


def reduce(request: Request, encoded: EncodedText, row: Row) -> Row:
    """Returns of a row's logits the best `tokens` of each mask, int64 [masks, wanted], and their `scores`, float32 [masks, wanted]."""
    best = [_best(request, encoded, logits) for logits in row["logits"]]
    return {"tokens": np.stack([tokens for tokens, _ in best]), "scores": np.stack([scores for _, scores in best])}


def held(request: Request, encoded: EncodedText | JointText, config: ModelConfig) -> int:
    """Returns how many numbers the search for joint masks holds, at most."""
    if not isinstance(encoded, JointText):
        return 0
    return sum(pattern.held(encoded.beam, encoded.top_k, encoded.tokenizer.vocabulary_size) for pattern in encoded.patterns)


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


def _all_pieces(words: Sequence[str], tokenizer: Tokenizer) -> tuple[dict[Pieces, str], tuple[str, ...]]:
    exact = [tokenizer.token_id(word) for word in words]
    others = iter(tokenizer.tokenize([word for word, id_ in zip(words, exact, strict=True) if id_ is None]))
    pieces = [tuple(next(others).ids) if id_ is None else (id_,) for id_ in exact]
    found: dict[Pieces, str] = {}
    for word, each in zip(words, pieces, strict=True):
        if each:
            found.setdefault(each, word)
    if not found:
        raise InvalidValueError("`targets` has no word that the vocabulary knows; give at least one.")
    unknown_id = None if tokenizer.unknown is None else tokenizer.token_id(tokenizer.unknown)
    unknown = [word for word, each in zip(words, pieces, strict=True) if not each or unknown_id in each]
    some = ", ".join(word[:32] for word in unknown[:5])
    return found, (f"targets; {len(unknown)} of {len(words)} have pieces that the vocabulary does not know: {some}",) if unknown else ()


class FillMaskBody(TaskBody):
    """Body of a fill-mask request."""

    model_config = body_config(inputs="The king of [MASK] died in 1066.", parameters={"top_k": 3})
    parameters_type: ClassVar[type[TaskParameters]] = FillMaskParameters

    inputs: Annotated[TextOrTexts, Field(description="A text with one or more masks, or a list of such texts.")]
    parameters: FillMaskParameters | None = None

    def requests(self, config: ModelConfig | None = None) -> list[Any]:
        """Returns one request per text, all with the same targets."""
        parameters = self.parameters or DEFAULTS
        if parameters.beam is not None and not parameters.joint:
            raise InvalidValueError("`beam` is for masks that are filled together; set `joint` to true, or leave it out.")
        mask = None if config is None or config.mask is None else config.mask.token
        shared = Targets(parameters.targets, texts=len(self.items)) if parameters.targets and self.items else None
        return [Request(text, parameters, shared, mask) for text in self.items]

    def check_client(self, user_agent: str) -> None:
        """Stops a request of a client that would not read the answer.

        Raises:
            InvalidValueError: It has several inputs, or masks that are filled together, and its client reads neither.
        """
        super().check_client(user_agent)
        if user_agent.startswith(JAVASCRIPT) and self.parameters is not None and self.parameters.joint:
            raise InvalidValueError(
                "`joint` gives several tokens at once, which @huggingface/inference cannot read; ask with another client, such as fetch."
            )

    def answer(self, results: list[Any], user_agent: str = "") -> Any:
        """Returns the tokens; of several masks to @huggingface/inference, which reads no more, one list: the first mask's, then the next one's."""
        found = super().answer(results, user_agent)
        if user_agent.startswith(JAVASCRIPT) and isinstance(found[0], list):
            return [filled for each in found for filled in each]
        return found


class Filled(BaseModel):
    """One token in a mask's place."""

    score: Annotated[float, Field(examples=[0.257])]
    token: Annotated[int, Field(examples=[2563])]
    token_str: Annotated[str, Field(examples=["england"])]
    sequence: Annotated[str, Field(examples=["the king of england died in 1066."])]


class JointlyFilled(BaseModel):
    """Tokens in the places of all masks of a text; with `targets` the ones that they are the pieces of."""

    score: Annotated[float, Field(examples=[0.091])]
    tokens: Annotated[list[int], Field(examples=[[2332, 2414]])]
    token_strs: Annotated[list[str], Field(examples=[["king", "london"]])]
    targets: list[str] | None = None
    sequence: Annotated[str, Field(examples=["the king of london died in 1066."])]


def _missing(manifest: Manifest) -> str | None:
    return "`tokenizer.mask` must not be null for fill-mask" if manifest.tokenizer.mask is None else None


SPEC = TaskSpec(
    name=TASK,
    path="fill-mask",
    title="Fill masked words",
    body=FillMaskBody,
    answer=list[Filled] | list[list[Filled]] | list[list[list[Filled]]] | list[JointlyFilled] | list[list[JointlyFilled]],
    estimate=estimate,
    encode=encode,
    decode=decode,
    reduce=reduce,
    held=held,
    missing=_missing,
    load_mix="mask",
)
