"""Embeddings (feature extraction): a text to a vector, or to one for each of its tokens.

Special tokens count as tokens, as in sentence-transformers, whose mean goes over the attention mask, and in the Hugging Face
pipeline, which returns them; padding never does.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from service.bundle.manifest import Embedding, Layers, Pooling
from service.errors import InvalidValueError
from service.tasks.encoded import Encoded, ModelConfig
from service.tasks.scores import Floats, Row
from service.text.tokenizer import Tokenizer, estimate_tokens

TASK = "feature-extraction"
# Which output of the graph has the vectors of these layers.
OUTPUTS: dict[Layers, str] = {"last": "last_hidden_state", "last_four": "last_four_hidden_states"}
LAST_FOUR = 4
_LEAST_NORM = np.float32(1e-12)


@dataclass(frozen=True, slots=True)
class Request:
    """One text to embed. What a caller leaves open `settled` takes from the bundle.

    Attributes:
        text: The text.
        prompt: What is put before it.
        pooling: How the tokens' vectors become one; `none` keeps them all.
        normalize: Whether vectors are brought to length 1.
        layers: The last layer, or the last four side by side.
        width: Values of a vector, before `dimensions`; 0 if not known.
        dimensions: How many of the first values to keep, before normalizing; all when None.
        truncate: Whether a text over the model's length is cut (else it is an error).
        truncation_direction: At which end it loses its tokens.
        encoding_format: A vector as a list of floats, or as the base64 of its float32 values, little-endian.
    """

    text: str
    prompt: str = ""
    pooling: Pooling = "cls"
    normalize: bool = False
    layers: Layers = "last"
    width: int = 0
    dimensions: int | None = None
    truncate: bool = True
    truncation_direction: Literal["left", "right"] = "right"
    encoding_format: Literal["float", "base64"] = "float"

    @property
    def chars(self) -> int:
        """Characters that have to be tokenized."""
        return len(self.prompt) + len(self.text)


def settled(options: Mapping[str, Any], embedding: Embedding) -> dict[str, Any]:
    """Returns the fields of a Request but its text: what the caller chose, and where that is nothing what the bundle says.

    Args:
        options: Fields by their names on the wire: those of Request, and `prompt_name` in place of `prompt`.
        embedding: What the bundle says.

    Raises:
        InvalidValueError: The bundle has no such prompt or layers, or fewer dimensions.
    """
    layers: Layers = options.get("layers", "last")
    if layers == "last_four" and embedding.layers != "last_four":
        raise InvalidValueError(
            "`layers` is `last_four`, but this model's graph gives out its last layer only; export it with `--layers last_four`."
        )
    width = embedding.dimensions * (LAST_FOUR if layers == "last_four" else 1)
    dimensions = options.get("dimensions")
    if dimensions is not None and dimensions > width:
        raise InvalidValueError(f"`dimensions` is {dimensions}, and this model's vectors have {width}; ask for at most that many.")
    name = options.get("prompt_name", embedding.default_prompt)
    if name is not None and name not in embedding.prompts:
        known = ", ".join(f"`{prompt}`" for prompt in embedding.prompts)
        raise InvalidValueError(
            f"this model has no prompt `{name[:64]}`; " + (f"known are {known}." if known else "it has none, so leave `prompt_name` out.")
        )
    defaults = {"pooling": embedding.pooling, "normalize": embedding.normalize}
    chosen = {key: value for key, value in options.items() if key != "prompt_name"}
    return defaults | chosen | {"prompt": "" if name is None else embedding.prompts[name], "width": width}


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
    if len(tokens) > room and not request.truncate:
        raise InvalidValueError(f"the text has {len(tokens)} tokens and the model takes {room}; shorten it, or set `truncate` to true.")
    ids = tokens.ids[-room:] if request.truncation_direction == "left" else tokens.ids[:room]
    encoding = tokenizer.assemble(ids)
    values = len(encoding) * (request.dimensions or request.width) if request.pooling == "none" else 0
    return Encoded(encodings=[encoding], truncated=len(tokens) > room, values=values)


def decode(request: Request, encoded: Encoded, rows: Sequence[Row], head: ModelConfig) -> list[Any] | str:
    """Returns the vector, a list of floats or a text of base64, or with the pooling `none` a list of these, one for each token.

    Args:
        request: The request.
        encoded: Not needed.
        rows: One row with the output of the layers, float32 [length, values], without padding.
        head: Not needed.
    """
    found = vectors(request, rows[0])
    if request.encoding_format == "base64":
        return packed(found) if found.ndim == 1 else [packed(vector) for vector in found]
    result: list[Any] = found.tolist()
    return result


def packed(vector: Floats) -> str:
    """Returns a vector, float32 [values], as base64: four bytes a value, little-endian, as clients of the OpenAI API read it."""
    return base64.b64encode(vector.astype("<f4").tobytes()).decode("ascii")


def vectors(request: Request, row: Row) -> Floats:
    """Returns the vector of a text, float32 [values], or with the pooling `none` float32 [length, values]."""
    pooled = pool(row[OUTPUTS[request.layers]], request.pooling)[..., : request.dimensions]
    return normalized(pooled) if request.normalize else pooled


def pool(tokens: Floats, pooling: Pooling) -> Floats:
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
