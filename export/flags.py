"""Types of flags that both `bert-export` and `bert-export verify` have."""

from __future__ import annotations

import argparse


def share(text: str) -> float:
    """Returns a number above 0 and at most 1.

    Raises:
        argparse.ArgumentTypeError: It is none.
    """
    try:
        value = float(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"`{text}` is not a number") from error
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"`{text}` is not above 0 and at most 1")
    return value
