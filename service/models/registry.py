"""Registry: finds loaded models by name and by task, and chooses the default model of each task."""

import logging
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from pathlib import Path
from textwrap import shorten
from types import SimpleNamespace
from typing import Any

from pydantic import TypeAdapter, ValidationError

from bertserve.service.bundle.files import find_bundles, read_manifest
from bertserve.service.errors import CallerValue, HttpError, InvalidValueError, SettingsError, StartError
from bertserve.service.messages import describe_validation_error, did_you_mean, quote_names
from bertserve.service.models.model import Model
from bertserve.service.settings import Settings
from bertserve.service.tasks.catalog import TASKS, answered_tasks, requested_task

logger = logging.getLogger("bertserve.loading")

DEFAULTS_FILE = "defaults.json"
_DEFAULTS = TypeAdapter(dict[str, str])


def _configured_defaults(settings: Settings, models: Sequence[Model], broken: Mapping[str, str]) -> dict[str, str]:
    """Returns task -> name of its default model, as the operator chose: by `--default`, or else by `defaults.json` of a models folder.

    Tasks are written by their Hugging Face name or by their path. A file's default is ignored if it is one of the `broken` models.

    Raises:
        StartError: A file cannot be read, or is not a JSON object of names.
        SettingsError: A task is unknown or has two models, or its model is not loaded or does not answer it.
    """
    tasks = {key: spec for spec in TASKS.values() for key in (spec.path, spec.name)}
    chosen: dict[str, tuple[str, str]] = {}  # task -> name of the model, and who chose it
    files = [(f"`{path}`", _read_defaults(path)) for folder in settings.models if (path := folder / DEFAULTS_FILE).exists()]
    for origin, defaults in [("--default", settings.default), *files]:
        for key, name in defaults.items():
            if key not in tasks:
                raise SettingsError(f"{origin} has the unknown task `{key}`; known tasks are {', '.join(tasks)}.")
            spec = tasks[key]
            other, other_origin = chosen.get(spec.name, (name, origin))
            if origin != "--default" and (name in broken or other_origin == "--default"):
                continue
            use_flag = f"choose one with --default {spec.path}=NAME"
            if other != name:
                raise SettingsError(f"{origin} makes `{name}` the default for `{key}`, but {other_origin} makes it `{other}`; {use_flag}.")
            candidates = [model.name for model in models if spec.name in model.tasks]
            if name not in candidates:
                raise SettingsError(
                    f"{origin} makes `{name}` the default for `{key}`, but no model of that name is loaded for that task; loaded are "
                    f"{quote_names(candidates)}. Fix it, or {use_flag}."
                )
            chosen[spec.name] = name, origin
    return {task: name for task, (name, _) in chosen.items()}


def _read_defaults(path: Path) -> dict[str, str]:
    try:
        return _DEFAULTS.validate_json(path.read_bytes(), strict=True)
    except (OSError, ValidationError) as error:
        reason = error.strerror if isinstance(error, OSError) else describe_validation_error(error.errors(include_url=False)[0])
        example = '{"text-classification": "sentiment"}'
        raise StartError(f"`{path}` must be a JSON object of tasks and model names, such as {example}: {reason}.") from error


def _base(task: str) -> str | None:
    """Returns the task whose models answer a task: another one if it is derived; None if models of any task can answer it."""
    derivation = TASKS[task].derivation
    return task if derivation is None else derivation.base


