"""bert-export calibrate: reads flags and returns exit codes (docs/reference/export-flags.md)."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from bertserve.export import flags
from bertserve.export.errors import ExportError, report_error
from bertserve.service.errors import BertServeError
from bertserve.service.flag_parser import FlagParser


def main(argv: Sequence[str]) -> int:
    """Runs the command; returns its exit code."""
    args = build_parser().parse_args(argv)
    if flags.report_missing(["onnxruntime", "scipy"], "calibrating needs them", "cpu", "export"):
        return 3
    # importing these packages takes a while, and --help and wrong flags do not need them
    from bertserve.export.score_calibration.calibrate import calibrate

    try:
        target = calibrate(**vars(args))
    except (ExportError, BertServeError, OSError) as error:
        return report_error(error, args.output)
    print(f"{target}: written, with a reliability diagram in its README.md")
    if not args.aims:
        print("no threshold was chosen: `decide` needs --aim, such as `--aim max-error=0.02`, or a threshold in each request")
    return 0


def build_parser() -> argparse.ArgumentParser:
    """Returns the parser of the command."""
    parser = FlagParser(
        prog="bert-export calibrate",
        description="Calibrate the scores of a bundle on labeled data, and choose thresholds with a guarantee.",
        epilog="To export a local folder named calibrate, write ./calibrate.",
    )
    parser.add_argument("bundle_folder", metavar="BUNDLE", type=Path, help="folder of the bundle, such as models/sentiment")
    parser.add_argument(
        "--data",
        metavar="FILE",
        type=Path,
        required=True,
        help="JSON Lines of inputs with correct answers, as for `verify --data`, at least 100: one half fits the calibration, the other "
        "tests it",
    )
    parser.add_argument(
        "--test-data",
        metavar="FILE",
        type=Path,
        help="at least 100 other examples for the test; all of --data then fits the calibration (default: one half of --data)",
    )
    parser.add_argument(
        "--aim",
        dest="aims",
        type=flags.parse_aim,
        action="append",
        default=[],
        metavar="[LABEL:]AIM=SHARE",
        help="choose a threshold that reaches this with 95 %% confidence: precision=0.98, max-error=0.02, recall=0.9 of a label, or "
        "coverage=0.95 for sets of labels; one per label if labels do not exclude each other",
    )
    parser.add_argument("--output", metavar="MODELS_DIR", type=Path, required=True, help="models folder; the bundle is MODELS_DIR/NAME/")
    parser.add_argument("--overwrite", action="store_true", help="replace an existing bundle of that name")
    return parser
