"""Registry: makes models of bundles and finds them by name and by task."""

from __future__ import annotations

import difflib
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from service.bundle import Bundle
from service.cost import CostModel
from service.engine import THREADS, OnnxEngine, available_provider, why_not
from service.engines import Engines, IdleEngine, min_tokens
from service.errors import InvalidValueError, NotFoundError, ProviderError, SettingsError
from service.evidence import ANY, Floor
from service.graph import GraphSpec, Precision, Provider
from service.metrics import Metrics
from service.model import Model
from service.scheduler import Scheduler
from service.tasks.uses import USES
from service.tokenization import Tokenizer

logger = logging.getLogger("bertserve.registry")

# Rows and lengths of the warm-up runs that the cost model is fitted to: short ones show the fixed cost of a run. Graphs
# with a shape plan warm up on all of it.
WARM_UP_SHAPES = ((1, 8), (1, 32), (1, 128), (4, 32))
WARM_UP_REPEATS = 3
SHOWN_LABELS = 10  # of a model, in a message


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """How models are loaded: the provider, which graph of a bundle, what may share a batch, and the evidence asked for.

    Attributes:
        provider: What runs the graphs.
        provider_asked: What the operator asked for, where that is another; by default the provider.
        precision: Which graph of a bundle.
        batch_variant: Whether texts share a batch also on graphs that are not batch-invariant.
        max_batch_tokens: Budget of a batch.
        idle_threads: Threads of a run beside which nothing runs or waits; of one thread like all others where it is 1.
        engine_cache: Folder for TensorRT's engines.
        floor: The evidence that a bundle must have.
    """

    provider: Provider
    provider_asked: Provider | None = None
    precision: Precision | Literal["auto"] = "auto"
    batch_variant: bool = False
    max_batch_tokens: int = 8192
    idle_threads: int = 1
    engine_cache: Path | None = None
    floor: Floor = ANY


class Registry:
    """The loaded models."""

    def __init__(self, models: Sequence[Model], defaults: Mapping[str, str]) -> None:
        """Takes loaded models.

        Args:
            models: In any order.
            defaults: Task -> name of the model that its endpoint uses; otherwise the first by name.

        Raises:
            SettingsError: A default names no loaded model of its task.
        """
        self.models = {model.name: model for model in sorted(models, key=lambda model: model.name)}
        self._defaults: dict[str, Model] = {}
        for model in self.models.values():
            for task in model.tasks:
                self._defaults.setdefault(task, model)
        for task, name in defaults.items():
            chosen = self.models.get(name)
            if chosen is None or task not in chosen.tasks:
                have = ", ".join(f"{each}={m.name}" for m in self.models.values() for each in m.tasks)
                raise SettingsError(f"--default {task}={name} names no loaded model of that task; there is {have}.")
            self._defaults[task] = chosen

    def get(self, name: str) -> Model:
        """Returns the model of that name.

        Raises:
            NotFoundError: No such model; the message names the nearest.
        """
        if name not in self.models:
            near = difflib.get_close_matches(name, self.models, n=1)
            raise NotFoundError(
                f"no model `{name[:64]}` is loaded; " + (f"did you mean `{near[0]}`?" if near else f"there is {', '.join(self.models)}.")
            )
        return self.models[name]

    def for_task(self, task: str, name: str | None = None) -> Model:
        """Returns the named model, or the task's default one.

        Raises:
            NotFoundError: No such model, or none of that task.
            InvalidValueError: The named model is of another task, or lacks what this one needs.
        """
        if name is None:
            if task not in self._defaults:
                takes = f"it takes a {USES[task].of} model{USES[task].needs and f' with {USES[task].needs}'}, and " if task in USES else ""
                raise NotFoundError(
                    f"no model for {task} is loaded; {takes}there is {', '.join(f'{m.name} ({m.task})' for m in self.models.values())}."
                )
            return self._defaults[task]
        model = self.get(name)
        if task not in model.tasks:
            raise InvalidValueError(self._unfit(model, task))
        return model

    def _unfit(self, model: Model, task: str) -> str:
        """Returns why a model cannot do a task, and which can where that is more than a matter of the model's task."""
        why = f"the model `{model.name}` is for {model.task}, this endpoint is for {task}; POST to /models/{model.name} instead."
        if task not in USES:
            return why
        able = ", ".join(f"`{other.name}`" for other in self.models.values() if task in other.tasks)
        if model.task == USES[task].of:
            labels = model.bundle.manifest.labels
            shown = ", ".join(f"`{label}`" for label in labels[:SHOWN_LABELS]) + (", ..." if len(labels) > SHOWN_LABELS else "")
            why = f"the model `{model.name}` cannot do {task}: that takes {USES[task].needs}, and its labels are {shown}."
        return f"{why} " + (f"Models that can do it: {able}." if able else "No model that is loaded can do it.")


