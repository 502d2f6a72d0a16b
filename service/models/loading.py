"""Loads verified bundles as models with warmed-up sessions, on the execution provider of this machine."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np

from bertserve.service.bundle import files
from bertserve.service.bundle.files import Bundle
from bertserve.service.bundle.graph_spec import GraphSpec, Precision
from bertserve.service.bundle.manifest import Manifest
from bertserve.service.bundle.validation_policy import (
    ValidationPolicy,
    describe_agreement,
    is_low,
    is_measured_near,
    is_of_other_kernels,
)
from bertserve.service.engine.cost_model import CostModel
from bertserve.service.engine.engines import Engines, MultiThreadedEngine, min_multi_threaded_tokens
from bertserve.service.engine.hardware import cpu_instructions
from bertserve.service.engine.onnx_engine import OnnxEngine
from bertserve.service.engine.sessions import available_provider, why_not
from bertserve.service.errors import BundleError, EngineError, ProviderError, SettingsError
from bertserve.service.metrics import Metrics
from bertserve.service.models.model import Model
from bertserve.service.providers import Provider
from bertserve.service.scheduling.scheduler import Scheduler
from bertserve.service.tasks import catalog
from bertserve.service.text.tokenizer import Encoding, Tokenizer

logger = logging.getLogger("bertserve.loading")

# Rows and lengths of the warm-up runs to which the cost model is fitted; short runs show the fixed cost of a run. A graph
# with a shape plan runs all planned shapes.
WARM_UP_SHAPES = ((1, 8), (1, 32), (1, 128), (4, 32))
WARM_UP_REPEATS = 3


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """How models are loaded: the provider, the graph of a bundle, the batching, and the required validation report.

    Attributes:
        provider: The execution provider of the graphs.
        provider_asked: The provider that the operator requested.
        precision: The precision of the graph to choose.
        batch_variant: Whether texts share a batch even if a graph is not batch-invariant.
        max_batch_tokens: Maximum tokens of a batch.
        multi_threads: Threads of a multi-threaded run; 1 creates no second session.
        engine_cache: Folder for TensorRT's engines.
        validation_policy: The validation report that a bundle needs.
    """

    provider: Provider
    provider_asked: Provider
    precision: Precision | Literal["auto"]
    batch_variant: bool
    max_batch_tokens: int
    multi_threads: int
    engine_cache: Path | None
    validation_policy: ValidationPolicy


def choose_provider(bundles: Sequence[Bundle], provider: Provider | Literal["auto"]) -> Provider:
    """Returns the provider to use: the requested one, or for `auto` the best provider for which every bundle has a graph."""
    if provider != "auto":
        return provider
    best = available_provider()
    return best if all(any(graph.provider == best for graph in bundle.manifest.graphs) for bundle in bundles) else "cpu"


def obtain_provider(requested: Provider, *, allow_fallback: bool) -> Provider:
    """Returns the provider that sessions will get: the requested one, or the CPU if the operator allowed that.

    Raises:
        ProviderError: Sessions do not get it and no fallback is allowed; the message says what is missing.
    """
    if requested == "cpu" or (reason := why_not(requested)) is None:
        return requested
    if not allow_fallback:
        raise ProviderError(
            f"--provider {requested} is not available: {reason} Or serve on the CPU with --provider cpu, or allow "
            "that with --allow-provider-fallback."
        )
    logger.warning("SERVING ON THE CPU: --provider %s is not available, and --allow-provider-fallback is set: %s", requested, reason)
    return "cpu"


def verify(path: Path, *, metrics: Metrics) -> Bundle:
    """Returns the bundle of a folder, after a check of every file against its manifest.

    Raises:
        BundleError: A file does not match; the message says how.
    """
    with metrics.timed_load(path.name, "verify"):
        return files.load_bundle(path)


def load_model(bundle: Bundle, *, options: LoadOptions, scheduler: Scheduler, metrics: Metrics) -> Model:
    """Creates a warmed-up, timed model from a verified bundle.

    Raises:
        BundleError: The bundle's task is not supported; it lacks a requirement of its task, the requested graph or the validation report;
            or its graph does not match its tokenizer or its manifest.
        ProviderError: The provider is missing, or cannot load the graph.
        SettingsError: The model's longest text exceeds the maximum tokens of a batch.
    """
    with metrics.timed_load(bundle.manifest.name, "load"):
        model = _load(bundle, options, scheduler, metrics)
    metrics.model_info.labels(*model.labels).set(1)
    return model


@dataclass(frozen=True, slots=True)
class OpenedBundle:
    """The parts of a bundle that turn texts into outputs: its graph, its tokenizer, and the engine of this graph."""

    graph: GraphSpec
    tokenizer: Tokenizer
    engine: OnnxEngine


def open_bundle(bundle: Bundle, options: LoadOptions) -> OpenedBundle:
    """Returns the parts of a verified bundle, after checks that they fit together.

    Raises:
        BundleError: As `load_model`.
        ProviderError: As `load_model`.
        SettingsError: As `load_model`.
    """
    manifest = bundle.manifest
    catalog.spec_of(bundle)
    if manifest.tokenizer.max_length > options.max_batch_tokens:
        raise SettingsError(
            f"--max-batch-tokens is {options.max_batch_tokens}, less than the longest text of the model `{manifest.name}` "
            f"({manifest.tokenizer.max_length} tokens); raise it."
        )
    graph = _graph(bundle, options)
    options.validation_policy.check(manifest.name, graph)
    _warn(manifest, graph, options.validation_policy)
    spec = manifest.tokenizer
    engine = OnnxEngine(
        bundle.path / graph.file, graph, pad_id=spec.pad_id, padding_side=spec.padding_side, engine_cache=options.engine_cache
    )
    tokenizer = Tokenizer(bundle.tokenizer_path, spec)
    _check_fit(bundle, engine, tokenizer)
    return OpenedBundle(graph, tokenizer, engine)


def _load(bundle: Bundle, options: LoadOptions, scheduler: Scheduler, metrics: Metrics) -> Model:
    opened, manifest = open_bundle(bundle, options), bundle.manifest
    graph, engine = opened.graph, opened.engine
    cost = CostModel(manifest.flops)
    shapes = [(rows, min(length, manifest.tokenizer.max_length)) for rows, length in WARM_UP_SHAPES]
    shapes = shapes if graph.shapes is None else graph.shapes.shapes
    cost.fit(engine.time_runs(shapes, repeats=WARM_UP_REPEATS))
    if graph.provider != "cpu":
        # cuDNN builds a plan per thread and shape, which takes up to 0.1 s
        scheduler.on_each_thread([partial(engine.time_runs, [shape], repeats=1) for shape in shapes])
    return Model(
        bundle,
        graph,
        tokenizer=opened.tokenizer,
        engines=Engines(engine, _multi_threaded_engine(engine, bundle, graph, options, cost)),
        cost=cost,
        scheduler=scheduler,
        metrics=metrics.model(manifest.task, manifest.name),
        batch_variant=options.batch_variant,
    )


def _warn(manifest: Manifest, graph: GraphSpec, policy: ValidationPolicy) -> None:
    """Logs warnings about the graph that is served."""
    which = f"{graph.provider}/{graph.precision}"
    if is_low(graph) and not is_measured_near(manifest.metrics, which):
        logger.warning(
            "the model %s may answer differently from its checkpoint: graph %s: %s. %s",
            manifest.name,
            which,
            describe_agreement(graph.validation),
            "Measure it on your own texts with `bert-export verify --data`, or serve --precision fp32.",
        )
    if policy.asks and is_of_other_kernels(graph, own := cpu_instructions()):
        logger.warning(
            "model %s: the validation report of graph %s was measured on a CPU with %s; this CPU has %s, and may round int8 differently. "
            "Measure it here with `bert-export verify --data`.",
            manifest.name,
            which,
            ", ".join(graph.validation.speed.instructions) if graph.validation.speed else "unknown instruction sets",
            ", ".join(own),
        )
    for omitted in manifest.omitted:
        if omitted.provider == graph.provider:
            logger.warning(
                "the model %s is served as %s: %s was tried at its export, and %s", manifest.name, which, omitted.precision, omitted.reason
            )


def _check_fit(bundle: Bundle, engine: OnnxEngine, tokenizer: Tokenizer) -> None:
    """Runs a text of the maximum length from the last token of the vocabulary: either may exceed a table of the graph."""
    manifest = bundle.manifest
    length, last = manifest.tokenizer.max_length, tokenizer.vocabulary_size - 1
    ids = np.full(length, last, dtype=np.int64)
    try:
        row = engine.run([Encoding(ids, np.zeros(length, dtype=np.int64), masks=(length - 1,))])[0]
    except EngineError as error:
        raise BundleError(
            f"bundle `{manifest.name}`: its graph fails on a text of {length} tokens with the id {last}, the last "
            f"id of its tokenizer ({error.message}) The tokenizer does not match the graph; export the bundle "
            "again."
        ) from error
    for name, expected in catalog.TASKS[manifest.task].widths(manifest).items():
        if row[name].shape[-1] != expected:
            raise BundleError(
                f"bundle `{manifest.name}`: its graph returns {row[name].shape[-1]} values as `{name}`, but its manifest "
                f"says {expected}; export the bundle again."
            )
    _check_attention(manifest, engine)


def _check_attention(manifest: Manifest, engine: OnnxEngine) -> None:
    """Checks the last attention head of each layer on a short text: the weights of a long text would need too much memory."""
    if not manifest.attention_heads:
        return
    ids = np.zeros(2, dtype=np.int64)
    maps = tuple((layer, count - 1) for layer, count in enumerate(manifest.attention_heads))
    try:
        engine.run([Encoding(ids, ids, masks=(1,), maps=maps)])
    except EngineError as error:
        raise BundleError(
            f"bundle `{manifest.name}`: its graph does not return the attention of {list(manifest.attention_heads)} "
            f"heads, as its manifest says ({error.message}) Export the bundle again."
        ) from error


def _multi_threaded_engine(
    engine: OnnxEngine, bundle: Bundle, graph: GraphSpec, options: LoadOptions, cost: CostModel
) -> MultiThreadedEngine | None:
    """Returns the creator of a second session with more threads, if it is configured and some text would run faster with it."""
    longest = bundle.manifest.tokenizer.max_length
    tokens = min_multi_threaded_tokens(cost, nodes=graph.validation.nodes, longest=longest)
    if options.multi_threads == 1 or graph.provider != "cpu" or tokens is None:
        return None

    def make() -> OnnxEngine:
        # the files may have changed since the model was loaded, and both sessions must return the same results
        files.verify_graph(bundle.path, graph)
        threaded_engine = engine.with_threads(options.multi_threads)
        threaded_engine.time_runs([(1, tokens)], repeats=1)
        return threaded_engine

    return MultiThreadedEngine(make, model=bundle.manifest.name, threads=options.multi_threads, min_tokens=tokens)


def _graph(bundle: Bundle, options: LoadOptions) -> GraphSpec:
    """Returns the graph to run, without planned shapes that exceed the maximum tokens of a batch.

    The requested precision applies only to the requested provider; after a fallback, the default graph runs.
    """
    fell_back = options.provider_asked != options.provider
    graph = bundle.graph(options.provider, "auto" if fell_back else options.precision)
    if graph.shapes is None:
        return graph
    return graph.model_copy(update={"shapes": graph.shapes.within(options.max_batch_tokens)})
