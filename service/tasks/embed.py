"""Embeddings (feature extraction): a text to a vector, or to one for each of its tokens.

Special tokens count as tokens, as in sentence-transformers, whose mean goes over the attention mask, and in the Hugging Face
pipeline, which returns them; padding never does.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from pydantic import BaseModel, BeforeValidator, Field

from service.bundle.manifest import Embedding, Layers, Manifest, Pooling
from service.errors import InvalidValueError
from service.tasks.body import TaskBody, TaskParameters, TextOrTexts, Truncate, TruncationDirection, body_config, lower
from service.tasks.decoding.scores import Floats, Row
from service.tasks.encoded import Encoded, ModelConfig
from service.tasks.spec import TaskSpec
from service.text.tokenizer import Tokenizer, estimate_tokens

TASK = "feature-extraction"
# Which output of the graph has the vectors of these layers.
OUTPUTS: dict[Layers, str] = {"last": "last_hidden_state", "last_four": "last_four_hidden_states"}
LAST_FOUR = 4
_LEAST_NORM = np.float32(1e-12)
# huggingface_hub makes numbers of an embedding's answer by `float`, so that it cannot read base64, which it sends (2.4 does).
_HUGGINGFACE_HUB = re.compile(r"hf_hub/\d+\.\d+")


Pool = Annotated[
    Literal["none", "cls", "mean", "max"] | None,
    BeforeValidator(lower),
    Field(description="How the tokens' vectors become one, in place of the model's own way; `none` keeps them all."),
]
PromptName = Annotated[str | None, Field(description="Which of the model's prompts is put before each text.")]


class EmbedOptions(BaseModel):
    """How a text is embedded; each may stand beside `inputs`, as the official client sends them, or within `parameters`."""

    normalize: Annotated[bool | None, Field(description="Bring vectors to length 1; by default as the model says.")] = None
    prompt_name: PromptName = None
    truncate: Truncate = None
    truncation_direction: TruncationDirection = None
    dimensions: Annotated[int | None, Field(ge=1, description="Keep that many of the first values; normalizing comes after.")] = None
    encoding_format: Annotated[
        Literal["float", "base64"] | None,
        BeforeValidator(lower),
        Field(description="A vector is a list of numbers, or one text: the base64 of its values as float32, little-endian."),
    ] = None
    pooling: Pool = None
    layers: Annotated[
        Literal["last", "last_four"] | None,
        BeforeValidator(lower),
        Field(description="The last layer, or the last four side by side where the bundle was exported with them."),
    ] = None


class EmbedParameters(EmbedOptions, TaskParameters):
    """Parameters of an embedding request."""


DEFAULTS = EmbedParameters(pooling="cls", normalize=False)


@dataclass(frozen=True, slots=True)
class Request:
    """One text to embed.

    Attributes:
        text: The text.
        parameters: How; `resolve` has filled in what the bundle says where the caller says nothing.
        prompt: What is put before the text.
        width: Values of a vector, before `dimensions`; 0 if not known.
    """

    text: str
    parameters: EmbedParameters = DEFAULTS
    prompt: str = ""
    width: int = 0

    @property
    def chars(self) -> int:
        """Characters that have to be tokenized."""
        return len(self.prompt) + len(self.text)


def resolve(given: EmbedParameters, embedding: Embedding) -> Request:
    """Returns a request without a text: what the caller chose, and where that is nothing what the bundle says.

    Args:
        given: The caller's parameters.
        embedding: What the bundle says.

    Raises:
        InvalidValueError: The bundle has no such prompt or layers, or fewer dimensions.
    """
    if given.layers == "last_four" and embedding.layers != "last_four":
        raise InvalidValueError(
            "`layers` is `last_four`, but this model's graph gives out its last layer only; export it with `--layers last_four`."
        )
    width = embedding.dimensions * (LAST_FOUR if given.layers == "last_four" else 1)
    if given.dimensions is not None and given.dimensions > width:
        raise InvalidValueError(f"`dimensions` is {given.dimensions}, and this model's vectors have {width}; ask for at most that many.")
    name = embedding.default_prompt if given.prompt_name is None else given.prompt_name
    if name is not None and name not in embedding.prompts:
        known = ", ".join(f"`{prompt}`" for prompt in embedding.prompts)
        raise InvalidValueError(
            f"this model has no prompt `{name[:64]}`; " + (f"known are {known}." if known else "it has none, so leave `prompt_name` out.")
        )
    own = {"pooling": embedding.pooling, "normalize": embedding.normalize}
    parameters = given.model_copy(update={field: value for field, value in own.items() if getattr(given, field) is None})
    return Request("", parameters, "" if name is None else embedding.prompts[name], width)


def estimate(request: Request, max_length: int) -> int:
    """Returns a cheap guess of the tokens that the request will cost."""
    return min(estimate_tokens(request.prompt) + estimate_tokens(request.text), max_length)


def encode(request: Request, tokenizer: Tokenizer) -> Encoded:
    """Returns the one encoding of the (cut) text.

    Raises:
        InvalidValueError: The text is too long and `truncate` is false.
    """
    (tokens,) = tokenizer.tokenize([request.prompt + request.text])
    room = tokenizer.room(pair=False)
    if len(tokens) > room and request.parameters.truncate is False:
        raise InvalidValueError(f"the text has {len(tokens)} tokens and the model takes {room}; shorten it, or set `truncate` to true.")
    ids = tokens.ids[-room:] if request.parameters.truncation_direction == "left" else tokens.ids[:room]
    encoding = tokenizer.assemble(ids)
    values = len(encoding) * (request.parameters.dimensions or request.width) if request.parameters.pooling == "none" else 0
    return Encoded(encodings=[encoding], truncated=len(tokens) > room, values=values)


def decode(request: Request, encoded: Encoded, rows: Sequence[Row], config: ModelConfig) -> Floats | str | list[str]:
    """Returns the vector, float32 [values] or a text of base64, or with the pooling `none` one for each token: float32 [length, values].

    Args:
        request: The request.
        encoded: Not needed.
        rows: One row with the output of the layers, float32 [length, values], without padding, or what `reduce` kept of it.
        config: Not needed.
    """
    found = vectors(request, rows[0])
    if request.parameters.encoding_format == "base64":
        return packed(found) if found.ndim == 1 else [packed(vector) for vector in found]
    return found


def packed(vector: Floats) -> str:
    """Returns a vector, float32 [values], as base64: four bytes a value, little-endian, as clients of the OpenAI API read it."""
    return base64.b64encode(vector.astype("<f4").tobytes()).decode("ascii")


def reduce(request: Request, encoded: Encoded | None, row: Row) -> Row:
    """Returns a row's pooled `vector`, float32 [values], or with the pooling `none` the tokens', float32 [length, values], as a copy."""
    pooled = pool(row[OUTPUTS[request.parameters.layers or "last"]], request.parameters.pooling)
    return {"vector": np.array(pooled[..., : request.parameters.dimensions])}


def vectors(request: Request, row: Row) -> Floats:
    """Returns the vector of a text, float32 [values], or with the pooling `none` float32 [length, values].

    Args:
        request: How.
        row: The outputs of the layers, float32 [length, values], or what `reduce` kept of them.
    """
    pooled = (row if "vector" in row else reduce(request, None, row))["vector"]
    return normalized(pooled) if request.parameters.normalize else pooled


def pool(tokens: Floats, pooling: Pooling | None) -> Floats:
    """Returns one vector for the vectors of all tokens, float32 [length, values]; with `none` those themselves."""
    pooled = tokens
    if pooling == "cls":
        pooled = tokens[0]
    elif pooling == "mean":
        pooled = tokens.mean(axis=0, dtype=np.float32)
    elif pooling == "max":
        pooled = tokens.max(axis=0)
    return pooled


def normalized(values: Floats) -> Floats:
    """Returns vectors of length 1 along the last axis; a vector of zeros stays one."""
    norms = np.sqrt(np.square(values).sum(axis=-1, keepdims=True, dtype=np.float32))
    unit: Floats = values / np.maximum(norms, _LEAST_NORM)
    return unit


class EmbedBody(EmbedOptions, TaskBody):
    """Body of an embedding request."""

    model_config = body_config(inputs=["A warm, funny film.", "The bridge was built in 1886."], normalize=True)
    always_list: ClassVar[bool] = True
    parameters_type: ClassVar[type[TaskParameters]] = EmbedParameters

    inputs: TextOrTexts
    parameters: EmbedParameters | None = None

    def requests(self, config: ModelConfig | None = None) -> list[Any]:
        """Returns one request per text, with what the caller left open as the bundle says."""
        assert config is not None and config.embedding is not None, "a manifest for embeddings has it"
        beside = self.model_dump(include=set(EmbedOptions.model_fields), exclude_none=True)
        within = {} if self.parameters is None else self.parameters.model_dump(exclude_none=True)
        for name in beside.keys() & within.keys():
            if beside[name] != within[name]:
                raise InvalidValueError(f"`{name}` stands both beside `inputs` and in `parameters`, and differs; leave one of them out.")
        like = resolve(EmbedParameters(**beside | within), config.embedding)
        return [replace(like, text=text) for text in self.items]

    def answer(self, results: list[Any], user_agent: str = "") -> Any:
        """Returns the vectors.

        Raises:
            InvalidValueError: huggingface_hub asks for base64, which it cannot read.
        """
        wanted = self.encoding_format or (self.parameters and self.parameters.encoding_format)
        if wanted == "base64" and _HUGGINGFACE_HUB.search(user_agent):
            raise InvalidValueError(
                "`encoding_format` is `base64`, which huggingface_hub cannot read; leave it out, or ask with another client."
            )
        return super().answer(results, user_agent)


def _missing(manifest: Manifest) -> str | None:
    return "`embedding` must not be null for feature-extraction" if manifest.embedding is None else None


SPEC = TaskSpec(
    name=TASK,
    path="embed",
    title="Embed texts as vectors",
    body=EmbedBody,
    answer=list[list[float]] | list[list[list[float]]] | list[str] | list[list[str]],
    estimate=estimate,
    encode=encode,
    decode=decode,
    reduce=reduce,
    missing=_missing,
)
