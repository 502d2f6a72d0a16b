"""Calibrates the graphs of a bundle on labeled data, and writes the result as a new version of the bundle."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from bertserve.export.bundle import package_bundle, refuse_existing
from bertserve.export.decisions.outcomes import IDENTITY, Example, Outcomes, Parameters, check_aim, check_aims, collect, method_of
from bertserve.export.decisions.predictions import SEED, measure
from bertserve.export.decisions.reliability import diagrams, with_section
from bertserve.export.decisions.thresholds import Aim, choose
from bertserve.export.errors import DataError, ExportError
from bertserve.export.validation.labeled_data import read_data
from bertserve.export.validation.served_graph import open_graph
from bertserve.export.workspace import workspace
from bertserve.service.bundle.decision import Decision, Method, Threshold
from bertserve.service.bundle.files import CARD_FILE, MANIFEST_FILE, TOKENIZER_FILE, Bundle, load_bundle
from bertserve.service.bundle.graph_spec import GraphSpec
from bertserve.service.bundle.manifest import Manifest
from bertserve.service.engine.sessions import why_not
from bertserve.service.tasks import classify
from bertserve.service.tasks.decide import CHOSEN
from bertserve.service.text.tokenizer import Tokenizer

MIN_EXAMPLES = 100  # different inputs of a file; with fewer, an interval is wider than what a calibration changes
SCORE_BINS = 20  # of equal width, for the reference of drift: a shift of 0.05 is visible, and 100 examples leave 5 per bin


@dataclass(frozen=True)
class CalibrateSpec:
    """The flags of the command."""

    bundle: Path
    data: Path
    output: Path
    judge: Path | None = None
    aims: Sequence[Aim] = ()
    overwrite: bool = False


def calibrate(spec: CalibrateSpec, report: Callable[[GraphSpec], None], skip: Callable[[GraphSpec, str], None]) -> Path:
    """Calibrates all graphs that this machine can run, and writes the bundle; returns its folder.

    `report` gets each calibrated graph, and `skip` each other graph with the reason.

    Raises:
        ExportError: The data cannot be used, a calibration is worse than raw scores, or no threshold reaches an aim. Nothing is written.
        BertServeError: The bundle cannot be used, or a graph cannot be opened.
    """
    bundle = load_bundle(spec.bundle.resolve())
    tokenizer = Tokenizer(bundle.tokenizer_path, bundle.manifest.tokenizer)
    target = spec.output / bundle.manifest.name
    with workspace(bundle.manifest.name, spec.output) as scratch:
        refuse_existing(target, overwrite=spec.overwrite)
        method = method_of(bundle.manifest)
        for aim in spec.aims:
            check_aim(aim, bundle.manifest)
        check_aims(spec.aims, method)
        fitted, judged, sha256 = _read(spec, bundle.manifest)
        graphs, calibrated = list[GraphSpec](), False
        for graph in bundle.manifest.graphs:
            if (missing := why_not(graph.provider)) is not None:
                skip(graph, missing)
                graphs.append(graph)
                continue
            raw = graph.model_copy(update={"decision": None})
            served = open_graph(bundle.path, raw, bundle.manifest.tokenizer, tokenizer, bundle.manifest, graph.provider)
            decision = decide(method, collect(served, method, fitted), collect(served, method, judged), graph.name, spec.aims, sha256)
            graphs.append(graph.model_copy(update={"decision": decision}))
            report(graphs[-1])
            calibrated = True
        if not calibrated:
            raise ExportError(f"this machine can run no graph of `{bundle.path}`; calibrate it where it is served.")
        manifest = Manifest.model_validate(bundle.manifest.model_copy(update={"graphs": tuple(graphs)}).model_dump())
        _copy(bundle, scratch / "bundle")
        card = bundle.path / CARD_FILE
        texts = {CARD_FILE: with_section(card.read_text(encoding="utf-8") if card.exists() else f"# {manifest.name}\n", manifest.graphs)}
        texts[MANIFEST_FILE] = manifest.model_dump_json(indent=1) + "\n"
        refuse_existing(target, overwrite=spec.overwrite)  # created meanwhile, on a file system without locks
        package_bundle(scratch / "bundle", target, texts | diagrams(manifest))
    return target


def decide(method: Method, fitted: Outcomes, judged: Outcomes, name: str, aims: Sequence[Aim], sha256: str) -> Decision:
    """Returns the calibration of a graph with its thresholds.

    Raises:
        DataError: The data cannot calibrate it.
        ExportError: The calibration is worse than raw scores, or no threshold reaches an aim.
    """
    for part in (fitted, judged):
        correct = part.predictions(IDENTITY).correct
        if correct.all() or not correct.any():
            raise DataError(
                f"{name} predicts {'all' if correct.any() else 'none'} of the examples correctly, so its scores cannot be calibrated; give "
                "other examples, some of which are difficult."
            )
    parameters = fitted.fit()
    predictions = judged.predictions(parameters)
    before, after = measure(judged.predictions(IDENTITY)), measure(predictions)
    if after.log_loss.value > before.log_loss.value:
        raise ExportError(
            f"the calibration of {name} makes the log loss worse: {before.log_loss.value:.4f} becomes {after.log_loss.value:.4f} on the "
            "examples that did not fit it; check that all examples are from the same source, or give more."
        )
    scores, label_counts = predictions.scores, Counter[str]()
    for label, score in zip(predictions.labels.tolist(), scores.tolist(), strict=True):
        label_counts[label] += method != "per-label" or score >= CHOSEN
    if method == "per-label":
        scores = scores.reshape(predictions.count, -1).max(axis=1)
    return Decision(
        method=method,
        scale=parameters[0],
        bias=parameters[1],
        fitted=fitted.predictions(IDENTITY).count,
        judged=predictions.count,
        data_sha256=sha256,
        before=before,
        after=after,
        thresholds=tuple(_thresholds(name, fitted, judged, parameters, aims)),
        score_counts=tuple(np.histogram(scores, bins=SCORE_BINS, range=(0, 1))[0].tolist()),
        label_counts=dict(label_counts),
    )


def _thresholds(name: str, fitted: Outcomes, judged: Outcomes, parameters: Parameters, aims: Sequence[Aim]) -> list[Threshold]:
    chosen, missed = list[Threshold](), list[str]()
    for aim in aims:
        parts = [part.predictions(parameters, aim) for part in (fitted, judged)]
        if not all(part.correct.any() for part in parts):
            raise DataError(
                f"`{aim}`: {name} finds no correct `{aim.label}` in a half of the examples; give more examples with this label."
            )
        result = choose(aim, *parts)
        if isinstance(result, Threshold):
            chosen.append(result)
            continue
        needed = (
            "at every threshold the measured share of errors is above the aim, so more examples do not help"
            if result.more is None
            else f"about {result.more} more examples that judge (all of --judge, or half of --data) can show it"
        )
        missed.append(
            f"`{aim}`: the closest decides {result.decided:.1%} with {result.error:.2%} errors, and the aim is {aim.error:.2%}; {needed}"
        )
    if missed:
        raise ExportError(f"no threshold of {name} reaches {'; '.join(missed)}. Give more examples, or an aim that is easier to reach.")
    return chosen


def _read(spec: CalibrateSpec, manifest: Manifest) -> tuple[list[Example], list[Example], str]:
    """Returns the examples that fit and those that judge, and the digest of their files.

    Raises:
        DataError: A file cannot be read, has too few examples, or only one label, or the files have the same texts.
    """
    parts, digest = list[list[Example]](), hashlib.sha256()
    for path in [spec.data] if spec.judge is None else [spec.data, spec.judge]:
        part = [Example(row, correct) for row, correct in zip(*read_data(path, manifest), strict=True) if correct is not None]
        if (count := len({example.text for example in part})) < MIN_EXAMPLES:
            raise DataError(f"`{path}` has {count} different inputs with a correct answer; a calibration needs at least {MIN_EXAMPLES}.")
        if manifest.task == classify.TASK and len({example.kind for example in part}) == 1:
            raise DataError(f"all examples of `{path}` have the same label; give examples of each label.")
        parts.append(part)
        digest.update(path.read_bytes())
    if spec.judge is None:
        return *split(parts[0]), digest.hexdigest()
    fitting = {example.text for example in parts[0]}
    if shared := [example.row.line for example in parts[1] if example.text in fitting]:
        raise DataError(
            f"{len(shared)} inputs of `{spec.judge}` are in `{spec.data}` too, the first one in line {shared[0]}; remove them, because examples "
            "that judge must be new."
        )
    return parts[0], parts[1], digest.hexdigest()


def split(examples: Sequence[Example]) -> tuple[list[Example], list[Example]]:
    """Returns two random halves with equal shares of each kind. Copies of an input are in the same half."""
    order = np.random.default_rng(SEED).permutation(len(examples)).tolist()
    halves, half_of = (list[Example](), list[Example]()), dict[str, int]()
    for example in sorted((examples[i] for i in order), key=lambda example: example.kind):
        halves[half_of.setdefault(example.text, len(half_of) % 2)].append(example)
    return halves


def _copy(bundle: Bundle, folder: Path) -> None:
    """Links graphs and tokenizer of a bundle into a new folder, or copies them to another file system."""
    folder.mkdir()
    for name in {TOKENIZER_FILE, *(file.file for graph in bundle.manifest.graphs for file in graph.files)}:
        try:
            os.link(bundle.path / name, folder / name)
        except OSError:  # another file system, or one without links
            shutil.copyfile(bundle.path / name, folder / name)
