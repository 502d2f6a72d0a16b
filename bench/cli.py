"""bert-bench: load a service over HTTP and compare it with a raw ONNX Runtime loop.

Exit codes: 0 success, 1 an objective was missed or no request was answered, 2 wrong usage or an unreachable address, 3 the
bench extra is not installed, 4 some or all steps of a sweep were inconclusive, 130 interrupted.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bertserve.bench import flags
from bertserve.bench.errors import BenchError, MissingExtraError
from bertserve.bench.progress import BenchProgress
from bertserve.bench.report import html, slo
from bertserve.bench.report.report import BenchReport, read, summary_lines, write

_INCONCLUSIVE = 4
_INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit code."""
    args = flags.build_parser().parse_args(argv)
    stop = threading.Event()
    try:
        with _set_on_interrupt(stop):
            return _draw(args) if args.command == "report" else _measure(args, stop)
    except BenchError as error:
        print(f"bert-bench: {error}", file=sys.stderr)
        return 3 if isinstance(error, MissingExtraError) else 2
    except KeyboardInterrupt:
        return _INTERRUPTED


@contextmanager
def _set_on_interrupt(stop: threading.Event) -> Iterator[None]:
    """Sets an event on the first Ctrl-C, and raises KeyboardInterrupt on the second."""

    def on_sigint(*_: object) -> None:
        if stop.is_set():
            raise KeyboardInterrupt
        stop.set()

    before = signal.signal(signal.SIGINT, on_sigint)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _draw(args: argparse.Namespace) -> int:
    write(html.render_page([read(file) for file in args.files]), args.html)
    return 0


def _measure(args: argparse.Namespace, stop: threading.Event) -> int:
    """Runs a command that measures; after an error it reports the measurements so far."""
    objectives = slo.parse_objectives(args.slo or flags.DEFAULT_OBJECTIVES.get(args.command, ()))
    if args.html:
        html.require_matplotlib()  # before the load
    report = BenchReport(args.command, flags.settings(args))
    progress = BenchProgress(quiet=args.quiet)
    # importing tokenizers, pydantic and onnxruntime takes a second, and --help and wrong flags do not need them
    from bertserve.bench import commands

    try:
        commands.run(args, report, objectives, stop=stop, progress=progress)
    finally:
        report.interrupted = stop.is_set()
        if report.runs or report.limits:
            if report.judged or not report.inconclusive:  # a sweep without results has missed nothing
                measured = report.judged | report.figures
                report.verdicts = [slo.Verdict(objective, measured.get(objective.metric)) for objective in objectives]
            _write(report, args)
    if report.interrupted:
        return _INTERRUPTED
    if report.inconclusive:
        return _INCONCLUSIVE
    missed = any(not verdict.passed for verdict in report.verdicts)
    return 1 if missed or not commands.has_results(report) else 0


def _write(report: BenchReport, args: argparse.Namespace) -> None:
    document: dict[str, Any] = report.document()
    if args.json == Path("-"):
        print(json.dumps(document, indent=1))
    else:
        in_color = sys.stdout.isatty() and "NO_COLOR" not in os.environ
        for line in summary_lines(report):
            print(f"\x1b[31m{line}\x1b[0m" if in_color and line.startswith("MISSED") else line)
        if args.json:
            write(json.dumps(document, indent=1) + "\n", args.json)
    if args.html:
        write(html.render_page([document]), args.html)


if __name__ == "__main__":
    sys.exit(main())
