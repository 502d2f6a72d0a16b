"""Embeddings (feature extraction): a text to one vector, or to one vector per token.

Special tokens count as tokens, as in sentence-transformers, which averages over the attention mask, and in the Hugging Face
pipeline, which returns them; padding never counts.
"""

import base64
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from pydantic import BaseModel, Field

from bertserve.service.body.task_body import (
    AnyCase,
    ClosedModel,
    Indices,
    TaskBody,
    TextOrTexts,
    Truncate,
    TruncationDirection,
    body_config,
    one_of,
)
from bertserve.service.bundle.graph_spec import Outputs
from bertserve.service.bundle.manifest import LAST_FOUR, VECTOR_OUTPUT, Combine, Embedding, Layers, Manifest, ModelConfig
from bertserve.service.errors import CallerValue, InvalidValueError
from bertserve.service.messages import quote_names
from bertserve.service.tasks.cost import ENTRY_BYTES, NUMBER_BYTES, TEXT_CHARS, Cost
from bertserve.service.tasks.decoding import Floats
from bertserve.service.tasks.step import EMPTY_WARNINGS, Step, TaskGenerator, TaskModel, TaskResult
from bertserve.service.tasks.task_spec import TaskSpec
from bertserve.service.text.tokenizer import Encoding, Tokenizer
from bertserve.service.text.windows import kept_tokens, too_long_error


def select_layers(layers: Layers | list[int] | None, embedding: Embedding) -> tuple[int, ...]:
    """Returns the positions of the requested layers, or of the bundle's default, in the graph's output; empty for only the last layer.

    Raises:
        InvalidValueError: The bundle lacks a layer, or a layer is named twice.
    """
    named = {"last": (-1,), "last_four": tuple(range(-LAST_FOUR, 0))}
    indices = named[layers] if isinstance(layers, str) else tuple(layers or embedding.default_layers or named["last"])
    position_by_layer = embedding.positions
    if missing := [layer for layer in indices if layer not in position_by_layer]:
        raise InvalidValueError(
            "`layers` has {missing}, but this model has only the layers {known}; the operator can export it with other `--layers`.",
            missing=CallerValue(missing[0]),
            known=", ".join(map(str, sorted(position_by_layer)[:32])),
        )
    positions = tuple(position_by_layer[layer] for layer in indices)
    if len(set(positions)) < len(positions):
        raise InvalidValueError("`layers` has a duplicate: {layers}; name each once.", layers=CallerValue(list(indices)))
    return () if positions == (position_by_layer[-1],) else positions


TASK = "feature-extraction"

PromptName = Annotated[str | None, Field(description="Name of the model's prompt to put before texts.")]
Dimensions = Annotated[int | None, Field(ge=1, description="Keep this many leading values; normalization comes after.")]
EncodingFormat = Annotated[
    AnyCase[Literal["float", "base64"]] | None, Field(description="Lists of numbers, or base64 of little-endian float32 values.")
]


class EmbedOptions(BaseModel):
    """Options of embeddings. Each can be next to `inputs`, where the official client sends it, or within `parameters`."""

    normalize: Annotated[bool | None, Field(description="Scale vectors to length 1; by default the model's own setting.")] = None
    prompt_name: PromptName = None
    truncate: Truncate = None
    truncation_direction: TruncationDirection = None
    dimensions: Dimensions = None
    encoding_format: EncodingFormat = None
    pooling: Annotated[
        AnyCase[Literal["none", "cls", "mean", "max"]] | None,
        Field(description="Pooling of token vectors; `none` keeps them all. By default the model's own."),
    ] = None
    layers: Annotated[
        Annotated[AnyCase[Literal["last", "last_four"]] | Indices, one_of("`last`, `last_four` or a list of numbers of layers")] | None,
        Field(description="Layers of the bundle: -1 is the last, 0 the embedding output. By default the bundle's own choice."),
    ] = None
    combine: Annotated[
        AnyCase[Combine] | None, Field(description="How several layers become one vector; by default the model's own setting.")
    ] = None


class EmbedParameters(EmbedOptions, ClosedModel):
    """Parameters of an embedding request."""


@dataclass(slots=True)
class EmbedInput:
    """One text to embed, after the text `prompt`. `embed_inputs` has replaced unset parameters by the bundle's defaults.

    `width` is the number of values of a vector before `dimensions`; 0 if unknown. `layers` is the result of `select_layers`. `own_pooling`
    says whether the vector comes from the model's own pooling of its last layer, which a graph can return. `compared_texts` are the other
    texts of a similarity request.
    """

    text: str
    parameters: EmbedParameters
    prompt: str = ""
    width: int = 0
    layers: Sequence[int] = ()
    own_pooling: bool = False
    compared_texts: Sequence[str] = ()

    @property
    def chars(self) -> int:
        """Characters to tokenize; each of the compared texts counts `TEXT_CHARS` more."""
        compared = sum(len(self.prompt) + len(text) + TEXT_CHARS for text in self.compared_texts)
        return len(self.prompt) + len(self.text) + compared


