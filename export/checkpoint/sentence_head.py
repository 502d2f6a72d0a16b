"""The modules of sentence-transformers after the encoder: they make one vector of the vectors of a text's tokens.

The service itself pools by `cls`, `mean` or `max` and applies a final Normalize, so that a request can choose another pooling. All other
steps (other poolings, several poolings side by side, Dense layers) are part of the graph, which then returns the vector as
`sentence_embedding`. A checkpoint without `modules.json` gets Text Embeddings Inference's default pooling: the vector of the first token,
[CLS], not normalized.

Padding can be on either side. sentence-transformers gives the same vectors, because its positions start at a text's first token.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from pydantic import Field, field_validator
from torch.nn.functional import normalize
from transformers import PreTrainedModel

from bertserve.export.checkpoint.sentence_transformers import (
    DENSE,
    NORMALIZE,
    POOLING,
    TRANSFORMER,
    SentenceSettings,
    SettingsFile,
    read_modules,
)
from bertserve.export.checkpoint.weight_files import find_weights, read_weights
from bertserve.export.errors import ExportError
from bertserve.service.bundle.checkpoint_files import MODULES_FILE
from bertserve.service.bundle.manifest import VECTOR_OUTPUT, Embedding, Pooling

_FUNCTIONS = ("Identity", "Tanh", "ReLU", "GELU", "Sigmoid", "SiLU")  # after a Dense layer: classes of `torch.nn` without parameters


def _sum(tokens: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    return (tokens * weights.unsqueeze(-1)).sum(1)


def _first(tokens: torch.Tensor, mask: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    return _sum(tokens, mask * (positions == 1))


def _max(tokens: torch.Tensor, mask: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    # padding gets the values of a token, because infinity has no half precision
    return torch.where(mask.unsqueeze(-1) > 0, tokens, _first(tokens, mask, positions).unsqueeze(1)).amax(1)


def _mean(tokens: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    return _sum(tokens, weights) / weights.sum(1, keepdim=True)


# sentence-transformers puts several side by side in this order; each gets the vectors of the tokens, float32 [rows, length,
# values], the mask, float32 [rows, length], and the position of each token in its text from 1, int64 [rows, length]
POOLINGS: dict[str, Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "cls": _first,
    "max": _max,
    "mean": lambda tokens, mask, positions: _mean(tokens, mask),
    "mean_sqrt_len_tokens": lambda tokens, mask, positions: _sum(tokens, mask) / mask.sum(1, keepdim=True).sqrt(),
    "weightedmean": lambda tokens, mask, positions: _mean(tokens, mask * positions),
    "lasttoken": lambda tokens, mask, positions: _sum(tokens, mask * (positions == positions[:, -1:])),
}


class SentenceHead(torch.nn.Module):
    """Poolings, whose vectors are put side by side, and further steps."""

    def __init__(self, poolings: Sequence[str], steps: Sequence[torch.nn.Module]) -> None:
        super().__init__()
        self.poolings = tuple(poolings)
        self.steps = torch.nn.Sequential(*steps)

    def forward(self, tokens: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Returns the vectors of texts, float32 [rows, values], from token vectors and the attention mask, int64 [rows, length]."""
        positions = mask.cumsum(1)
        vectors = [POOLINGS[pooling](tokens, mask.to(tokens.dtype), positions) for pooling in self.poolings]
        return self.steps(torch.cat(vectors, dim=-1))


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
    """Returns the manifest's entry for vectors of the last layer, and what the graph does after the encoder, if the service cannot."""
    modules = [module for module in read_modules(folder) if module[0] != TRANSFORMER]
    kinds = [kind for kind, _ in modules]
    if kinds and (kinds[0] != POOLING or not {DENSE, NORMALIZE}.issuperset(kinds[1:])):
        raise ExportError(
            f"`{folder / MODULES_FILE}` has steps {', '.join(kinds)}; supported: {TRANSFORMER}, {POOLING}, then {DENSE} and {NORMALIZE}."
        )
    poolings = _read_poolings(modules[0][1] / "config.json", settings) if modules else ("cls",)
    # sentence-transformers cuts vectors after it normalizes them, and does not normalize them again
    ends_normal = kinds[-1:] == [NORMALIZE] and settings.truncate_dim is None
    width, steps = len(poolings) * dimensions, list[torch.nn.Module]()
    for kind, module_folder in modules[1:]:
        config = _StepFile.read(module_folder / "config.json")
        if kind == NORMALIZE:
            steps.append(_Normalize())
        else:
            steps.append(_read_dense(module_folder, config, width))
            width = config.out_features
    steps = steps[: len(steps) - ends_normal]
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
    return embedding, None if in_service else SentenceHead(poolings, steps)


