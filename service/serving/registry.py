"""Registry: finds loaded models by name and by task."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

from bertserve.service.errors import InvalidValueError, NotFoundError, nearest
from bertserve.service.serving.defaults import able_models, check_defaults, chosen_defaults
from bertserve.service.serving.model import Model
from bertserve.service.tasks.catalog import TASKS

logger = logging.getLogger("bertserve.loading")

SHOWN_LABELS = 10  # of a model, in a message


class Registry:
    """The loaded models, which may change while requests come; a request keeps the model that it found.

    Attributes:
        models: Name -> model.
        changes: How often the models have changed.
    """

    def __init__(
        self, models: Sequence[Model], wanted: Mapping[str, str], *, by_name: bool = False, present: Mapping[str, str] | None = None
    ) -> None:
        """Takes loaded models.

        Args:
            models: In any order.
            wanted: Task -> name of the model that its endpoint uses; a task that bundles of another one answer uses that one's, where it can.
            by_name: Whether of several models that could be a default the first by name is; otherwise there must be a wanted one.
            present: Task -> name of the model that its endpoint used before, for a worker that takes the place of another: models may have
                come and gone, so nothing is checked.

        Raises:
            SettingsError: A wanted model is not loaded or not of its task, or a task has several models and none of them is wanted.
        """
        self.models = {model.name: model for model in sorted(models, key=lambda model: model.name)}
        self.changes = 0
        self._wanted = wanted
        self._by_name = by_name
        if present is None:
            check_defaults(self._answered(), wanted, by_name=by_name)
        self._defaults = self._chosen(present or {})

    @property
    def defaults(self) -> dict[str, str]:
        """Task -> name of the model that its endpoint uses."""
        return {task: model.name for task, model in self._defaults.items()}

    def default_of(self, model: Model) -> list[str]:
        """Returns the tasks whose endpoints use a model."""
        return [task for task in TASKS if self._defaults.get(task) is model]

    def put(self, model: Model) -> None:
        """Takes a model, in place of the one of its name; the defaults stay, and the log says where it could be one."""
        is_new = model.name not in self.models
        self.models = dict(sorted((self.models | {model.name: model}).items()))
        self._choose_again()
        for task in model.tasks if is_new else ():
            if (used := self._defaults.get(task)) not in (None, model):
                logger.info("the model %s could answer /%s too, which goes on using %s", model.name, TASKS[task].path, used and used.name)

    def remove(self, name: str) -> None:
        """Lets a model go; an endpoint that used it uses the one that is left, if it is the only one."""
        del self.models[name]
        self._choose_again()

    def _choose_again(self) -> None:
        """Chooses defaults after a change; none moves silently, nor while its model is loaded."""
        self.changes += 1
        before = self.defaults
        self._defaults = self._chosen(before)
        for task, spec in TASKS.items():
            old, new = before.get(task), self.defaults.get(task)
            if new is not None and old != new:
                logger.warning("/%s uses the model %s now%s", spec.path, new, "" if old is None else f", and not {old}")
            elif new is None and len(able := self._able(task)) > 1:
                logger.warning(
                    "/%s has no default model: %s could be it; start with --default %s=NAME", spec.path, ", ".join(able), spec.path
                )

    def _able(self, task: str) -> list[str]:
        """Returns the names of the models that answer a task."""
        return able_models(self._answered(), task)

    def _answered(self) -> dict[str, Sequence[str]]:
        """Returns name -> tasks of each model."""
        return {name: model.tasks for name, model in self.models.items()}

    def _chosen(self, present: Mapping[str, str]) -> dict[str, Model]:
        """Returns task -> the model that its endpoint uses, given those that it used before."""
        chosen = chosen_defaults(self._answered(), self._wanted, by_name=self._by_name, present=present)
        return {task: self.models[name] for task, name in chosen.items()}

    def get(self, name: str) -> Model:
        """Returns the model of that name.

        Raises:
            NotFoundError: No such model; the message names the nearest.
        """
        if name not in self.models:
            if near := nearest(name, self.models):
                raise NotFoundError("no model `{name}` is loaded; did you mean `{models}`?", name=name[:64], models=near)
            raise NotFoundError(
                "no model `{name}` is loaded; loaded are: {models}.", name=name[:64], models=", ".join(self.models) or "none"
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
                if able := self._able(task):
                    raise NotFoundError(
                        "several models could answer ({models}), and none of them is the default for {task}; name one as `model`, or by "
                        "the path /models/NAME.",
                        models=", ".join(f"`{each}`" for each in able),
                        task=task,
                    )
                models = ", ".join(f"{model.name} ({model.task})" for model in self.models.values()) or "none"
                if (derivation := TASKS[task].derivation) is None:
                    raise NotFoundError("no model for {task} is loaded; loaded are: {models}.", task=task, models=models)
                raise NotFoundError(
                    "no model for {task} is loaded, which takes {setting}; loaded are: {models}.",
                    task=task,
                    setting=f"a {derivation.base or ''} model".replace("  ", " ") + (derivation.needs and f" with {derivation.needs}"),
                    models=models,
                )
            return self._defaults[task]
        model = self.get(name)
        if task not in model.tasks:
            raise self._unfit(model, task)
        return model

    def one(self, name: str | None) -> Model:
        """Returns the named model, or the only one that is loaded.

        Raises:
            NotFoundError: No such model, or none at all.
            InvalidValueError: None is named, and several are loaded.
        """
        if name is not None:
            return self.get(name)
        if len(self.models) > 1:
            raise InvalidValueError(
                "several models are loaded; name one of them in `model`: {models}.", models=", ".join(f"`{each}`" for each in self.models)
            )
        if not self.models:
            raise NotFoundError("no model is loaded.")
        return next(iter(self.models.values()))

    def _unfit(self, model: Model, task: str) -> InvalidValueError:
        """Returns why a model cannot do a task, and which can where that is more than a matter of the model's task."""
        derivation = TASKS[task].derivation
        if derivation is None:
            return InvalidValueError(
                "the model `{model}` is for {own_task}, this endpoint is for {task}; POST to /models/{model} instead.",
                model=model.name,
                own_task=model.task,
                task=task,
            )
        able = ", ".join(f"`{name}`" for name in self._able(task)) or "none that is loaded"
        if derivation.base not in (None, model.task):
            return InvalidValueError(
                "the model `{model}` is for {own_task}, this endpoint is for {task}; POST to /models/{model} instead. Models that can do it: "
                "{models}.",
                model=model.name,
                own_task=model.task,
                task=task,
                models=able,
            )
        setting = derivation.needs
        if derivation.base is not None:
            labels = model.bundle.manifest.labels
            shown = ", ".join(f"`{label}`" for label in labels[:SHOWN_LABELS]) + (", ..." if len(labels) > SHOWN_LABELS else "")
            setting = f"{setting}, and its labels are {shown or 'none'}"
        return InvalidValueError(
            "the model `{model}` cannot do {task}: that takes {setting}. Models that can do it: {models}.",
            model=model.name,
            task=task,
            setting=setting,
            models=able,
        )