def embedding_settings(config: ModelConfig) -> Embedding:
    """Returns the settings of a model that embeds texts."""
    assert config.embedding is not None, "every manifest of an embedding model has it"
    return config.embedding


def embed_inputs(texts: Sequence[str], parameters: EmbedParameters, config: ModelConfig) -> list[EmbedInput]:
    """Returns one input per text, with the caller's choices and the bundle's defaults.

    Raises:
        InvalidValueError: The bundle lacks the prompt or a layer, or its vectors are shorter, or layers are requested without a pooling of
            tokens.
    """
    embedding = embedding_settings(config)
    pooling = parameters.pooling or embedding.pooling
    if pooling == "graph" and parameters.layers is not None:
        raise InvalidValueError("`layers` needs `pooling`, because the model's own pooling is for its last layer; set `pooling` too.")
    layers = () if pooling == "graph" else select_layers(parameters.layers, embedding)
    if parameters.combine is not None and len(layers) < 2:
        raise InvalidValueError("`combine` needs two or more `layers`; choose them, or remove `combine`.")
    combine = parameters.combine or embedding.combine
    width = embedding.vector_dimensions if pooling == "graph" else None
    width = width or embedding.dimensions * (len(layers) if layers and combine == "concat" else 1)
    if parameters.dimensions is not None and parameters.dimensions > width:
        raise InvalidValueError(
            "`dimensions` is {dimensions}, but this model's vectors have {width}; give at most {width}.",
            dimensions=CallerValue(parameters.dimensions),
            width=width,
        )
    name = embedding.default_prompt if parameters.prompt_name is None else parameters.prompt_name
    if name is not None and name not in embedding.prompts:
        known = quote_names(embedding.prompts) if embedding.prompts else "none, so remove `prompt_name`"
        raise InvalidValueError("unknown prompt `{name}`; this model has {known}.", name=CallerValue(name), known=known)
    dimensions = None if embedding.truncate_dim is None or pooling == "none" else min(embedding.truncate_dim, width)
    model_defaults = {"pooling": pooling, "normalize": embedding.normalize, "dimensions": dimensions, "combine": combine}
    parameters = parameters.model_copy(
        update={field: value for field, value in model_defaults.items() if getattr(parameters, field) is None}
    )
    own_pooling = pooling == embedding.pooling != "none" and not layers
    prompt = "" if name is None else embedding.prompts[name]
    return [EmbedInput(text, parameters, prompt, width=width, layers=layers, own_pooling=own_pooling) for text in texts]


def _vector_bytes(input_: EmbedInput, length: int) -> int:
    """Returns the bytes of the vector of a text of `length` tokens, or of one vector per token, in a result."""
    vectors = length if input_.parameters.pooling == "none" else 1
    # base64 needs four bytes for three
    number_bytes = 16 / 3 if input_.parameters.encoding_format == "base64" else NUMBER_BYTES
    return vectors * (ENTRY_BYTES + int(number_bytes * (input_.parameters.dimensions or input_.width)))


def embed(input_: EmbedInput, model: TaskModel) -> TaskGenerator:
    """Returns the vector, float32 [values] or base64; for the pooling `none`, one vector per token: float32 [length, values].

    The row has the output of the chosen layers, float32 [length, values], without padding, or the pooled `sentence_embedding`.

    Raises:
        InvalidValueError: The text is too long and `truncate` is false.
    """
    encoding, truncated = encode(input_, input_.text, model.tokenizer)
    [row] = yield Step(
        [encoding],
        Cost(_vector_bytes(input_, len(encoding))),
        lambda _, row: pool(input_, row, model.config),
        small_outputs=input_.own_pooling,
        truncated=truncated,
        warnings=() if input_.text.strip() else EMPTY_WARNINGS,
    )
    vector: Floats = row["vector"]
    if input_.parameters.encoding_format != "base64":
        return TaskResult(vector)
    # four bytes per value, little-endian, as clients of the OpenAI API read it
    encoded = [base64.b64encode(values.astype("<f4").tobytes()).decode("ascii") for values in np.atleast_2d(vector)]
    return TaskResult(encoded[0] if vector.ndim == 1 else encoded)


