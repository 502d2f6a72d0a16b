"""The command bert-serve, with the subcommands `serve`, `score`, `check`, `models`, `health` and `new-key`.

Exit codes: 0 success, 1 a start or a check failed, 2 wrong usage, 3 scoring finished with rejected rows.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
import signal
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from pydantic import Field
from pydantic_settings import BaseSettings, CliPositionalArg, CliSubCommand, CliToggleFlag

from bertserve.service import __version__, listing
from bertserve.service.auth import new_key
from bertserve.service.bundle import files
from bertserve.service.bundle.manifest import NAME_PATTERN
from bertserve.service.errors import SettingsError, StartError, did_you_mean, install_command
from bertserve.service.flag_parser import drop_stdout
from bertserve.service.settings import CLI_CONFIG, AddressSettings, ScoreSettings, Settings, SourceSettings, parse
from bertserve.service.sources import with_sources

# Formats of `score` by the suffix of a file.
_FORMATS = {".jsonl": "jsonl", ".ndjson": "jsonl", ".csv": "csv", ".tsv": "tsv", ".parquet": "parquet"}


class Serve(Settings):
    """Serve the models of a folder over HTTP. Each flag is also a BERT_SERVE_* variable, and a key of the file of --config."""

    def run(self) -> int:
        """Serves until a signal stops it; returns the exit code."""
        from bertserve.service.server.serve import serve  # a slow import, which --help and wrong flags do not need

        serve(self, with_sources)
        return 0


class Score(ScoreSettings):
    """Score the rows of a file with a model: write a file with a prediction for each row."""

    source: CliPositionalArg[str] = Field(
        description="Input file: JSON Lines, CSV, TSV or Parquet; - is stdin. With --ray, Parquet files or their folder."
    )
    output: CliPositionalArg[str] = Field(description="New file, whose name ends with its format. With --ray, a new folder.")
    input_format: Literal["jsonl", "csv", "tsv", "parquet"] | None = Field(
        None, description="Format of the input (default: from the file name)."
    )
    rejected: Path | None = Field(None, description="New file for rejected rows and their errors (default: OUTPUT.rejected.jsonl).")
    ray: str | None = Field(
        None, description="Score on a Ray cluster: its address, `auto` for a running one, or `local` for a new one here."
    )

    def run(self) -> int:
        """Scores the input; returns the exit code."""
        from bertserve.service.server.logs import configure_logging

        configure_logging(self.log_format)
        logging.getLogger().setLevel(logging.WARNING)
        if self.prediction_column == self.warnings_column:
            raise SettingsError("--prediction-column and --warnings-column are the same; give two names.")
        settings = _with_one_model(self)
        if self.ray is not None:
            if self.rejected is not None or self.input_format not in (None, "parquet"):
                raise SettingsError(
                    "with --ray, files are Parquet, and their column `error` has the errors; remove --rejected and --input-format."
                )
            from bertserve.service.scoring.ray_data import score_on_ray

            return score_on_ray(settings, self.source, self.output, self.ray)
        from bertserve.service.scoring.score import score

        source, output = Path("/dev/stdin" if self.source == "-" else self.source), Path(self.output)
        return score(settings, source, output, self.rejected or Path(f"{self.output}.rejected.jsonl"), self._formats())

    def _formats(self) -> tuple[str, str]:
        """Returns the formats of the input and of the output."""
        source, output = self.input_format or _FORMATS.get(Path(self.source).suffix.lower()), _FORMATS.get(Path(self.output).suffix.lower())
        if source is None:
            raise SettingsError(f"`{self.source}` ends with none of {', '.join(_FORMATS)}; give --input-format.")
        if self.output == "-":
            raise SettingsError("score cannot write to stdout; give the name of a new file as the output.")
        if output is None:
            raise SettingsError(f"the output `{self.output}` ends with none of {', '.join(_FORMATS)}; rename it.")
        if source == "jsonl" != output:
            raise SettingsError(f"JSON Lines cannot become {output}, because their rows can have different fields; write JSON Lines.")
        if "parquet" in (source, output) and find_spec("pyarrow") is None:
            raise SettingsError(f"Parquet needs pyarrow, which is not installed; `{install_command('parquet')}` adds it.")
        return source, output


def _with_one_model(score: Score) -> ScoreSettings:
    """Returns the settings with one model: the named bundle in the folders of --models, or the named source.

    Raises:
        SettingsError: No model or several models are named, or no bundle has the name.
    """
    if len(score.model) != 1:
        raise SettingsError(f"--model names {len(score.model)} models, but score takes one; give --model NAME or --model SOURCE.")
    (name,) = score.model
    bundle = files.find_bundle(score.models, name)
    if bundle is None and re.fullmatch(NAME_PATTERN, name) and not Path(name).exists():
        names = (path.parent.name for folder in score.models for path in folder.glob(f"*/{files.MANIFEST_FILE}"))
        hint = did_you_mean(name, names, f"give the folder that has it with --models, or a hub id with its owner, such as org/{name}.")
        raise SettingsError(f"no bundle `{name}` in {', '.join(f'`{folder}`' for folder in score.models)}; {hint}")
    resolved = with_sources(score.model_copy(update={"model": (name if bundle is None else str(bundle),)}))
    return resolved.model_copy(update={"models": resolved.models[-1:], "model": ()})


class Check(Settings):
    """Check that serve would start with the same settings, and that each model answers its stored example as at export."""

    def run(self) -> int:
        """Checks all models; returns the exit code."""
        from bertserve.service.check import check  # a slow import, which wrong flags do not need
        from bertserve.service.server.serve import check_start

        check_start(self)
        return asyncio.run(check(with_sources(self)))


class Models(SourceSettings):
    """List the models that `serve` would serve with the same settings. It reads only their manifests, and loads or exports nothing."""

    as_json: bool = Field(False, validation_alias="json", description="Print all details as a JSON list.")

    def run(self) -> int:
        """Prints the list; returns 1 if a manifest cannot be read."""
        listed = [listing.describe(path) for path in files.find_bundles(with_sources(self, export=False).models)]
        print(json.dumps(listed, indent=1) if self.as_json else listing.as_table(listed), flush=True)
        return 1 if any("error" in model for model in listed) else 0


class Health(AddressSettings):
    """Check whether the service on this machine with the same settings is ready, for the health check of a container."""

    def run(self) -> int:
        """Checks the service; returns the exit code."""
        from bertserve.service.health import check_readiness

        print(check_readiness(self))
        return 0


class NewKey(BaseSettings):
    """Create an API key. It prints the key to stderr, and its line for the file of --api-key-file, which has only a digest, to stdout."""

    model_config = CLI_CONFIG

    name: CliPositionalArg[str] = Field(description="Name of the key in logs and metrics.")

    def run(self) -> int:
        """Prints a key and its line; returns the exit code."""
        key, line = new_key(self.name)
        print(f"the API key, shown only once: {key}", file=sys.stderr)
        print(line)
        return 0


class BertServe(BaseSettings):
    """Serve bundles made by bert-export. `bert-serve serve --help` lists all settings."""

    model_config = CLI_CONFIG

    serve: CliSubCommand[Serve] = Field(description="Serve the models of a folder over HTTP.")
    score: CliSubCommand[Score] = Field(description="Score the rows of a file with a model.")
    check: CliSubCommand[Check] = Field(description="Check that each model answers its stored example as at export.")
    models: CliSubCommand[Models] = Field(
        description="List the models that serve would load: task, labels, graphs, validation report, card."
    )
    health: CliSubCommand[Health] = Field(description="Check whether the service on this machine with the same settings is ready.")
    new_key: CliSubCommand[NewKey] = Field(description="Create an API key and its line for --api-key-file.")
    version: CliToggleFlag[bool] = Field(False, description="Print the version and exit.")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit code."""
    if os.getpid() == 1:
        # in a container this is process 1, which ignores signals without a handler; nothing else handles SIGTERM until models are loaded
        signal.signal(signal.SIGTERM, lambda number, _: os._exit(128 + number))
    try:
        args = sys.argv[1:] if argv is None else argv
        parsed = parse(BertServe, args)
        if parsed.version:
            print(f"bert-serve {__version__}")
            return 0
        command = parsed.serve or parsed.score or parsed.check or parsed.models or parsed.health or parsed.new_key
        if command is None:
            raise SettingsError(
                "give a command, `serve`, `score`, `check`, `models`, `health` or `new-key`; `bert-serve --help` describes them."
            )
        return command.run()
    except StartError as error:
        print(f"bert-serve: {error}", file=sys.stderr)
        return 2 if isinstance(error, SettingsError) else 1
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except BrokenPipeError:
        return drop_stdout()


if __name__ == "__main__":
    sys.exit(main())
