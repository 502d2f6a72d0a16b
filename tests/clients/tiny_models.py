"""Writes tiny bundles of the kinds that the embedded models lack: `python tiny_models.py FOLDER`."""

import sys
from pathlib import Path

import tiny

if __name__ == "__main__":
    folder = Path(sys.argv[1])
    tiny.bundle(folder, "rank", labels=["relevance"], activation="sigmoid", attention_heads=(2, 3), max_length=128)
