"""The parser of all commands. `bert-serve` reads its settings through it with pydantic-settings."""

import argparse
import os
import sys
from typing import Any, NoReturn

from bertserve.service.messages import did_you_mean


def drop_stdout() -> int:
    """Returns the exit code of a command whose stdout was closed, for example by `head`."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the rest of the buffer must be written somewhere
    return 1


class FlagParser(argparse.ArgumentParser):
    """Parses a command line. Each error is one line, and an error about an unknown flag or command suggests the most similar known one.

    Attributes:
        arguments: Its arguments in order, with `--help`.
        commands: The action whose `choices` are the parsers of its subcommands; None without subcommands.
    """

    def __init__(self, **options: Any) -> None:
        self.arguments: list[argparse.Action] = []
        self.commands: Any = None
        super().__init__(**options)

    def add_argument(self, *names: Any, **options: Any) -> argparse.Action:
        """Adds an argument, as in argparse."""
        action = super().add_argument(*names, **options)
        self.arguments.append(action)
        return action

    def add_subparsers(self, **options: Any) -> Any:
        """Adds subcommands, as in argparse; one must be given."""
        self.commands = super().add_subparsers(required=True, **options)
        return self.commands

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Returns the arguments, all of which are known."""
        words = sys.argv[1:] if args is None else list(args)
        if self.commands is not None and words and not words[0].startswith("-") and words[0] not in self.commands.choices:
            hint = did_you_mean(words[0], self.commands.choices, "see --help.", name_format="{}")
            self.error(f"unknown command `{words[0]}`; {hint}")
        arguments, unknown = super().parse_known_args(words, namespace)
        if unknown:
            otherwise = "see --help." if self.commands is None else "give the command first, and see --help of the command."
            flags = [flag for argument in self.arguments for flag in argument.option_strings]
            hint = did_you_mean(unknown[0].partition("=")[0], flags, otherwise, name_format="{}")
            self.error(f"unknown argument `{unknown[0]}`; {hint}")
        return arguments, unknown

    def error(self, message: str) -> NoReturn:
        """Ends with exit code 2 and one line on stderr."""
        self.exit(2, f"{self.prog}: error: {message}\n")