def encode(input_: EmbedInput, text: str, tokenizer: Tokenizer) -> tuple[Encoding, bool]:
    """Returns the encoding of a text of the input, and whether the text is cut.

    Raises:
        InvalidValueError: The text is too long and `truncate` is false.
    """
    (tokens,) = tokenizer.tokenize([input_.prompt + text])
    max_tokens = tokenizer.max_text_tokens(pair=False)
    if len(tokens) > max_tokens and input_.parameters.truncate is False:
        raise too_long_error(len(tokens), max_tokens, "or set `truncate` to true")
    token_range = kept_tokens(len(tokens), max_tokens, input_.parameters.truncation_direction or tokenizer.spec.truncation_side)
    return tokenizer.assemble(tokens.ids[token_range.start : token_range.stop]), len(tokens) > max_tokens


def pool(input_: EmbedInput, row: Outputs, config: ModelConfig) -> Outputs:
    """Returns a row's `vector`, a copy, float32 [values]; for the pooling `none` the vectors of all tokens, float32 [length, values]."""
    is_pooled = input_.own_pooling and VECTOR_OUTPUT in row
    values = row[VECTOR_OUTPUT] if is_pooled else _POOLINGS[input_.parameters.pooling](_token_vectors(input_, row, config))
    vector = np.array(values[..., : input_.parameters.dimensions])
    return {"vector": normalized(vector) if input_.parameters.normalize else vector}


def _token_vectors(input_: EmbedInput, row: Outputs, config: ModelConfig) -> Floats:
    """Returns the vectors of all tokens, float32 [length, values], from the chosen layers."""
    if not input_.layers:
        return row["last_hidden_state"]
    embedding = embedding_settings(config)
    values = row[embedding.layers_output]  # the vectors of all layers in a row
    layers = values.reshape(len(values), embedding.layer_count, -1)[:, list(input_.layers)]
    if input_.parameters.combine == "concat":
        return layers.reshape(len(values), -1)
    total: Floats = layers.sum(axis=1, dtype=np.float32)
    return total if input_.parameters.combine == "sum" else total / np.float32(len(input_.layers))


# each returns one vector from the vectors of all tokens, float32 [length, values], or these vectors
_POOLINGS: dict[str | None, Callable[[Floats], Floats]] = {
    "none": lambda tokens: tokens,
    "cls": lambda tokens: tokens[0],
    "mean": lambda tokens: tokens.mean(axis=0, dtype=np.float32),
    "max": lambda tokens: tokens.max(axis=0),
}


def normalized(values: Floats) -> Floats:
    """Returns vectors with length 1 along the last axis; a zero vector stays zero."""
    norms = np.sqrt(np.square(values).sum(axis=-1, keepdims=True, dtype=np.float32))
    return values / np.maximum(norms, np.float32(1e-12))


class EmbedBody(EmbedOptions, TaskBody):
    """Body of an embedding request."""

    model_config = body_config(inputs=["A warm, funny film.", "The bridge was built in 1886."], normalize=True)
    always_list: ClassVar[bool] = True

    inputs: TextOrTexts
    parameters: EmbedParameters | None = None

    def task_inputs(self, config: ModelConfig) -> list[Any]:
        """Returns one input per text, with the bundle's defaults for unset parameters.

        Raises:
            InvalidValueError: The parameters contradict each other, or do not fit the model.
        """
        options = self.model_dump(include=set(EmbedOptions.model_fields), exclude_none=True)
        nested_options = {} if self.parameters is None else self.parameters.model_dump(exclude_none=True)
        for name in options.keys() & nested_options.keys():
            if options[name] != nested_options[name]:
                raise InvalidValueError(
                    "`{field}` is given next to `inputs` and in `parameters`, with different values; remove one of them.", field=name
                )
        return embed_inputs(self.items, EmbedParameters(**options | nested_options), config)


def _widths(manifest: Manifest) -> dict[str, int]:
    embedding = embedding_settings(manifest)
    vector_width = {} if embedding.vector_dimensions is None else {VECTOR_OUTPUT: embedding.vector_dimensions}
    return {embedding.layers_output: embedding.dimensions * embedding.layer_count, "last_hidden_state": embedding.dimensions} | vector_width


SPEC = TaskSpec(
    name=TASK,
    path="embed",
    title="Embed texts as vectors",
    body=EmbedBody,
    response_type=list[list[Annotated[float, Field(examples=[0.0412])]]] | list[list[list[float]]] | list[str] | list[list[str]],
    function=embed,
    result_bytes=_vector_bytes,
    missing_field=lambda manifest: "`embedding` must not be null for feature-extraction" if manifest.embedding is None else None,
    widths=_widths,
)
