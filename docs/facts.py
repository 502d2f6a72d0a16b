"""Reads the facts that pages repeat from the code: settings, flags, metrics, endpoints and layers. `generate` formats them."""

import asyncio
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import httpx
from prometheus_client import Counter, Gauge, Histogram
from pydantic.fields import FieldInfo

from bertserve.bench import cli as bench_cli
from bertserve.export import calibrate_cli, cli, verify_cli
from bertserve.service.api.application import Application, create_fastapi
from bertserve.service.api.openapi import describe_routes
from bertserve.service.api.routing import GuardedRoute
from bertserve.service.body import json_text
from bertserve.service.build import build
from bertserve.service.cli import BertServe, Score
from bertserve.service.errors import HTTP_ERRORS, BertServeError, CallerError, HttpError, RefusedError, StartError
from bertserve.service.flag_parser import FlagParser
from bertserve.service.metrics import Metrics
from bertserve.service.settings import Settings
from bertserve.service.tasks import cost
from bertserve.service.tasks.catalog import TASKS
from bertserve.service.tasks.task_spec import TaskSpec

ROOT = Path(__file__).parent.parent


class Flag(NamedTuple):
    """A flag of a command line.

    Attributes:
        usage: Name and value, such as `--name NAME`.
        meaning: Its help text, with its default.
        required: Whether the command needs it.
    """

    usage: str
    meaning: str
    required: bool


class Metric(NamedTuple):
    """A metric, named as `/metrics` shows it without the prefix `bertserve_`."""

    name: str
    kind: str
    labels: Sequence[str]
    meaning: str


def settings() -> Mapping[str, FieldInfo]:
    """Returns the fields of the service's settings."""
    return Settings.model_fields


def score_settings() -> Mapping[str, FieldInfo]:
    """Returns the fields of `bert-serve score` that are not settings of the service; positional ones first."""
    return {name: field for name, field in Score.model_fields.items() if name not in Settings.model_fields}


def service_commands() -> list[str]:
    """Returns the commands of `bert-serve`."""
    return [name.replace("_", "-") for name in BertServe.model_fields]


def parsers() -> dict[str, FlagParser]:
    """Returns the parsers of `bert-export` and `bert-bench`, by command."""
    bench_commands = bench_cli.build_parser().commands.choices.items()
    return {
        "bert-export": cli.build_parser(),
        "bert-export verify": verify_cli.build_parser(),
        "bert-export calibrate": calibrate_cli.build_parser(),
        **{f"bert-bench {name}": parser for name, parser in bench_commands},
    }


def flags(parser: FlagParser) -> Iterator[Flag]:
    """Yields the flags of a parser, except `--help` and `--version`."""
    for argument in parser.arguments:
        name = argument.option_strings[-1] if argument.option_strings else ""
        if name in ("--help", "--version"):
            continue
        value = "" if argument.nargs == 0 else argument.dest.upper() if argument.choices else argument.metavar or argument.dest.upper()
        meaning = str(argument.help) % vars(argument)
        if argument.choices is not None:
            meaning += f"; one of {', '.join(f'`{choice}`' for choice in argument.choices)}"
        yield Flag(f"{name} {value}".strip(), meaning, argument.required and bool(name))


def tasks() -> list[TaskSpec]:
    """Returns all tasks of the service."""
    return list(TASKS.values())


def errors() -> list[BertServeError]:
    """Returns an error of each type that a request can get, except internal errors."""
    special = {CallerError, StartError, HttpError, RefusedError}
    classes = {*CallerError.__subclasses__(), *BertServeError.__subclasses__()} - special
    return [
        *(kind("what is wrong") for kind in sorted(classes, key=lambda kind: kind.__name__)),
        *(HttpError(status, "what is wrong") for status in HTTP_ERRORS),
        RefusedError("what is wrong", reason="queue_full", retry_after_s=1.2),
    ]


def limits() -> Mapping[str, int]:
    """Returns the limits of a request that are not settings, by what they limit."""
    return {f"{what} of a body": limit for _, limit, what in json_text.JSON_LIMITS} | {
        f"characters of an input to tokenize; each of its texts after the first counts {cost.TEXT_CHARS} more": cost.MAX_TOKENIZED_CHARS,
        "predicted microseconds of decoding": cost.MAX_DECODE_US,
        "bytes of the answer as JSON": cost.MAX_RESPONSE_BYTES,
    }


def read_labels(collector: Counter | Gauge | Histogram) -> tuple[str, ...]:
    """Returns the names of a new collector's labels. Only its samples have them, and a collector with labels gets one by their values."""
    for count in range(1, 5):
        with suppress(ValueError):  # another number of labels
            collector.labels(*["any"] * count)
    return tuple(name for name in next(iter(collector.collect())).samples[0].labels if name != "le")


def metrics() -> list[Metric]:
    """Returns all metrics: those of processes, which are read at each scrape, and then the others in the order of their creation."""
    all_metrics = Metrics()
    process_metrics = [(family, tuple(family.samples[0].labels)) for family in all_metrics.processes.collect()]
    collectors = (value for value in vars(all_metrics).values() if isinstance(value, Counter | Gauge | Histogram))
    others = [(family, read_labels(collector)) for collector in collectors for family in collector.describe()]
    return [
        Metric(
            family.name.removeprefix("bertserve_") + ("_total" if family.type == "counter" else ""),
            family.type,
            labels,
            family.documentation,
        )
        for family, labels in (*process_metrics, *others)
    ]


def layers(package: str) -> list[list[str]]:
    """Returns the layers of a package from import-linter's contract, top to bottom; modules of a layer do not import each other."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"]["contracts"]
    contract = next(
        contract for contract in contracts if contract["type"] == "layers" and contract["containers"] == [f"bertserve.{package}"]
    )
    return [[name.strip() for name in layer.split("|")] for layer in contract["layers"]]


def answers(requests: Sequence[tuple[str, str]]) -> list[str]:
    """Returns the answers of the included models to requests; each request is a path and a body."""
    if not requests:
        return []
    service = build(Settings(models=ROOT / "models", provider="cpu", multi_threads=1, workers=1))

    async def ask() -> list[str]:
        service.start()
        try:
            async with httpx.AsyncClient(transport=httpx.ASGITransport(Application(service)), base_url="http://docs", timeout=60) as client:
                return [(await client.post(path, content=body.encode())).raise_for_status().text for path, body in requests]
        finally:
            await service.stop(0)

    return asyncio.run(ask())


@cache
def openapi() -> dict[str, Any]:
    """Returns the service's OpenAPI document, which does not depend on the loaded models."""
    state = build(Settings(models=ROOT / "models/embed", provider="cpu", multi_threads=1, workers=1))
    return describe_routes([route for route in create_fastapi(state).routes if isinstance(route, GuardedRoute)])
