"""Writes the tiny bundle `attention`, because no included model outputs its attention: `python tiny_models.py FOLDER`."""

import sys
from pathlib import Path

import tiny

if __name__ == "__main__":
    folder = Path(sys.argv[1])
    tiny.bundle(folder, "attention", attention_heads=(2, 3), max_length=128)
