"""bert-export analyze: turns flags into a SweepSpec or a profile; prints tables, writes JSON and plots, returns exit codes.

Exit codes: 0 success, 1 nothing could be measured, 2 wrong usage, 3 a required package is not installed.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bertserve.export import flags
from bertserve.export.analyze.shapes import AXES, LENGTHS, MIDDLE, NAMED, choose_lengths
from bertserve.export.errors import ExportError
from bertserve.service import __version__
from bertserve.service.bundle.files import is_bundle
from bertserve.service.errors import BertServeError
from bertserve.service.flag_parser import FlagParser

if TYPE_CHECKING:
    from bertserve.service.bundle.graph_spec import Precision

PACKAGES = ("torch", "transformers", "sentencepiece", "onnx", "onnxscript", "onnxruntime")
OF_A_BUNDLE = ("onnx_ir", "onnxruntime")
REPORT_FILE = "analysis.json"


def main(argv: Sequence[str]) -> int:
    """Runs the command; returns its exit code."""
    parser = _parser()
    args = parser.parse_args(argv)
    of_bundle = is_bundle(Path(args.source))
    if of_bundle and (args.batch is not None or args.by is not None):
        parser.error("--batch and --by are for configurations and checkpoints, not for a bundle; remove them")
    if not of_bundle and "fp16" in (args.precision or ()):
        parser.error("argument --precision: fp16 is for GPUs, but runs are measured on the CPU; give fp32, int8 or both")
    if flags.say_missing(OF_A_BUNDLE if of_bundle else PACKAGES, "analyzing needs the export extra", "export", "cpu"):
        return 3
    try:
        if args.output is not None:
            args.output.mkdir(parents=True, exist_ok=True)
        _analyze_bundle(args) if of_bundle else _analyze_shapes(args)
    except (ExportError, BertServeError) as error:
        print(f"bert-export: {error}", file=sys.stderr)
        return error.exit_code if isinstance(error, ExportError) else 1
    except OSError as error:
        print(
            f"bert-export: cannot write: {error.strerror or error} (`{error.filename or args.output}`); give another --output.",
            file=sys.stderr,
        )
        return 1
    return 0


def _analyze_shapes(args: argparse.Namespace) -> None:
    # importing torch and transformers takes seconds, and --help and wrong flags do not need them
    from bertserve.export.analyze import report
    from bertserve.export.analyze.sweep import SweepSpec, run_sweep

    precisions: tuple[Precision, ...] = args.precision or ("fp32", "int8")
    axes = AXES if args.by is None else args.by
    spec = SweepSpec(args.source, precisions, args.lengths, axes, args.batch or 8, args.seconds)
    sweep = run_sweep(spec)
    print("\n".join(report.sweep_tables(sweep)))
    _report(args.output, asdict(sweep))
    if args.output is not None:
        _say_plots(report.plot_sweep(sweep, args.output) if report.can_plot() else [])


def _analyze_bundle(args: argparse.Namespace) -> None:
    from bertserve.export.analyze import report
    from bertserve.export.analyze.profiling import profile_graph
    from bertserve.export.verify.graph_checks import list_graphs
    from bertserve.service.bundle.files import load_bundle

    bundle = load_bundle(Path(args.source).resolve())
    lengths = choose_lengths(args.lengths, [MIDDLE], bundle.manifest.tokenizer.max_length)
    entries = []
    for graph in bundle.manifest.graphs:
        if graph.provider == "cpu" and (graph.precision in args.precision if args.precision else graph.default):
            profiles = profile_graph(bundle, graph, lengths, seconds=args.seconds / 10)
            entries.append({"graph": graph.file, "precision": graph.precision, "profiles": [asdict(profile) for profile in profiles]})
            lines = [f"{bundle.manifest.name}, {graph.file}, one thread"]
            for profile in profiles:
                lines += ["", *report.profile_tables(profile)]
            print("\n".join(lines))
            if args.output is not None:
                folder = args.output / graph.precision
                folder.mkdir(exist_ok=True)
                _say_plots([path for profile in profiles for path in report.plot_profile(profile, folder)] if report.can_plot() else [])
    if not entries:
        raise ExportError(f"bundle `{bundle.manifest.name}` has no such graph for the CPU; it has {list_graphs(bundle.manifest.graphs)}.")
    _report(args.output, {"bundle": bundle.manifest.name, "graphs": entries})


def _report(output: Path | None, figures: dict[str, Any]) -> None:
    """Prints the machine, and writes the metrics as JSON if a folder is given."""
    from bertserve.service.backend.hardware import cpu_instructions, cpu_name, usable_cores
    from bertserve.service.backend.sessions import VERSION

    cpu, instructions = cpu_name(), cpu_instructions()
    print(
        f"\none thread of {usable_cores()} cores, {cpu}, {', '.join(instructions)}, onnxruntime {VERSION}; ratios count, not the machine's speed"
    )
    if output is not None:
        machine = {"cpu": cpu, "instructions": instructions, "cores": usable_cores(), "onnxruntime": VERSION, "bertserve": __version__}
        path = output / REPORT_FILE
        path.write_text(
            json.dumps({"machine": machine} | figures, indent=1, default=lambda record: record.model_dump()) + "\n", encoding="utf-8"
        )
        print(f"wrote {path}")


def _say_plots(paths: Sequence[Path]) -> None:
    from bertserve.export.analyze.report import MISSING

    for path in paths:
        print(f"wrote {path}")
    if not paths:
        print(f"bert-export: {MISSING}", file=sys.stderr)


def _parser() -> argparse.ArgumentParser:
    parser = FlagParser(
        prog="bert-export analyze",
        description="Measure where inference time goes: a model and variants of it, or a bundle by layer.",
        epilog="To export a local folder named analyze, write ./analyze.",
    )
    parser.add_argument(
        "source",
        metavar="SOURCE",
        nargs="?",
        default="bert-base",
        help=f"checkpoint folder, config.json, hub id, bundle folder, or one of {', '.join(NAMED)} (default: bert-base); missing weights "
        "are random",
    )
    parser.add_argument(
        "--precision",
        type=flags.parse_precisions,
        metavar="LIST",
        help="comma list of fp32, int8 (default: both; for a bundle, its default graph for the CPU)",
    )
    parser.add_argument(
        "--lengths",
        type=_parse_lengths,
        metavar="LIST",
        help=f"comma list of lengths in tokens (default: {','.join(map(str, LENGTHS))}; for a bundle {MIDDLE}); variants are compared at "
        f"the length nearest to {MIDDLE}",
    )
    parser.add_argument(
        "--by",
        type=_parse_axes,
        metavar="LIST",
        help=f"comma list of {', '.join(AXES)}: dimensions to vary (default: all; `none` varies nothing)",
    )
    parser.add_argument("--batch", type=_parse_count, metavar="N", help="batch size for the throughput (default: 8)")
    parser.add_argument(
        "--seconds",
        type=lambda text: flags.parse_positive(text, 10**6),
        default=600.0,
        metavar="SECONDS",
        help="time budget: variants that do not fit are skipped and listed; the model itself is always measured (default: 600)",
    )
    parser.add_argument(
        "--output",
        type=Path,
        metavar="DIR",
        help=f"folder for {REPORT_FILE} and, if matplotlib is installed (extra `bench`), SVG plots",
    )
    return parser


def _parse_lengths(text: str) -> tuple[int, ...]:
    return tuple(sorted({_parse_count(part) for part in text.split(",")}))


def _parse_count(text: str) -> int:
    if not text.isascii() or not text.isdigit() or not 1 <= int(text) <= 10**5:
        raise argparse.ArgumentTypeError(f"`{text}` is not a whole number from 1 to 100000")
    return int(text)


def _parse_axes(text: str) -> tuple[Any, ...]:
    names = () if text == "none" else tuple(text.split(","))
    if any(name not in AXES for name in names) or len(set(names)) != len(names):
        raise argparse.ArgumentTypeError(f"`{text}` is not a list of names from {', '.join(AXES)} without duplicates, or none")
    return names


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
