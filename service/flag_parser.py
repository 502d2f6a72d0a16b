"""The parser of `bert-export`, `bert-bench` and their subcommands. `bert-serve` reads its settings with pydantic-settings."""

from __future__ import annotations

import argparse
import itertools
import re
import sys
from typing import Any, NoReturn

from bertserve.service.errors import did_you_mean

_WRONG_COMMAND = re.compile(r"argument COMMAND: invalid choice: '(.*?)' \(choose from (.*)\)")


class FlagParser(argparse.ArgumentParser):
    """Parses a command line. Each error is one line, and an error about an unknown flag or command has the most similar known one."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Returns the arguments; it checks the flags first, because argparse would report missing arguments before unknown flags."""
        words = sys.argv[1:] if args is None else list(args)
        if self._subparsers is None:  # otherwise these words belong to a subcommand
            for word in itertools.takewhile(lambda word: word != "--", words):
                flag = word.partition("=")[0]
                if flag.startswith("--") and not any(option.startswith(flag) for option in self._option_string_actions):
                    self.error(self._unknown(flag))
        arguments, unknown = super().parse_known_args(words, namespace)
        if unknown:
            self.error(self._unknown(unknown[0]))
        return arguments, unknown

    def error(self, message: str) -> NoReturn:
        """Ends with exit code 2 and one line on stderr."""
        if (wrong := _WRONG_COMMAND.search(message)) is not None:
            commands = wrong[2].replace("'", "").split(", ")
            message = f"unknown command `{wrong[1]}`; " + did_you_mean(wrong[1], commands, "see --help.", name_format="{}")
        self.exit(2, f"{self.prog}: error: {message}\n")

    def _unknown(self, argument: str) -> str:
        flag = argument.partition("=")[0]
        return f"unknown argument `{argument}`; " + did_you_mean(flag, self._option_string_actions, "see --help.", name_format="{}")
