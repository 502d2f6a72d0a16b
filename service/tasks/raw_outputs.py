"""Raw outputs: token ids to the graph's outputs, for callers who tokenize and decode themselves.

It is not in the catalog: every bundle answers it, whatever its task. Each row is one encoding, so it shares batches, queue and
limits with other requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bertserve.service.bundle.graph_spec import OutputSpec
from bertserve.service.bundle.manifest import Manifest
from bertserve.service.errors import InvalidValueError
from bertserve.service.tasks.batch import Batch, TaskModel, TaskRun
from bertserve.service.tasks.body import TaskBody
from bertserve.service.tasks.cost import NUMBER_BYTES, Cost
from bertserve.service.tasks.fill_mask import MAX_MASKS
from bertserve.service.tasks.spec import TaskSpec
from bertserve.service.text.tokenizer import Encoding


@dataclass(frozen=True, slots=True)
class Request:
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

    @property
    def chars(self) -> int:
        """Characters to tokenize, always 0."""
        return 0


def rows(
    ids: NDArray[np.int64],
    mask: NDArray[np.int64],
    type_ids: NDArray[np.int64],
    *,
    outputs: Sequence[OutputSpec],
    manifest: Manifest,
    fills_masks: bool,
) -> list[Request]:
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
    model_types = {piece.type_id for piece in (*manifest.tokenizer.single, *manifest.tokenizer.pair)}
    requests = []
    for index in range(len(ids)):
        try:
            place = _tokens(mask[index], manifest.tokenizer.padding_side)
            _check_types(type_ids[index][place], model_types)
            masks = _masks(ids[index][place], manifest) if fills_masks else ()
        except InvalidValueError as error:
            error.input_index = index
            raise
        encoding = Encoding(ids[index][place].copy(), type_ids[index][place].copy(), masks=masks)
        requests.append(Request(encoding, ids.shape[1], tuple(outputs), manifest))
    return requests


def _tokens(mask: NDArray[np.int64], side: str) -> slice:
    """Returns the positions of the tokens in a row."""
    count, length = int(np.count_nonzero(mask)), len(mask)
    place = slice(length - count, length) if side == "left" else slice(0, count)
    if count == 0 or not (mask[place] == 1).all():
        order = "zeros and then ones" if side == "left" else "ones and then zeros"
        raise InvalidValueError(
            "`attention_mask` has gaps, other values than 0 and 1, or no 1; this model is padded on the {side}, so give {order}.",
            order=order,
            side=side,
        )
    return place


def _check_types(type_ids: NDArray[np.int64], model_types: set[int]) -> None:
    invalid = [value for value in np.unique(type_ids).tolist() if value not in model_types]
    if invalid:
        raise InvalidValueError(
            "`token_type_ids` has {wrong}, but this model has {names}.", wrong=invalid[0], names=", ".join(map(str, sorted(model_types)))
        )


def _masks(ids: NDArray[np.int64], manifest: Manifest) -> tuple[int, ...]:
    assert manifest.tokenizer.mask is not None, "every manifest of a fill-mask model has it"
    masks = np.flatnonzero(ids == manifest.tokenizer.mask.id).tolist()
    if not 1 <= len(masks) <= MAX_MASKS:
        raise InvalidValueError(
            "the row has {masks_count} mask tokens ({id}) and 1 to {limit} are allowed, because only masks have logits.",
            masks_count=len(masks),
            id=manifest.tokenizer.mask.id,
            limit=MAX_MASKS,
        )
    return tuple(masks)


def estimate(request: Request, max_length: int) -> int:
    """Returns the tokens of the row."""
    return request.encoding.cost_tokens


def run_ids(request: Request, model: TaskModel) -> TaskRun:
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
            outside=outside[0],
            vocabulary_size=vocabulary_size - 1,
        )
    # outputs are returned with padding
    units = {"per_text": 1, "per_token": request.padded, "per_mask": len(encoding.masks)}
    values = sum(units[output.kind] * _width(output, request.manifest, vocabulary_size) for output in request.outputs)
    names = [output.name for output in request.outputs]
    [row] = yield Batch(
        [encoding],
        Cost(answer_bytes=NUMBER_BYTES * values, memory_per_input=values),
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
    estimate=estimate,
    run=run_ids,
)
