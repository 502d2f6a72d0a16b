"""Joint masks: fills the masks of a text together, by a beam search that runs the text with partial fillings.

Masks are filled from left to right. The probability of a token is predicted with the earlier masks filled, and with its own mask and the
later ones in place. The score of a filling is the product of these probabilities. As all fillings have the same order, their scores add up
to 1, and can be compared. An order by confidence would give each filling its own distribution.

A target of several tokens needs as many masks. Targets with different numbers of tokens need different texts, each with its own search.
Scores are not divided by the number of tokens.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bertserve.service.bundle.graph_spec import Outputs
from bertserve.service.errors import InvalidValueError
from bertserve.service.tasks.cost import Cost, candidates_cost
from bertserve.service.tasks.decoding import best_tokens
from bertserve.service.tasks.step import Step, TaskGenerator, TaskResult, TextInput
from bertserve.service.text.tokenizer import Encoding, Tokenizer

DEFAULT_BEAM = 8  # fillings that are kept after each mask; each one is a run for the next mask
# Maximum masks of a text, with one per token of a target: the run for each mask follows the run for the one before.
MAX_JOINT_MASKS = 16
# Maximum number of texts with different numbers of masks; each one is searched with its own beam.
MAX_PATTERNS = 64

TokenTuple = tuple[int, ...]
# The surprisal (the negative logarithm of the score), and the token ids for the first masks, from left to right. The lowest is best.
Filling = tuple[float, TokenTuple]


@dataclass(frozen=True, slots=True)
class Slot:
    """A mask of the caller's text, as a number of masks: one per token of its targets.

    Attributes:
        size: Number of masks.
        count: Number of ways to fill them: its targets, or the vocabulary.
        next_tokens: Tokens so far -> allowed next tokens, ascending; None for any token.
        targets: Tokens -> target; None for any token.
    """

    size: int
    count: int
    next_tokens: Mapping[TokenTuple, NDArray[np.int64]] | None = None
    targets: Mapping[TokenTuple, str] | None = None


@dataclass(frozen=True, slots=True)
class Pattern:
    """The token ids of the whole text with one mask per token to fill in, the positions of the masks, and their slots, in order.

    The model reads the text from the position `start`.
    """

    ids: list[int]
    masks: list[int]
    slots: tuple[Slot, ...]
    start: int

    def filled(self, tokens: TokenTuple, start: int, stop: int) -> list[int]:
        """Returns a part of the text that contains all masks, with the first masks filled."""
        ids = self.ids[start:stop]
        for mask, token in zip(self.masks, tokens, strict=False):
            ids[mask - start] = token
        return ids

    def split(self, tokens: TokenTuple) -> list[TokenTuple]:
        """Returns the tokens of each slot: fewer than its size for the current slot, none for later ones."""
        parts, first = [], 0
        for slot in self.slots:
            parts.append(tokens[first : first + slot.size])
            first += slot.size
        return parts

    def allowed(self, tokens: TokenTuple) -> NDArray[np.int64] | None:
        """Returns the allowed next tokens, ascending; None for any. At least one mask is not filled."""
        slot, part = next((slot, part) for slot, part in zip(self.slots, self.split(tokens), strict=True) if len(part) < slot.size)
        return None if slot.next_tokens is None else slot.next_tokens[part]


def fill_jointly(
    input_: TextInput[Any], ids: list[int], masks: list[int], slots: Sequence[Slot] | None, tokenizer: Tokenizer, warnings: tuple[str, ...]
) -> TaskGenerator:
    """Returns the best fillings of all masks of a text together, by falling score.

    `masks` are the positions of the masks in the token ids of the text, at least one; `slots` contains None if any token can fill a mask.

    Raises:
        InvalidValueError: There are too many masks or texts, or the masks of a text do not fit the model's length.
    """
    beam, top_k = input_.parameters.beam or DEFAULT_BEAM, input_.parameters.top_k
    slots = slots or [Slot(1, tokenizer.vocabulary_size)]
    if len(slots) ** len(masks) > MAX_PATTERNS:
        raise InvalidValueError(
            "{masks_count} masks with targets of {slots_count} different numbers of tokens need {texts} texts "
            "to search and {limit} are allowed; give targets of fewer different lengths, or fewer masks.",
            masks_count=len(masks),
            slots_count=len(slots),
            texts=len(slots) ** len(masks),
            limit=MAX_PATTERNS,
        )
    patterns = [_pattern(ids, masks, chosen, tokenizer) for chosen in product(slots, repeat=len(masks))]
    longest, mask_count = max(len(pattern.ids) for pattern in patterns), max(len(pattern.masks) for pattern in patterns)
    count = min(top_k, sum(slot.count for slot in slots) ** len(masks))
    max_tokens = tokenizer.max_text_tokens(pair=False)
    specials = tokenizer.spec.max_length - max_tokens
    tokens = sum(_max_runs(pattern.slots, beam) * (min(len(pattern.ids), max_tokens) + specials + 1) for pattern in patterns)
    cost = candidates_cost(input_.text, longest, count, masks=mask_count) + Cost(reserved_tokens=tokens)
    yield Step([], cost, truncated=longest > max_tokens, warnings=warnings)  # the search starts after the check of its total cost
    return (yield from _search(patterns, beam=beam, top_k=top_k, tokenizer=tokenizer))


def build_slots(targets: Mapping[TokenTuple, str]) -> list[Slot]:
    """Returns the slots of a mask, one for each number of tokens of the targets; `targets` maps tokens to their target."""
    slots = []
    for size in sorted({len(tokens) for tokens in targets}):
        of_size = {tokens: target for tokens, target in targets.items() if len(tokens) == size}
        next_tokens: dict[TokenTuple, set[int]] = {}
        for target_tokens in of_size:
            for index, token in enumerate(target_tokens):
                next_tokens.setdefault(target_tokens[:index], set()).add(token)
        slots.append(Slot(size, len(of_size), {prefix: np.array(sorted(tokens)) for prefix, tokens in next_tokens.items()}, of_size))
    return slots


def _pattern(ids: list[int], masks: Sequence[int], slots: tuple[Slot, ...], tokenizer: Tokenizer) -> Pattern:
    count = sum(slot.size for slot in slots)
    if count > MAX_JOINT_MASKS:
        hint = "" if count == len(masks) else f" with a mask for each token of {'its' if len(masks) == 1 else 'their'} targets"
        raise InvalidValueError(
            "the text has {count} masks{hint} and `joint` fills at most {limit}; use fewer masks or shorter targets.",
            count=count,
            hint=hint,
            limit=MAX_JOINT_MASKS,
        )
    expanded: list[int] = []
    positions: list[int] = []
    before = 0
    for mask, slot in zip(masks, slots, strict=True):
        expanded += ids[before:mask]
        positions += range(len(expanded), len(expanded) + slot.size)
        expanded += [ids[mask]] * slot.size
        before = mask + 1
    expanded += ids[before:]
    max_tokens, span = tokenizer.max_text_tokens(pair=False), positions[-1] - positions[0] + 1
    if span > max_tokens:
        raise InvalidValueError(
            "the masks of the text span {span} tokens and the model takes {max_tokens}; shorten the text, or remove "
            "`joint` to fill each mask separately.",
            span=span,
            max_tokens=max_tokens,
        )
    middle = (positions[0] + positions[-1]) // 2
    start = min(max(middle - max_tokens // 2, positions[-1] - max_tokens + 1, 0), max(len(expanded) - max_tokens, 0))
    return Pattern(expanded, positions, slots, start)


def _max_runs(slots: Sequence[Slot], beam: int) -> int:
    """Returns the maximum number of texts that are run for the masks of the slots: for each mask, one per kept filling before it."""
    runs, fillings = 0, 1
    for slot in slots:
        runs += fillings
        fillings = min(fillings * slot.count, beam)
        runs += fillings * (slot.size - 1)
    return runs


def _search(patterns: Sequence[Pattern], *, beam: int, top_k: int, tokenizer: Tokenizer) -> TaskGenerator:
    """Returns the `top_k` best fillings of all patterns, by falling score. Each step runs the next mask of all patterns.

    `beam` is the number of fillings that each pattern keeps.
    """
    max_tokens = tokenizer.max_text_tokens(pair=False)
    fillings: list[list[Filling]] = [[(0.0, ())] for _ in patterns]
    for done in range(max(len(pattern.masks) for pattern in patterns)):
        open_patterns = [(index, pattern) for index, pattern in enumerate(patterns) if done < len(pattern.masks)]
        counts = {index: top_k if done + 1 == len(pattern.masks) else beam for index, pattern in open_patterns}
        encodings: list[Encoding] = []
        choices: list[tuple[int, NDArray[np.int64] | None]] = []
        for index, pattern in open_patterns:
            for _, tokens in fillings[index]:
                ids = pattern.filled(tokens, pattern.start, pattern.start + max_tokens)
                encodings.append(tokenizer.assemble(ids, masks=[pattern.masks[done] - pattern.start]))
                choices.append((counts[index], pattern.allowed(tokens)))
        rows = iter((yield Step(encodings, keep=partial(_best, choices))))
        for index, _ in open_patterns:
            fillings[index] = _extended(fillings[index], [next(rows) for _ in fillings[index]], counts[index])
    return TaskResult(_results(patterns, fillings, top_k, tokenizer))


def _best(choices: Sequence[tuple[int, NDArray[np.int64] | None]], index: int, row: Outputs) -> Outputs:
    """Returns the best `tokens` of one mask, int64 [tokens], and the logarithms of their probabilities as `log_probs`, float64.

    `choices` gives the maximum number of tokens and the allowed ones for each encoding.
    """
    logits = row["logits"][0].astype(np.float64)
    shifted = logits - logits.max()
    log_probs = shifted - np.log(np.exp(shifted).sum())
    best = best_tokens(log_probs, *choices[index])
    return {"tokens": best, "log_probs": log_probs[best]}


def _extended(fillings: Sequence[Filling], rows: Sequence[Outputs], count: int) -> list[Filling]:
    """Returns the best `count` fillings with one more mask filled; `rows` contains the result of `_best` for each filling."""
    surprisals = [surprisal - row["log_probs"] for (surprisal, _), row in zip(fillings, rows, strict=True)]
    all_surprisals = np.concatenate(surprisals)
    count = min(count, len(all_surprisals))
    # creates no objects for the many dropped ones; includes all that equal the last one, so that ties are ordered
    highest = np.partition(all_surprisals, count - 1)[count - 1]
    candidates = [
        (float(next_surprisals[index]), (*tokens, int(row["tokens"][index])))
        for (_, tokens), row, next_surprisals in zip(fillings, rows, surprisals, strict=True)
        for index in np.flatnonzero(next_surprisals <= highest)
    ]
    return sorted(candidates)[:count]


def _results(
    patterns: Sequence[Pattern], fillings: Sequence[Sequence[Filling]], top_k: int, tokenizer: Tokenizer
) -> list[dict[str, object]]:
    """Returns the best fillings of all patterns, by falling score."""
    pairs = [(filling, pattern) for pattern, of_pattern in zip(patterns, fillings, strict=True) for filling in of_pattern]
    best = sorted(pairs, key=lambda pair: pair[0])[:top_k]
    texts = [pattern.filled(tokens, 0, len(pattern.ids)) for (_, tokens), pattern in best]
    results: list[dict[str, object]] = []
    for ((surprisal, tokens), pattern), sequence in zip(best, tokenizer.decode_all(texts, skip_special=True), strict=True):
        filled_slots = zip(pattern.slots, pattern.split(tokens), strict=True)
        targets = [slot.targets[part] for slot, part in filled_slots if slot.targets is not None]
        results.append(
            {
                "score": math.exp(-surprisal),
                "tokens": list(tokens),
                "token_strs": tokenizer.decode_all([[token] for token in tokens], skip_special=False),
                **({"targets": targets} if targets else {}),
                "sequence": sequence,
            }
        )
    return results
