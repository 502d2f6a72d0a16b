"""Finds the padding that a model tolerates: a token that no text has, and the side of it. It runs the model to find out.

A decoder's classifier reads the last token that is not padding, and it recognizes padding by the id that its configuration names. So the id
counts, and not only the mask. With an id that the configuration does not name the last position would be read, which is padding.

These are the first runs of the model. A model that replaces layers of its own while it reads is refused then, because its answers depend on
what it has read before. BigBird is one: a short text switches it for good to full attention, in place of the sparse attention that its
configuration names. A graph of either attention differs from what transformers answers with the other, and only the checkpoint's owner can
say which is meant.
"""

from __future__ import annotations

import string
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from bertserve.export.errors import CheckpointError
from bertserve.service.bundle.manifest import Piece, Side, SpecialPiece

SIDES: tuple[Side, ...] = ("right", "left")
MAX_DIFFERENCE = 1e-3


@dataclass(frozen=True)
class Padding:
    """Padding that leaves a text's outputs unchanged.

    Attributes:
        id: Token id.
        side: Where it stands.
    """

    id: int
    side: Side


def settle_pad_token(source: str, model: PreTrainedModel, tokenizer: Any, pieces: Sequence[Piece]) -> None:
    """Gives tokenizer and configuration a padding token where they have none, as GPT's have not.

    transformers reads the last position then, and takes one text at a time. No template contains the chosen token: otherwise the last
    token of a text would be taken for padding, and another one be read.

    Args:
        source: The checkpoint, for the message.
        model: Its configuration may get an id.
        tokenizer: May get a token.
        pieces: The templates.

    Raises:
        CheckpointError: There is none, and no special token that could be one.
    """
    config = model.config.get_text_config()
    named = config.pad_token_id
    if tokenizer.pad_token_id is None and _is_row(named, model):
        tokenizer.pad_token = tokenizer.convert_ids_to_tokens(named)
    if named is not None and tokenizer.pad_token_id is not None:
        return
    template = {piece.id for piece in pieces if isinstance(piece, SpecialPiece)}
    order = (tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id, tokenizer.bos_token_id, *tokenizer.all_special_ids)
    free = next((id_ for id_ in order if id_ is not None and id_ not in template and _is_row(id_, model)), None)
    if free is None:
        raise CheckpointError(
            f"the tokenizer of `{source}` has no padding token, and no other special token that texts do not use; "
            "set `pad_token` and save it again."
        )
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.convert_ids_to_tokens(free)
    if named is None:
        config.pad_token_id = free


def refuse_ordinary_padding(source: str, tokenizer: Any, pad_id: int, texts: Iterable[str]) -> None:
    """Refuses padding by a token that ordinary texts have: the service takes padding that a text spells for unknown text.

    Args:
        source: The checkpoint, for the message.
        tokenizer: Its Hugging Face tokenizer.
        pad_id: Token id of padding.
        texts: Ordinary texts.

    Raises:
        CheckpointError: One of the texts has the token.
    """
    if pad_id == tokenizer.unk_token_id:
        return
    texts = [*texts, " ".join(string.printable)]
    encodings = tokenizer(texts, add_special_tokens=False)["input_ids"]
    found = next((text for text, ids in zip(texts, encodings, strict=True) if pad_id in ids), None)
    if found is not None:
        token = tokenizer.convert_ids_to_tokens(pad_id)
        raise CheckpointError(
            f"the padding token of `{source}` is `{token}` (id {pad_id}), which is an ordinary token, such as "
            f"in `{found[:60]}`; set `pad_token` to a token that no text has, and `pad_token_id` in config.json "
            "to its id."
        )


def find_padding(model: PreTrainedModel, tokenizer: Any, names: Sequence[str], max_length: int) -> Padding:
    """Returns the padding which leaves a text's outputs unchanged: on the right or else the left, of the tokenizer's id or else the model's own.

    XLNet, for one, reads its last position, so it tolerates padding on the left alone. LLaMA tolerates both sides, as its positions are
    relative; but on the left they are other numbers, whose last bits differ, and int8 makes a step of that. If none is tolerated the
    tokenizer's own is returned: parity then finds the graph not batch-invariant, and the service runs it one text at a time.

    Args:
        model: In evaluation mode.
        tokenizer: Its Hugging Face tokenizer, which has a padding token.
        names: The inputs that the tokenizer fills.
        max_length: The longest text that the model reads, in tokens.
    """
    named = model.config.get_text_config().pad_token_id
    ids = dict.fromkeys(id_ for id_ in (tokenizer.pad_token_id, named) if _is_row(id_, model))
    found = (Padding(id_, side) for side in SIDES for id_ in ids if _tolerates(model, tokenizer, names, max_length, Padding(id_, side)))
    return next(found, Padding(tokenizer.pad_token_id, tokenizer.padding_side))


def _is_row(id_: int | None, model: PreTrainedModel) -> bool:
    """Returns whether an id is one of the embedding: some configurations name -1."""
    embeddings: Any = model.get_input_embeddings()
    return id_ is not None and 0 <= id_ < embeddings.weight.shape[0]


def _tolerates(model: PreTrainedModel, tokenizer: Any, names: Sequence[str], max_length: int, padding: Padding) -> bool:
    short, long = "A", "Another text, which is a good deal longer than the one before it."
    side, cut = padding.side, {"truncation": True, "max_length": max_length, "return_tensors": "pt", "return_token_type_ids": True}
    batch = tokenizer([short, long], padding=True, padding_side=side, **cut)
    batch["input_ids"] = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, padding.id)
    alone = tokenizer([short], **cut)
    length = alone["input_ids"].shape[1]
    with torch.no_grad():
        padded_outputs, outputs = (model(**{name: inputs[name] for name in names}) for inputs in (batch, alone))
    for name in outputs:
        padded, expected = padded_outputs[name], outputs[name]
        if not isinstance(expected, torch.Tensor):
            continue
        if expected.ndim > 1 and expected.shape[1] == length:
            padded = padded[:, -length:] if side == "left" else padded[:, :length]
        if not torch.allclose(padded[:1], expected, rtol=0, atol=MAX_DIFFERENCE):
            return False
    return True


@contextmanager
def refuse_self_modifying(source: str, model: PreTrainedModel) -> Iterator[None]:
    """Compares a model's layers before and after the block, which runs it for the first time.

    Args:
        source: The checkpoint, for the message.
        model: The model.

    Raises:
        CheckpointError: A layer is of another class afterwards.
    """
    classes_before, settings_before = _layer_classes(model), _effective_settings(model)
    yield
    for name, after in _layer_classes(model).items():
        before = classes_before.get(name, after)
        if after is before:
            continue
        changes = " and ".join(
            f"`{key}` to {value!r} in place of {settings_before[key]!r}"
            for key, value in _effective_settings(model).items()
            if settings_before[key] != value
        )
        raise CheckpointError(
            (
                f"{type(model).__name__} of `{source}` replaces the {before.__name__} `{name}` with a {after.__name__} "
                "when it reads a short text, so its answers depend on earlier texts. "
            )
            + (f"If this is right for all texts, set {changes} in config.json." if changes else "Such a model is not supported.")
        )


def _layer_classes(model: PreTrainedModel) -> dict[str, type]:
    return {name: type(module) for name, module in model.named_modules()}


def _effective_settings(model: PreTrainedModel) -> dict[str, Any]:
    """Returns the plain fields of the configuration, with the values that the encoder holds of them where it holds any."""
    fields = {key: value for key, value in model.config.to_dict().items() if isinstance(value, str | int | float | bool)}
    return fields | {key: value for key, value in vars(model.base_model).items() if key in fields}
