"""Shared parts of the commands of `bert-export`: parsers of flags, the aim of a threshold, and the check for packages."""

import argparse
import re
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from importlib.util import find_spec
from typing import Any, NamedTuple, get_args

from bertserve.export.errors import log
from bertserve.service.bundle.calibration import AimName
from bertserve.service.bundle.graph_spec import Precision
from bertserve.service.bundle.manifest import Layers
from bertserve.service.flag_parser import FlagParser
from bertserve.service.messages import install_command
from bertserve.service.providers import PROVIDERS, Provider


class Aim(NamedTuple):
    """The aim of a threshold, such as `precision=0.98`, or `LABEL:precision=0.98` for a label."""

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


def report_missing(packages: Iterable[str], purpose: str, *extras: str) -> bool:
    """Prints the modules that are not installed, and the command that installs the extras; returns whether any are missing."""
    missing = [package for package in packages if find_spec(package) is None]
    if missing:
        log(f"{', '.join(missing)} not installed; {purpose}: {install_command(*extras)}")
    return bool(missing)


def add_module_flags(parser: argparse.ArgumentParser, description: str) -> None:
    """Adds `--module`, with this description, and `--trust-module`."""
    parser.add_argument("--module", metavar="FILE:FACTORY", help=f"{description}; needs --trust-module")
    parser.add_argument("--trust-module", action="store_true", help="run the code of --module with your permissions; read the file first")


def check_module_flags(parser: FlagParser, args: argparse.Namespace) -> None:
    """Ends the command if one of `--module` and `--trust-module` lacks the other."""
    if args.module is not None and not args.trust_module:
        parser.error(
            f"argument --module: it would run the code of `{args.module}` with your permissions, which can do anything; read it, and give "
            "--trust-module if you trust it"
        )
    if args.trust_module and args.module is None:
        parser.error("argument --trust-module: it is for --module; remove it, because code of a checkpoint is never run")


def parse_share(text: str) -> float:
    """Returns a number above 0 and at most 1."""
    try:
        value = float(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"`{text}` is not a number") from error
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"`{text}` must be above 0 and at most 1")
    return value


def parse_aim(text: str) -> Aim:
    """Returns the aim of a flag, for argparse."""
    name, equals, share = text.rpartition("=")
    label, _, aim_name = name.rpartition(":")
    aim: AimName | None = next((aim for aim in get_args(AimName) if aim == aim_name), None)
    if not equals or aim is None:
        raise argparse.ArgumentTypeError(f"`{text}` is not [LABEL:]AIM=SHARE with one of the aims {', '.join(get_args(AimName))}")
    target = parse_share(share)
    if target == 1:
        raise argparse.ArgumentTypeError(f"`{text}` has a share of 1, which no sample can prove; give a smaller one")
    if aim == "coverage" and label:
        raise argparse.ArgumentTypeError(f"`{text}` is for sets of all labels; remove `{label}:`")
    return Aim(aim, target, label or None)


def parse_names(text: str, choices: Collection[str]) -> tuple[Any, ...]:
    """Returns the names of a comma list."""
    names = text.split(",")
    if any(name not in choices for name in names) or len(set(names)) != len(names):
        raise argparse.ArgumentTypeError(f"`{text}` is not a list of names from {', '.join(choices)} without duplicates")
    return tuple(names)


parse_precisions: Callable[[str], tuple[Precision, ...]] = partial(parse_names, choices=get_args(Precision))
parse_providers: Callable[[str], tuple[Provider, ...]] = partial(parse_names, choices=PROVIDERS)


def parse_layers(text: str) -> Layers:
    """Returns the layers for a name or a comma list of numbers."""
    layers_by_name: dict[str, Layers] = {"last": "last", "last_four": "last_four"}
    if text in layers_by_name:
        return layers_by_name[text]
    if not re.fullmatch(r"-?\d{1,4}(,-?\d{1,4})*", text):
        raise argparse.ArgumentTypeError(f"`{text}` is neither last nor last_four nor a list of numbers such as -4,-3,-2,-1")
    return tuple(map(int, text.split(",")))


def join_negative_layers(arguments: Sequence[str]) -> list[str]:
    """Returns the arguments with `--layers` and a list that begins with a minus joined, because argparse would take the list for a flag."""
    joined_arguments: list[str] = []
    for argument in arguments:
        if joined_arguments[-1:] == ["--layers"] and re.fullmatch(r"-\d[\d,-]*", argument):
            joined_arguments[-1] = f"--layers={argument}"
        else:
            joined_arguments.append(argument)
    return joined_arguments
