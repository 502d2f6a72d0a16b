"""bert-export calibrate: turns flags into a CalibrateSpec; prints the results, returns exit codes.

Exit codes: 0 the bundle is written, 1 it is not, because a calibration is worse or an aim is not reached, 2 wrong usage or data, 3 a required
package is not installed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

from bertserve.export import flags
from bertserve.export.decisions import reliability
from bertserve.export.decisions.thresholds import Aim
from bertserve.export.errors import ExportError
from bertserve.service.bundle.decision import AimName
from bertserve.service.bundle.graph_spec import GraphSpec
from bertserve.service.errors import BertServeError
from bertserve.service.flag_parser import FlagParser


def main(argv: Sequence[str]) -> int:
    """Runs the command; returns its exit code."""
    args = build_parser().parse_args(argv)
    if flags.report_missing(["onnxruntime"], "calibrating needs it", "cpu"):
        return 3
    # importing onnxruntime takes a while, and --help and wrong flags do not need it
    from bertserve.export.decisions.calibrate import CalibrateSpec, calibrate

    try:
        target = calibrate(CalibrateSpec(**vars(args)), _report, _skip)
    except (ExportError, BertServeError) as error:
        print(f"bert-export: {error}", file=sys.stderr)
        return error.exit_code if isinstance(error, ExportError) else 1
    except OSError as error:
        print(
            f"bert-export: cannot write the bundle: {error.strerror or error} (`{error.filename or args.output}`); free disk space, or give "
            "another --output. No partial files are left.",
            file=sys.stderr,
        )
        return 1
    print(f"{target}: written, with a reliability diagram in its README.md")
    return 0


def _report(graph: GraphSpec) -> None:
    decision = graph.decision
    assert decision is not None, "it was just calibrated"
    print(f"{graph.name}: {reliability.describe(decision)}")
    for name, before, after in reliability.qualities(decision):
        print(f"  {name:<11} {before} -> {after}")
    for threshold in decision.thresholds:
        print(f"  {reliability.describe_threshold(threshold)}")


def _skip(graph: GraphSpec, reason: str) -> None:
    print(f"bert-export: {graph.name} is not calibrated: {reason}", file=sys.stderr)


def build_parser() -> argparse.ArgumentParser:
    """Returns the parser of the command."""
    parser = FlagParser(
        prog="bert-export calibrate",
        description="Calibrate the scores of a bundle on labeled data, and choose thresholds with a guarantee.",
        epilog="To export a local folder named calibrate, write ./calibrate.",
    )
    parser.add_argument("bundle", metavar="BUNDLE", type=Path, help="folder of the bundle, such as models/sentiment")
    parser.add_argument(
        "--data",
        metavar="FILE",
        type=Path,
        required=True,
        help="JSON Lines of inputs with correct answers, as for `verify --data`, at least 100: one half fits the calibration, the other judges it",
    )
    parser.add_argument(
        "--judge", metavar="FILE", type=Path, help="examples to judge by, so that all of --data fit (default: a half of --data)"
    )
    parser.add_argument(
        "--aim",
        dest="aims",
        type=_parse_aim,
        action="append",
        default=[],
        metavar="[LABEL:]AIM=SHARE",
        help="choose a threshold that reaches this with 95 %% confidence: precision=0.98, max-error=0.02, recall=0.9 of a label, or "
        "coverage=0.95 for sets of labels; repeat for more aims",
    )
    parser.add_argument(
        "--output", metavar="MODELS_DIR", type=Path, required=True, help="models folder; the bundle is written to MODELS_DIR/NAME/"
    )
    parser.add_argument("--overwrite", action="store_true", help="replace an existing bundle of that name")
    return parser


def _parse_aim(text: str) -> Aim:
    name, equals, share = text.rpartition("=")
    label, _, aim_name = name.rpartition(":")
    aim: AimName | None = next((aim for aim in get_args(AimName) if aim == aim_name), None)
    if not equals or aim is None:
        raise argparse.ArgumentTypeError(f"`{text}` is not [LABEL:]AIM=SHARE with one of the aims {', '.join(get_args(AimName))}")
    target = flags.parse_positive(share)
    if target == 1:
        raise argparse.ArgumentTypeError(f"`{text}` cannot be shown by examples; give a share below 1")
    if aim == "coverage" and label:
        raise argparse.ArgumentTypeError(f"`{text}` is for sets of all labels; remove `{label}:`")
    return Aim(aim, target, label or None)
