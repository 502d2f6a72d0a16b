"""Calibrates the graphs of a bundle on labeled data, and writes the result as a new version of the bundle."""

import hashlib
import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from bertserve.export.errors import ExportError, UsageError, log
from bertserve.export.flags import Aim
from bertserve.export.model_card import bundle_texts, describe_calibration, read_quote
from bertserve.export.score_calibration.fitting import SEED, fit, measure_quality
from bertserve.export.score_calibration.scores import RAW, Outcomes, choose_method, collect
from bertserve.export.score_calibration.thresholds import check_aims, choose_threshold
from bertserve.export.validation.labeled_data import LabeledRow, read_data
from bertserve.export.validation.served_graph import open_graph
from bertserve.export.workspace import package_bundle, workspace
from bertserve.service.bundle.calibration import Calibration
from bertserve.service.bundle.files import CARD_FILE, TOKENIZER_FILE, load_bundle
from bertserve.service.bundle.graph_spec import GraphSpec
from bertserve.service.bundle.manifest import Manifest
from bertserve.service.engine.sessions import unavailable_reason
from bertserve.service.tasks import classify
from bertserve.service.tasks.decide import DEFAULT_THRESHOLD
from bertserve.service.text.tokenizer import Tokenizer

MIN_EXAMPLES = 100  # different inputs of a file; with fewer, intervals are wider than the change by a calibration
SCORE_BINS = 20  # bins of equal width for the reference of drift: they show a shift of 0.05, and 100 examples leave 5 per bin


def calibrate(bundle_folder: Path, data: Path, output: Path, *, test_data: Path | None, aims: Sequence[Aim], overwrite: bool) -> Path:
    """Calibrates all graphs that this machine can run, prints the results, and writes the bundle; returns its folder.

    Raises:
        ExportError: The data cannot be used, a calibration is worse than raw scores, or no threshold reaches an aim. Nothing is written.
        BertServeError: The bundle cannot be used, or a graph cannot be opened.
    """
    bundle = load_bundle(bundle_folder.resolve())
    manifest = bundle.manifest
    tokenizer = Tokenizer(bundle.tokenizer_path, manifest.tokenizer)
    target = output / manifest.name
    with workspace(manifest.name, output, overwrite=overwrite) as scratch:
        method = choose_method(manifest)
        check_aims(aims, method, manifest)
        fit_rows, test_rows = _examples(data, test_data, manifest)
        digest = hashlib.sha256(b"".join(path.read_bytes() for path in (data, test_data) if path is not None)).hexdigest()
        graphs = list[GraphSpec]()
        for graph in manifest.graphs:
            raw = graph.model_copy(update={"calibration": None})
            if (missing := unavailable_reason(graph.provider)) is not None:
                # its earlier thresholds are for other aims or examples than the other graphs' thresholds
                removed = "" if graph.calibration is None else " Its earlier calibration is removed."
                log(f"{graph.name} is not calibrated: {missing}{removed}")
                graphs.append(raw)
                continue
            served = open_graph(bundle.path, raw, tokenizer, manifest, graph.provider)
            fitted, tested = (collect(served, method, rows) for rows in (fit_rows, test_rows))
            calibration = fit_and_test(fitted, tested, graph.name, aims, digest)
            print(f"{graph.name}: {describe_calibration(calibration)}")
            graphs.append(graph.model_copy(update={"calibration": calibration}))
        if all(graph.calibration is None for graph in graphs):
            raise ExportError(f"this machine can run no graph of `{bundle.path}`; calibrate it where it is served.")
        manifest = Manifest.model_validate(manifest.model_copy(update={"graphs": tuple(graphs)}).model_dump())
        (scratch / "bundle").mkdir()
        for name in {TOKENIZER_FILE, *(file.file for graph in graphs for file in graph.files)}:
            shutil.copyfile(bundle.path / name, scratch / "bundle" / name)
        texts = bundle_texts(manifest, bundle.path, read_quote(bundle.path / CARD_FILE))
        package_bundle(scratch / "bundle", target, texts, overwrite=overwrite)
    return target


