"""bert-export: turns flags into ExportOptions; prints progress and reports, returns exit codes (docs/reference/export-flags.md).

`verify_cli` runs the subcommand `verify`, and `calibrate_cli` runs `calibrate`.
"""

import argparse
import os
import re
import signal
import sys
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import get_args

from pydantic import TypeAdapter

from bertserve.export import calibrate_cli, flags, verify_cli
from bertserve.export.build_input import Tracer, choose_precisions
from bertserve.export.errors import ExportError, log, report_error, warn
from bertserve.export.tasks import EXPORT_TASKS
from bertserve.export.workspace import handle_signals, raise_interrupt
from bertserve.service import __version__
from bertserve.service.bundle.manifest import NAME_PATTERN, NAME_RULE, Combine, Manifest, Metric, TokenTypes
from bertserve.service.bundle.validation_policy import LOW_AGREEMENT_THRESHOLD, describe_agreement, has_low_agreement, summarize_agreement
from bertserve.service.engine.hardware import usable_cores
from bertserve.service.flag_parser import FlagParser, drop_stdout
from bertserve.service.providers import PROVIDERS

PACKAGES = ("torch", "transformers", "sentencepiece", "onnx", "onnxscript", "onnxruntime")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    _share_cores()
    try:
        with handle_signals(raise_interrupt):
            # a folder named verify is exported as ./verify
            subcommand = {"verify": verify_cli.main, "calibrate": calibrate_cli.main}.get(next(iter(arguments), ""))
            return _export(arguments) if subcommand is None else subcommand(arguments[1:])
    except BrokenPipeError:
        return drop_stdout()
    except KeyboardInterrupt as error:
        number = signal.Signals(error.args[0] if error.args else signal.SIGINT)
        log(f"stopped by {number.name}; no partial files are left.")
        return 128 + number  # the shell's convention


def _share_cores() -> None:
    """Gives PyTorch as many threads as there are usable cores, and lets waiting threads sleep; OpenMP reads both when torch is imported.

    By default, a waiting thread spins. If another process has the core of the thread that it waits for, each operator then takes a time
    slice: a stage of 6 s took 190 s.
    """
    os.environ.setdefault("OMP_NUM_THREADS", str(usable_cores()))
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def _export(argv: Sequence[str]) -> int:
    """Checks flags and packages before the export; returns the exit code."""
    parser = build_parser()
    args = parser.parse_args(flags.join_negative_layers(argv))
    _check_flags(parser, args)
    if flags.report_missing(PACKAGES, "exporting needs the export extra", "export", "cpu"):
        return 3
    # importing torch and transformers takes seconds, and --help and wrong flags do not need them
    from transformers.utils import logging

    from bertserve.export.model_card import measurements
    from bertserve.export.pipeline import ExportOptions, export

    if not sys.stderr.isatty():
        logging.disable_progress_bar()  # a log shows one line per stage
    if args.module is not None:
        log(f"running the code of `{args.module}` with your permissions, as --trust-module says.")
    own = ("source", "module", "trust_module", "verbose")
    values = {name: value for name, value in vars(args).items() if name not in own and value is not None}
    options = ExportOptions(source=args.source or args.module, module=args.module is not None, **values)
    try:
        target, manifest = export(options)
    except (ExportError, OSError) as error:
        return report_error(error, options.output)
    _print_agreements(target, manifest)
    if args.verbose:
        print(measurements(manifest, target))
    for graph in filter(has_low_agreement, manifest.graphs):
        warn(
            f"graph {graph.name}: {describe_agreement(graph.validation)}, but at least {LOW_AGREEMENT_THRESHOLD:.0%} is "
            f"expected; it is {'the default graph, as requested' if graph.default else 'not the default graph'}. Measure it on texts of "
            "your own (`bert-export verify --data`), and try a lower --max-int8-error or your own --int8-texts."
        )
    defaults = {graph.provider: f"{graph.name} is the default" for graph in manifest.graphs if graph.default}
    for omitted in manifest.omitted:
        default = defaults.get(omitted.provider, f"{omitted.provider} has no other graph")
        log(f"{omitted.provider}/{omitted.precision} is missing, and {default}: {omitted.reason}")
    return 4 if manifest.omitted else 0


