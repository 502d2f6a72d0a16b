"""The modules of sentence-transformers after the encoder: they make one vector of the vectors of a text's tokens.

Pooling by `cls`, `mean` or `max` happens in the service, so that a request can choose another one, and so does a final Normalize. Anything
else is a part of the graph, whose output `sentence_embedding` then is the vector: other poolings, several poolings side by side, and Dense
layers. A checkpoint without `modules.json` gets Text Embeddings Inference's default pooling: the vector of the first token, [CLS], not
normalized.

Padding can be on either side. sentence-transformers gives the same vectors, because its positions start at a text's first token.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

import torch
from torch.nn.functional import normalize
from transformers import PreTrainedModel

from bertserve.export.checkpoint.sentence_transformers import (
    DENSE,
    MODULES_FILE,
    NORMALIZE,
    POOLING,
    TRANSFORMER,
    ModuleEntry,
    SentenceSettings,
    read_modules,
    read_object,
    refuse_settings,
)
from bertserve.export.checkpoint.weight_files import find_weights, read_weights
from bertserve.export.errors import CheckpointError
from bertserve.service.bundle.manifest import VECTOR_OUTPUT, Embedding, Pooling

STEPS = (TRANSFORMER, POOLING, DENSE, NORMALIZE)
_VECTOR = "sentence_embedding"  # sentence-transformers' name of the text's vector

# the flags of older files, in the order in which sentence-transformers puts the poolings side by side -> the pooling
_FLAGS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
_FUNCTIONS = ("Identity", "Tanh", "ReLU", "GELU", "Sigmoid", "SiLU")  # after a Dense layer: classes of `torch.nn` without parameters


def _sum(tokens: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    return (tokens * weights.unsqueeze(-1)).sum(1)


def _first(tokens: torch.Tensor, mask: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    return _sum(tokens, mask * (places == 1))


def _max(tokens: torch.Tensor, mask: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    # padding gets the values of a token, because infinity has no half precision
    return torch.where(mask.unsqueeze(-1) > 0, tokens, _first(tokens, mask, places).unsqueeze(1)).amax(1)


def _mean(tokens: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    return _sum(tokens, weights) / weights.sum(1, keepdim=True)


# each gets the vectors of the tokens, float32 [rows, length, values], the mask, float32 [rows, length], and the position of each token in
# its text from 1, int64 [rows, length]
POOLINGS: dict[str, Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "cls": _first,
    "max": _max,
    "mean": lambda tokens, mask, places: _mean(tokens, mask),
    "mean_sqrt_len_tokens": lambda tokens, mask, places: _sum(tokens, mask) / mask.sum(1, keepdim=True).sqrt(),
    "weightedmean": lambda tokens, mask, places: _mean(tokens, mask * places),
    "lasttoken": lambda tokens, mask, places: _sum(tokens, mask * (places == places[:, -1:])),
}


class SentenceHead(torch.nn.Module):
    """Poolings, whose vectors are put side by side, and further steps.

    Attributes:
        poolings: Names of the poolings.
        width: Values of the vector.
    """

    def __init__(self, poolings: Sequence[str], steps: Sequence[torch.nn.Module], width: int) -> None:
        super().__init__()
        self.poolings, self.width = tuple(poolings), width
        self.steps = torch.nn.Sequential(*steps)

    def forward(self, tokens: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Returns the vectors of texts, float32 [rows, width], from those of tokens and the attention mask, int64 [rows, length]."""
        places = mask.cumsum(1)
        vectors = [POOLINGS[pooling](tokens, mask.to(tokens.dtype), places) for pooling in self.poolings]
        result: torch.Tensor = self.steps(torch.cat(vectors, dim=-1))
        return result


