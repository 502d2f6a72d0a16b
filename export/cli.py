"""bert-export: flags to an ExportSpec, progress, the evidence, exit codes; `bert-export verify` is in `verify_cli`.

Exit codes: 0 done, 1 the export failed, 2 wrong usage or an existing bundle, 3 a needed package is not installed, 130 and 143
stopped by SIGINT or SIGTERM.
"""

from __future__ import annotations

import argparse
import re
import signal
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, get_args

from export import flags, verify_cli
from export.errors import ExportError
from export.precisions import choose_precisions
from export.signals import Stopped, raise_on_signals
from service import __version__
from service.bundle.manifest import NAME_PATTERN, Figure, Layers, read_figures
from service.tasks import catalog

if TYPE_CHECKING:
    from service.bundle.manifest import Manifest

TASKS = tuple(name for name, spec in catalog.TASKS.items() if spec.derivation is None)
VERIFY = "verify"  # as the first argument; a folder of that name can be exported as ./verify
PACKAGES = ("torch", "transformers", "onnx", "onnxruntime")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        with raise_on_signals():
            return verify_cli.main(arguments[1:]) if arguments[:1] == [VERIFY] else _export(arguments)
    except (Stopped, KeyboardInterrupt) as error:
        stopped = error if isinstance(error, Stopped) else Stopped(signal.SIGINT)
        print(f"bert-export: stopped by {stopped.signal.name}; nothing is left behind.", file=sys.stderr)
        return stopped.exit_code


def _export(argv: Sequence[str]) -> int:
    """Checks flags and packages before the export; returns the exit code."""
    parser = _parser()
    args = parser.parse_args(argv)
    try:
        choose_precisions(args.provider, args.precision)
    except ValueError as error:
        parser.error(f"argument --precision: {error}")
    missing = [module for module in PACKAGES if find_spec(module) is None]
    if missing:
        print(
            f"bert-export: {', '.join(missing)} not installed; exporting needs the export extra: pip install 'bertserve[export,cpu]'",
            file=sys.stderr,
        )
        return 3
    return _run(args)


def _run(args: argparse.Namespace) -> int:
    """Exports as the flags say and prints the evidence; returns the exit code."""
    # torch and transformers take seconds to import, and --help and wrong flags must not wait for them
    from export.pipeline import ExportSpec, export

    spec = ExportSpec(
        source=args.source,
        output=args.output,
        name=args.name,
        task=args.task,
        precisions=args.precision,
        providers=args.provider,
        revision=args.revision,
        overwrite=args.overwrite,
        figures=args.figures,
        **{name: value for name in ("calibration", "max_int8_error", "layers") if (value := getattr(args, name)) is not None},
    )
    try:
        target, manifest = export(spec, lambda line: print(line, file=sys.stderr, flush=True))
    except ExportError as error:
        print(f"bert-export: {error}", file=sys.stderr)
        return error.exit_code
    except OSError as error:
        where = error.filename or spec.output  # the error of a failed write, as on a full disk, does not name its file
        print(
            f"bert-export: cannot write the bundle: {error.strerror or error} (`{where}`); make room or give another --output. "
            "Nothing is left behind.",
            file=sys.stderr,
        )
        return 1
    _print_evidence(target, manifest)
    return 0


