"""Chooses the token types (segment ids) of a model: from its tokenizer's template, or none, which most models read as zeros.

What the model was trained with decides. Many tokenizer classes gave the template's types in transformers 4 and give none in transformers 5,
so the version that wrote config.json decides for them. The reference and the graphs get the same types.
"""

import inspect
import re
from collections.abc import Iterable
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from bertserve.export.errors import ExportError, warn
from bertserve.service.bundle.manifest import TemplatePart, TokenTypes

Template = tuple[TemplatePart, ...]  # the special tokens and the texts of an encoding, in order
TYPE_IDS = "token_type_ids"
# Classes with their own list of inputs, from which transformers 5 dropped token types. Other such lists are the same in both versions;
# classes with the default list, such as XLNet's and the generic one, lost token types too.
_CHANGED_CLASSES = ("AlbertTokenizer", "HerbertTokenizer", "RemBertTokenizer", "SplinterTokenizer")


def choose_token_types(
    source: str, model: PreTrainedModel, tokenizer: Any, parts: Iterable[TemplatePart], *, version: str | None, requested: TokenTypes | None
) -> TokenTypes | None:
    """Returns the token types that the model was trained with, or None if it reads none.

    `parts` are the parts of all templates that the task uses; `version` is the version of transformers that wrote the checkpoint, if known.
    """
    rows = getattr(model.config, "type_vocab_size", None)
    if TYPE_IDS not in inspect.signature(model.forward).parameters or rows == 0:
        if requested is not None:
            raise ExportError(f"--token-types is {requested}, but {type(model).__name__} reads no token types; remove it.")
        return None
    if requested is not None:
        return requested
    # a model without a table of types, such as XLM, adds another vector for zeros, and nothing without types
    matters = rows is None or (rows != 1 and any(part.type_id for part in parts))
    gives_types = _gives_token_types(tokenizer)
    if gives_types is None:
        # before 5.0.0, early versions are unknown; config.json can contain a number
        major = None if re.match(r"5\.0\.0\.?(dev|rc)", str(version)) else re.match(r"(\d+)\.\d", str(version))
        gives_types = None if major is None else int(major[1]) < 5
        if gives_types is False and matters:
            warn(
                f"`{source}` was saved by transformers {version}, whose {type(tokenizer).__name__} gives no token types, so texts of a "
                "pair have the same; if it was trained with those of the template, give --token-types template."
            )
    if gives_types is not None or not matters:
        return "template" if gives_types else "zero"
    raise ExportError(
        f"`{source}` does not say with which token types it was trained: {type(tokenizer).__name__} gives them only in transformers 4, and "
        f"the version is {f'`{version}`' if version else 'not recorded'}; give --token-types template for transformers 4, or zero."
    )


def type_templates(
    source: str, model: PreTrainedModel, single: Template, pair: Template, token_types: TokenTypes | None, *, requires_pair: bool
) -> tuple[Template, Template | None]:
    """Returns the tokenizer's templates with the chosen token types; no template of a pair if the model lacks one of its types."""
    if token_types == "zero":  # noqa: S105 - no password
        single, pair = (tuple(part.model_copy(update={"type_id": 0}) for part in parts) for parts in (single, pair))
    rows = getattr(model.config, "type_vocab_size", None)
    highest = max(part.type_id for part in (*single, *pair))
    if token_types is None or not rows or highest < rows:
        return single, pair
    if requires_pair or any(part.type_id >= rows for part in single):
        raise ExportError(
            f"the tokenizer of `{source}` gives token types up to {highest}, but the model has {rows}; use the tokenizer of this model, or "
            "give --token-types zero if it was trained without token types."
        )
    return single, None  # PyTorch fails on pairs, but reads single texts


def _gives_token_types(tokenizer: Any) -> bool | None:
    """Returns whether a tokenizer gives token types in every version of transformers; None if only transformers 4 gave them."""
    if TYPE_IDS in tokenizer.model_input_names:
        return True
    owner = next(base for base in type(tokenizer).__mro__ if "model_input_names" in vars(base))
    if "model_input_names" in tokenizer.init_kwargs or (owner is not PreTrainedTokenizerBase and owner.__name__ not in _CHANGED_CLASSES):
        return False
    return None