class _Dense(torch.nn.Module):
    """A layer with a function, whose input is added on request; the weights have sentence-transformers' names."""

    def __init__(self, inputs: int, outputs: int, function: torch.nn.Module, *, bias: bool, use_residual: bool) -> None:
        super().__init__()
        self.linear, self.function, self.use_residual = torch.nn.Linear(inputs, outputs, bias), function, use_residual
        self.residual = torch.nn.Linear(inputs, outputs, bias=False) if use_residual and inputs != outputs else torch.nn.Identity()

    def forward(self, vectors: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.function(self.linear(vectors))
        return result + self.residual(vectors) if self.use_residual else result


class _Normalize(torch.nn.Module):
    def forward(self, vectors: torch.Tensor) -> torch.Tensor:
        return normalize(vectors, dim=-1)


def read_embedding(folder: Path, settings: SentenceSettings, dimensions: int) -> tuple[Embedding, SentenceHead | None]:
    """Reads the modules after the encoder.

    Args:
        folder: The checkpoint's folder.
        settings: Its other settings.
        dimensions: Values of a token's vector.

    Returns:
        The manifest's entry for the embedding, with the last layer only, and the part of the graph, if the service cannot do it.

    Raises:
        CheckpointError: A file is broken, or needs an unsupported feature.
    """
    entries = [entry for entry in read_modules(folder) if entry.kind != TRANSFORMER]
    kinds = [entry.kind for entry in entries]
    if unknown := [kind for kind in kinds if kind not in STEPS]:
        raise CheckpointError(
            f"`{folder / MODULES_FILE}` has the step `{unknown[0]}`, which is not supported; supported are {', '.join(STEPS)}."
        )
    if kinds and (kinds[0] != POOLING or POOLING in kinds[1:]):
        raise CheckpointError(
            f"`{folder / MODULES_FILE}` has the steps {', '.join(kinds)}; supported is one Pooling after the Transformer, and then Dense "
            "and Normalize."
        )
    poolings = _read_poolings(entries[0].folder / "config.json", settings) if entries else ("cls",)
    # sentence-transformers cuts vectors after it normalizes them, and does not normalize them again
    ends_normal = kinds[-1:] == [NORMALIZE] and settings.truncate_dim is None
    width, steps = len(poolings) * dimensions, []
    for entry in entries[1 : len(entries) - ends_normal]:
        step, width = _read_dense(entry, width) if entry.kind == DENSE else (_read_normalize(entry), width)
        steps.append(step)
    if ends_normal:
        _read_normalize(entries[-1])
    in_service = not steps and len(poolings) == 1 and poolings[0] in get_args(Pooling)
    embedding = Embedding(
        pooling=poolings[0] if in_service else "graph",  # type: ignore[arg-type]  # checked by pydantic
        normalize=ends_normal,
        dimensions=dimensions,
        vector_dimensions=None if in_service else width,
        truncate_dim=settings.truncate_dim,
        similarity=settings.similarity,
        prompts=settings.prompts,
        default_prompt=settings.default_prompt,
    )
    return embedding, None if in_service else SentenceHead(poolings, steps, width)


def attach(model: PreTrainedModel, head: SentenceHead) -> None:
    """Makes an encoder return the vector of each text too, as `sentence_embedding`."""
    model.sentence_head = head.eval()

    def add_vector(module: Any, arguments: Any, options: Mapping[str, Any], output: Any) -> Any:
        tokens, mask = output["last_hidden_state"], options.get("attention_mask")
        output[VECTOR_OUTPUT] = head(tokens, torch.ones(tokens.shape[:2], dtype=torch.int64) if mask is None else mask)
        return output

    model.register_forward_hook(add_vector, with_kwargs=True)


def _read_poolings(path: Path, settings: SentenceSettings) -> tuple[str, ...]:
    """Reads the pooling modes of a Pooling module's `config.json`."""
    if not path.is_file():
        raise CheckpointError(f"`{path}`, which modules.json names, is missing; copy the whole checkpoint.")
    config = read_object(path)
    refuse_settings(path, config, {*_FLAGS, "pooling_mode", "include_prompt", "embedding_dimension", "word_embedding_dimension"})
    modes = config.get("pooling_mode")
    if modes is None:
        modes = [pooling for flag, pooling in _FLAGS.items() if config.get(flag)]
    poolings = [str(mode) for mode in (modes if isinstance(modes, list) else [modes])]
    if not poolings or not set(poolings) <= set(POOLINGS):
        raise CheckpointError(f"`{path}` pools by {' and '.join(poolings) or 'nothing'}; supported are {', '.join(POOLINGS)}.")
    if config.get("include_prompt") is False and any(settings.prompts.values()):
        raise CheckpointError(f"`{path}` leaves the tokens of the prompt out of pooling, which is not supported; remove the prompts.")
    return tuple(poolings)


def _read_config(entry: ModuleEntry, *known: str) -> dict[str, Any]:
    """Reads the `config.json` of a module that reads and writes the text's vector."""
    path = entry.folder / "config.json"
    config, names = read_object(path), ("module_input_name", "module_output_name")
    refuse_settings(path, config, (*known, *names))
    for name in names:
        if config.get(name) not in (None, _VECTOR):
            raise CheckpointError(f"`{name}` in `{path}` is {json.dumps(config[name])}; only `{_VECTOR}` is supported.")
    return config


def _read_normalize(entry: ModuleEntry) -> torch.nn.Module:
    _read_config(entry)
    return _Normalize()


def _read_dense(entry: ModuleEntry, width: int) -> tuple[torch.nn.Module, int]:
    """Returns a Dense module for vectors of this width, and the width of its results."""
    config = _read_config(entry, "in_features", "out_features", "bias", "activation_function", "use_residual")
    activation, outputs = config.get("activation_function", "torch.nn.Tanh"), config.get("out_features")
    package, _, function = str(activation).rpartition(".")
    if not package.startswith("torch.nn") or function not in _FUNCTIONS:
        raise CheckpointError(
            f"`activation_function` in `{entry.folder / 'config.json'}` is {json.dumps(activation)}; supported are {', '.join(_FUNCTIONS)} of "
            "`torch.nn`."
        )
    if type(outputs) is not int or config.get("in_features") != width:
        raise CheckpointError(
            f"`{entry.folder / 'config.json'}` has {config.get('in_features')} `in_features` and {outputs} `out_features`, but the step before "
            f"it gives vectors of {width} values; copy the whole checkpoint."
        )
    options = {"bias": bool(config.get("bias", True)), "use_residual": bool(config.get("use_residual"))}
    dense = _Dense(width, outputs, getattr(torch.nn, function)(), **options)
    path = find_weights(str(entry.folder), entry.folder)[0]
    try:
        dense.load_state_dict(read_weights(str(entry.folder), path))
    except RuntimeError as error:
        raise CheckpointError(f"the weights `{path}` do not match the config.json next to them: {error}.") from error
    if not all(torch.isfinite(weight).all() for weight in dense.parameters()):
        raise CheckpointError(f"`{path}` has NaN or infinite weights; the training diverged.")
    return dense, outputs
