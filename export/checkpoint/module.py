"""Loads the user's own module: runs the code of a trusted file, and converts its result to a checkpoint.

The file's function returns a dictionary of the fields of `ModuleSpec`, so it imports nothing (docs/how-to/serve-a-checkpoint.md).

This is the only place that runs code other than that of the exporter and its packages. It requires two flags of
`bert-export`, and neither a checkpoint nor a bundle can enable it.
"""

import hashlib
import inspect
import sys
from collections.abc import Sequence
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, Self

import torch
from pydantic import ConfigDict, Field, ValidationError, model_validator
from pydantic.dataclasses import dataclass
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerFast
from transformers.modeling_outputs import ModelOutput

from bertserve.export.checkpoint.checkpoint import Checkpoint
from bertserve.export.checkpoint.fast_tokenizer import make_tokenizer_spec, read_templates, vocabulary_size
from bertserve.export.checkpoint.padding import find_padding
from bertserve.export.checkpoint.signature import INPUTS, graph_outputs
from bertserve.export.checkpoint.task_head import read_activation, read_labels
from bertserve.export.checkpoint.token_types import TYPE_IDS
from bertserve.export.errors import ExportError
from bertserve.export.tasks import EXPORT_TASKS
from bertserve.service.bundle.manifest import Embedding, Pooling, Source
from bertserve.service.messages import describe_validation_error


@dataclass(frozen=True, kw_only=True, config=ConfigDict(arbitrary_types_allowed=True, extra="forbid"))
class ModuleSpec:
    """A PyTorch module with the information that transformers stores in a checkpoint's files.

    Attributes:
        module: Takes `input_ids` and, if its `forward` has these parameters, `attention_mask` and `token_type_ids`, int64 [rows, length].
            Returns float32 logits [rows, labels]; for token classification [rows, length, labels]; for question answering a tuple of two
            [rows, length]; and without a head, vectors [rows, length, values].
        tokenizer: A `tokenizer.json` with special tokens in its post-processor; a relative path starts at the factory's file.
        task: `text-classification`, `token-classification`, `question-answering` or `feature-extraction`.
        pad_token: The padding token, which no text contains.
        labels: Label names by id, for classification.
        problem_type: `single_label_classification`, `multi_label_classification` or `regression`; it decides how logits become scores.
        cls_token: The token for "no answer" in question answering.
        max_length: Maximum length in tokens, including special tokens.
        pooling: The pooling of a text's vectors, for feature-extraction.
    """

    module: torch.nn.Module
    tokenizer: str | Path
    task: Literal["text-classification", "token-classification", "question-answering", "feature-extraction"]
    pad_token: str
    labels: Sequence[str] = ()
    problem_type: Literal["single_label_classification", "multi_label_classification", "regression"] = "single_label_classification"
    cls_token: str | None = None
    max_length: int = Field(default=512, ge=3)
    pooling: Pooling = "mean"

    @model_validator(mode="after")
    def _has_labels_for_the_task(self) -> Self:
        if (labeled := EXPORT_TASKS[self.task].labeled) != bool(self.labels):
            raise ValueError(f"`labels` are {list(self.labels)!r}; {self.task} needs {'labels' if labeled else 'none'}")
        return self


class _Module(PreTrainedModel):  # type: ignore[misc]  # untyped in transformers
    """The user's module with the interface of a transformers model."""

    config_class = PreTrainedConfig
    main_input_name = "input_ids"

    def __init__(self, config: PreTrainedConfig, module: torch.nn.Module, outputs: tuple[str, ...], vocabulary: int) -> None:
        super().__init__(config)
        self.module = module
        self._outputs = outputs
        self._rows = vocabulary

    def forward(self, **inputs: torch.Tensor) -> ModelOutput:
        """Returns the module's outputs by name."""
        outputs = self.module(**inputs)
        tensors = outputs if isinstance(outputs, tuple | list) else (outputs,)
        return ModelOutput(zip(self._outputs, tensors, strict=True))

    def get_input_embeddings(self) -> torch.nn.Module:
        """Returns an embedding with one row per token of the tokenizer, because the module's own embedding cannot be identified."""
        return torch.nn.Embedding(self._rows, 1, device="meta")