def attach_sentence_head(model: PreTrainedModel, head: SentenceHead) -> None:
    """Makes an encoder return the vector of each text too, as `sentence_embedding`."""
    model.sentence_head = head.eval()

    def add_vector(module: Any, arguments: Any, options: Mapping[str, Any], output: Any) -> Any:
        tokens, mask = output["last_hidden_state"], options.get("attention_mask")
        output[VECTOR_OUTPUT] = head(tokens, torch.ones(tokens.shape[:2], dtype=torch.int64) if mask is None else mask)
        return output

    model.register_forward_hook(add_vector, with_kwargs=True)


class _PoolingFile(SettingsFile):
    """The settings of a Pooling: `pooling_mode` or, in older files, a flag for each of `POOLINGS`."""

    pooling_mode: list[Literal["cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken"]] = Field(default=[])
    cls: bool = Field(default=False, alias="pooling_mode_cls_token")
    max: bool = Field(default=False, alias="pooling_mode_max_tokens")
    mean: bool = Field(default=False, alias="pooling_mode_mean_tokens")
    mean_sqrt_len_tokens: bool = Field(default=False, alias="pooling_mode_mean_sqrt_len_tokens")
    weightedmean: bool = Field(default=False, alias="pooling_mode_weightedmean_tokens")
    lasttoken: bool = Field(default=False, alias="pooling_mode_lasttoken")
    include_prompt: bool = True
    embedding_dimension: Any = None
    word_embedding_dimension: Any = None

    @field_validator("pooling_mode", mode="before")
    @classmethod
    def _as_list(cls, mode: Any) -> Any:
        return mode if isinstance(mode, list) else [mode]


class _StepFile(SettingsFile):
    """The settings of a Dense or Normalize, which read and write the text's vector, by sentence-transformers' name of it."""

    module_input_name: Literal["sentence_embedding"] = "sentence_embedding"
    module_output_name: Literal["sentence_embedding"] = "sentence_embedding"
    # fields of a Dense only
    in_features: int = 0
    out_features: int = 0
    bias: bool = True
    activation_function: str = "torch.nn.Tanh"
    use_residual: bool = False


def _read_poolings(path: Path, settings: SentenceSettings) -> Sequence[str]:
    if not path.is_file():
        raise ExportError(f"`{path}`, which modules.json names, is missing; copy the whole checkpoint.")
    config = _PoolingFile.read(path)
    poolings: Sequence[str] = config.pooling_mode or [pooling for pooling in POOLINGS if getattr(config, pooling)]
    if not poolings:
        raise ExportError(f"`{path}` pools by nothing; supported are {', '.join(POOLINGS)}.")
    if not config.include_prompt and any(settings.prompts.values()):
        raise ExportError(f"`{path}` leaves the tokens of the prompt out of pooling, which is not supported; remove the prompts.")
    return poolings


def _read_dense(folder: Path, config: _StepFile, width: int) -> _Dense:
    """Returns a Dense module for vectors of this width."""
    package, _, function = config.activation_function.rpartition(".")
    if not package.startswith("torch.nn") or function not in _FUNCTIONS:
        raise ExportError(
            f"`activation_function` in `{folder / 'config.json'}` is `{config.activation_function}`; supported are {', '.join(_FUNCTIONS)} "
            "of `torch.nn`."
        )
    if config.in_features != width:
        raise ExportError(
            f"`in_features` in `{folder / 'config.json'}` is {config.in_features}, but the step before it gives {width} values; fix it."
        )
    dense = _Dense(width, config.out_features, getattr(torch.nn, function)(), bias=config.bias, use_residual=config.use_residual)
    path = find_weights(str(folder), folder)[0]
    try:
        dense.load_state_dict(read_weights(str(folder), path))
    except RuntimeError as error:
        raise ExportError(f"the weights `{path}` do not match the config.json next to them: {error}.") from error
    if not all(torch.isfinite(weight).all() for weight in dense.parameters()):
        raise ExportError(f"`{path}` has NaN or infinite weights; the training diverged.")
    return dense
