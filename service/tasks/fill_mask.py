"""Fill-mask: a text with masked words to the best tokens for each mask, like the Hugging Face pipeline.

There are two intended differences from the pipeline: a text over the model's length is read in one window around each mask; and
the mask is the only special token that a text can contain, because other spellings of special tokens are ordinary text.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Annotated, Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from pydantic import AfterValidator, BaseModel, BeforeValidator, Field
from pydantic_core import PydanticCustomError

from bertserve.service.body.task_body import MAX_TOP_K, ClosedModel, TaskBody, TextOrTexts, body_config
from bertserve.service.bundle.graph_spec import TOP_LOG_PROBS_OUTPUT, TOP_TOKENS, TOP_TOKENS_OUTPUT, Outputs
from bertserve.service.bundle.manifest import ModelConfig
from bertserve.service.errors import InvalidParameterError, InvalidValueError
from bertserve.service.tasks.cost import TEXT_CHARS, candidates_cost
from bertserve.service.tasks.decoding import activate, best_tokens
from bertserve.service.tasks.joint_masks import DEFAULT_BEAM, MAX_PATTERNS, Slot, TokenTuple, build_slots, fill_jointly
from bertserve.service.tasks.step import Step, TaskGenerator, TaskModel, TaskResult, TextInput
from bertserve.service.tasks.task_spec import TaskSpec
from bertserve.service.text.tokenizer import Encoding, Tokenizer

TASK = "fill-mask"
MAX_MASKS = 64  # masks of a text; each needs memory for the logits of the whole vocabulary
MAX_TARGET_CHARS = 2**14  # characters of all targets


def _check_targets(targets: list[str] | None) -> list[str] | None:
    if (chars := sum(map(len, targets or ()))) > MAX_TARGET_CHARS:
        limits = {"most": MAX_TARGET_CHARS, "chars": chars}
        raise PydanticCustomError("targets", "must have at most {most} characters in total, not {chars}", limits)
    return targets


class FillMaskParameters(ClosedModel):
    """Parameters of fill-mask."""

    top_k: Annotated[int, Field(ge=1, le=MAX_TOP_K, description="Number of tokens for each mask, at most `--max-top-k`.")] = 5
    targets: Annotated[
        # longer than every entry of a vocabulary
        Annotated[list[Annotated[str, Field(max_length=256)]], Field(fail_fast=True, min_length=1, max_length=1000)] | None,
        BeforeValidator(lambda value: [value] if isinstance(value, str) else value),
        AfterValidator(_check_targets),
        Field(description=f"Only consider these words, of at most {MAX_TARGET_CHARS:,} characters in total."),
    ] = None
    joint: Annotated[bool, Field(description="Fill all masks of a text together, instead of each by itself.")] = False
    beam: Annotated[int | None, Field(ge=1, le=64, description=f"With `joint`, the beam width; by default {DEFAULT_BEAM}.")] = None


@dataclass(slots=True)
class FillMaskInput(TextInput[FillMaskParameters]):
    """A text with masks. Its `other_chars` are its share of the characters of the targets.

    Attributes:
        resolve_targets: Returns the result of `target_ids`, or with `joint` of `target_slots`; None if any token can fill a mask. All
            texts of a body share it, so that the targets are tokenized once.
    """

    resolve_targets: Callable[[Tokenizer], tuple[Any, tuple[str, ...]]] | None = None


def fill_masks(input_: FillMaskInput, model: TaskModel) -> TaskGenerator:
    """Returns the best tokens for the mask, or a list of them per mask if there are several; with `joint` the best fillings of all masks.

    The rows have the output `logits`, float32 [masks, vocabulary], or the best tokens; there is one row per window. A result is
    `{score, token, token_str, sequence}`; `sequence` is the whole text with the token instead of the mask.

    Raises:
        InvalidValueError: There is no mask, there are too many, or no target contains a token.
    """
    tokenizer = model.tokenizer
    ids, mask = tokenizer.tokenize([input_.text])[0].ids, tokenizer.spec.mask
    assert mask is not None, "every manifest of a fill-mask model has it"
    masks = [i for i, id_ in enumerate(ids) if id_ == mask.id]
    _check_masks(len(masks), mask.token, input_.text)
    targets, warnings = (None, ()) if input_.resolve_targets is None else input_.resolve_targets(tokenizer)
    if input_.parameters.joint:
        return (yield from fill_jointly(input_, ids, masks, targets, tokenizer, warnings))

    def keep(_: int, row: Outputs) -> Outputs:
        if TOP_TOKENS_OUTPUT in row:
            tokens, log_probs = row[TOP_TOKENS_OUTPUT], row[TOP_LOG_PROBS_OUTPUT]
            best_first = np.lexsort((tokens, -log_probs))[:, : input_.parameters.top_k]  # a GPU's order of equal scores is undefined
            tokens, log_probs = (np.take_along_axis(values, best_first, axis=1) for values in (tokens, log_probs))
            return {"tokens": tokens, "scores": np.exp(log_probs)}
        best, scores = [], []
        for logits in row["logits"]:  # one by one, because the scores of a whole vocabulary are large
            all_scores = activate(logits, "softmax")
            best.append(best_tokens(all_scores, input_.parameters.top_k, targets))
            scores.append(all_scores[best[-1]])
        return {"tokens": np.stack(best), "scores": np.stack(scores)}

    candidates = len(masks) * min(input_.parameters.top_k, tokenizer.vocabulary_size if targets is None else len(targets))
    cost = candidates_cost(input_.text, len(ids), candidates)
    small_outputs = targets is None and input_.parameters.top_k <= TOP_TOKENS
    rows = yield Step(_windows(ids, masks, tokenizer), cost, keep, small_outputs, warnings=warnings)
    best = [pair for row in rows for pair in zip(row["tokens"].tolist(), row["scores"].tolist(), strict=True)]
    if len(masks) == 1:
        return TaskResult(_candidates(tokenizer, ids, masks[0], *best[0], skip_special=True))
    whole = tokenizer.assemble(ids, masks=masks)
    # with several masks the special tokens stay in the sequences, as in the pipeline
    token_ids, pairs = whole.ids.tolist(), zip(whole.masks, best, strict=True)
    return TaskResult([_candidates(tokenizer, token_ids, position, *pair, skip_special=False) for position, pair in pairs])


def _windows(ids: list[int], masks: Sequence[int], tokenizer: Tokenizer) -> list[Encoding]:
    """Returns one encoding with all masks, or one around each mask if the text exceeds the model's length."""
    max_tokens = tokenizer.max_text_tokens(pair=False)
    if len(ids) <= max_tokens:
        return [tokenizer.assemble(ids, masks=masks)]
    starts = [min(max(i - max_tokens // 2, 0), len(ids) - max_tokens) for i in masks]
    return [tokenizer.assemble(ids[start : start + max_tokens], masks=[i - start]) for i, start in zip(masks, starts, strict=True)]


def _candidates(
    tokenizer: Tokenizer, ids: list[int], position: int, tokens: Sequence[int], scores: Sequence[float], *, skip_special: bool
) -> list[dict[str, Any]]:
    """Returns the candidates of the mask at a position of a text."""
    texts = tokenizer.decode_all([[token] for token in tokens], skip_special=False)
    sequences = tokenizer.decode_all([[*ids[:position], token, *ids[position + 1 :]] for token in tokens], skip_special=skip_special)
    return [
        {"score": score, "token": token, "token_str": text, "sequence": sequence}
        for score, token, text, sequence in zip(scores, tokens, texts, sequences, strict=True)
    ]


def _check_masks(count: int, mask: str, text: str) -> None:
    if count > MAX_MASKS:
        raise InvalidValueError("the text has {count} masks and {limit} are allowed; split it.", count=count, limit=MAX_MASKS)
    if count == 0:
        other = re.search(r"\[MASK\]|<mask>|___", text)  # masks of other models
        raise InvalidValueError(
            "the text has no mask; write `{known}` for each word to fill in{instead}.",
            known=mask,
            instead="" if other is None else f", instead of `{other[0]}`",
        )


def _tokenize_targets(targets: Sequence[str], tokenizer: Tokenizer) -> list[TokenTuple]:
    """Returns the tokens of each target: the vocabulary entry if there is one, otherwise the tokens of its text, which can be empty."""
    vocabulary_ids = [tokenizer.token_id(target) for target in targets]
    tokenized_targets = iter(tokenizer.tokenize([target for target, id_ in zip(targets, vocabulary_ids, strict=True) if id_ is None]))
    target_tokens = [tuple(next(tokenized_targets).ids) if id_ is None else (id_,) for id_ in vocabulary_ids]
    if not any(target_tokens):
        raise InvalidParameterError("`targets` has no word of the model's vocabulary; give at least one.")
    return target_tokens


def target_ids(targets: Sequence[str], tokenizer: Tokenizer) -> tuple[NDArray[np.int64], tuple[str, ...]]:
    """Returns the token ids of targets, ascending, and warnings about targets that are cut or left out."""
    target_tokens = _tokenize_targets(targets, tokenizer)
    first_tokens = [
        tokens[:1] for target, tokens in zip(targets, target_tokens, strict=True) if tokens and tokenizer.token_id(target) is None
    ]
    warnings = []
    if first_tokens:
        some = _shorten(tokenizer.decode_all(first_tokens, skip_special=False))
        warnings.append(f"targets; {len(first_tokens)} of {len(targets)} are not in the vocabulary, so their first tokens are used: {some}")
    if without_tokens := sum(not tokens for tokens in target_tokens):
        warnings.append(f"targets; {without_tokens} of {len(targets)} have no tokens, so they are left out")
    return np.array(sorted({tokens[0] for tokens in target_tokens if tokens})), tuple(warnings)


def target_slots(targets: Sequence[str], tokenizer: Tokenizer) -> tuple[list[Slot], tuple[str, ...]]:
    """Returns the slots of a mask that targets fill, and a warning about targets outside of the vocabulary."""
    target_tokens, target_by_tokens = _tokenize_targets(targets, tokenizer), dict[TokenTuple, str]()
    for target, tokens in zip(targets, target_tokens, strict=True):
        if tokens:
            target_by_tokens.setdefault(tokens, target)
    unknown = [target for target, tokens in zip(targets, target_tokens, strict=True) if not tokens or tokenizer.unknown_id in tokens]
    return build_slots(target_by_tokens), (
        f"targets; {len(unknown)} of {len(targets)} have no tokens, or tokens that are not in the vocabulary: {_shorten(unknown)}",
    ) if unknown else ()


def _shorten(words: Sequence[str]) -> str:
    """Returns some of the words for a warning, which is a header."""
    return ", ".join(word[:32] for word in words[:5])


class FillMaskBody(TaskBody):
    """Body of a fill-mask request."""

    model_config = body_config(inputs="The king of [MASK] died in 1066.", parameters={"top_k": 3})
    top_k_is_limited: ClassVar[bool] = True

    inputs: Annotated[TextOrTexts, Field(description="One or more texts with masks.")]
    parameters: FillMaskParameters | None = None

    def task_inputs(self, config: ModelConfig) -> list[Any]:
        """Returns one input per text, all with the same targets.

        Raises:
            InvalidValueError: `beam` is given without `joint`.
        """
        parameters: FillMaskParameters = self.parameters or self.default_parameters
        if parameters.beam is not None and not parameters.joint:
            raise InvalidValueError("`beam` needs `joint`; set `joint` to true, or remove `beam`.")
        if not parameters.targets or not self.items:
            return [FillMaskInput(text, parameters) for text in self.items]
        resolve_targets = cache(partial(target_slots if parameters.joint else target_ids, parameters.targets))
        chars = sum(len(target) + TEXT_CHARS for target in parameters.targets) // len(self.items)
        if parameters.joint:  # targets of different lengths need several texts, whose number is known only after tokenizing
            chars += MAX_PATTERNS * TEXT_CHARS
        return [FillMaskInput(text, parameters, other_chars=chars, resolve_targets=resolve_targets) for text in self.items]


class MaskCandidate(BaseModel):
    """A token that fills a mask."""

    score: Annotated[float, Field(examples=[0.257])]
    token: Annotated[int, Field(examples=[2563])]
    token_str: Annotated[str, Field(examples=["england"])]
    sequence: Annotated[str, Field(examples=["the king of england died in 1066."])]


class JointMaskCandidate(BaseModel):
    """Tokens that fill all masks of a text; with `targets`, also the targets that they spell."""

    score: Annotated[float, Field(examples=[0.091])]
    tokens: Annotated[list[int], Field(examples=[[2332, 2414]])]
    token_strs: Annotated[list[str], Field(examples=[["king", "london"]])]
    targets: list[str] | None = None
    sequence: Annotated[str, Field(examples=["the king of london died in 1066."])]


SPEC = TaskSpec(
    name=TASK,
    path="fill-mask",
    title="Fill masked words",
    body=FillMaskBody,
    response_type=list[MaskCandidate]
    | list[list[MaskCandidate]]
    | list[list[list[MaskCandidate]]]
    | list[JointMaskCandidate]
    | list[list[JointMaskCandidate]],
    function=fill_masks,
    missing_field=lambda manifest: "`tokenizer.mask` must not be null for fill-mask" if manifest.tokenizer.mask is None else None,
)
