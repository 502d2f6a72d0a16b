"""bert-bench: load a service over HTTP and compare it with a raw ONNX Runtime loop.

Exit codes: 0 success, 1 an objective was missed or no request was answered, 2 wrong usage or an unreachable address, 4 a sweep could not
measure a rate because the generator was late, 130 interrupted.
"""

import argparse
import math
import signal
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from bertserve.bench import workloads
from bertserve.service import __version__
from bertserve.service.errors import BertServeError
from bertserve.service.flag_parser import FlagParser, drop_stdout

_DEFAULT_URL = "http://127.0.0.1:8000/classify"
# subcommand -> help
COMMANDS: Mapping[str, str] = {
    "closed": "closed loop: each connection sends its next request when the last one is answered",
    "open": "open loop: Poisson arrivals at a rate; latency counts from the scheduled time",
    "sweep": "find the highest open-loop rate that meets the objectives of --slo (default: p99_ms=50) in two loads",
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
    if not colon or not name.strip() or not text.isprintable() or max(text) > "\xff":
        raise argparse.ArgumentTypeError(f"`{name}` is not a header; give 'NAME: VALUE' in Latin-1")
    return name.strip(), value.strip()


_count, _positive, _not_negative = _number(int), _number(float, 1e-9), _number(float, 0)


def build_parser() -> FlagParser:
    """Returns the parser of all subcommands."""
    parser = FlagParser(
        prog="bert-bench",
        description="Load a service over HTTP and compare it with a raw ONNX Runtime loop. `bert-bench COMMAND --help` lists its flags.",
    )
    parser.add_argument("--version", action="version", version=f"bert-bench {__version__}")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND")
    commands = {}
    for name, text in COMMANDS.items():
        commands[name] = subparsers.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
        _add_load(commands[name])
    for name in ("closed", "sweep", "compare"):
        commands[name].add_argument(
            "--connections", type=_count, default=16, help="connections to each target, with one request each (default: 16)"
        )
    for name in ("open", "sweep"):
        commands[name].add_argument("--max-connections", type=_count, default=512, help="maximum connections to each target (default: 512)")
    commands["open"].add_argument("--rate", type=_positive, required=True, help="requests per second to all targets")
    commands["sweep"].add_argument("--steps", type=_count, default=6, help="maximum number of rates (default: 6)")
    help_text = "the first and highest rate (default: start with 1.1 times the closed-loop throughput, and double it while it holds)"
    commands["sweep"].add_argument("--max-rate", type=_positive, help=help_text)
    command = commands["compare"]
    command.add_argument("--bundle", type=Path, required=True, metavar="DIR", help="bundle that the target serves, for the raw loop")
    command.add_argument("--raw-graph", type=Path, metavar="FILE", help="ONNX file for the raw loop instead of the bundle's graph")
    command.add_argument("--threads", type=_count, help="concurrent raw loops (default: the service's inference threads)")
    command.add_argument("--rounds", type=_count, default=3, help="rounds of both measurements (default: 3)")
    return parser


def _add_load(command: argparse.ArgumentParser) -> None:
    names = ", ".join(workloads.NAMES)
    help_text = f"endpoint and workload: {names}, or a JSON Lines file of bodies; repeat for several at once (default: {_DEFAULT_URL})"
    command.add_argument("--target", action="append", metavar="URL[=WORKLOAD]", help=help_text)
    command.add_argument("--texts", type=_count, default=1, help="texts per request (default: 1)")
    command.add_argument("--seconds", type=_positive, default=10.0, help="duration of each load or loop (default: 10)")
    command.add_argument("--warmup-s", type=_not_negative, default=1.0, metavar="SECONDS", help="time before a load (default: 1)")
    command.add_argument("--timeout-s", type=_positive, default=30.0, metavar="SECONDS", help="longer requests are errors (default: 30)")
    command.add_argument("--seed", type=int, default=0, help="random seed for texts and arrivals (default: 0)")
    help_text = "header of every request; repeat for more"
    command.add_argument("--header", action="append", type=_header, default=[], metavar="'NAME: VALUE'", help=help_text)
    command.add_argument("--api-key-file", type=Path, metavar="FILE", help="file with the service's API key")
    help_text = "objective such as p99_ms=50; exit code 1 if it is missed; repeat, or separate with commas (default: error_rate=0.01)"
    command.add_argument("--slo", action="append", default=[], metavar="METRIC=NUMBER", help=help_text)
    command.add_argument("--quiet", action="store_true", help="print no progress to stderr")
    command.add_argument("--json", type=Path, metavar="FILE", help="write the report as JSON; `-` prints it instead of the summary")
    command.add_argument("--html", type=Path, metavar="FILE", help="write the report as an HTML page with plots (needs the extra `bench`)")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit code."""
    parser = build_parser()
    args = parser.parse_args(argv)
    args.target = args.target or [_DEFAULT_URL]
    if args.command == "compare" and len(args.target) > 1:
        parser.error("argument --target: compare takes one")
    names = [name.lower() for name, _ in args.header] + ["authorization"] * bool(args.api_key_file)
    if len(names) > len(set(names)):
        parser.error("argument --header: a name occurs twice; give each once, and Authorization not with --api-key-file")
    # importing tokenizers, pydantic and onnxruntime takes a second, and --help and wrong flags do not need them
    from bertserve.bench.commands import run_command

    stop = threading.Event()

    def on_sigint(*_: object) -> None:
        stop.set()
        signal.signal(signal.SIGINT, before)  # the second Ctrl-C ends the process

    before = signal.signal(signal.SIGINT, on_sigint)
    try:
        return run_command(args, stop)
    except BrokenPipeError:
        return drop_stdout()
    except (BertServeError, OSError) as error:
        print(f"bert-bench: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    finally:
        signal.signal(signal.SIGINT, before)


if __name__ == "__main__":
    sys.exit(main())
