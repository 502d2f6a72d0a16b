"""An aim of a threshold, as the flag `--aim` gives it."""

from __future__ import annotations

import argparse
from typing import NamedTuple, get_args

from bertserve.export.flags import parse_share
from bertserve.service.bundle.calibration import AimName


class Aim(NamedTuple):
    """What a threshold must reach, such as `precision=0.98`, or `LABEL:precision=0.98` for a label."""

    name: AimName
    target: float
    label: str | None = None

    def __str__(self) -> str:
        return f"{f'{self.label}:' if self.label is not None else ''}{self.name}={self.target:g}"

    @property
    def counts_missed(self) -> bool:
        """Whether an error is a correct item below the threshold; otherwise it is a wrong prediction at or above it."""
        return self.name in ("recall", "coverage")

    @property
    def max_error(self) -> float:
        """The largest share of errors."""
        return self.target if self.name == "max-error" else round(1 - self.target, 9)


def parse_aim(text: str) -> Aim:
    """Returns the aim of a flag, for argparse."""
    name, equals, share = text.rpartition("=")
    label, _, aim_name = name.rpartition(":")
    aim: AimName | None = next((aim for aim in get_args(AimName) if aim == aim_name), None)
    if not equals or aim is None:
        raise argparse.ArgumentTypeError(f"`{text}` is not [LABEL:]AIM=SHARE with one of the aims {', '.join(get_args(AimName))}")
    target = parse_share(share)
    if target == 1:
        raise argparse.ArgumentTypeError(f"`{text}` cannot be shown by examples; give a share below 1")
    if aim == "coverage" and label:
        raise argparse.ArgumentTypeError(f"`{text}` is for sets of all labels; remove `{label}:`")
    return Aim(aim, target, label or None)
