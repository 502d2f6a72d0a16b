"""bert-export verify: turns flags into VerifyOptions; prints the report, returns exit codes (docs/reference/export-flags.md)."""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from bertserve.export import flags
from bertserve.export.errors import ExportError, report_error
from bertserve.export.tasks import EXPORT_TASKS
from bertserve.service.flag_parser import FlagParser
from bertserve.service.providers import PROVIDERS

# the metrics for data with correct answers: their names in `--min-metric`, and their full names
METRICS = {
    name.removesuffix(" correlation").lower().replace(" ", "-"): name for task in EXPORT_TASKS.values() for name in task.metric_names
}


def main(argv: Sequence[str]) -> int:
    """Runs the command; returns its exit code."""
    parser = build_parser()
    args = parser.parse_args(argv)
    _check_flags(parser, args)
    checkpoint = args.checkpoint or args.module
    packages, extras = ["onnxruntime"], ["cpu"]
    if checkpoint is not None:
        packages, extras = ["torch", "transformers", "sentencepiece", "onnx", *packages], ["export", *extras]
    if flags.report_missing(packages, "verifying needs the listed extras", *extras):
        return 3
    # importing onnxruntime takes a while, and --help and wrong flags do not need it
    from bertserve.export.validation.verify import VerifyOptions, VerifyReport, verify

    values = {"checkpoint": checkpoint, "module": args.module is not None, "min_metrics": dict(args.min_metrics)}
    options = VerifyOptions(**{name: value for name, value in (vars(args) | values).items() if name not in ("json", "trust_module")})
    report = VerifyReport(as_json=args.json)
    try:
        verify(options, report)
    except (ExportError, OSError) as error:
        return report_error(error, args.bundle_folder)
    if args.json:
        print(json.dumps({"bundle": str(args.bundle_folder), "passed": report.passed, "checks": report.checks}, indent=1), flush=True)
    return 0 if report.passed else 1


def _check_flags(parser: FlagParser, args: argparse.Namespace) -> None:
    has_module, has_checkpoint = args.module is not None, args.checkpoint is not None
    if args.checkpoint == "":
        parser.error("--checkpoint is empty; give a folder or hub id, or remove it")
    if args.data is None and (args.min_agreement or args.min_metrics):
        parser.error("--min-agreement and --min-metric need --data; give it too")
    if len(dict(args.min_metrics)) < len(args.min_metrics):
        parser.error("--min-metric has a duplicate metric; give each once")
    if has_module and has_checkpoint:
        parser.error("--module replaces --checkpoint; remove one of them")
    flags.check_module_flags(parser, args)
    if args.revision is not None and not has_checkpoint:
        parser.error("--revision is for the hub id of --checkpoint; give --checkpoint too")
    if args.update and (not (has_checkpoint or has_module) or args.providers or args.precisions):
        parser.error("--update measures all graphs; give --checkpoint or --module, and neither --provider nor --precision")
    if args.int8_validation is not None and not args.update:
        parser.error("--int8-validation needs --update; give both")


def build_parser() -> FlagParser:
    """Returns the parser of `bert-export verify`."""
    parser = FlagParser(
        prog="bert-export verify",
        description="Check a bundle again: digests, the stored example, rows in batches, and the references that you give.",
        epilog="To export a local folder named verify, write ./verify.",
    )
    parser.add_argument("bundle_folder", metavar="BUNDLE", type=Path, help="folder of the bundle, such as models/sentiment")
    parser.add_argument("--checkpoint", metavar="SOURCE", help="folder or hub id of the checkpoint: compare each graph with PyTorch again")
    parser.add_argument("--revision", help="branch, tag or commit of the hub id of --checkpoint")
    flags.add_module_flags(parser, "instead of --checkpoint: the --module of the bundle's export")
    parser.add_argument(
        "--data",
        metavar="FILE",
        type=Path,
        help='JSON Lines of inputs such as {"text": ...}, with or without the correct answers: measures agreement with the checkpoint or '
        "the fp32 graph, and quality metrics",
    )
    parser.add_argument("--min-agreement", type=flags.parse_share, metavar="SHARE", help="minimum agreement of each graph on the data")
    parser.add_argument(
        "--min-metric",
        dest="min_metrics",
        type=_parse_minimum,
        action="append",
        default=[],
        metavar="METRIC=SHARE",
        help="minimum of a metric of each graph on the data, such as matthews=0.55; repeat for more metrics: " + ", ".join(METRICS),
    )
    parser.add_argument(
        "--provider",
        dest="providers",
        type=flags.parse_providers,
        metavar="LIST",
        help=f"comma list of {', '.join(PROVIDERS)}: check only the graphs for these providers, which must be available (default: all "
        "graphs, on the CPU if their provider is unavailable)",
    )
    parser.add_argument(
        "--precision",
        dest="precisions",
        type=flags.parse_precisions,
        metavar="LIST",
        help="comma list of fp32, fp16, int8: check only these graphs (default: all)",
    )
    parser.add_argument(
        "--update",
        action="store_true",
        help="if all checks pass, measure again and update manifest and card; needs --checkpoint or --module",
    )
    parser.add_argument(
        "--int8-validation",
        metavar="FILE",
        type=Path,
        help="with --update: texts to validate int8, none of which it was made with (default: those of the export, if they are built in)",
    )
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    return parser


def _parse_minimum(text: str) -> tuple[str, float]:
    name, equals, share = text.partition("=")
    if not equals or name.lower() not in METRICS:
        raise argparse.ArgumentTypeError(f"`{text}` is not METRIC=SHARE, such as accuracy=0.9; the metrics are {', '.join(METRICS)}")
    return METRICS[name.lower()], flags.parse_share(share)
