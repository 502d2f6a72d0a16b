"""The files of a checkpoint: bert-export reads them, and `bert-serve` only recognizes them."""

import os
from pathlib import Path

MODULES_FILE = "modules.json"  # a file of sentence-transformers
ADAPTER_CONFIG_FILE = "adapter_config.json"  # a file of peft
FILE_PATTERNS = ("*.json", "*.safetensors", "*.txt", "*.model", "README.md")  # all files but pickles; its Python files are never read


def is_checkpoint(folder: Path) -> bool:
    """Returns whether a folder contains the files of a checkpoint, which differ from a bundle's files."""
    return any(os.path.isfile(folder / name) for name in ("config.json", ADAPTER_CONFIG_FILE, MODULES_FILE))


def may_be_hub_id(source: str) -> bool:
    """Returns whether a source that is not a folder can be an id of the Hugging Face Hub, NAME or OWNER/NAME."""
    return source != "" and source.count("/") <= 1 and not source.startswith((".", "/", "~"))
