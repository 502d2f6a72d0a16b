"""Finds the padding that does not change a model's outputs: a token that no text contains, and a side. It runs the model for this.

A decoder's classifier reads the last token that is not padding, and recognizes padding by the id in its configuration. Therefore
not only the mask but also the id matters: with another id, it would read the last position, which is padding.
"""

import string
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

from bertserve.export.errors import ExportError
from bertserve.service.bundle.manifest import Side, SpecialPart, TemplatePart

Padding = tuple[int, Side]  # the token id and the side of padding


def set_pad_token(source: str, model: PreTrainedModel, tokenizer: Any, parts: Sequence[TemplatePart]) -> None:
    """Gives tokenizer and configuration a padding token if they lack one, as for GPT.

    Without one, transformers reads the last position, and takes one text at a time. No template contains the chosen token; otherwise the
    last token of a text would be taken for padding, and another token would be read.
    """
    config = model.config.get_text_config()
    configured_id = config.pad_token_id
    if tokenizer.pad_token_id is None and _is_row(configured_id, model):
        tokenizer.pad_token = tokenizer.convert_ids_to_tokens(configured_id)
    if configured_id is not None and tokenizer.pad_token_id is not None:
        return
    template = {part.id for part in parts if isinstance(part, SpecialPart)}
    order = (tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id, tokenizer.bos_token_id, *tokenizer.all_special_ids)
    free_id = next((id_ for id_ in order if id_ is not None and id_ not in template and _is_row(id_, model)), None)
    if free_id is None:
        raise ExportError(f"the tokenizer of `{source}` has no padding token, nor another unused special token; set `pad_token`.")
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.convert_ids_to_tokens(free_id)
    if configured_id is None:
        config.pad_token_id = free_id


def refuse_pad_token_in_texts(source: str, tokenizer: Any, pad_id: int, texts: Iterable[str]) -> None:
    """Refuses a padding token that ordinary texts contain, because the service reads it as unknown text there."""
    if pad_id == tokenizer.unk_token_id:
        return
    texts = [*texts, " ".join(string.printable)]
    encodings = tokenizer(texts, add_special_tokens=False)["input_ids"]
    example = next((text for text, ids in zip(texts, encodings, strict=True) if pad_id in ids), None)
    if example is not None:
        raise ExportError(
            f"the padding token of `{source}`, `{tokenizer.convert_ids_to_tokens(pad_id)}` (id {pad_id}), occurs in ordinary texts, such "
            f"as `{example[:60]}`; set `pad_token` to a token that no text has, and `pad_token_id` in config.json to its id."
        )


def find_padding(model: PreTrainedModel, tokenizer: Any, names: Sequence[str], max_length: int) -> Padding:
    """Returns the padding that does not change outputs: on the right or else the left, with the tokenizer's id or else the model's.

    XLNet reads its last position, so it only tolerates padding on the left. LLaMA tolerates both sides, because its positions are relative.
    On the left, however, the position numbers change, which changes the last bits of values, and int8 rounding can turn that into a whole
    quantization step. If no padding is tolerated, the tokenizer's own is returned: parity then finds that the graph is not batch-invariant,
    and the service runs single texts.
    """
    configured_id = model.config.get_text_config().pad_token_id
    ids = dict.fromkeys(id_ for id_ in (tokenizer.pad_token_id, configured_id) if _is_row(id_, model))
    sides: tuple[Side, ...] = ("right", "left")
    paddings = ((id_, side) for side in sides for id_ in ids if _tolerates(model, tokenizer, names, max_length, (id_, side)))
    return next(paddings, (tokenizer.pad_token_id, tokenizer.padding_side))


def _is_row(id_: int | None, model: PreTrainedModel) -> bool:
    """Returns whether an id is a row of the embedding; some configurations have -1."""
    embeddings: Any = model.get_input_embeddings()
    return id_ is not None and 0 <= id_ < embeddings.weight.shape[0]


def _tolerates(model: PreTrainedModel, tokenizer: Any, names: Sequence[str], max_length: int, padding: Padding) -> bool:
    short, long = "A", "Another text, which is a good deal longer than the one before it."
    (pad_id, side), cut = padding, {"truncation": True, "max_length": max_length, "return_tensors": "pt", "return_token_type_ids": True}
    batch = tokenizer([short, long], padding=True, padding_side=side, **cut)
    batch["input_ids"] = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, pad_id)
    short_batch = tokenizer([short], **cut)
    length = short_batch["input_ids"].shape[1]
    with torch.no_grad():
        padded_outputs, outputs = (model(**{name: inputs[name] for name in names}) for inputs in (batch, short_batch))
    for name in outputs:
        padded, expected = padded_outputs[name], outputs[name]
        if not isinstance(expected, torch.Tensor):
            continue
        if expected.ndim > 1 and expected.shape[1] == length:
            padded = padded[:, -length:] if side == "left" else padded[:, :length]
        if not torch.allclose(padded[:1], expected, rtol=0, atol=1e-3):  # float32 rounding is far below this
            return False
    return True
