"""Registry: finds loaded models by name and by task."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence

from service.errors import InvalidValueError, NotFoundError, SettingsError
from service.serving.model import Model
from service.tasks.catalog import TASKS

SHOWN_LABELS = 10  # of a model, in a message


class Registry:
    """The loaded models, which may change while requests come; a request keeps the model that it found."""

    def __init__(self, models: Sequence[Model], defaults: Mapping[str, str], *, check: bool = True) -> None:
        """Takes loaded models.

        Args:
            models: In any order.
            defaults: Task -> name of the model that its endpoint uses; otherwise the first by name.
            check: Whether defaults must be loaded; later they may come and go.

        Raises:
            SettingsError: A default names no loaded model of its task.
        """
        self.models = {model.name: model for model in models}
        self._wanted = defaults
        self._choose_defaults()
        for task, name in defaults.items() if check else ():
            if self._defaults.get(task) is not self.models.get(name):
                have = ", ".join(f"{each}={m.name}" for m in self.models.values() for each in m.tasks)
                raise SettingsError(f"--default {task}={name} names no loaded model of that task; there is {have}.")

    def put(self, model: Model) -> None:
        """Takes a model, in place of the one of its name."""
        self.models[model.name] = model
        self._choose_defaults()

    def remove(self, name: str) -> None:
        """Lets a model go; its endpoint then uses the next one of its task by name."""
        del self.models[name]
        self._choose_defaults()

    def _choose_defaults(self) -> None:
        self.models = dict(sorted(self.models.items()))
        self._defaults: dict[str, Model] = {}
        for model in self.models.values():
            for task in model.tasks:
                if task not in self._defaults or self._wanted.get(task) == model.name:
                    self._defaults[task] = model

    def get(self, name: str) -> Model:
        """Returns the model of that name.

        Raises:
            NotFoundError: No such model; the message names the nearest.
        """
        if name not in self.models:
            near = difflib.get_close_matches(name[:64], self.models, n=1)  # of a name of megabytes it would take seconds
            raise NotFoundError(
                f"no model `{name[:64]}` is loaded; "
                + (f"did you mean `{near[0]}`?" if near else f"there is {', '.join(self.models) or 'none'}.")
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
                derivation = TASKS[task].derivation
                takes = f"it takes a {derivation.base} model{derivation.needs and f' with {derivation.needs}'}, and " if derivation else ""
                raise NotFoundError(
                    f"no model for {task} is loaded; {takes}there is {', '.join(f'{m.name} ({m.task})' for m in self.models.values()) or 'none'}."
                )
            return self._defaults[task]
        model = self.get(name)
        if task not in model.tasks:
            raise InvalidValueError(self._unfit(model, task))
        return model

    def _unfit(self, model: Model, task: str) -> str:
        """Returns why a model cannot do a task, and which can where that is more than a matter of the model's task."""
        why = f"the model `{model.name}` is for {model.task}, this endpoint is for {task}; POST to /models/{model.name} instead."
        derivation = TASKS[task].derivation
        if derivation is None:
            return why
        able = ", ".join(f"`{other.name}`" for other in self.models.values() if task in other.tasks)
        if model.task == derivation.base:
            labels = model.bundle.manifest.labels
            shown = ", ".join(f"`{label}`" for label in labels[:SHOWN_LABELS]) + (", ..." if len(labels) > SHOWN_LABELS else "")
            why = f"the model `{model.name}` cannot do {task}: that takes {derivation.needs}, and its labels are {shown}."
        return f"{why} " + (f"Models that can do it: {able}." if able else "No model that is loaded can do it.")
