"""The command line: subcommands, their flags and their help."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from bertserve.bench import workloads
from bertserve.bench.report import slo
from bertserve.service import __version__
from bertserve.service.flag_parser import FlagParser

DEFAULT_URL = "http://127.0.0.1:8000/classify"
_ANSWERED = (f"error_rate={slo.DEFAULT_ERROR_RATE}",)
# commands that send load -> their default objectives
DEFAULT_OBJECTIVES = dict.fromkeys(("closed", "open", "compare", "concurrent-targets", "tail-latency"), _ANSWERED) | {
    "sweep": ("p99_ms=50",)
}
# subcommand -> help
COMMANDS: Mapping[str, str] = {
    "closed": "closed loop: each connection sends its next request when the last one is answered",
    "open": "open loop: Poisson arrivals at a rate; latency counts from the scheduled time",
    "sweep": "find the highest open-loop rate that meets the targets of --slo (default: p99_ms=50)",
    "compare": "service and raw ONNX Runtime loop in turn: medians and the ratio of their throughputs",
    "concurrent-targets": "each target alone, then all at once: the share of throughput that each keeps",
    "tail-latency": "open loop at a share of the maximum throughput, compared with an ideal queue with the same arrivals and run times",
    "engine-limit": "the raw ONNX Runtime loop, without a service",
    "report": "draw reports of --json as one HTML page",
}


def build_parser() -> argparse.ArgumentParser:
    """Returns the parser of all subcommands."""
    parser = FlagParser(
        prog="bert-bench",
        description="Load a service over HTTP and compare it with a raw ONNX Runtime loop.",
        epilog="`bert-bench COMMAND --help` lists the flags of a command; docs/how-to/load-test.md explains what to measure how.",
    )
    parser.add_argument("--version", action="version", version=f"bert-bench {__version__}")
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    commands = {}
    for name, text in COMMANDS.items():
        commands[name] = subparsers.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")

    for name in DEFAULT_OBJECTIVES:
        _add_load(commands[name], connections=name != "open")
    for name in ("open", "sweep", "tail-latency"):
        commands[name].add_argument("--max-connections", type=_count, default=512, help="maximum connections per target (default: 512)")
    for name in ("closed", "open", "sweep", "compare", "tail-latency", "engine-limit"):
        _add_bundle(commands[name], required=name in ("compare", "tail-latency", "engine-limit"))
    for name, rounds in {"compare": 3, "concurrent-targets": 3, "tail-latency": 1}.items():
        commands[name].add_argument("--rounds", type=_count, default=rounds, help=f"rounds of all measurements (default: {rounds})")
    for name in COMMANDS:
        if name != "report":
            _add_measurement(commands[name])

    commands["open"].add_argument("--rate", type=_positive, required=True, help="requests per second, divided evenly among the targets")
    command = commands["sweep"]
    command.add_argument(
        "--steps", type=_count, default=6, help="maximum number of rates; a load is repeated once if the generator was late (default: 6)"
    )
    command.add_argument(
        "--max-rate",
        type=_positive,
        help="start with this rate and try no higher one (default: start with 1.1 times the closed-loop throughput, and double it while "
        "the targets hold)",
    )
    command = commands["tail-latency"]
    command.add_argument("--share", type=_positive, default=0.7, help="share of the maximum throughput (default: 0.7)")
    command.add_argument(
        "--servers", type=_count, help="servers of the ideal queue (default: the service's inference threads, else --threads)"
    )
    command = commands["engine-limit"]
    command.add_argument("--workload", help="built-in workload or file of bodies (default: by the bundle's task)")
    command = commands["report"]
    command.add_argument("files", type=Path, nargs="+", metavar="FILE", help="reports; the runs of several are drawn together")
    command.add_argument("--html", type=Path, required=True, metavar="FILE", help="HTML page to write")
    return parser


def settings(args: argparse.Namespace) -> dict[str, Any]:
    """Returns the flags for a report, which has only the names of headers."""
    shown = {name: str(value) if isinstance(value, Path) else value for name, value in vars(args).items() if name != "command"}
    if "header" in shown:
        shown["header"] = [header.partition(":")[0] for header in args.header]
    return shown


def _add_load(command: argparse.ArgumentParser, *, connections: bool) -> None:
    command.add_argument(
        "--target",
        action="append",
        metavar="URL[=WORKLOAD]",
        help=f"endpoint and workload ({', '.join(workloads.NAMES)}, or a JSON Lines file of bodies); repeat to load several at once (default: "
        f"{DEFAULT_URL}, with the workload for the model's task)",
    )
    if connections:
        command.add_argument("--connections", type=_count, default=16, help="connections per target (default: 16)")
    command.add_argument(
        "--warmup-s", type=_not_negative, default=1.0, metavar="SECONDS", help="warm-up before each load, not measured (default: 1)"
    )
    command.add_argument(
        "--timeout-s", type=_positive, default=30.0, metavar="SECONDS", help="time after which a request counts as an error (default: 30)"
    )
    command.add_argument("--header", action="append", default=[], metavar="'NAME: VALUE'", help="header of every request; repeat for more")
    command.add_argument("--api-key-file", type=Path, metavar="FILE", help="file with the service's API key")


def _add_bundle(command: argparse.ArgumentParser, *, required: bool) -> None:
    command.add_argument(
        "--bundle", type=Path, required=required, metavar="DIR", help="bundle of the target's model, for the raw ONNX Runtime loop"
    )
    command.add_argument("--bare-graph", type=Path, metavar="FILE", help="ONNX file for the raw loop instead of the bundle's graph")
    command.add_argument("--threads", type=_count, default=2, help="concurrent raw loops (default: 2)")


def _add_measurement(command: argparse.ArgumentParser) -> None:
    command.add_argument("--texts", type=_count, default=1, help="texts per request (default: 1)")
    command.add_argument("--seconds", type=_positive, default=10.0, help="duration of each load or loop (default: 10)")
    command.add_argument("--seed", type=int, default=0, help="random seed for texts and arrivals (default: 0)")
    command.add_argument(
        "--slo",
        action="append",
        default=[],
        metavar="METRIC=NUMBER",
        help="target; exit code 1 if it is missed. Repeat, or separate with commas. A load also has error_rate=0.01 unless you give another: "
        f"{', '.join(slo.METRICS)}",
    )
    command.add_argument("--json", type=Path, metavar="FILE", help="write the report as JSON; `-` prints it instead of the summary")
    command.add_argument("--html", type=Path, metavar="FILE", help="write the report as an HTML page with plots (needs the extra `bench`)")
    command.add_argument("--quiet", action="store_true", help="show no progress on stderr")


def _number(text: str, allowed: Callable[[float], bool], description: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and allowed(value)):
        raise argparse.ArgumentTypeError(f"`{text}` is not {description}")
    return value


def _positive(text: str) -> float:
    return _number(text, lambda value: value > 0, "a number over 0")


def _not_negative(text: str) -> float:
    return _number(text, lambda value: value >= 0, "a number of at least 0")


def _count(text: str) -> int:
    return int(_number(text, lambda value: value >= 1 and value == int(value), "a whole number of at least 1"))