def _print_evidence(target: Path, manifest: Manifest) -> None:
    """Prints a few lines for each graph of a finished bundle."""
    print(f"{target}: {manifest.task}" + (f", labels {', '.join(manifest.labels)}" if manifest.labels else ""))
    for graph in manifest.graphs:
        evidence = graph.evidence
        spans = "" if evidence.span_agreement is None else f", {evidence.spans} spans with an F1 of {evidence.span_agreement:.4f}"
        print(
            f"  {graph.file}  {sum((target / file.file).stat().st_size for file in graph.files) / 2**20:.1f} MiB{'  default' if graph.default else ''}\n"
            f"    worst logit error to PyTorch {evidence.worst_abs_error:.1e}, answers agree on {evidence.label_agreement:.1%} of "
            f"{evidence.samples} samples{spans}, row in batch against row alone {evidence.worst_row_error:.1e}"
            f" ({'batch-invariant' if graph.batch_invariant else 'not batch-invariant'})\n"
            f"    {evidence.nodes} nodes; fused {evidence.fusions}; quantized {evidence.quantized or 'none'}"
            + (f", which moves the outputs by {evidence.quantization_error:.3f} of their spread" if evidence.quantized else "")
            + ("" if evidence.provider == graph.provider else f"; measured on {evidence.provider}, for {graph.provider} was not there")
        )
        if evidence.lengths:
            print("    worst logit error by tokens: " + ", ".join(f"{e.up_to}: {e.worst_abs_error:.1e}" for e in evidence.lengths))
        if evidence.speed:
            times = ", ".join(f"{timing.length}: {timing.median_ms:.1f}" for timing in evidence.speed.timings)
            print(f"    milliseconds by tokens, {evidence.speed.threads} thread, {evidence.speed.cpu}: {times}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="bert-export",
        description="Export a fine-tuned checkpoint to a bundle that bert-serve serves.",
        epilog="`bert-export verify BUNDLE` checks a bundle again; see `bert-export verify --help`.",
    )
    parser.add_argument("--version", action="version", version=f"bert-export {__version__}")
    parser.add_argument("source", metavar="SOURCE", help="a local checkpoint folder, or a hub id such as org/model")
    parser.add_argument(
        "--output", metavar="MODELS_DIR", type=Path, required=True, help="the models folder; the bundle is written to MODELS_DIR/NAME/"
    )
    parser.add_argument("--name", type=_parse_name, help="name of the bundle (default: the last part of SOURCE)")
    parser.add_argument(
        "--task",
        choices=("auto", *TASKS),
        default="auto",
        help="what the checkpoint was fine-tuned for (default: read from its architecture)",
    )
    parser.add_argument(
        "--precision",
        type=flags.parse_precisions,
        metavar="LIST",
        help="comma list of fp32, fp16, int8; fp16 is for GPUs, int8 for the CPU; of each provider the last that it has is the default "
        "graph (default: all)",
    )
    parser.add_argument(
        "--provider",
        type=flags.parse_providers,
        default=("cpu",),
        metavar="LIST",
        help="comma list of cpu, cuda, tensorrt: what to make graphs for (default: cpu)",
    )
    parser.add_argument("--revision", help="branch, tag or commit of a hub id")
    parser.add_argument("--overwrite", action="store_true", help="replace an existing bundle of that name")
    parser.add_argument(
        "--figures",
        type=_parse_figures,
        default=(),
        metavar="FILE",
        help="JSON list of measured figures for the card: [{name, checkpoint, graphs: {cpu/int8: value}}]",
    )
    parser.add_argument(
        "--calibration",
        type=Path,
        metavar="FILE",
        help="texts of your own, one a line, to choose the int8 scales on (default: 700 English texts that come with bertserve)",
    )
    parser.add_argument(
        "--layers",
        choices=get_args(Layers),
        help="of an embedding model: give out the last layer, or the last four side by side too (default: last)",
    )
    parser.add_argument(
        "--max-int8-error",
        type=flags.parse_share,
        metavar="SHARE",
        help="how far int8 may move the outputs on the calibration texts, as a share of their standard deviation (default: 0.1); "
        "the matrices that matter most stay in float until it holds",
    )
    return parser


def _parse_name(text: str) -> str:
    if not re.fullmatch(NAME_PATTERN, text):
        raise argparse.ArgumentTypeError(f"`{text}` does not match {NAME_PATTERN}")
    return text


def _parse_figures(path: str) -> tuple[Figure, ...]:
    try:
        return read_figures(Path(path).read_bytes())
    except (OSError, ValueError) as error:
        raise argparse.ArgumentTypeError(f"`{path}` is not a list of figures: {error}") from error


if __name__ == "__main__":
    sys.exit(main())
