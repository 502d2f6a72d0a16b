"""Raw outputs: token ids to the graph's outputs, for callers who tokenize and decode themselves.

It is not in the catalog: every bundle answers it, whatever its task. Each row is one encoding, so it shares batches, queue and
limits with other requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from bertserve.service.bundle.graph_spec import OutputSpec
from bertserve.service.bundle.manifest import Manifest
from bertserve.service.errors import InvalidValueError, Sent
from bertserve.service.tasks.batch import Batch, TaskModel, TaskRun
from bertserve.service.tasks.body import TaskBody
from bertserve.service.tasks.cost import NUMBER_BYTES, Cost
from bertserve.service.tasks.fill_mask import MAX_MASKS
from bertserve.service.tasks.spec import TaskSpec
from bertserve.service.text.tokenizer import Encoding


@dataclass(frozen=True, slots=True)
class RawOutputsRequest:
    """One row of token ids.

    Attributes:
        encoding: The row without its padding; it has the positions of its masks if the graph uses them.
        padded: Length of the row with the caller's padding, which the answer keeps.
        outputs: The requested outputs of the graph.
        manifest: The manifest, for the sizes of the outputs.
    """

    encoding: Encoding
    padded: int
    outputs: tuple[OutputSpec, ...]
    manifest: Manifest

    chars: ClassVar[int] = 0  # nothing is tokenized


def rows(
    ids: NDArray[np.int64],
    mask: NDArray[np.int64],
    type_ids: NDArray[np.int64],
    *,
    outputs: Sequence[OutputSpec],
    manifest: Manifest,
    fills_masks: bool,
) -> list[RawOutputsRequest]:
    """Returns one request per row.

    Args:
        ids: Token ids [rows, length].
        mask: 1 for tokens and 0 for padding [rows, length].
        type_ids: Segment ids [rows, length].
        outputs: The requested outputs.
        manifest: The model's manifest.
        fills_masks: Whether its graph has outputs per mask.

    Raises:
        InvalidValueError: A row cannot be run; `input_index` is its index.
    """
    length, pads_left = ids.shape[1], manifest.tokenizer.padding_side == "left"
    counts, places = np.count_nonzero(mask, axis=1), np.arange(length)
    # the positions of the tokens, if all padding of a row is on one side
    tokens = places >= length - counts[:, None] if pads_left else places < counts[:, None]
    mask_token = manifest.tokenizer.mask
    masks = tokens & (ids == mask_token.id) if fills_masks and mask_token is not None else None
    _check(mask, type_ids, tokens, masks, manifest)
    requests, outputs = [], tuple(outputs)
    for index, count in enumerate(counts.tolist()):
        place = slice(length - count, length) if pads_left else slice(0, count)
        mask_places = () if masks is None else tuple(np.flatnonzero(masks[index, place]).tolist())
        encoding = Encoding(ids[index, place].copy(), type_ids[index, place].copy(), masks=mask_places)
        requests.append(RawOutputsRequest(encoding, length, outputs, manifest))
    return requests


def _check(
    mask: NDArray[np.int64], type_ids: NDArray[np.int64], tokens: NDArray[np.bool_], masks: NDArray[np.bool_] | None, manifest: Manifest
) -> None:
    """Checks all rows at once; one by one, hundreds of rows would stop the event loop for milliseconds.

    Args:
        mask: 1 for tokens and 0 for padding [rows, length].
        type_ids: Segment ids [rows, length].
        tokens: Which positions have a token.
        masks: Which positions have a mask; None for a graph without outputs per mask.
        manifest: The model's manifest.

    Raises:
        InvalidValueError: The first row that cannot be run; `input_index` is its index.
    """
    model_types = sorted({piece.type_id for piece in (*manifest.tokenizer.single, *manifest.tokenizer.pair)})
    has_gaps = (mask != tokens).any(axis=1) | ~tokens.any(axis=1)
    foreign = tokens.copy()
    for type_id in model_types:
        foreign &= type_ids != type_id
    wrong = has_gaps | foreign.any(axis=1)
    if masks is not None:
        mask_counts = np.count_nonzero(masks, axis=1)
        wrong |= (mask_counts < 1) | (mask_counts > MAX_MASKS)
    if not wrong.any():
        return
    row = int(wrong.argmax())
    if has_gaps[row]:
        side = manifest.tokenizer.padding_side
        error = InvalidValueError(
            "`attention_mask` has gaps, other values than 0 and 1, or no 1; this model is padded on the {side}, so give {order}.",
            order="zeros and then ones" if side == "left" else "ones and then zeros",
            side=side,
        )
    elif foreign[row].any():
        error = InvalidValueError(
            "`token_type_ids` has {wrong}, but this model has {names}.",
            wrong=Sent(int(type_ids[row][foreign[row]].min())),
            names=", ".join(map(str, model_types)),
        )
    else:
        assert manifest.tokenizer.mask is not None, "every manifest of a fill-mask model has it"
        error = InvalidValueError(
            "the row has {masks_count} mask tokens ({id}) and 1 to {limit} are allowed, because only masks have logits.",
            masks_count=int(mask_counts[row]),
            id=manifest.tokenizer.mask.id,
            limit=MAX_MASKS,
        )
    error.input_index = row
    raise error


def run_ids(request: RawOutputsRequest, model: TaskModel) -> TaskRun:
    """Returns the row's outputs by name, float32, without padding.

    Raises:
        InvalidValueError: The row is too long, or has an id outside the vocabulary.
    """
    encoding, vocabulary_size = request.encoding, model.tokenizer.vocabulary_size
    if len(encoding) > model.tokenizer.max_length:
        raise InvalidValueError(
            "the row has {encoding_count} tokens and the model takes {max_length}; truncate it.",
            encoding_count=len(encoding),
            max_length=model.tokenizer.max_length,
        )
    outside = encoding.ids[(encoding.ids < 0) | (encoding.ids >= vocabulary_size)]
    if len(outside):
        raise InvalidValueError(
            "the token id {outside} is not in the vocabulary; give ids from 0 to {vocabulary_size}.",
            outside=Sent(outside[0]),
            vocabulary_size=vocabulary_size - 1,
        )
    # outputs are returned with padding
    units = {"per_text": 1, "per_token": request.padded, "per_mask": len(encoding.masks)}
    values = sum(units[output.kind] * _width(output, request.manifest, vocabulary_size) for output in request.outputs)
    names = [output.name for output in request.outputs]
    [row] = yield Batch(
        [encoding],
        Cost(answer_bytes=NUMBER_BYTES * values, memory=values),
        lambda _, row: {name: row[name].copy() for name in names},
    )
    return row


def _width(output: OutputSpec, manifest: Manifest, vocabulary_size: int) -> int:
    """Returns the number of values of an output per text, token or mask."""
    if output.kind == "per_mask":
        return vocabulary_size
    if manifest.embedding is not None:
        return manifest.embedding.dimensions * (manifest.embedding.layer_count if output.name == manifest.embedding.layers_output else 1)
    return max(len(manifest.labels), 1)


SPEC = TaskSpec(
    name="raw-outputs",
    path="",
    title="Run token ids, and return the outputs of the graph",
    body=TaskBody,
    answer=Any,
    estimate=lambda request, max_length: request.encoding.cost_tokens,
    run=run_ids,
)
