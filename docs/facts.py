"""Reads the facts that pages repeat from the code: settings, flags, metrics, endpoints and layers. `generate` formats them."""

from __future__ import annotations

import argparse
import asyncio
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import httpx
from prometheus_client.metrics import MetricWrapperBase
from pydantic.fields import FieldInfo

from bertserve.bench import cli as bench_cli
from bertserve.export import cli, verify_cli
from bertserve.service.api.app import create_fastapi
from bertserve.service.api.endpoint import Endpoint
from bertserve.service.cli import BertServe, Score
from bertserve.service.metrics import Metrics
from bertserve.service.models.build import build
from bertserve.service.settings import Settings
from bertserve.service.tasks import cost, json_text
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
    return [name.replace("_", "-") for name in BertServe.model_fields if name != "version"]


def parsers() -> dict[str, argparse.ArgumentParser]:
    """Returns the parsers of `bert-export` and `bert-bench`, by command."""
    subcommands = next(action.choices for action in bench_cli.build_parser()._actions if isinstance(action.choices, dict))
    names: dict[argparse.ArgumentParser, str] = {}
    for name, parser in subcommands.items():
        names.setdefault(parser, name)  # an alias has the same parser, and comes later
    return {
        "bert-export": cli._parser(),
        "bert-export verify": verify_cli._parser(),
        **{f"bert-bench {name}": parser for parser, name in names.items()},
    }


def flags(parser: argparse.ArgumentParser) -> Iterator[Flag]:
    """Yields the flags of a parser, except `--help` and `--version`."""
    formatter = parser._get_formatter()
    for action in parser._actions:
        if isinstance(action, argparse._HelpAction | argparse._VersionAction):
            continue
        name = action.option_strings[-1] if action.option_strings else ""
        value = "" if action.nargs == 0 else formatter._metavar_formatter(action, action.dest.upper())(1)[0]
        meaning = formatter._expand_help(action)
        if action.choices is not None:
            value, meaning = action.dest.upper(), f"{meaning}; one of {', '.join(f'`{choice}`' for choice in action.choices)}"
        yield Flag(f"{name} {value}".strip(), meaning, action.required and bool(name))


def tasks() -> list[TaskSpec]:
    """Returns all tasks of the service."""
    return list(TASKS.values())


def limits() -> Mapping[str, int]:
    """Returns the limits of a request that are not settings, by what they limit."""
    return {f"{what} of a body": limit for _, limit, what in json_text.LIMITS} | {
        f"characters of an input to tokenize; each of its texts after the first counts {cost.TEXT_CHARS} more": cost.MAX_CHARS,
        "predicted microseconds of decoding": cost.MAX_DECODE_US,
        "bytes of the answer as JSON": cost.MAX_ANSWER_BYTES,
    }


def metrics() -> list[Metric]:
    """Returns all metrics: those of processes, which are read at each scrape, and then the others in the order of their creation."""
    all_metrics = Metrics()
    collectors = [value for value in vars(all_metrics).values() if isinstance(value, MetricWrapperBase)]
    of_processes = [
        Metric(
            family.name.removeprefix("bertserve_") + ("_total" if family.type == "counter" else ""),
            family.type,
            list(family.samples[0].labels),
            family.documentation,
        )
        for family in all_metrics.processes.collect()
    ]
    return of_processes + [
        Metric(
            collector._name.removeprefix("bertserve_") + ("_total" if collector._type == "counter" else ""),
            collector._type,
            collector._labelnames,
            collector._documentation,
        )
        for collector in collectors
    ]


def layers(package: str) -> list[list[str]]:
    """Returns the layers of a package from import-linter's contract, top to bottom; modules of a layer do not import each other."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"]["contracts"]
    contract = next(
        contract for contract in contracts if contract["type"] == "layers" and contract["containers"] == [f"bertserve.{package}"]
    )
    return [[name.strip() for name in layer.split("|")] for layer in contract["layers"]]


def answers(requests: Sequence[tuple[str, str]]) -> list[str]:
    """Returns the answers of the embedded models to requests; each request is a path and a body."""
    service = build(Settings(models=ROOT / "models", provider="cpu", multi_threads=1, workers=1))

    async def ask() -> list[str]:
        service.scheduler.start()
        try:
            async with httpx.AsyncClient(transport=httpx.ASGITransport(Endpoint(service)), base_url="http://docs", timeout=60) as client:
                return [(await client.post(path, content=body.encode())).raise_for_status().text for path, body in requests]
        finally:
            await service.scheduler.stop(0)

    return asyncio.run(ask()) if requests else []


@cache
def openapi() -> dict[str, Any]:
    """Returns the service's OpenAPI document, which does not depend on the loaded models."""
    return create_fastapi(build(Settings(models=ROOT / "models", provider="cpu", multi_threads=1, workers=1))).openapi()
