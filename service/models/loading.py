"""Loads verified bundles as models with warmed-up sessions, on the execution provider of this machine."""

import logging
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path

import numpy as np

from bertserve.service.bundle import files
from bertserve.service.bundle.files import Bundle
from bertserve.service.bundle.graph_spec import GraphSpec
from bertserve.service.bundle.manifest import Manifest
from bertserve.service.bundle.validation_policy import (
    check_report,
    describe_agreement,
    has_low_agreement,
    metrics_match_checkpoint,
    other_int8_instructions,
)
from bertserve.service.engine.cost_model import CostModel
from bertserve.service.engine.hardware import cpu_instructions
from bertserve.service.engine.model_engines import ModelEngines, min_multi_threaded_tokens
from bertserve.service.engine.onnx_engine import OnnxEngine
from bertserve.service.engine.sessions import available_provider, unavailable_reason
from bertserve.service.errors import EngineError, SettingsError, StartError
from bertserve.service.metrics import Metrics
from bertserve.service.models.model import Model
from bertserve.service.providers import GpuOptions, Provider
from bertserve.service.scheduling.scheduler import Scheduler
from bertserve.service.settings import ModelSettings
from bertserve.service.tasks import catalog
from bertserve.service.text.tokenizer import Encoding, Tokenizer

logger = logging.getLogger("bertserve.loading")


def with_provider(settings: ModelSettings, bundles: Iterable[Path]) -> ModelSettings:
    """Returns settings with the execution provider to use: for `auto`, the best one for which all bundles in these folders have a graph.

    Raises:
        StartError: The provider is not available and no fallback is allowed; the message says what is missing.
    """
    requested = settings.provider
    if requested == "auto":
        best = available_provider()
        requested = best if all(_has_graph(path, best) for path in bundles) else "cpu"
    if requested == "cpu" or (reason := unavailable_reason(requested, settings.device_id)) is None:
        return settings.model_copy(update={"provider": requested})
    if not settings.allow_provider_fallback:
        raise StartError(
            f"--provider {requested} is not available: {reason} Alternatively, serve on the CPU with "
            "--provider cpu, or set --allow-provider-fallback."
        )
    logger.warning("SERVING ON THE CPU: --provider %s is not available, and --allow-provider-fallback is set: %s", requested, reason)
    # the precision was meant for the other provider
    return settings.model_copy(update={"provider": "cpu", "precision": "auto"})


def _has_graph(path: Path, provider: Provider) -> bool:
    try:
        return any(graph.provider == provider for graph in files.read_manifest(path)[0].graphs)
    except StartError:  # the load of the bundle reports it
        return True


def load_model(path: Path, served: Model | None = None, *, settings: ModelSettings, scheduler: Scheduler, metrics: Metrics) -> Model:
    """Verifies the files of a bundle, and creates a warmed-up, timed model; or returns `served` if the bundle still has its version.

    The settings come from `with_provider`. If multi-threaded runs of the scheduler have several threads, the model gets a second session
    for them.

    Raises:
        StartError: A file does not match the manifest, or as `open_bundle`.
    """
    with metrics.time_load(path.name, "verify"):
        bundle = files.load_bundle(path)
    if served is not None and served.bundle.version == bundle.version:
        return served
    manifest = bundle.manifest
    with metrics.time_load(path.name, "load"):
        tokenizer, engine = open_bundle(bundle, settings)
        graph = engine.graph
        # these are run if the graph has no shape plan; short runs show the fixed cost of a run
        shapes = [(rows, min(length, manifest.tokenizer.max_length)) for rows, length in ((1, 8), (1, 32), (1, 128), (4, 32))]
        shapes = shapes if graph.shapes is None else graph.shapes.all_shapes
        cost_model = CostModel(manifest.flops, engine.time_runs(shapes, repeats=3))
        if graph.provider != "cpu":
            # cuDNN builds a plan per thread and shape, which takes up to 0.1 s; CUDA graphs are captured per thread
            scheduler.on_each_thread([partial(engine.warm_up, *shape) for shape in shapes])
        return Model(
            bundle,
            tokenizer=tokenizer,
            engines=_engines(engine, bundle, settings, cost_model, scheduler.queue.threads_per_run),
            cost_model=cost_model,
            scheduler=scheduler,
            metrics=metrics.model(manifest.task, manifest.name),
            settings=settings,
        )