def fit_and_test(fitted: Outcomes, tested: Outcomes, graph_name: str, aims: Sequence[Aim], data_sha256: str) -> Calibration:
    """Returns the calibration of a graph with its thresholds, from the outcomes of the rows that fit it and of the rows that test it.

    Raises:
        UsageError: The data cannot calibrate it.
        ExportError: The calibration is worse than raw scores, or no threshold reaches an aim.
    """
    for part in (fitted, tested):
        correct = part.predictions(RAW).correct
        if correct.all() or not correct.any():
            raise UsageError(
                f"{graph_name} predicts {'all' if correct.any() else 'none'} of the examples correctly, so its scores cannot be "
                "calibrated; give other examples, some of which are difficult."
            )
    parameters = fit(fitted)
    predictions = tested.predictions(parameters)
    before, after = measure_quality(tested.predictions(RAW)), measure_quality(predictions)
    if after.log_loss.value > before.log_loss.value:
        raise ExportError(
            f"the calibration of {graph_name} makes the log loss worse: {before.log_loss.value:.4f} becomes {after.log_loss.value:.4f} on "
            "the examples that did not fit it; check that all examples are from the same source, or give more."
        )
    thresholds = []
    for aim in aims:
        counted = tested.labels if aim.name == "coverage" else None if aim.label is None else [aim.label]
        thresholds.append(choose_threshold(aim, graph_name, *(part.predictions(parameters, counted) for part in (fitted, tested))))
    scores, labels = predictions.scores, predictions.labels
    if tested.method == "per-label":
        labels = labels[scores >= DEFAULT_THRESHOLD]
        scores = scores.reshape(predictions.count, -1).max(axis=1)
    return Calibration(
        method=tested.method,
        scale=parameters.scale,
        bias=parameters.bias,
        fitted=fitted.predictions(RAW).count,
        tested=predictions.count,
        data_sha256=data_sha256,
        before=before,
        after=after,
        thresholds=tuple(thresholds),
        score_counts=tuple(np.histogram(scores, bins=SCORE_BINS, range=(0, 1))[0].tolist()),
        label_counts={label: int((labels == label).sum()) for label in np.unique(predictions.labels).tolist()},
    )


def _examples(data: Path, test_data: Path | None, manifest: Manifest) -> tuple[list[LabeledRow], list[LabeledRow]]:
    """Returns the rows that fit a calibration and the rows that test it; refuses too few examples, one label, or shared inputs."""
    parts = list[list[LabeledRow]]()
    for path in [data] if test_data is None else [data, test_data]:
        rows = read_data(path, manifest)
        part = [row for row in rows if row.gold is not None]
        if without := len(rows) - len(part):
            log(f"{without} of {len(rows)} lines of `{path}` are left out: they have no correct answer")
        if (count := len({example.text for example in part})) < MIN_EXAMPLES:
            raise UsageError(f"`{path}` has {count} different inputs with a correct answer; a calibration needs at least {MIN_EXAMPLES}.")
        if manifest.task == classify.TASK and len({example.kind for example in part}) == 1:
            raise UsageError(f"all examples of `{path}` have the same label; give examples of each label.")
        if contradictions := len({(example.text, example.kind) for example in part}) - count:
            log(f"{contradictions} inputs of `{path}` have another label in another line; correct the wrong one")
        parts.append(part)
    fit_rows, test_rows = parts if len(parts) == 2 else split(parts[0])
    fit_texts = {example.text for example in fit_rows}
    if shared := [example.line for example in test_rows if example.text in fit_texts]:
        raise UsageError(
            f"{len(shared)} inputs of `{test_data}` are in `{data}` too, the first one in line {shared[0]}; remove them, because test "
            "examples must not be in --data."
        )
    return fit_rows, test_rows


def split(examples: Sequence[LabeledRow]) -> tuple[list[LabeledRow], list[LabeledRow]]:
    """Returns two random halves with equal shares of each kind. Copies of an input are in the same half."""
    order = np.random.default_rng(SEED).permutation(len(examples)).tolist()
    halves, half_of = (list[LabeledRow](), list[LabeledRow]()), dict[str, int]()
    for example in sorted((examples[i] for i in order), key=lambda example: example.kind):
        halves[half_of.setdefault(example.text, len(half_of) % 2)].append(example)
    return halves
