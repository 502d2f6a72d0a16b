"""The report of a command: what it measured and what it measured it on, as JSON.

The JSON keys are the names of the dataclass fields below. `FORMAT_VERSION` says which they are: a file of today's version must stay readable.
"""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from bertserve.bench.engine.limit import EngineLimit
from bertserve.bench.errors import BenchError
from bertserve.bench.report.generator_stats import GeneratorStats
from bertserve.bench.report.measurement import Measurement
from bertserve.bench.report.slo import Verdict
from bertserve.service import __version__

FORMAT = "bert-bench"
FORMAT_VERSION = 1


@dataclass(frozen=True, slots=True)
class Run:
    """One load.

    Attributes:
        name: Description such as `closed, 16 connections`.
        targets: One measurement for each target.
        generator: Figures of the load generator itself.
        limit: Engine limit measured right after the load, if it was asked for.
    """

    name: str
    targets: Sequence[Measurement]
    generator: GeneratorStats
    limit: EngineLimit | None = None


@dataclass(slots=True)
class Report:
    """Everything that a command reports. It is filled while the command runs, and complete at any time.

    Attributes:
        command: The subcommand.
        settings: Its flags, without keys.
        service: `/info` of the service, if it has one.
        models: What the endpoints say of their models: digest of the bundle, precision, labels.
        engine: Bundle and graph of the engine limit, if it was measured.
        runs: The loads, in order.
        limits: Engine limits that belong to no load.
        figures: Results of the command as a whole, such as `ratio`.
        judged: Figures of the loads that the objectives are checked against, besides `figures`.
        verdicts: Results of the objectives.
        inconclusive: Names of the steps of a sweep that say nothing, because the generator was late in each try.
        is_lower_bound: Whether a sweep ended with every rate holding that it tried, so that higher ones may hold too.
        interrupted: Whether Ctrl-C ended the command early.
        started: Start of the command, in ISO 8601 with the offset of the time zone.
    """

    command: str
    settings: Mapping[str, Any]
    service: Mapping[str, Any] | None = None
    models: list[Mapping[str, Any]] = field(default_factory=list)
    engine: Mapping[str, Any] | None = None
    runs: list[Run] = field(default_factory=list)
    limits: list[EngineLimit] = field(default_factory=list)
    figures: dict[str, float | None] = field(default_factory=dict)
    judged: dict[str, float | None] = field(default_factory=dict)
    verdicts: list[Verdict] = field(default_factory=list)
    inconclusive: list[str] = field(default_factory=list)
    is_lower_bound: bool = False
    interrupted: bool = False
    started: str = field(default_factory=lambda: time.strftime("%Y-%m-%dT%H:%M:%S%z"))

    def document(self) -> dict[str, Any]:
        """Returns the report as plain JSON values."""
        document = {"format": FORMAT, "format_version": FORMAT_VERSION, "version": __version__, "machine": _machine(), **asdict(self)}
        document["verdicts"] = [
            {"condition": str(verdict.objective), "measured": verdict.measured, "passed": verdict.passed} for verdict in self.verdicts
        ]
        value: dict[str, Any] = json.loads(json.dumps(document, default=str))
        return value


def write(text: str, path: Path) -> None:
    """Writes a report to a file.

    Raises:
        BenchError: The file cannot be written.
    """
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise BenchError(f"the report `{path}` cannot be written: {error.strerror}.") from error


def read(path: Path) -> dict[str, Any]:
    """Reads a report that `--json` wrote.

    Raises:
        BenchError: The file cannot be read, or is not a report of this format version.
    """
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise BenchError(f"`{path}` is not a report of bert-bench: {getattr(error, 'strerror', None) or 'it is not JSON'}.") from error
    if not isinstance(value, dict) or (value.get("format"), value.get("format_version")) != (FORMAT, FORMAT_VERSION):
        raise BenchError(f"`{path}` is not a report of bert-bench, version {FORMAT_VERSION}; give files that --json wrote.")
    return value


def _machine() -> dict[str, Any]:
    return {"cpus": os.cpu_count(), "system": platform.system(), "processor": platform.machine(), "python": platform.python_version()}
