"""The files of a model's weights: safetensors or, if there are none, the pickles that PyTorch wrote before.

A pickle can run any code when it is read. `torch.load` with `weights_only=True` creates only tensors and plain values, and refuses all
other objects. Pickles are not read in another way.
"""

from __future__ import annotations

import json
import pickle
import re
import warnings
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from bertserve.export.errors import CheckpointError

SAFETENSORS, PICKLED_MODEL = "model.safetensors", "pytorch_model.bin"
_GLOBAL = re.compile(r"\bGLOBAL ([\w.]+)")  # in the message of torch


def find_weights(source: str, folder: Path) -> list[Path]:
    """Returns the files from which transformers loads a model's weights: one file, or the parts in an index; safetensors before pickles.

    Raises:
        CheckpointError: An index is broken or names files of another format, or all weights are in formats that are not supported.
    """
    for name in (SAFETENSORS, PICKLED_MODEL):
        if (folder / name).is_file():
            return [folder / name]
        if (folder / f"{name}.index.json").is_file():
            return _parts(source, folder / f"{name}.index.json", Path(name).suffix)
    raise CheckpointError(
        f"the weights of `{source}` cannot be read: it has neither `{SAFETENSORS}` nor `{PICKLED_MODEL}`; save the model with `save_pretrained`. "
        "Weights of TensorFlow or Flax must first be loaded with transformers 4 (`from_tf=True`, `from_flax=True`)."
    )


def _parts(source: str, index: Path, suffix: str) -> list[Path]:
    try:
        parts = {str(part) for part in json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()}
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise CheckpointError(f"the weights of `{source}` cannot be read: `{index.name}` is not an index of weights.") from error
    names = sorted(part for part in parts if not part.endswith(suffix) or Path(part).name != part)
    if names:
        raise CheckpointError(
            f"the weights of `{source}` cannot be read: `{index.name}` names `{names[0]}`, which is not a `{suffix}` file of its folder; "
            "save the model again with `save_pretrained`."
        )
    return [index.parent / part for part in sorted(parts)]


def read_weights(source: str, path: Path) -> dict[str, torch.Tensor]:
    """Returns the tensors in a file of safetensors, or in a pickle.

    Raises:
        CheckpointError: A pickle has other objects, or the file cannot be read.
    """
    if path.suffix == ".bin":
        return read_pickle(source, path)
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"the weights of `{source}` cannot be read: {error}; the file is damaged or missing.") from error


def read_pickle(source: str, path: Path, device: str = "cpu") -> dict[str, torch.Tensor]:
    """Returns the tensors in a pickle; on the device `meta` only their shapes.

    Raises:
        CheckpointError: It has other objects, or cannot be read.
    """
    start = f"the weights of `{source}` cannot be read: `{path.name}` "
    save = "save only the weights, with `save_pretrained`."
    try:
        with warnings.catch_warnings(action="ignore"):  # of other versions of pickle's format
            tensors = torch.load(path, map_location=device, weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, OSError, ValueError, EOFError, KeyError, AttributeError, TypeError) as error:
        # torch's own message recommends `weights_only=False`
        if match := _GLOBAL.search(str(error)):
            raise CheckpointError(f"{start}has an object of `{match[1]}`, which could run code; {save}") from error
        raise CheckpointError(
            f"{start}is damaged or a placeholder, or has other objects than tensors; download it again, or {save}"
        ) from error
    if not isinstance(tensors, dict) or not tensors or not all(isinstance(tensor, torch.Tensor) for tensor in tensors.values()):
        keys = f" with the keys {', '.join(map(repr, list(tensors)[:4]))}" if isinstance(tensors, dict) else ""
        raise CheckpointError(f"{start}is not a dictionary of names and tensors, but a {type(tensors).__name__}{keys}; {save}")
    return tensors
