"""bert-bench: load a service over HTTP and compare it with a raw ONNX Runtime loop.

Exit codes: 0 success, 1 an objective was missed or no request was answered, 2 wrong usage or an unreachable address, 130 interrupted.
"""

from __future__ import annotations

import argparse
import json
import math
import signal
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from bertserve.bench import BenchError, objectives, page, workloads
from bertserve.bench.report import BenchReport, summary_lines
from bertserve.service import __version__
from bertserve.service.flag_parser import FlagParser

_DEFAULT_URL = "http://127.0.0.1:8000/classify"
# subcommand -> help
COMMANDS: Mapping[str, str] = {
    "closed": "closed loop: each connection sends its next request when the last one is answered",
    "open": "open loop: Poisson arrivals at a rate; latency counts from the scheduled time",
    "sweep": "find the highest open-loop rate that meets the objectives of --slo (default: p99_ms=50) in two runs",
    "compare": "service and raw ONNX Runtime loop in turn: the ratio of their throughputs, with its spread",
}


def _number(kind: type[float] | type[int], lowest: float = 1) -> Callable[[str], float]:
    """Returns the parser of a flag's number, which is at least `lowest`."""

    def number(text: str) -> float:
        value = kind(text)
        if not lowest <= value < math.inf:
            raise argparse.ArgumentTypeError(f"`{text}` is below {lowest:g} or infinite")
        return value

    return number


def _header(text: str) -> tuple[str, str]:
    name, colon, value = text.partition(":")
    if not colon or not name.strip() or not text.isprintable():
        raise argparse.ArgumentTypeError(f"`{name}` is not a header; give 'NAME: VALUE'")
    return name.strip(), value.strip()


_count, _positive, _not_negative = _number(int), _number(float, 1e-9), _number(float, 0)


def build_parser() -> FlagParser:
    """Returns the parser of all subcommands."""
    parser = FlagParser(
        prog="bert-bench",
        description="Load a service over HTTP and compare it with a raw ONNX Runtime loop. `bert-bench COMMAND --help` lists its flags.",
    )
    parser.add_argument("--version", action="version", version=f"bert-bench {__version__}")
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    commands = {}
    for name, text in COMMANDS.items():
        commands[name] = subparsers.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
        _add_load(commands[name])
    for name in ("closed", "sweep", "compare"):
        commands[name].add_argument("--connections", type=_count, default=16, help="connections with one request each (default: 16)")
    for name in ("open", "sweep"):
        commands[name].add_argument("--max-connections", type=_count, default=512, help="maximum connections (default: 512)")

    commands["open"].add_argument("--rate", type=_positive, required=True, help="requests per second")
    command = commands["sweep"]
    command.add_argument("--steps", type=_count, default=6, help="maximum number of rates (default: 6)")
    command.add_argument(
        "--max-rate",
        type=_positive,
        help="start with this rate and try no higher one (default: start with 1.1 times the closed-loop throughput, and double it while "
        "the objectives are met)",
    )
    command = commands["compare"]
    command.add_argument("--bundle", type=Path, required=True, metavar="DIR", help="bundle that the target serves, for the raw loop")
    command.add_argument("--raw-graph", type=Path, metavar="FILE", help="ONNX file for the raw loop instead of the bundle's graph")
    command.add_argument("--threads", type=_count, help="concurrent raw loops (default: the service's inference threads)")
    command.add_argument("--rounds", type=_count, default=3, help="rounds of both measurements (default: 3)")
    return parser


def _add_load(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--target",
        default=_DEFAULT_URL,
        metavar="URL[=WORKLOAD]",
        help=f"endpoint and workload ({', '.join(workloads.NAMES)}, or a JSON Lines file of bodies; default: {_DEFAULT_URL}, with the workload "
        "for the model's task)",
    )
    command.add_argument("--texts", type=_count, default=1, help="texts per request (default: 1)")
    command.add_argument("--seconds", type=_positive, default=10.0, help="duration of each load or loop (default: 10)")
    command.add_argument(
        "--warmup-s", type=_not_negative, default=1.0, metavar="SECONDS", help="uncounted time before each load (default: 1)"
    )
    command.add_argument("--timeout-s", type=_positive, default=30.0, metavar="SECONDS", help="longer requests are errors (default: 30)")
    command.add_argument("--seed", type=int, default=0, help="random seed for texts and arrivals (default: 0)")
    command.add_argument(
        "--header", action="append", type=_header, default=[], metavar="'NAME: VALUE'", help="header of every request; repeat for more"
    )
    command.add_argument("--api-key-file", type=Path, metavar="FILE", help="file with the service's API key")
    command.add_argument(
        "--slo",
        action="append",
        default=[],
        metavar="METRIC=NUMBER",
        help="objective; exit code 1 if it is missed. Repeat, or separate with commas. error_rate=0.01 is added unless you give another: "
        f"{', '.join(objectives.METRICS)}",
    )
    command.add_argument("--json", type=Path, metavar="FILE", help="write the report as JSON; `-` prints it instead of the summary")
    command.add_argument("--html", type=Path, metavar="FILE", help="write the report as an HTML page with plots (needs the extra `bench`)")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit code."""
    args = build_parser().parse_args(argv)
    stop = threading.Event()

    def on_sigint(*_: object) -> None:
        stop.set()
        signal.signal(signal.SIGINT, before)  # the second Ctrl-C ends the process

    before = signal.signal(signal.SIGINT, on_sigint)
    try:
        return _measure(args, stop)
    except BenchError as error:
        print(f"bert-bench: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    finally:
        signal.signal(signal.SIGINT, before)


def _measure(args: argparse.Namespace, stop: threading.Event) -> int:
    """Runs a command that measures; after an error it reports the measurements so far."""
    parsed_objectives = objectives.parse(args.slo or (["p99_ms=50"] if args.command == "sweep" else []))
    if args.html:
        page.require_matplotlib()  # before the load
    settings = vars(args) | {"header": [name for name, _ in args.header]}  # a value may be a key
    report = BenchReport(args.command, settings, parsed_objectives)
    # importing tokenizers, pydantic and onnxruntime takes a second, and --help and wrong flags do not need them
    from bertserve.bench import commands

    try:
        commands.measure(args, report, stop)
    finally:
        report.interrupted = stop.is_set()
        if report.runs:
            _write(report, args)
    if report.interrupted:
        return 130
    return 0 if report.has_results and not report.is_missed else 1


def _write(report: BenchReport, args: argparse.Namespace) -> None:
    """Prints the summary, and writes the reports.

    Raises:
        BenchError: A file cannot be written.
    """
    document = json.dumps(report.document(), indent=1)
    print(document if args.json == Path("-") else "\n".join(summary_lines(report)))
    files = {} if args.json in (None, Path("-")) else {args.json: document}
    if args.html:
        files[args.html] = page.render(report)
    for path, text in files.items():
        try:
            path.write_text(text, encoding="utf-8")
        except OSError as error:
            raise BenchError(f"the report `{path}` cannot be written: {error.strerror}.") from error


if __name__ == "__main__":
    sys.exit(main())