def _check_flags(parser: FlagParser, args: argparse.Namespace) -> None:
    is_module = args.module is not None
    if bool(args.source) == is_module:
        parser.error("give a SOURCE, or --module FILE:FACTORY instead")
    flags.check_module_flags(parser, args)
    of_a_checkpoint = (args.revision, args.layers, args.combine, args.token_types)
    if is_module and (args.task != "auto" or args.ignored_weights or any(value is not None for value in of_a_checkpoint)):
        parser.error(
            "argument --module: the factory sets the task; remove --task, --revision, --layers, --combine, --ignore-weights and "
            "--token-types"
        )
    if args.attentions and is_module:
        parser.error("argument --attentions: it is not supported with --module; remove it")
    if args.attentions and args.providers != ("cpu",):
        providers = ",".join(args.providers)
        parser.error(f"argument --attentions: only graphs for the CPU return attention, but --provider is {providers}; remove one")
    try:
        precisions = choose_precisions(args.providers, args.precisions)
    except ValueError as error:
        parser.error(f"argument --precision: {error}")
    has_int8_flags = args.quick or args.int8_validation is not None or args.max_int8_error is not None
    if has_int8_flags and "int8" not in chain(*precisions.values()):
        parser.error("--quick, --int8-validation and --max-int8-error are for int8, which --provider and --precision exclude; remove them")


def _print_agreements(target: Path, manifest: Manifest) -> None:
    labels, more_labels = ", ".join(manifest.labels[:10]), len(manifest.labels) - 10
    more = f" and {more_labels} more" if more_labels > 0 else ""
    print(f"{target}: {manifest.task}" + (f", labels {labels}{more}" if labels else ""))
    for graph in manifest.graphs:
        measured_on = graph.validation.provider
        mib = sum(file.size_bytes or 0 for file in graph.files) / 2**20
        print(
            f"  {graph.file}  {mib:.1f} MiB{'  default' if graph.default else ''}  agreement with the checkpoint: "
            f"{summarize_agreement(graph.validation.agreement)}; at least {LOW_AGREEMENT_THRESHOLD:.0%} is expected"
            + ("" if measured_on == graph.provider else f"; measured on {measured_on}, because {graph.provider} was not available")
        )


def build_parser() -> FlagParser:
    """Returns the parser of the command without `verify`."""
    parser = FlagParser(
        prog="bert-export",
        description="Export a fine-tuned checkpoint to a bundle that bert-serve serves.",
        epilog="`bert-export verify BUNDLE` checks a bundle again, and `bert-export calibrate BUNDLE` calibrates its scores; they have "
        "their own --help.",
    )
    parser.add_argument("--version", action="version", version=f"bert-export {__version__}")
    parser.add_argument("source", metavar="SOURCE", nargs="?", help="checkpoint folder, or hub id such as org/model")
    parser.add_argument("--output", metavar="MODELS_DIR", type=Path, required=True, help="models folder; the bundle is MODELS_DIR/NAME/")
    parser.add_argument("--name", type=_parse_name, help="name of the bundle (default: the last part of SOURCE)")
    parser.add_argument("--task", choices=("auto", *EXPORT_TASKS), default="auto", help="task (default: that of the architecture)")
    parser.add_argument(
        "--precision",
        dest="precisions",
        type=flags.parse_precisions,
        metavar="LIST",
        help="comma list of fp32, fp16 (GPUs) and int8 (CPU); the last one that a provider has becomes its default graph (default: all; "
        f"int8 or fp16 becomes the default graph only if it reaches {100 * LOW_AGREEMENT_THRESHOLD:g} %% agreement with the checkpoint)",
    )
    parser.add_argument(
        "--provider",
        dest="providers",
        type=flags.parse_providers,
        default=("cpu",),
        metavar="LIST",
        help=f"comma list of {', '.join(PROVIDERS)}: providers to make graphs for (default: cpu)",
    )
    parser.add_argument("--revision", help="branch, tag or commit of a hub id")
    flags.add_module_flags(
        parser, "instead of SOURCE: a Python file and its function that returns a PyTorch module, a tokenizer file, a task and labels"
    )
    parser.add_argument("--overwrite", action="store_true", help="replace an existing bundle of that name")
    parser.add_argument("--verbose", action="store_true", help="also print the card's tables of measurements")
    parser.add_argument(
        "--metrics-file",
        dest="metrics",
        type=_parse_metrics,
        default=(),
        metavar="FILE",
        help="JSON list of measured metrics for the card: [{name, checkpoint, graphs: {cpu/int8: value}}]",
    )
    _add_int8_flags(parser)
    _add_model_flags(parser)
    return parser


