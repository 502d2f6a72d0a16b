"""The command bert-serve, with the subcommands `serve`, `score`, `check`, `models`, `health` and `new-key`."""

import asyncio
import json
import logging
import os
import re
import shutil
import signal
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal

from pydantic import BaseModel, Field
from pydantic_settings import BaseSettings, CliPositionalArg, CliSubCommand

from bertserve.service import listing
from bertserve.service.auth import new_key
from bertserve.service.bundle import files
from bertserve.service.bundle.manifest import NAME_PATTERN
from bertserve.service.command_line import parse
from bertserve.service.errors import SettingsError, StartError
from bertserve.service.flag_parser import drop_stdout
from bertserve.service.messages import did_you_mean, install_command
from bertserve.service.settings import CLI_CONFIG, ModelSettings, ScoreSettings, Settings
from bertserve.service.sources import with_sources

Format = Literal["jsonl", "csv", "tsv", "parquet"]
# formats by file suffix
_FORMATS: dict[str, Format] = {".jsonl": "jsonl", ".ndjson": "jsonl", ".csv": "csv", ".tsv": "tsv", ".parquet": "parquet"}


class Score(ScoreSettings):
    """Score the rows of a file with a model: write a file with a prediction for each row."""

    source: CliPositionalArg[str] = Field(
        description="Input file: JSON Lines, CSV, TSV or Parquet; - is stdin. With --ray, Parquet files or their folder."
    )
    output: CliPositionalArg[str] = Field(description="New file, whose name ends with its format; - is stdout. With --ray, a new folder.")
    input_format: Format | None = Field(None, description="Format of the input (default: from the file name).")
    output_format: Format | None = Field(
        None, description="Format of the output (default: from the file name; for stdout, that of the input)."
    )
    rejected: Path | None = Field(
        None, description="New file for rejected rows and their errors (default: OUTPUT.rejected.jsonl, or none for stdout)."
    )
    max_rejected: int = Field(
        1000,
        ge=0,
        description="Maximum rejected rows, 0 without a file for them. The run stops above it; a run with a larger number continues it.",
    )
    ray: str | None = Field(
        None, description="Score on a Ray cluster: its address, `auto` for a running one, or `local` for a new one here."
    )
    actors: int | None = Field(None, ge=1, description="With --ray: maximum actors, which each load the model (default: as many as fit).")
    actor_cpus: int | None = Field(
        None, ge=1, description="With --ray: CPUs and threads of an actor, at most those of the largest node but one (default: 4)."
    )


class Models(ModelSettings):
    """List the models that `serve` would serve with the same settings. It reads only their manifests, and loads or exports nothing."""

    as_json: bool = Field(False, validation_alias="json", description="Print all details as a JSON list.")


class NewKey(BaseModel):
    """Create an API key. It prints the key to stderr, and its line for the file of --api-key-file, with only a digest, to stdout."""

    name: CliPositionalArg[str] = Field(description="Name of the key in logs and metrics.")


class BertServe(BaseSettings):
    """Serve bundles made by bert-export. `bert-serve serve --help` lists all settings."""

    model_config = CLI_CONFIG

    serve: CliSubCommand[Settings] = Field(
        description="Serve the models of a folder over HTTP. Each flag is also a BERT_SERVE_* variable, and a key of the file."
    )
    score: CliSubCommand[Score] = Field(description="Score the rows of a file with a model.")
    check: CliSubCommand[Settings] = Field(description="Check that each model answers its stored example as at export.")
    models: CliSubCommand[Models] = Field(
        description="List the models that serve would load: task, labels, graphs, validation report, card."
    )
    health: CliSubCommand[Settings] = Field(description="Check whether the service on this machine with the same settings is ready.")
    new_key: CliSubCommand[NewKey] = Field(description="Create an API key: print it to stderr, and its line for --api-key-file to stdout.")


def _score(command: Score) -> int:
    from bertserve.service.logs import configure_logging

    configure_logging(command.log_format)
    logging.getLogger().setLevel(logging.WARNING)
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # ends as after Ctrl-C, so that temporary files are removed
    if command.prediction_column == command.warnings_column:
        raise SettingsError("--prediction-column and --warnings-column are the same; give two names.")
    settings = _with_one_model(command)
    if command.ray is not None:
        # variables and the file can be for other commands
        flags = command.model_fields_set - ScoreSettings.model_validate({"config": command.config}).model_fields_set
        if unused := sorted(flags & {"input_format", "json_cells", "max_rejected", "output_format", "rejected", "threads"}):
            raise SettingsError(
                "with --ray, files are Parquet, their column `error` has the errors, and actors have a thread per CPU; remove "
                f"--{unused[0].replace('_', '-')}."
            )
        from bertserve.service.scoring.ray_data import score_on_ray

        return score_on_ray(settings, command.source, command.output, command.ray, command.actors, command.actor_cpus)
    if command.actors or command.actor_cpus:
        raise SettingsError("--actors and --actor-cpus need --ray; remove them.")
    from bertserve.service.scoring.score import score

    source, formats = Path("/dev/stdin" if command.source == "-" else command.source), _formats(command)
    if command.output != "-":
        rejected = command.rejected or Path(f"{command.output}.rejected.jsonl")
        return score(settings, source, Path(command.output), rejected, formats, command.max_rejected)
    if "parquet" in formats:
        raise SettingsError("the output - cannot be Parquet; give a file.")
    max_rejected = command.max_rejected if command.rejected else 0
    try:
        # the parts of the output need a folder
        with TemporaryDirectory(dir=command.rejected and command.rejected.absolute().parent, prefix=".score-") as folder:
            output = Path(folder) / "output"
            code = score(settings, source, output, command.rejected or Path(folder) / "rejected", formats, max_rejected)
            with output.open("rb") as file:
                shutil.copyfileobj(file, sys.stdout.buffer)
            sys.stdout.flush()  # here, so that a closed pipe is an error of this command
    except BrokenPipeError:
        raise
    except OSError as error:
        drop_stdout()
        raise StartError(f"the output - or a file next to --rejected cannot be written: {error}; fix that, and try again.") from error
    return code


