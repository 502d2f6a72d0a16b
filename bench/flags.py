"""The command line: subcommands, flags, and what each means."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.report import slo
from bench.workload import mixes
from service import __version__

_URL = "http://127.0.0.1:8000/classify"
DEFAULT_SLO = {"sweep": ("p99_ms=50",)}
# commands that need a bundle for the engine's limit
NEED_BUNDLE = ("compare", "limit", "tail")


def parser() -> argparse.ArgumentParser:
    """Returns the parser of all subcommands."""
    made = argparse.ArgumentParser(
        prog="bert-bench",
        description="Load a service over HTTP and compare it with the engine alone.",
        epilog="`bert-bench COMMAND --help` lists the flags of a command; docs/how-to/load-test.md explains what to measure how.",
    )
    made.add_argument("--version", action="version", version=f"bert-bench {__version__}")
    commands = made.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def add(name: str, text: str) -> argparse.ArgumentParser:
        return commands.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")

    one = add("closed", "closed loop: connections that each send their next request when the last one was answered")
    _add_load(one)
    one = add("open", "open loop: Poisson arrivals at a rate; latency counts from when a request was due")
    _add_load(one, connections=None)
    one.add_argument("--rate", type=_positive, required=True, help="requests a second, shared evenly by the targets")
    _add_open(one)
    one = add("sweep", "find the highest rate of an open loop that keeps the targets of --slo (default: p99_ms=50)")
    _add_load(one)
    _add_open(one)
    one.add_argument("--steps", type=_count, default=6, help="loads at most (default: 6)")
    one.add_argument("--max-rate", type=_positive, help="look up to this rate (default: 1.1 times what a closed loop gets)")
    one = add("compare", "the service and the bare engine in turn: medians, and the ratio of their speeds")
    _add_load(one)
    _add_rounds(one, 3)
    one = add("together", "each target alone and all at once in turn: how much of its own speed each keeps")
    _add_load(one, bundle=False)
    _add_rounds(one, 3)
    one = add("tail", "open loop at a share of the closed loop's maximum, against an ideal queue with the same arrivals and run times")
    _add_load(one)
    _add_open(one)
    _add_rounds(one, 1)
    one.add_argument("--share", type=_positive, default=0.7, help="of the maximum (default: 0.7)")
    one.add_argument("--servers", type=_count, help="of the ideal queue (default: the service's lanes, else --threads)")
    one = add("limit", "the engine alone, no service needed")
    one.add_argument("--mix", help="built-in mix or file of bodies (default: the one for the bundle's task)")
    _add_common(one)
    _add_bundle(one)
    one = add("report", "draw reports that --json wrote as one HTML page")
    one.add_argument("files", type=Path, nargs="+", metavar="FILE", help="reports; of several the runs are drawn together")
    one.add_argument("--html", type=Path, required=True, metavar="FILE", help="the page to write")
    return made


def settings(args: argparse.Namespace) -> dict[str, Any]:
    """Returns the flags for the report: of headers their names only."""
    shown = {
        name: str(value) if isinstance(value, Path) else value
        for name, value in vars(args).items()
        if name not in ("command", "default_target")
    }
    if "header" in shown:
        shown["header"] = [header.partition(":")[0] for header in args.header]
    return shown


def _add_common(one: argparse.ArgumentParser) -> None:
    one.add_argument("--texts", type=_count, default=1, help="texts in each request (default: 1)")
    one.add_argument("--seconds", type=_positive, default=10.0, help="measured seconds of each load or loop (default: 10)")
    one.add_argument("--seed", type=int, default=0, help="of the texts and the arrivals (default: 0)")
    one.add_argument(
        "--slo",
        action="append",
        default=[],
        metavar="FIGURE=NUMBER",
        help=f"a target to keep, or exit with 1; repeat, or separate with commas: {', '.join(slo.FIGURES)}",
    )
    one.add_argument("--json", type=Path, metavar="FILE", help="write the report as JSON; `-` prints it in place of the summary")
    one.add_argument("--html", type=Path, metavar="FILE", help="write the report as a page with plots (needs the bench extra)")
    one.add_argument("--quiet", action="store_true", help="no progress on stderr")


def _add_bundle(one: argparse.ArgumentParser) -> None:
    required = one.prog.split()[-1] in NEED_BUNDLE
    one.add_argument("--bundle", type=Path, required=required, metavar="DIR", help="bundle of the target's model, for the engine's limit")
    one.add_argument("--bare-graph", type=Path, metavar="FILE", help="ONNX file for the limit in place of the bundle's, same tokenizer")
    one.add_argument("--threads", type=_count, default=2, help="loops of the limit at the same time (default: 2)")


def _add_load(one: argparse.ArgumentParser, *, connections: int | None = 16, bundle: bool = True) -> None:
    one.add_argument(
        "--target",
        action="append",
        metavar="URL[=MIX]",
        help=f"endpoint and what to send: a mix ({', '.join(mixes.NAMES)}) or a JSON Lines file of bodies; repeat to load several at once "
        f"(default: {_URL}, with the mix for the model's task)",
    )
    one.set_defaults(default_target=_URL)
    if connections is not None:
        one.add_argument("--connections", type=_count, default=connections, help=f"to each target (default: {connections})")
    one.add_argument("--warmup-s", type=_not_negative, default=1.0, metavar="SECONDS", help="before each load, not counted (default: 1)")
    one.add_argument("--timeout-s", type=_positive, default=30.0, metavar="SECONDS", help="after which a request is an error (default: 30)")
    one.add_argument("--header", action="append", default=[], metavar="'NAME: VALUE'", help="sent with every request; repeat for more")
    one.add_argument("--api-key-file", type=Path, metavar="FILE", help="file with the service's API key")
    _add_common(one)
    if bundle:
        _add_bundle(one)


def _add_open(one: argparse.ArgumentParser) -> None:
    one.add_argument("--max-connections", type=_count, default=512, help="to each target in an open loop (default: 512)")


def _add_rounds(one: argparse.ArgumentParser, count: int) -> None:
    one.add_argument("--rounds", type=_count, default=count, help=f"of everything, in turn (default: {count})")


def _number(text: str, allowed: Callable[[float], bool], what: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and allowed(value)):
        raise argparse.ArgumentTypeError(f"`{text}` is not {what}")
    return value


def _positive(text: str) -> float:
    return _number(text, lambda value: value > 0, "a number over 0")


def _not_negative(text: str) -> float:
    return _number(text, lambda value: value >= 0, "a number of at least 0")


def _count(text: str) -> int:
    return int(_number(text, lambda value: value >= 1 and value == int(value), "a whole number of at least 1"))
