"""Writes the tiny bundles `attention` and `calibrated`: no included model has what they have. `python tiny_models.py FOLDER`."""

import sys
from pathlib import Path

from support import tiny

if __name__ == "__main__":
    folder = Path(sys.argv[1])
    tiny.bundle(folder, "attention", attention_heads=(2, 3), max_length=128)
    tiny.calibrate(tiny.bundle(folder, "calibrated"), {"threshold": 0.57})
