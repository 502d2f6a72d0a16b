"""The figures that data with right answers is scored by, under the names that `--min-figure` takes. It imports nothing heavy: flags use it."""

from __future__ import annotations

import argparse

from bertserve.export.flags import parse_share

ACCURACY, F1, MACRO_F1, MICRO_F1 = "accuracy", "F1", "macro F1", "micro F1"
MATTHEWS, PEARSON, SPEARMAN = "Matthews correlation", "Pearson correlation", "Spearman correlation"
ERROR = "mean absolute error"  # the one figure of which less is better; it has no floor
ENTITY_F1, EXACT_MATCH, TOP_1 = "entity F1", "exact match", "top-1"
NAMES = {
    figure.removesuffix(" correlation").lower().replace(" ", "-"): figure
    for figure in (ACCURACY, F1, MACRO_F1, MICRO_F1, MATTHEWS, PEARSON, SPEARMAN, ENTITY_F1, EXACT_MATCH, TOP_1)
}


def parse_floor(text: str) -> tuple[str, float]:
    """Returns a figure and the least that it may be, of `NAME=SHARE`.

    Raises:
        argparse.ArgumentTypeError: The text is not that, or names no figure.
    """
    name, equals, share = text.partition("=")
    if not equals or name.lower() not in NAMES:
        raise argparse.ArgumentTypeError(f"`{text}` is not FIGURE=SHARE, such as accuracy=0.9, with a figure out of {', '.join(NAMES)}")
    return NAMES[name.lower()], parse_share(share)
