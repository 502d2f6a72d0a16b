"""The files of a model's weights: safetensors or, if there are none, the pickles that PyTorch wrote before.

A pickle can run any code when it is read. `torch.load` with `weights_only=True` creates only tensors and plain values, and refuses all
other objects. Pickles are not read in another way.
"""

import json
import pickle
import re
import warnings
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from bertserve.export.errors import ExportError

SAFETENSORS, PICKLED_MODEL = "model.safetensors", "pytorch_model.bin"
_GLOBAL_NAME = re.compile(r"\bGLOBAL ([\w.]+)")  # the name of a class in torch's message


def find_weights(source: str, folder: Path) -> list[Path]:
    """Returns the files from which transformers loads a model's weights: one file, or the parts in an index; safetensors before pickles."""
    for name in (SAFETENSORS, PICKLED_MODEL):
        if (folder / name).is_file():
            return [folder / name]
        index = folder / f"{name}.index.json"
        if not index.is_file():
            continue
        try:
            parts = sorted({str(part) for part in json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()})
        except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
            raise ExportError(f"the weights of `{source}` cannot be read: `{index.name}` is not an index of weights.") from error
        if wrong_parts := [part for part in parts if not part.endswith(Path(name).suffix) or Path(part).name != part]:
            raise ExportError(
                f"the weights of `{source}` cannot be read: `{index.name}` names `{wrong_parts[0]}`, which is not a `{Path(name).suffix}` "
                "file of its folder; save the model again with `save_pretrained`."
            )
        return [folder / part for part in parts]
    raise ExportError(
        f"the weights of `{source}` are neither `{SAFETENSORS}` nor `{PICKLED_MODEL}`; save them with `save_pretrained`, those of "
        "TensorFlow or Flax with transformers 4 (`from_tf=True`, `from_flax=True`)."
    )


def read_weights(source: str, path: Path) -> dict[str, torch.Tensor]:
    """Returns the tensors in a file of safetensors, or in a pickle."""
    if path.suffix == ".bin":
        return read_pickle(source, path)
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise ExportError(f"the weights of `{source}` cannot be read: {error}; the file is damaged or missing.") from error


def read_pickle(source: str, path: Path, device: str = "cpu") -> dict[str, torch.Tensor]:
    """Returns the tensors in a pickle; on the device `meta` only their shapes."""
    start = f"the weights of `{source}` cannot be read: `{path.name}` "
    save = "save only the weights, with `save_pretrained`."
    try:
        with warnings.catch_warnings(action="ignore"):  # torch warns of other pickle protocols
            tensors = torch.load(path, map_location=device, weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, OSError, ValueError, EOFError, KeyError, AttributeError, TypeError) as error:
        # torch's own message recommends `weights_only=False`
        if match := _GLOBAL_NAME.search(str(error)):
            raise ExportError(f"{start}has an object of `{match[1]}`, which could run code; {save}") from error
        raise ExportError(f"{start}is damaged or a placeholder, or has other objects than tensors; download it again, or {save}") from error
    if not isinstance(tensors, dict) or not tensors or not all(isinstance(tensor, torch.Tensor) for tensor in tensors.values()):
        keys = f" with the keys {', '.join(map(repr, list(tensors)[:4]))}" if isinstance(tensors, dict) else ""
        raise ExportError(f"{start}is not a dictionary of names and tensors, but a {type(tensors).__name__}{keys}; {save}")
    return tensors