def load_module(location: str) -> Checkpoint:
    """Runs `FILE:FACTORY`, a Python file and its function that returns the fields of a ModuleSpec; returns its module as a checkpoint."""
    path, factory = _split(location)
    spec = _call(path, factory)
    tokenizer = _load_tokenizer(path, spec)
    names = [name for name in inspect.signature(spec.module.forward).parameters if name in INPUTS]
    if "input_ids" not in names:
        raise ExportError(f"`forward` of the module of `{location}` has no parameter `input_ids`; supported are {', '.join(INPUTS)}.")
    tokenizer.model_input_names = names
    task = EXPORT_TASKS[spec.task]
    labels = dict(enumerate(spec.labels)) if task.labeled else {0: "", 1: ""}
    config = PreTrainedConfig(
        pad_token_id=tokenizer.pad_token_id,
        id2label=labels,
        label2id={},
        problem_type=spec.problem_type,
        architectures=["module"],
        num_hidden_layers=1,
    )
    model = _Module(config, spec.module, tuple(output.name for output in task.outputs), vocabulary_size(tokenizer)).eval().float()
    inputs = tuple(INPUTS[name] for name in names)
    single, pair = read_templates(location, tokenizer)
    last_id = vocabulary_size(tokenizer) - 1
    try:
        with torch.no_grad():
            width = _check_outputs(location, spec, model, names, last_id)
        padding = find_padding(model, tokenizer, names, spec.max_length)
    except ExportError:
        raise
    except Exception as error:  # the user's code can raise any error
        raise ExportError(
            f"the module of `{location}` fails on ids of at most {last_id}, or on a text of up to {spec.max_length} tokens: "
            f"{type(error).__name__}: {error}."
        ) from error
    tokenizer_spec = make_tokenizer_spec(tokenizer, single, pair, padding, max_length=spec.max_length, mask=None)
    embedding = Embedding(pooling=spec.pooling, normalize=False, dimensions=width) if task.embeds else None
    return Checkpoint(
        origin=Source(
            checkpoint=f"{path.name}:{factory}",
            revision=None,
            weights_sha256=_digest(spec.module),
            versions={},
            token_types="template" if TYPE_IDS in names else None,
        ),
        model=model,
        task=spec.task,
        inputs=inputs,
        outputs=graph_outputs(spec.task, embedding),
        labels=read_labels(location, config) if task.labeled else (),
        activation=task.activation or read_activation(config),
        hf_tokenizer=tokenizer,
        tokenizer=tokenizer_spec,
        embedding=embedding,
    )


def module_name(location: str) -> str:
    """Returns the default name of a module's bundle, which is the name of its file."""
    return _split(location)[0].stem


def _split(location: str) -> tuple[Path, str]:
    file, colon, factory = location.rpartition(":")
    if not colon or not file or not factory.isidentifier() or not Path(file).is_file():
        raise ExportError(f"--module is `{location}`; give FILE:FACTORY, a Python file that exists and a function in it.")
    return Path(file).resolve(), factory


def _call(path: Path, factory: str) -> ModuleSpec:
    name = f"bertserve_module_{path.stem}"
    module = ModuleType(name)
    module.__file__ = str(path)
    sys.modules[name] = module  # dataclasses and tracers look up modules by name
    try:
        SourceFileLoader(name, str(path)).exec_module(module)
        returned = getattr(module, factory)()
        return returned if isinstance(returned, ModuleSpec) else ModuleSpec(**returned)
    except ValidationError as error:
        first = error.errors()[0]
        value = f" (it is {first['input']!r})" if isinstance(first["input"], str | int) else ""
        raise ExportError(f"`{factory}` of `{path}` returned an invalid ModuleSpec: {describe_validation_error(first)}{value}.") from error
    except Exception as error:  # the user's code can raise any error
        raise ExportError(f"`{factory}` of `{path}` failed: {type(error).__name__}: {error}") from error


def _load_tokenizer(path: Path, spec: ModuleSpec) -> Any:
    file = path.parent / spec.tokenizer
    special = {"pad_token": spec.pad_token} | ({"cls_token": spec.cls_token} if spec.cls_token is not None else {})
    try:
        tokenizer: Any = PreTrainedTokenizerFast(tokenizer_file=str(file))
    except Exception as error:  # `tokenizers` raises a plain Exception for every failure
        raise ExportError(f"the tokenizer `{file}` of the module cannot be read: {error}") from error
    vocabulary = tokenizer.get_vocab()
    for name, token in special.items():
        if token not in vocabulary:
            raise ExportError(f"`{name}` of the module is `{token}`, which is not a token of `{file}`; name one of its tokens.")
        setattr(tokenizer, name, token)
    tokenizer.model_max_length = spec.max_length
    return tokenizer


def _check_outputs(location: str, spec: ModuleSpec, model: _Module, names: list[str], last_id: int) -> int:
    """Runs the module on two rows with the highest id; returns the width of its output."""
    ids = torch.full((2, 5), last_id)
    values = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "token_type_ids": torch.zeros_like(ids)}
    outputs = model(**{name: values[name] for name in names})
    task, width = EXPORT_TASKS[spec.task], len(spec.labels)
    for output in task.outputs:
        tensor = outputs[output.name]
        tail = (width,) if task.labeled else (tensor.shape[-1],) if task.embeds else ()
        expected = (2, *tail) if output.kind == "per_text" else (2, 5, *tail)
        if not isinstance(tensor, torch.Tensor) or tensor.dtype != torch.float32 or tuple(tensor.shape) != expected:
            raise ExportError(
                f"the module of `{location}` returns `{output.name}` of {tensor.dtype} {list(tensor.shape)} for 2 rows of 5 tokens, but "
                f"{spec.task} with {width} labels needs torch.float32 {list(expected)}."
            )
    return int(outputs[task.outputs[0].name].shape[-1])


def _digest(module: torch.nn.Module) -> str:
    hasher = hashlib.sha256()
    for name, tensor in sorted(module.state_dict().items()):
        hasher.update(name.encode())
        hasher.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return hasher.hexdigest()
