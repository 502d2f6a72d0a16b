"""Registry: finds loaded models by name and by task, and keeps the errors of models that could not be loaded."""

import logging
from collections.abc import Iterable
from http import HTTPStatus
from textwrap import shorten
from typing import Any

from bertserve.service.errors import CallerValue, HttpError, InvalidValueError
from bertserve.service.messages import did_you_mean, quote_names
from bertserve.service.metrics import Metrics
from bertserve.service.models.default_models import base_task, candidates, choose_defaults, configured_defaults
from bertserve.service.models.model import Model
from bertserve.service.settings import Settings
from bertserve.service.tasks.catalog import TASKS, requested_task

logger = logging.getLogger("bertserve.loading")


class Registry:
    """The loaded models, which can change during requests; a request keeps the model that it started with.

    The metrics `model_info` and `broken_models` show the same models.

    Attributes:
        models: Name -> model, sorted by name.
        broken: Name -> error, for models that could not be loaded.
        defaults: Task -> name of its default model.
    """

    def __init__(self, settings: Settings, metrics: Metrics) -> None:
        self.models: dict[str, Model] = {}
        self.broken: dict[str, str] = {}
        self.defaults: dict[str, str] = {}
        self._settings = settings
        self._metrics = metrics
        self._configured_defaults: dict[str, str] = {}

    def start(self, models: Iterable[Model]) -> None:
        """Adds the first models, sorted by name, and chooses the defaults.

        Raises:
            StartError: As `configured_defaults`.
        """
        self.models = {model.name: model for model in models}
        self._configured_defaults = configured_defaults(self._settings, self._tasks, self.broken)
        self.defaults = choose_defaults(self._settings, self._tasks, self._configured_defaults, self.broken, before={})
        for model in self.models.values():
            self._metrics.model_info.labels(*model.metric_labels).set(True)

    def add(self, model: Model) -> None:
        """Adds a model, or replaces the one of the same name, and removes its error. Logs which of its tasks still use another model."""
        self.clear_error(model.name)
        old = self.models.get(model.name)
        if model is old:
            return
        self._replace_models(self.models | {model.name: model})
        logger.info("the model %s is now served as version %s", model.name, model.bundle.version)
        for task in model.tasks if old is None else ():
            if (used := self.defaults.get(task, model.name)) != model.name:
                logger.info("the model %s can also answer /%s, which still uses %s", model.name, TASKS[task].path, used)

    def remove(self, model: Model) -> None:
        """Removes a model, whose open requests are still answered."""
        self._replace_models({name: other for name, other in self.models.items() if other is not model})
        self._metrics.forget_reference(model.name)
        logger.info("the model %s is unloaded", model.name)

    def keep_error(self, name: str, message: str) -> None:
        """Keeps the error of a model that could not be loaded; an older version can still be served."""
        self.broken[name] = message
        self._metrics.broken_models.labels(name).set(1)

    def clear_error(self, name: str) -> None:
        """Forgets the error of a model, if there is one."""
        if self.broken.pop(name, None) is not None:
            self._metrics.broken_models.labels(name).set(0)

    def _replace_models(self, models: dict[str, Model]) -> None:
        """Replaces the models, and logs changes of defaults. A default stays while its model is loaded."""
        for model in (*self.models.values(), *models.values()):
            self._metrics.model_info.labels(*model.metric_labels).set(models.get(model.name) is model)
        before = self.defaults
        self.models = dict(sorted(models.items()))
        self.defaults = choose_defaults(self._settings, self._tasks, self._configured_defaults, self.broken, before)
        for task, spec in TASKS.items():
            old, new = (defaults.get(task, "none") for defaults in (before, self.defaults))
            if old != new:
                names = quote_names(candidates(self._tasks, task))
                logger.warning("the default of /%s is %s (before: %s); --default can choose %s", spec.path, new, old, names)

    @property
    def _tasks(self) -> dict[str, tuple[str, ...]]:
        """Name of a model -> tasks that it answers."""
        return {model.name: model.tasks for model in self.models.values()}

    def list_default_tasks(self, model: Model) -> list[str]:
        """Returns the tasks whose default is this model."""
        return [task for task in TASKS if self.defaults.get(task) == model.name]

    def describe(self) -> list[str]:
        """Returns a line about each model, with the endpoints whose default it is."""
        lines = []
        for model in self.models.values():
            endpoints = ", ".join(f"/{TASKS[task].path}" for task in self.list_default_tasks(model))
            lines.append(f"{model.name}: {model.task}, {model.graph.name}" + (f", answers {endpoints}" if endpoints else ""))
        return lines

    def get(self, name: str) -> Model:
        """Returns the model with a name.

        Raises:
            HttpError: There is no such model; the message names the most similar one.
        """
        if (model := self.models.get(name)) is None:
            hint = did_you_mean(name, self.models, f"loaded are: {quote_names(self.models)}.")
            raise HttpError(HTTPStatus.NOT_FOUND, "no model `{name}` is loaded; {hint}", name=CallerValue(name), hint=hint)
        return model

    def for_task(self, task: str, name: str | None = None) -> Model:
        """Returns the named model, or the task's default model.

        Raises:
            HttpError: There is no such model, or no model for the task.
            InvalidValueError: The named model cannot answer the task.
        """
        if name is None:
            if (name := self.defaults.get(task)) is not None:
                return self.models[name]
            raise HttpError(
                HTTPStatus.NOT_FOUND,
                "there is no default model for {task}, which needs {requirement}. Models for {task}: {candidates}. Set `model` to "
                "one of them, or ask the operator to load one; loaded are: {models}.",
                task=task,
                requirement=_requirement(task),
                candidates=quote_names(candidates(self._tasks, task)),
                models=", ".join(f"{model.name} ({model.task})" for model in self.models.values()) or "none",
            )
        model = self.get(name)
        if task not in model.tasks:
            raise InvalidValueError(
                "the model `{model}` is for {own_task} (labels: {labels}). It cannot answer {task}, which needs {requirement}. "
                "Models for {task}: {candidates}. Send a POST to /models/{model} for {own_task}.",
                model=name,
                own_task=model.task,
                labels=shorten(quote_names(model.bundle.manifest.labels), 300, placeholder=" ..."),
                task=task,
                requirement=_requirement(task),
                candidates=quote_names(candidates(self._tasks, task)),
            )
        return model

    def task_of_body(self, model: Model, value: Any) -> str:
        """Returns the task that the JSON value of a body requests of a model.

        Raises:
            InvalidValueError: The model cannot answer it.
        """
        task = requested_task(model.task, value)
        self.for_task(task, model.name)
        return task


def _requirement(task: str) -> str:
    """Returns which models can answer a task, for messages."""
    base, derivation = base_task(task), TASKS[task].derivation
    kind = f"a model for {base}" if base else "a model"
    return f"{kind} with {derivation.needs}" if derivation and derivation.needs else kind
