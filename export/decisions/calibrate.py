"""Calibrates the graphs of a bundle on labeled data, and writes the result as a new version of the bundle."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bertserve.export.bundle import package_bundle, refuse_existing
from bertserve.export.decisions.outcomes import IDENTITY, Outcomes, Parameters, collect
from bertserve.export.decisions.predictions import SEED, Indices, measure
from bertserve.export.decisions.thresholds import Goal, Miss, choose
from bertserve.export.errors import DataError, ExportError
from bertserve.export.reliability import diagrams, with_section
from bertserve.export.validation.labeled_data import read_data
from bertserve.export.validation.served_graph import ServedGraph, open_graph
from bertserve.export.workspace import workspace
from bertserve.service.bundle.decision import Decision, Threshold
from bertserve.service.bundle.files import CARD_FILE, MANIFEST_FILE, TOKENIZER_FILE, Bundle, load_bundle
from bertserve.service.bundle.graph_spec import GraphSpec
from bertserve.service.bundle.manifest import Manifest
from bertserve.service.engine.sessions import why_not
from bertserve.service.scoring.rows import Row
from bertserve.service.text.tokenizer import Tokenizer

LEAST_EXAMPLES = 100
SCORE_BINS = 20  # of equal width, for the reference of drift: a shift of 0.05 is visible, and 100 examples leave 5 per bin


@dataclass(frozen=True)
class CalibrateSpec:
    """The flags of the command."""

    bundle: Path
    data: Path
    output: Path
    judge: Path | None = None
    goals: Sequence[Goal] = ()
    overwrite: bool = False


@dataclass(frozen=True)
class Labeled:
    """The labeled rows of all files; the rows from `judged_from` on are those of the second file, None with one file."""

    rows: Sequence[Row]
    golds: Sequence[Any]
    judged_from: int | None
    sha256: str


def calibrate(spec: CalibrateSpec, report: Callable[[GraphSpec], None], skip: Callable[[GraphSpec, str], None]) -> Path:
    """Calibrates all graphs that this machine can run, and writes the bundle; returns its folder.

    `report` gets each calibrated graph, and `skip` each other graph with the reason.

    Raises:
        ExportError: The data cannot be used, a calibration is worse than raw scores, or no threshold reaches an aim. Nothing is written.
        BertServeError: The bundle cannot be used, or a graph fails.
    """
    bundle = load_bundle(spec.bundle.resolve())
    tokenizer = Tokenizer(bundle.tokenizer_path, bundle.manifest.tokenizer)
    target = spec.output / bundle.manifest.name
    with workspace(bundle.manifest.name, spec.output) as scratch:
        refuse_existing(target, overwrite=spec.overwrite)
        data = _read(spec, bundle.manifest)
        if all(why_not(graph.provider) is not None for graph in bundle.manifest.graphs):
            raise ExportError(f"this machine can run no graph of `{bundle.path}`; calibrate it where it is served.")
        graphs = []
        for graph in bundle.manifest.graphs:
            if (missing := why_not(graph.provider)) is not None:
                skip(graph, missing)
                graphs.append(graph)
                continue
            raw = graph.model_copy(update={"decision": None})
            served = open_graph(bundle.path, raw, bundle.manifest.tokenizer, tokenizer, bundle.manifest, graph.provider)
            graphs.append(graph.model_copy(update={"decision": decide(served, data, spec.goals)}))
            report(graphs[-1])
        manifest = Manifest.model_validate(bundle.manifest.model_copy(update={"graphs": tuple(graphs)}).model_dump())
        _copy(bundle, scratch / "bundle")
        card = bundle.path / CARD_FILE
        texts = {CARD_FILE: with_section(card.read_text(encoding="utf-8") if card.exists() else f"# {manifest.name}\n", manifest.graphs)}
        texts[MANIFEST_FILE] = manifest.model_dump_json(indent=1) + "\n"
        refuse_existing(target, overwrite=spec.overwrite)  # created meanwhile, on a file system without locks
        package_bundle(scratch / "bundle", target, texts | diagrams(manifest))
    return target


def decide(served: ServedGraph, data: Labeled, goals: Sequence[Goal]) -> Decision:
    """Returns the calibration of a graph with its thresholds.

    Raises:
        DataError: The data cannot calibrate it.
        ExportError: The calibration is worse than raw scores, or no threshold reaches an aim.
    """
    outcomes, name = collect(served, data.rows, data.golds), served.graph.name
    halves = _halves(outcomes.kinds) if data.judged_from is None else np.split(np.arange(len(outcomes)), [data.judged_from])
    fitted, judged = (outcomes.take(half) for half in halves)
    for part in (fitted, judged):
        _refuse_one_kind(part, name)
    parameters = fitted.fit()
    before, after = measure(judged.predictions(IDENTITY)), measure(judged.predictions(parameters))
    if after.log_loss.value > before.log_loss.value:
        raise ExportError(
            f"the calibration of {name} makes the log loss worse: {before.log_loss.value:.4f} becomes {after.log_loss.value:.4f} on the "
            "examples that did not fit it; check that all examples are from the same source, or give more."
        )
    scores, label_counts = judged.reference(parameters)
    scale, bias = parameters
    return Decision(
        method=outcomes.method,
        scale=scale,
        bias=bias,
        fitted=len(fitted),
        judged=len(judged),
        data_sha256=data.sha256,
        before=before,
        after=after,
        thresholds=_thresholds(goals, fitted, judged, parameters, name, with_halves=data.judged_from is None),
        score_counts=tuple(np.histogram(scores, bins=SCORE_BINS, range=(0, 1))[0].tolist()),
        label_counts=dict(label_counts),
    )


def _thresholds(
    goals: Sequence[Goal], fitted: Outcomes, judged: Outcomes, parameters: Parameters, name: str, *, with_halves: bool
) -> tuple[Threshold, ...]:
    chosen, missed = list[Threshold](), list[str]()
    for goal in goals:
        result = choose(goal, fitted.predictions(parameters, goal), judged.predictions(parameters, goal))
        if isinstance(result, Threshold):
            chosen.append(result)
        else:
            missed.append(_describe_miss(goal, result, len(judged) * (2 if with_halves else 1)))
    if missed:
        raise ExportError(f"no threshold of {name} reaches {'; '.join(missed)}. Give more examples, or a lower aim.")
    return tuple(chosen)


def _describe_miss(goal: Goal, miss: Miss, examples: int) -> str:
    needed = (
        "at every threshold the measured share of errors is above the aim, so more examples do not help"
        if miss.more is None
        else f"about {max(miss.more - 1, 0.1) * examples:.0f} more examples can show it"
    )
    return (
        f"`{goal}`: the closest decides {miss.decided:.1%} with {miss.error:.2%} errors, at most {miss.bound:.2%} at 95 % confidence, but the "
        f"aim allows {goal.error:.2%}; {needed}"
    )


def _read(spec: CalibrateSpec, manifest: Manifest) -> Labeled:
    """Returns the lines with a correct answer of the data, and of `--judge`.

    Raises:
        DataError: A file cannot be read, or has fewer than `LEAST_EXAMPLES`.
    """
    rows, golds, starts, content = list[Row](), list[Any](), list[int](), b""
    for path in [spec.data] if spec.judge is None else [spec.data, spec.judge]:
        starts.append(len(rows))
        labeled = [(row, gold) for row, gold in zip(*read_data(path, manifest), strict=True) if gold is not None]
        if len(labeled) < LEAST_EXAMPLES:
            raise DataError(f"`{path}` has {len(labeled)} examples with a right answer; a calibration needs at least {LEAST_EXAMPLES}.")
        rows += [row for row, _ in labeled]
        golds += [gold for _, gold in labeled]
        content += path.read_bytes()
    return Labeled(rows, golds, starts[1] if spec.judge else None, hashlib.sha256(content).hexdigest())


def _halves(kinds: Sequence[str]) -> list[Indices]:
    """Returns two random halves of the examples with equal shares of each kind."""
    shuffled = np.random.default_rng(SEED).permutation(len(kinds)).tolist()
    ordered = np.array(sorted(shuffled, key=lambda example: kinds[example]), dtype=np.int64)
    return [ordered[::2], ordered[1::2]]


def _refuse_one_kind(outcomes: Outcomes, name: str) -> None:
    """Refuses data that says nothing about wrong predictions.

    Raises:
        DataError: All examples have the same label, or all predictions are right or all wrong.
    """
    kinds, right = set(outcomes.kinds), outcomes.predictions(IDENTITY).right
    if outcomes.method in ("temperature", "per-label") and len(kinds) == 1:
        raise DataError(f"all {len(outcomes)} examples have the same label (`{kinds.pop()}`); give examples of each label.")
    if right.all() or not right.any():
        raise DataError(
            f"{name} predicts {'all' if len(right) and right.all() else 'none'} of {len(outcomes)} examples correctly, so its scores cannot "
            "be calibrated; give other examples, some of which are difficult."
        )


def _copy(bundle: Bundle, folder: Path) -> None:
    """Links graphs and tokenizer of a bundle into a new folder, or copies them to another file system."""
    folder.mkdir()
    for name in {TOKENIZER_FILE, *(file.file for graph in bundle.manifest.graphs for file in graph.files)}:
        try:
            os.link(bundle.path / name, folder / name)
        except OSError:  # another file system, or one without links
            shutil.copyfile(bundle.path / name, folder / name)