def open_bundle(bundle: Bundle, settings: ModelSettings) -> tuple[Tokenizer, OnnxEngine]:
    """Returns the tokenizer of a verified bundle, and the engine of its graph, after checks that they fit together.

    Raises:
        StartError: The bundle's task is not supported; it lacks a requirement of its task, the requested graph or the validation report;
            or its graph does not match its tokenizer or its manifest.
        StartError: The provider is missing, or cannot load the graph.
        SettingsError: The model's longest text exceeds the maximum tokens of a batch.
    """
    manifest, task = bundle.manifest, catalog.find_spec(bundle)
    graph = bundle.graph(settings.provider, settings.precision)
    batch_tokens = settings.batch_tokens(graph.precision)
    if manifest.tokenizer.max_length > batch_tokens:
        raise SettingsError(
            f"--max-batch-tokens is {batch_tokens}, less than the longest text of the model `{manifest.name}` "
            f"({manifest.tokenizer.max_length} tokens); raise it."
        )
    if graph.shapes is not None:
        graph = graph.model_copy(update={"shapes": graph.shapes.within(batch_tokens)})
    check_report(manifest.name, graph, required=settings.require_validation, min_agreement=settings.min_agreement)
    _warn(manifest, graph, needs_report=settings.require_validation or settings.min_agreement is not None)
    engine = _open_engine(bundle, graph, settings)
    tokenizer = Tokenizer(bundle.tokenizer_path, manifest.tokenizer)
    _check_fit(manifest, engine, tokenizer, task.widths(manifest))
    return tokenizer, engine


def _warn(manifest: Manifest, graph: GraphSpec, *, needs_report: bool) -> None:
    """Logs warnings about the graph that is served."""
    if has_low_agreement(graph) and not metrics_match_checkpoint(manifest.metrics, graph.name):
        logger.warning(
            "the model %s, served as %s, may answer differently from its checkpoint: %s. Measure it on your own texts with `bert-export "
            "verify --data`, or serve --precision fp32.",
            manifest.name,
            graph.name,
            describe_agreement(graph.validation),
        )
    if needs_report and (measured_with := other_int8_instructions(graph, own := cpu_instructions())):
        logger.warning(
            "the model %s, served as %s, was measured on a CPU with %s; this CPU has %s, and can round int8 differently. Measure it here "
            "with `bert-export verify --data`.",
            manifest.name,
            graph.name,
            ", ".join(measured_with),
            ", ".join(own),
        )
    for omitted in manifest.omitted:
        if omitted.provider == graph.provider:
            logger.warning("the model %s: its export as %s failed: %s", manifest.name, omitted.precision, omitted.reason)


def _check_fit(manifest: Manifest, engine: OnnxEngine, tokenizer: Tokenizer, widths: Mapping[str, int]) -> None:
    """Runs a text of the maximum length from the last token of the vocabulary: both can exceed a table of the graph.

    If the graph returns attention, a second text asks for the last head of each layer. `widths` gives the number of values per output.
    """
    length, last, heads = manifest.tokenizer.max_length, tokenizer.vocabulary_size - 1, manifest.attention_heads
    ids, zeros = np.full(length, last, dtype=np.int64), np.zeros(length, dtype=np.int64)
    maps = tuple((layer, count - 1) for layer, count in enumerate(heads))
    try:
        [row] = engine.run([Encoding(ids, zeros, masks=(length - 1,))])
        if maps:  # on a short text, because the weights of a long one would need too much memory
            engine.run([Encoding(zeros[:2], zeros[:2], masks=(1,), maps=maps)])
    except EngineError as error:
        raise StartError(
            f"bundle `{manifest.name}`: its graph fails on a text of {length} tokens with the id {last}, the last id of its tokenizer, "
            f"or on the attention heads in its manifest, {list(heads)} ({error.message}) Export the bundle again."
        ) from error
    for name, expected in widths.items():
        width = row[name].shape[-1] if name in row else 0
        if width != expected:
            raise StartError(
                f"bundle `{manifest.name}`: its graph returns {width} values as `{name}`, but its manifest says {expected}; export the "
                "bundle again."
            )


def _open_engine(bundle: Bundle, graph: GraphSpec, settings: ModelSettings, threads: int = 1) -> OnnxEngine:
    """Returns an engine with `threads` threads per run."""
    spec, file, cache = bundle.manifest.tokenizer, bundle.path / graph.file, settings.engine_cache
    gpu = GpuOptions(settings.device_id, settings.gpu_mem_limit_mib, settings.cuda_graphs)
    return OnnxEngine(file, graph, pad_id=spec.pad_id, padding_side=spec.padding_side, engine_cache=cache, threads=threads, gpu=gpu)


def _engines(engine: OnnxEngine, bundle: Bundle, settings: ModelSettings, cost_model: CostModel, threads: int) -> ModelEngines:
    """Returns the engines of a model: with a second session, if it is configured and some text would run faster with more threads."""
    graph, longest = engine.graph, bundle.manifest.tokenizer.max_length
    tokens = min_multi_threaded_tokens(cost_model, nodes=graph.validation.nodes, longest=longest)
    if threads == 1 or graph.provider != "cpu" or tokens is None:
        return ModelEngines(engine)

    def create() -> OnnxEngine:
        # the files can have changed since the model was loaded, and both sessions must return the same results
        files.verify_graph(bundle.path, graph)
        threaded_engine = _open_engine(bundle, graph, settings, threads)
        threaded_engine.time_runs([(1, tokens)], repeats=1)
        return threaded_engine

    return ModelEngines(engine, create, threads=threads, min_tokens=tokens, model=bundle.manifest.name)
