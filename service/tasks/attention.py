"""Attention: the weight of each token of a text for each other token, by layer and head, like transformers' `attentions` and BertViz.

Every bundle that was exported with `--attentions` answers it, whatever its task. Layers and heads are counted from 0, as in `attentions`;
negative numbers count from the end. Texts are never truncated, because half a text has other weights.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby
from operator import itemgetter
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import BaseModel, Field

from bertserve.service.body.task_body import ClosedModel, Indices, TaskBody, body_config
from bertserve.service.bundle.manifest import ModelConfig
from bertserve.service.errors import CallerValue, InvalidValueError
from bertserve.service.tasks.classify import TextsOrPairs
from bertserve.service.tasks.cost import ENTRY_BYTES, NUMBER_BYTES, Cost, text_bytes
from bertserve.service.tasks.step import Step, TaskGenerator, TaskModel, TaskResult, TextInput, copy_outputs
from bertserve.service.tasks.task_spec import Derivation, TaskSpec
from bertserve.service.text.windows import too_long_error

TASK = "attention"
OUTPUT = "attentions"  # output of the graphs


class AttentionParameters(ClosedModel):
    """Parameters of an attention request."""

    output_attentions: Annotated[Literal[True] | None, Field(description="Request attention at a model's own path.")] = None
    layers: Annotated[
        Indices | None, Field(description="Layers to return, in this order; 0 is the first, -1 the last. By default all.")
    ] = None
    heads: Annotated[Indices | None, Field(description="Heads of each layer to return, in this order. By default all.")] = None


Maps = Sequence[tuple[int, int]]  # layer and head of each requested map, counted from 0, in the order of the answer


def select_maps(parameters: AttentionParameters, counts: Sequence[int]) -> Maps:
    """Returns layer and head of each requested map; `counts` gives the number of heads of each layer.

    Raises:
        InvalidValueError: The model lacks a layer or head, or one is named twice.
    """
    layers = _indices("layers", parameters.layers, len(counts), "this model")
    return [
        (layer, head) for layer in layers for head in _indices("heads", parameters.heads, counts[layer], f"layer {layer} of this model")
    ]


def _indices(name: str, choice: Sequence[int] | None, count: int, owner: str) -> list[int]:
    """Returns the requested indices, counted from 0."""
    requested = range(count) if choice is None else choice
    if (invalid := next((index for index in requested if not -count <= index < count), None)) is not None:
        raise InvalidValueError(
            "`{field}` has {index}, but {owner} has {count} {field}; give 0 to {last}, or -1 to {first} to count from the end.",
            field=name,
            index=CallerValue(invalid),
            owner=owner,
            count=count,
            last=count - 1,
            first=-count,
        )
    indices = [index % count for index in requested]
    if len(set(indices)) < len(indices):
        raise InvalidValueError("`{field}` has a duplicate: {indices}; name each once.", field=name, indices=CallerValue(list(requested)))
    return indices


def read_attention(input_: TextInput[Maps], model: TaskModel) -> TaskGenerator:
    """Returns the tokens, and the weights of each layer: float32 [heads, length, length], from each token (rows) to each token (columns).

    The row has the output `attentions`, float32 [maps, length, length].

    Raises:
        InvalidValueError: The text exceeds the model's length.
    """
    tokenizer = model.tokenizer
    # an empty second text counts as missing, as in the pipelines
    texts = tokenizer.tokenize([input_.text, input_.text_pair] if input_.text_pair else [input_.text])
    max_tokens, total = tokenizer.max_text_tokens(pair=len(texts) > 1), sum(map(len, texts))
    if total > max_tokens:
        raise too_long_error(total, max_tokens, "because attention needs the whole text")
    encoding = replace(tokenizer.assemble(*(text.ids for text in texts)), maps=tuple(sorted(input_.parameters)))
    length = len(encoding)
    tokens = [tokenizer.token(id_) or "" for id_ in encoding.ids.tolist()]
    offsets: list[tuple[int, int] | None] = [None] * length  # start and end in code points of the token's text; None for special tokens
    for start, text in zip(encoding.starts, texts, strict=True):
        offsets[start : start + len(text)] = text.offsets
    cost = Cost(
        _weight_bytes(input_, length) + sum(ENTRY_BYTES + text_bytes(token) for token in tokens),
        reserved_tokens=len(encoding.maps) * length**2 // 1024,  # a token's vector has about this many values
    )
    [row] = yield Step([encoding], cost, copy_outputs)
    weights = dict(zip(encoding.maps, row[OUTPUT], strict=True))
    second_start = max(encoding.starts) if len(texts) > 1 else None
    attentions = [np.stack([weights[key] for key in keys]) for _, keys in groupby(input_.parameters, itemgetter(0))]
    return TaskResult({"tokens": tokens, "offsets": offsets, "sentence_b_start": second_start, "attentions": attentions})


class AttentionBody(TaskBody):
    """Body of an attention request."""

    model_config = body_config(inputs="The cat sat down.", parameters={"output_attentions": True, "layers": [-1], "heads": [0, 1]})

    inputs: TextsOrPairs
    parameters: AttentionParameters | None = None

    def task_inputs(self, config: ModelConfig) -> list[Any]:
        """Returns one input per text or pair.

        Raises:
            InvalidValueError: The model lacks a layer or head, or one is named twice.
        """
        maps = select_maps(self.parameters or self.default_parameters, config.attention_heads)
        return [TextInput(item, maps) if isinstance(item, str) else TextInput(item.text, maps, item.text_pair) for item in self.items]


class Attention(BaseModel):
    """The attention of one text."""

    tokens: Annotated[list[str], Field(examples=[["[CLS]", "good", "[SEP]"]])]
    offsets: Annotated[list[tuple[int, int] | None], Field(examples=[[None, [0, 4], None]])]
    sentence_b_start: Annotated[int | None, Field(examples=[None])]
    attentions: Annotated[list[list[list[list[float]]]], Field(examples=[[[[[0.5, 0.3, 0.2], [0.1, 0.8, 0.1], [0.2, 0.2, 0.6]]]]])]


def _weight_bytes(input_: TextInput[Maps], length: int) -> int:
    """Returns the bytes of the weights of `length` tokens in a result."""
    return NUMBER_BYTES * len(input_.parameters) * length**2


SPEC = TaskSpec(
    name=TASK,
    path="attention",
    title="Return attention weights",
    body=AttentionBody,
    response_type=Attention | list[Attention],
    function=read_attention,
    derivation=Derivation(
        base=None,
        compatible=lambda manifest: bool(manifest.attention_heads),
        needs="attention in its graphs; export it with `--attentions`",
        discriminator=("parameters", "output_attentions"),
    ),
    result_bytes=_weight_bytes,
)