def _formats(command: Score) -> tuple[str, str]:
    """Returns the formats of the input and of the output."""
    source = command.input_format or _FORMATS.get(Path(command.source).suffix.lower())
    output = command.output_format or (source if command.output == "-" else _FORMATS.get(Path(command.output).suffix.lower()))
    if source is None:
        raise SettingsError(f"`{command.source}` ends with none of {', '.join(_FORMATS)}; give --input-format.")
    if output is None:
        raise SettingsError(f"the output `{command.output}` ends with none of {', '.join(_FORMATS)}; give --output-format.")
    if source == "jsonl" != output:
        raise SettingsError(
            f"JSON Lines cannot become {output}, because rows can have different fields; choose JSON Lines as the output format."
        )
    if command.json_cells and output in ("jsonl", "parquet"):
        raise SettingsError("--json-cells is for CSV and TSV, and this output has JSON or columns with types; remove it.")
    if "parquet" in (source, output) and find_spec("pyarrow") is None:
        raise SettingsError(f"Parquet needs pyarrow, which is not installed; `{install_command('parquet')}` adds it.")
    return source, output


def _with_one_model(command: Score) -> ScoreSettings:
    """Returns the settings with one model: the named bundle in the folders of --models, or the named source.

    Raises:
        SettingsError: No model or several models are named, or no bundle has the name.
    """
    if len(command.model) != 1:
        raise SettingsError(f"--model names {len(command.model)} models, but score takes one; give --model NAME or --model SOURCE.")
    (name,) = command.model
    bundle = files.find_bundle(command.models, name)
    if bundle is None and re.fullmatch(NAME_PATTERN, name) and not Path(name).exists():
        names = (path.parent.name for folder in command.models for path in folder.glob(f"*/{files.MANIFEST_FILE}"))
        hint = did_you_mean(name, names, f"give the folder that has it with --models, or a hub id with its owner, such as org/{name}.")
        raise SettingsError(f"no bundle `{name}` in {', '.join(f'`{folder}`' for folder in command.models)}; {hint}")
    resolved = with_sources(command.model_copy(update={"model": (name if bundle is None else str(bundle),)}))
    return resolved.model_copy(update={"models": resolved.models[-1:], "model": ()})


def _run(commands: BertServe) -> int:
    """Runs the command that is given; returns its exit code. Each import here is slow, and neither --help nor wrong flags need it."""
    if commands.serve is not None:
        from bertserve.service.server.serve import serve

        serve(commands.serve, with_sources)
    elif commands.score is not None:
        return _score(commands.score)
    elif commands.check is not None:
        from bertserve.service.check import check
        from bertserve.service.process import check_requirements, read_keys

        check_requirements(commands.check)
        read_keys(commands.check)  # fails if a file is wrong
        return asyncio.run(check(with_sources(commands.check)))
    elif commands.models is not None:
        descriptions = [listing.describe(path) for path in files.find_bundles(with_sources(commands.models, export=False).models)]
        print(json.dumps(descriptions, indent=1) if commands.models.as_json else listing.as_table(descriptions), flush=True)
        return 1 if any("error" in model for model in descriptions) else 0
    elif commands.health is not None:
        from bertserve.service.health import check_readiness

        print(check_readiness(commands.health))
    elif commands.new_key is not None:
        key, line = new_key(commands.new_key.name)
        print(f"the API key, shown only once: {key}", file=sys.stderr)
        print(line)
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit code."""
    if os.getpid() == 1:
        # in a container this is process 1, which ignores signals without a handler; nothing else handles SIGTERM until models are loaded
        signal.signal(signal.SIGTERM, lambda number, _: os._exit(128 + number))
    try:
        return _run(parse(BertServe, sys.argv[1:] if argv is None else argv))
    except StartError as error:
        print(f"bert-serve: {error}", file=sys.stderr)
        return 2 if isinstance(error, SettingsError) else 1
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except BrokenPipeError:
        return drop_stdout()


if __name__ == "__main__":
    sys.exit(main())