def choose_provider(loaded: Sequence[Bundle], wanted: Provider | Literal["auto"]) -> Provider:
    """Returns the provider to use: the one asked for, or for `auto` the best for which every bundle has a graph."""
    if wanted != "auto":
        return wanted
    best = available_provider()
    return best if all(any(graph.provider == best for graph in bundle.manifest.graphs) for bundle in loaded) else "cpu"


def obtain_provider(asked: Provider, *, allow_fallback: bool) -> Provider:
    """Returns the provider that sessions will get: the one asked for, or the CPU where the operator allowed that.

    Raises:
        ProviderError: Sessions do not get it, and nothing else was allowed; the message says what is missing.
    """
    if asked == "cpu" or (reason := why_not(asked)) is None:
        return asked
    if not allow_fallback:
        raise ProviderError(
            f"--provider {asked} cannot be had: {reason} Or serve on the CPU with --provider cpu, or allow that with --allow-provider-fallback."
        )
    logger.warning("SERVING ON THE CPU: --provider %s cannot be had, and --allow-provider-fallback is set: %s", asked, reason)
    return "cpu"


def load(loaded: Sequence[Bundle], *, options: LoadOptions, scheduler: Scheduler, metrics: Metrics) -> list[Model]:
    """Makes a warmed-up, timed model of each verified bundle.

    Raises:
        BundleError: A bundle lacks the graph asked for, or the evidence.
        ProviderError: The provider is missing.
        SettingsError: A model's longest text is over the batch budget.
    """
    return [_load(bundle, options, scheduler, metrics) for bundle in loaded]


def _load(bundle: Bundle, options: LoadOptions, scheduler: Scheduler, metrics: Metrics) -> Model:
    manifest = bundle.manifest
    if manifest.tokenizer.max_length > options.max_batch_tokens:
        raise SettingsError(
            f"--max-batch-tokens is {options.max_batch_tokens}, less than one text of the model `{manifest.name}` may have "
            f"({manifest.tokenizer.max_length}); raise it."
        )
    graph = _graph(bundle, options)
    options.floor.check(manifest.name, graph)
    engine = _engine(bundle, graph, options)
    cost = CostModel(manifest.flops)
    shapes = [(rows, min(length, manifest.tokenizer.max_length)) for rows, length in WARM_UP_SHAPES]
    cost.fit(engine.time_runs(shapes if graph.shapes is None else graph.shapes.shapes, repeats=WARM_UP_REPEATS))
    metrics.model_info.labels(manifest.name, bundle.version, graph.precision, graph.provider).set(1)
    return Model(
        bundle,
        graph,
        tokenizer=Tokenizer(bundle.tokenizer_path, manifest.tokenizer),
        engines=Engines(engine, _idle_engine(bundle, graph, options, cost)),
        cost=cost,
        scheduler=scheduler,
        metrics=metrics.model(manifest.task, manifest.name),
        batch_variant=options.batch_variant,
    )


def _engine(bundle: Bundle, graph: GraphSpec, options: LoadOptions, *, threads: int = THREADS) -> OnnxEngine:
    return OnnxEngine(
        bundle.path / graph.file,
        graph,
        pad_id=bundle.manifest.tokenizer.pad_id,
        padding_side=bundle.manifest.tokenizer.padding_side,
        threads=threads,
        engine_cache=options.engine_cache,
    )


def _idle_engine(bundle: Bundle, graph: GraphSpec, options: LoadOptions, cost: CostModel) -> IdleEngine | None:
    """Returns a second session with more threads, warmed up, where it was asked for and some text is worth it."""
    longest = bundle.manifest.tokenizer.max_length
    tokens = min_tokens(cost, nodes=graph.evidence.nodes, longest=longest)
    if options.idle_threads == 1 or graph.provider != "cpu" or tokens is None:
        return None
    engine = _engine(bundle, graph, options, threads=options.idle_threads)
    engine.time_runs([(1, tokens)], repeats=1)
    return IdleEngine(engine, options.idle_threads, tokens)


def _graph(bundle: Bundle, options: LoadOptions) -> GraphSpec:
    """Returns the graph to run, with no planned shape over the budget of a batch.

    The precision asked for is of the provider asked for: on another one it is the default graph that stands in.
    """
    fell_back = options.provider_asked not in (None, options.provider)
    graph = bundle.graph(options.provider, "auto" if fell_back else options.precision)
    if graph.shapes is None:
        return graph
    return graph.model_copy(update={"shapes": graph.shapes.within(options.max_batch_tokens)})
