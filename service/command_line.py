"""Reads the settings of a command of `bert-serve` from its command line and its environment, with pydantic-settings."""

import os
import re
from argparse import Action
from collections.abc import Sequence
from typing import Any, TypeVar

from pydantic import ValidationError
from pydantic_settings import BaseSettings, CliApp, CliSettingsSource
from pydantic_settings import SettingsError as CommandLineError

from bertserve.service import __version__
from bertserve.service.errors import SettingsError
from bertserve.service.flag_parser import FlagParser
from bertserve.service.messages import did_you_mean, requirement
from bertserve.service.settings import ENV_PREFIX, Settings, to_flag

# variables that enableServiceLinks of a pod sets: BERT_SERVE_SERVICE_HOST, BERT_SERVE_PORT=tcp://..., BERT_SERVE_PORT_8000_TCP_ADDR ...
_SERVICE_LINK = re.compile("SERVICE_HOST|SERVICE_PORT(_.+)?|PORT_[0-9]+_(TCP|UDP|SCTP)(_(ADDR|PORT|PROTO))?")
_METAVARS = {"Path": "PATH", "str": "TEXT", "IPvAnyNetwork": "NETWORK", "int": "NUMBER", "float": "NUMBER"}
_PATH_DEFAULT = re.compile(r"\(\w+Path\('(.*)'\),\)")
_Command = TypeVar("_Command", bound=BaseSettings)


def parse(command: type[_Command], args: Sequence[str]) -> _Command:
    """Reads settings from the arguments of a command line, the environment, the file that either names, and defaults, in this order.

    Raises:
        SettingsError: A value is wrong, or a BERT_SERVE_* variable or a key of the file is unknown.
        SystemExit: `--help`, `--version`, or a flag or subcommand is missing or unknown.
    """
    clean_environment()
    parser = FlagParser(prog="bert-serve", description=command.__doc__, allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"bert-serve {__version__}")
    try:
        source = CliSettingsSource[Any](
            command,
            root_parser=parser,
            add_argument_method=_add_argument,
            add_parser_method=_add_command,
            add_subparsers_method=FlagParser.add_subparsers,
        )
        return CliApp.run(command, cli_args=list(args), cli_settings_source=source)
    except CommandLineError as error:
        # the only errors that are left are about mappings; their text is `... for score.columns: ...`
        name = str(error).partition(": ")[0].rpartition(".")[2]
        raise SettingsError(f"{to_flag(name)} has a value that is neither NAME=VALUE nor a JSON object.") from error
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        message = requirement(first)
        name = next((part for part in reversed(first["loc"]) if isinstance(part, str)), "")  # other parts are places in a list
        if name not in Settings.model_fields:
            flag = f"{to_flag(name)} is `{first['input']}`: " if first["type"] != "missing" else ""
            raise SettingsError(f"{flag}{message}.") from error
        variable = f"{ENV_PREFIX}{name.upper()}"
        is_in_file = variable not in os.environ and all(word.partition("=")[0] != to_flag(name) for word in args)
        where = f"`{name}` in the file of --config" if is_in_file else f"{to_flag(name)} (or {variable})"
        raise SettingsError(f"{where} is `{first['input']}`: {message}.") from error


def _add_command(commands: Any, name: str, **options: Any) -> FlagParser:
    """Adds a subcommand. Its own help describes it like the list of commands, because commands share classes of settings."""
    return commands.add_parser(name, **options | {"description": options["help"]})


def _add_argument(parser: FlagParser, *names: Any, **options: Any) -> Action:
    """Adds an argument whose help shows values and defaults as users write them, not as Python, such as `tuple[Path,...]` and `None`."""
    if "metavar" in options:  # a switch takes no value
        for kind, shown in _METAVARS.items():
            options["metavar"] = re.sub(rf"tuple\[{kind},\.\.\.\]|\b{kind}\b", shown, options["metavar"])
    options["help"] = _PATH_DEFAULT.sub(r"\1", options["help"].removesuffix(" (default: None)").removesuffix(" (default: ())"))
    return parser.add_argument(*names, **options)


def clean_environment() -> None:
    """Removes the variables that Kubernetes sets for a Service named bert-serve, and refuses unknown ones that look like settings.

    Raises:
        SettingsError: A BERT_SERVE_* variable is unknown.
    """
    names = [name.upper() for name in Settings.model_fields]
    for name, value in list(os.environ.items()):
        if not name.startswith(ENV_PREFIX):
            continue
        setting = name.removeprefix(ENV_PREFIX)
        if _SERVICE_LINK.fullmatch(setting) or (setting == "PORT" and value.startswith(("tcp://", "udp://", "sctp://"))):
            del os.environ[name]
        elif setting not in names:
            hint = did_you_mean(setting, names, "only flags of `bert-serve serve` have variables.", name_format=ENV_PREFIX + "{}")
            raise SettingsError(f"unknown environment variable {name}; {hint}")