def _add_int8_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--int8-texts",
        type=Path,
        metavar="FILE",
        help="your own texts for int8, at least 16, of which at most 1,000 are used: one per line, or JSON Lines (.jsonl), CSV or TSV "
        "with text and, for pairs, text_pair, or question and context; a third is held out to validate int8 (default: 700 built-in "
        "English texts)",
    )
    parser.add_argument(
        "--int8-validation",
        type=Path,
        metavar="FILE",
        help="your own texts to validate int8, none of which is in --int8-texts (default: a quarter of the texts of --int8-texts)",
    )
    parser.add_argument("--quick", action="store_true", help="make int8 faster but less accurate, without measuring each matrix")
    parser.add_argument(
        "--max-int8-error",
        type=flags.parse_share,
        metavar="SHARE",
        help="maximum error of int8 on held-out texts, as a share of the outputs' standard deviation (default: 0.1); the most sensitive "
        "matrices stay in float until it holds, otherwise the bundle has no int8",
    )


def _add_model_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--layers",
        type=flags.parse_layers,
        metavar="LAYERS",
        help="layers of an embedding model that requests can use: last, last_four, or a comma list such as -4,-3,-2,-1, where -1 is the "
        "last layer and 0 the embedding output (default: last)",
    )
    parser.add_argument(
        "--combine",
        choices=get_args(Combine),
        help="with --layers: how these layers become one vector if a request names no layers (default: the last layer only)",
    )
    parser.add_argument(
        "--attentions",
        action="store_true",
        help="also return attention, for POST /attention; only for the CPU, and slower, because attention is not fused",
    )
    parser.add_argument(
        "--ignore-weights",
        dest="ignored_weights",
        action="append",
        default=[],
        metavar="PATTERN",
        help="weights of the checkpoint that can stay unused, such as 'aux_head.*'; repeat for more patterns (default: only weights of "
        "other known heads of the architecture)",
    )
    parser.add_argument(
        "--token-types",
        choices=get_args(TokenTypes),
        help="token types (segment ids) that the model was trained with: those of its tokenizer's template, or zero (default: those that "
        "the tokenizer gave in the version of transformers in config.json)",
    )
    parser.add_argument(
        "--tracer",
        choices=get_args(Tracer),
        help="PyTorch tracer: dynamo, or the deprecated torchscript (default: dynamo, then torchscript if dynamo fails)",
    )


def _parse_name(text: str) -> str:
    if not re.fullmatch(NAME_PATTERN, text):
        raise argparse.ArgumentTypeError(f"`{text}` is not a valid name, which has {NAME_RULE}")
    return text


def _parse_metrics(path: str) -> tuple[Metric, ...]:
    try:
        return tuple(TypeAdapter(list[Metric]).validate_json(Path(path).read_bytes()))
    except (OSError, ValueError) as error:
        raise argparse.ArgumentTypeError(f"`{path}` is not a list of metrics: {error}") from error


if __name__ == "__main__":
    sys.exit(main())
