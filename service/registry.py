"""Registry: makes models of bundles and finds them by name and by task."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from service.bundle import Bundle, Precision, Provider
from service.cost import CostModel
from service.engine import OnnxEngine, available_provider
from service.errors import InvalidValueError, NotFoundError, SettingsError
from service.evidence import ANY, Floor
from service.metrics import Metrics
from service.model import Model
from service.scheduler import Scheduler
from service.tokenization import Tokenizer

# Rows and lengths of the warm-up runs that the cost model is fitted to: short ones show the fixed cost of a run.
WARM_UP_SHAPES = ((1, 8), (1, 32), (1, 128))
WARM_UP_REPEATS = 3


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """How models are loaded: the provider, which graph of a bundle, what may share a batch, and the evidence asked for."""

    provider: Provider
    precision: Precision | Literal["auto"] = "auto"
    batch_variant: bool = False
    max_batch_tokens: int = 8192
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
            self._defaults.setdefault(model.task, model)
        for task, name in defaults.items():
            chosen = self.models.get(name)
            if chosen is None or chosen.task != task:
                have = ", ".join(f"{m.task}={m.name}" for m in self.models.values())
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
            InvalidValueError: The named model is of another task.
        """
        if name is None:
            if task not in self._defaults:
                raise NotFoundError(
                    f"no model for {task} is loaded; there is {', '.join(f'{m.name} ({m.task})' for m in self.models.values())}."
                )
            return self._defaults[task]
        model = self.get(name)
        if model.task != task:
            raise InvalidValueError(f"the model `{name}` is for {model.task}, this endpoint is for {task}; POST to /models/{name} instead.")
        return model


def choose_provider(loaded: Sequence[Bundle], wanted: Provider | Literal["auto"]) -> Provider:
    """Returns the provider to use: the one asked for, or for `auto` the best for which every bundle has a graph."""
    if wanted != "auto":
        return wanted
    best = available_provider()
    return best if all(any(graph.provider == best for graph in bundle.manifest.graphs) for bundle in loaded) else "cpu"


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
    graph = bundle.graph(options.provider, options.precision)
    options.floor.check(manifest.name, graph)
    engine = OnnxEngine(bundle.path / graph.file, graph, pad_id=manifest.tokenizer.pad_id, padding_side=manifest.tokenizer.padding_side)
    cost = CostModel(manifest.flops)
    shapes = [(rows, min(length, manifest.tokenizer.max_length)) for rows, length in WARM_UP_SHAPES]
    cost.fit(engine.time_runs(shapes, repeats=WARM_UP_REPEATS))
    metrics.model_info.labels(manifest.name, bundle.version, graph.precision, graph.provider).set(1)
    return Model(
        bundle,
        graph,
        tokenizer=Tokenizer(bundle.tokenizer_path, manifest.tokenizer),
        engine=engine,
        cost=cost,
        scheduler=scheduler,
        metrics=metrics.model(manifest.task, manifest.name),
        batch_variant=options.batch_variant,
    )
