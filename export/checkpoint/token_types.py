"""Chooses the token types (segment ids) that a model gets: those of its tokenizer's template, or none, which most models read as zeros.

What the model was trained with decides. Many tokenizer classes gave the template's types in transformers 4 and give none in transformers 5,
so the version that wrote config.json decides for them. The reference and the graphs get the same types.
"""

from __future__ import annotations

import inspect
import logging
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from bertserve.export.errors import CheckpointError
from bertserve.service.bundle.manifest import TemplatePart, TokenTypes

logger = logging.getLogger("bertserve.export")

TYPE_IDS = "token_type_ids"
# Classes with an own list of inputs, from which transformers 5 dropped token types. Other such lists are the same in both versions; classes
# with the default list, such as XLNet's and the generic one, lost token types too.
_CHANGED_CLASSES = ("AlbertTokenizer", "HerbertTokenizer", "RemBertTokenizer", "SplinterTokenizer")


@dataclass(frozen=True)
class TypedTemplates:
    """The templates with the token types that the model gets.

    Attributes:
        single: Template of one text.
        pair: Template of a pair; None if the model lacks one of its token types.
        token_types: The token types that the model was trained with; None if it reads none.
    """

    single: tuple[TemplatePart, ...]
    pair: tuple[TemplatePart, ...] | None
    token_types: TokenTypes | None

    @property
    def parts(self) -> tuple[TemplatePart, ...]:
        """The parts of both templates."""
        return (*self.single, *(self.pair or ()))


def choose_token_types(
    source: str,
    model: PreTrainedModel,
    tokenizer: Any,
    parts: Iterable[TemplatePart],
    *,
    version: str | None,
    requested: TokenTypes | None,
) -> TokenTypes | None:
    """Returns the token types that the model was trained with, or None if it reads none.

    `parts` are those of all templates that the task uses; `version` is the version of transformers that wrote the checkpoint, if known.

    Raises:
        CheckpointError: The user's choice has no effect, or it is unknown how the model was trained, and this matters.
    """
    rows = getattr(model.config, "type_vocab_size", None)
    if TYPE_IDS not in inspect.signature(model.forward).parameters or rows == 0:
        if requested is not None:
            raise CheckpointError(
                f"--token-types is {requested}, but {type(model).__name__} of `{source}` reads no token types; remove it."
            )
        return None
    if requested is not None:
        return requested
    # a model without a table of types, such as XLM, adds another vector for zeros, and nothing without types
    matters = rows is None or (rows != 1 and any(part.type_id for part in parts))
    gives_types = gives_token_types(tokenizer)
    if gives_types is None:
        gives_types = _gave_by_default(version)
        if gives_types is False and matters:
            logger.warning(
                "`%s` was saved by transformers %s, whose %s gives no token types, so the second text of a pair has the types of the first; if it "
                "was trained with those of the template, give --token-types template.",
                source,
                version,
                type(tokenizer).__name__,
            )
    if gives_types is not None or not matters:
        return "template" if gives_types else "zero"
    raise CheckpointError(
        f"it is unknown with which token types `{source}` was trained: {type(tokenizer).__name__} gave those of its template in transformers 4 "
        f"and gives none in transformers 5, and the version of its training is {f'`{version}`' if version else 'not recorded'}. Wrong types "
        "change the answers; give --token-types template for transformers 4 or older, or --token-types zero for transformers 5."
    )


def type_templates(
    source: str,
    model: PreTrainedModel,
    single: tuple[TemplatePart, ...],
    pair: tuple[TemplatePart, ...],
    token_types: TokenTypes | None,
    *,
    needs_pairs: bool,
) -> TypedTemplates:
    """Returns the tokenizer's templates with the chosen token types.

    Raises:
        CheckpointError: The model lacks a token type of all its inputs: of single texts or, with `needs_pairs`, of pairs.
    """
    if token_types == "zero":  # noqa: S105 - no password
        single, pair = (tuple(part.model_copy(update={"type_id": 0}) for part in parts) for parts in (single, pair))
    rows = getattr(model.config, "type_vocab_size", None)
    highest = max(part.type_id for part in (*single, *pair))
    if token_types is None or not rows or highest < rows:
        return TypedTemplates(single, pair, token_types)
    if needs_pairs or any(part.type_id >= rows for part in single):
        raise CheckpointError(
            f"the tokenizer of `{source}` gives token types up to {highest}, but the model has {rows}; use the tokenizer of this model, or "
            "give --token-types zero if it was trained without token types."
        )
    return TypedTemplates(single, None, token_types)  # PyTorch fails on pairs, but reads single texts


def gives_token_types(tokenizer: Any) -> bool | None:
    """Returns whether a tokenizer gives token types in every version of transformers; None if only transformers 4 gave them."""
    if TYPE_IDS in tokenizer.model_input_names:
        return True
    owner = next(base for base in type(tokenizer).__mro__ if "model_input_names" in vars(base))
    if "model_input_names" in tokenizer.init_kwargs or (owner is not PreTrainedTokenizerBase and owner.__name__ not in _CHANGED_CLASSES):
        return False
    return None


def _gave_by_default(version: str | None) -> bool | None:
    """Returns whether the classes that changed gave token types in a version; None if unknown, as for early versions before 5.0.0."""
    match = re.match(r"(\d+)\.\d", str(version))  # config.json may have a number
    if match is None or re.match(r"5\.0\.0\.?(dev|rc)", str(version)):
        return None
    return int(match[1]) < 5  # whose default list has no token types
