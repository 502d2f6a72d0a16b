"""Checks a bundle again, graph by graph: its files, its stored example, its batches, its checkpoint, and the user's own data."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from bertserve.export.verify.data_checks import Baseline, check_data, check_labels, fp32_baseline, read_dataset
from bertserve.export.verify.graph_checks import (
    BundleCheck,
    LoadedGraph,
    check_batches,
    check_engine,
    check_example,
    check_validation_report,
    choose_graphs,
    choose_provider,
)
from bertserve.service.bundle.files import Bundle, load_bundle
from bertserve.service.bundle.graph_spec import GraphSpec, Precision
from bertserve.service.errors import BertServeError, plural
from bertserve.service.providers import Provider


@dataclass(frozen=True)
class VerifySpec:
    """The options of a verification.

    Attributes:
        bundle: The bundle's folder.
        checkpoint: Its checkpoint: a folder or a hub id, or for a module `FILE:FACTORY`.
        data: JSONL of inputs, see `export/verify/data_checks.py`.
        min_agreement: Minimum agreement of each graph on the data, by the measure of the task.
        providers: Checks the graphs for these providers, each on its provider; None for all graphs, on the available providers.
        precisions: Checks the graphs with these precisions; None for all.
        min_metrics: Metric -> the minimum for each graph on the data.
        revision: Branch, tag or commit of a hub id.
        module: Whether `checkpoint` is a module, whose code is trusted and executed.
    """

    bundle: Path
    checkpoint: str | None = None
    data: Path | None = None
    min_agreement: float | None = None
    providers: tuple[Provider, ...] | None = None
    precisions: tuple[Precision, ...] | None = None
    min_metrics: Mapping[str, float] = field(default_factory=dict)
    revision: str | None = None
    module: bool = False


def verify(spec: VerifySpec) -> Iterator[BundleCheck]:
    """Runs the checks one by one on request; checks that depend on a failed one are left out.

    Raises:
        DataError: The data cannot be read, or a line cannot be answered.
        CheckpointError: The checkpoint cannot be loaded.
        MissingPackageError: The checkpoint is a LoRA adapter, and peft is not installed.
    """
    try:
        bundle = load_bundle(spec.bundle.resolve())
    except BertServeError as error:
        yield BundleCheck("files", False, error.message)
        return
    manifest = bundle.manifest
    # read before the checks, which take minutes
    lines = [] if spec.data is None else read_dataset(spec.data, manifest.task, manifest)
    yield BundleCheck("files", True, f"the digests of the tokenizer and {plural(len(manifest.graphs), 'graph')} match the manifest")
    if lines:
        yield check_labels(lines, manifest.task, needed=spec.min_agreement is None and spec.checkpoint is None)
    try:
        graphs = choose_graphs(bundle, spec.providers, spec.precisions)
    except BertServeError as error:
        yield BundleCheck("graphs", False, error.message)
        return
    usable = []
    for graph in graphs:
        loaded = yield from _check_graph(bundle, graph, requested=spec.providers is not None)
        if loaded is not None:
            usable.append(loaded)
        else:
            yield from _not_measured(graph, spec)
    if not usable:
        return
    baseline: Baseline | None = None
    if spec.checkpoint is not None:
        # importing torch and transformers takes seconds, and the other checks need neither
        from bertserve.export.verify import checkpoint_checks

        checkpoint = checkpoint_checks.load_checkpoint_of(bundle, spec.checkpoint, revision=spec.revision, module=spec.module)
        yield from checkpoint_checks.check_parity(usable, checkpoint)
        baseline = Baseline("the checkpoint", partial(checkpoint_checks.answer, checkpoint, usable[0].tokenizer))
    if lines:
        yield from check_data(usable, baseline or fp32_baseline(bundle, usable), lines, spec.min_agreement, spec.min_metrics)


def _not_measured(graph: GraphSpec, spec: VerifySpec) -> Iterator[BundleCheck]:
    """Fails the requested checks of a graph that does not run here, because there is no measurement."""
    name = f"{graph.provider}/{graph.precision}"
    if spec.checkpoint is not None:
        yield BundleCheck(f"parity {name}", False, "the graph does not run here, so it was not compared with the checkpoint")
    floors = {} if spec.min_agreement is None else {"agreement": spec.min_agreement}
    for metric, floor in (floors | dict(spec.min_metrics)).items():
        yield BundleCheck(f"{metric} {name}", False, f"the graph does not run here, so the required {floor} was not measured")


def _check_graph(bundle: Bundle, graph: GraphSpec, *, requested: bool) -> Generator[BundleCheck, None, LoadedGraph | None]:
    """Checks a graph against the manifest, on its own provider if that was requested; returns it if this machine can run it."""
    runs_on, provider_error = choose_provider(graph, requested=requested)
    loaded = LoadedGraph(bundle, graph, runs_on)
    yield check_validation_report(loaded)
    error = loaded.load_error()
    if error is not None or provider_error is not None:
        yield check_engine(loaded, error, provider_error)
    if error is not None:
        return None
    yield check_example(loaded)
    yield check_batches(loaded)
    return loaded