class Registry:
    """The loaded models, which may change during requests; a request keeps the model that it started with.

    Attributes:
        models: Name -> model, sorted by name.
        broken: Name -> error, for models that could not be loaded.
        defaults: Task -> name of its default model.
    """

    def __init__(self, models: Sequence[Model], broken: dict[str, str], settings: Settings) -> None:
        """Chooses the defaults of the models, which have any order, by the settings and the files of the models folders.

        A derived task uses the default of its base task, if that model can answer it. With `allow_implicit_default`, a task with several
        models and no choice uses the first model by name.

        Raises:
            StartError: There are no models, or a file of defaults is wrong.
            SettingsError: A configured default is wrong, or a task has several models and no choice.
        """
        self.models = {model.name: model for model in sorted(models, key=lambda model: model.name)}
        self.broken = broken
        self._settings = settings
        if not models:
            raise StartError(f"no model can be loaded: {'; '.join(broken.values())}")
        self._configured_defaults = _configured_defaults(settings, models, broken)
        self.defaults = self._choose({})
        ambiguous = dict[str, list[str]]()  # task -> models, for tasks that need a default and have none
        for task in TASKS:
            names, base = self._candidates(task), _base(task)
            # A task that models of any task can answer needs no default: with several such models, a request names the model. The default
            # of the base task, which precedes its derived tasks, is also the default of a derived task with the same models.
            if task not in self.defaults and len(names) > 1 and base is not None and ambiguous.get(base) != names:
                ambiguous[task] = names
        if ambiguous:
            which = "; ".join(f"/{TASKS[task].path} ({quote_names(names)})" for task, names in ambiguous.items())
            flag = ",".join(f"{TASKS[task].path}=NAME" for task in ambiguous)
            raise SettingsError(
                f"several models can answer {which}; choose the default with --default {flag}, or allow the first "
                "by name with --allow-implicit-default."
            )

    def warn_of_next_start(self) -> None:
        """Logs why a start with the same settings would fail, by the manifests of the bundles that are in the models folders now."""
        models, broken = list[Any](), dict(self.broken)  # what the choice of default models needs
        try:
            for path in find_bundles(self._settings.models):
                try:
                    if path.name in broken:
                        raise StartError(broken[path.name])
                    models.append(SimpleNamespace(name=path.name, tasks=answered_tasks(read_manifest(path)[0])))
                except StartError as error:
                    if not self._settings.skip_broken:
                        raise
                    broken[path.name] = error.message
            Registry(models, broken, self._settings)
        except StartError as error:
            logger.warning("the next start with these settings will fail: %s", error.message)

    def default_of(self, model: Model) -> list[str]:
        """Returns the tasks that have a model as their default."""
        return [task for task in TASKS if self.defaults.get(task) == model.name]

    def replace_models(self, models: Mapping[str, Model]) -> None:
        """Replaces the models, and logs changes of default models.

        A default does not change while its model is loaded; without it, the only candidate is the default.
        """
        before = self.defaults
        self.models = dict(sorted(models.items()))
        self.defaults = self._choose(before)
        for task, spec in TASKS.items():
            old, new = (defaults.get(task, "none") for defaults in (before, self.defaults))
            if old != new:
                candidates = quote_names(self._candidates(task))
                logger.warning("the default of /%s is %s (before: %s); --default can choose %s", spec.path, new, old, candidates)

    def _choose(self, before: Mapping[str, str]) -> dict[str, str]:
        """Returns task -> its default model: by choice, by the choice for its base task, as before, or the only or first candidate."""
        defaults = {}
        for task in TASKS:
            candidates = self._candidates(task)
            preferred = (self._configured_defaults.get(task), self._configured_defaults.get(_base(task) or ""), before.get(task))
            names = [name for name in preferred if name in candidates]
            if not names and (len(candidates) == 1 or self._settings.allow_implicit_default):
                names = candidates
            if names:
                defaults[task] = names[0]
        return defaults

    def _candidates(self, task: str) -> list[str]:
        """Returns the names of the models that answer a task."""
        return [model.name for model in self.models.values() if task in model.tasks]

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
                candidates=quote_names(self._candidates(task)),
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
                candidates=quote_names(self._candidates(task)),
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
    base, derivation = _base(task), TASKS[task].derivation
    kind = f"a model for {base}" if base else "a model"
    return f"{kind} with {derivation.needs}" if derivation and derivation.needs else kind
