"""Registry: finds loaded models by name and by task, and chooses the default model of each task."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from bertserve.service.errors import BundleError, InvalidValueError, NotFoundError, Sent, SettingsError, fault, nearest
from bertserve.service.models.model import Model
from bertserve.service.tasks.catalog import TASKS

DEFAULTS_FILE = "defaults.json"
_DEFAULTS = TypeAdapter(dict[str, str])


def _read_defaults(path: Path) -> dict[str, str]:
    """Reads the default models of one folder: task -> name; tasks are written as in `--default`.

    Raises:
        BundleError: The file cannot be read, or is not a JSON object of names.
    """
    try:
        return _DEFAULTS.validate_json(path.read_bytes(), strict=True)
    except OSError as error:
        raise BundleError(f"`{path}` cannot be read ({error.strerror}); make it readable, or remove it.") from error
    except ValidationError as error:
        raise BundleError(
            f'`{path}` is not a JSON object of tasks and model names, such as {{"text-classification": "sentiment"}}: '
            f"{fault(error.errors(include_url=False)[0])}."
        ) from error


Answered = Mapping[str, Sequence[str]]  # name of a model -> the tasks that it answers; sorted by name


def chosen_defaults(answered: Answered, choices: Mapping[str, str], *, by_name: bool, present: Mapping[str, str]) -> dict[str, str]:
    """Returns task -> name of its default model, for each task that has one.

    Args:
        answered: The models.
        choices: Task -> name, as the operator chose; a derived task uses the model of its base task, if that model can answer it.
        by_name: Whether a task with several models and no choice uses the first model by name.
        present: Task -> name, from before the change.
    """
    chosen: dict[str, str] = {}
    for task, spec in TASKS.items():
        able = able_models(answered, task)
        base = None if spec.derivation is None else choices.get(spec.derivation.base or "")
        named = next((name for name in (choices.get(task), base, present.get(task)) if name in able), None)
        if named is None and (len(able) == 1 or by_name):
            named = next(iter(able), None)
        if named is not None:
            chosen[task] = named
    return chosen


def check_defaults(answered: Answered, choices: Mapping[str, str], *, by_name: bool) -> None:
    """Checks that each endpoint has a default model at startup.

    Raises:
        SettingsError: A chosen model is not loaded or does not answer its task, or a task has several models and no choice.
    """
    defaults = chosen_defaults(answered, choices, by_name=by_name, present={})
    for task, name in choices.items():
        if defaults.get(task) != name:
            have = ", ".join(f"{model_task}={model}" for model, tasks in answered.items() for model_task in tasks)
            raise SettingsError(f"--default is {task}={name}, but no model of that name is loaded for that task; loaded are {have}.")
    # tasks that bundles of any task can answer are left out: with several such models, a request names the model
    own = [task for task, spec in TASKS.items() if spec.derivation is None or spec.derivation.base is not None]
    open_ = {task: able_models(answered, task) for task in own if task not in defaults}
    # the default of the base task is also the default of a derived task with the same models
    open_ = {
        task: names
        for task, names in open_.items()
        if len(names) > 1 and ((derivation := TASKS[task].derivation) is None or open_.get(derivation.base or "") != names)
    }
    if open_:
        which = "; ".join(f"/{TASKS[task].path} ({', '.join(f'`{name}`' for name in names)})" for task, names in open_.items())
        flag = ",".join(f"{TASKS[task].path}=NAME" for task in open_)
        raise SettingsError(
            f"several models can answer {which}; choose the default with --default {flag}, or allow the first "
            "by name with --allow-implicit-default."
        )


def able_models(answered: Answered, task: str) -> list[str]:
    """Returns the names of the models that answer a task."""
    return [name for name, tasks in answered.items() if task in tasks]


def wanted_defaults(
    flag_defaults: Mapping[str, str], folders: Sequence[Path], answered: Answered, broken: Mapping[str, str]
) -> dict[str, str]:
    """Returns task -> name of its default model: the defaults of the models folders, overridden by `--default`.

    A folder's default is ignored if it is one of the `broken` models, which could not be loaded.

    Raises:
        BundleError: A folder's default is not loaded, or its file cannot be read.
        SettingsError: Two folders contradict each other, or a task is unknown or occurs twice.
    """
    by_flag = _by_task(flag_defaults, "--default")
    defaults: dict[str, tuple[str, Path]] = {}
    files = [path for folder in folders if (path := folder / DEFAULTS_FILE).exists()]
    for file in files:
        for task, name in _by_task(_read_defaults(file), f"`{file}`").items():
            if task in by_flag or name in broken:
                continue
            if task not in answered.get(name, ()):
                raise BundleError(
                    f"`{file}` makes `{name}` the default for {task}, but no model of that name and task is loaded; "
                    f"fix the file, or choose another with --default {TASKS[task].path}=NAME."
                )
            other, path = defaults.setdefault(task, (name, file))
            if other != name:
                raise SettingsError(
                    f"`{path}` makes `{other}` the default for {task}, but `{file}` makes `{name}` the default; "
                    f"choose one with --default {TASKS[task].path}=NAME."
                )
    return {task: name for task, (name, _) in defaults.items()} | by_flag


def _by_task(defaults: Mapping[str, str], origin: str) -> dict[str, str]:
    """Returns task -> model name; `defaults` has each task by its Hugging Face name or by its path."""
    tasks = {spec.path: name for name, spec in TASKS.items()} | {name: name for name in TASKS}
    for task in defaults:
        if task not in tasks:
            raise SettingsError(f"{origin} has the unknown task `{task}`; known tasks are {', '.join(tasks)}.")
        if tasks[task] != task and tasks[task] in defaults:
            raise SettingsError(f"{origin} names a model for `{task}` and one for `{tasks[task]}`, which is the same task; remove one.")
    return {tasks[task]: name for task, name in defaults.items()}


logger = logging.getLogger("bertserve.loading")

SHOWN_LABELS = 10  # labels of a model that a message shows


class Registry:
    """The loaded models, which may change during requests; a request keeps the model that it started with.

    Attributes:
        models: Name -> model.
        choices: Task -> name of its default model, as the operator chose.
    """

    def __init__(self, models: Sequence[Model], choices: Mapping[str, str], *, by_name: bool = False) -> None:
        """Takes loaded models.

        Args:
            models: The models, in any order.
            choices: Task -> name of its default model; a derived task uses the model of its base task, if that model can answer it.
            by_name: Whether a task with several models and no choice uses the first model by name; otherwise it needs a choice.

        Raises:
            SettingsError: A chosen model is not loaded or does not answer its task, or a task has several models and no choice.
        """
        self.models = {model.name: model for model in sorted(models, key=lambda model: model.name)}
        self.choices = choices
        self._by_name = by_name
        check_defaults(self._answered(), choices, by_name=by_name)
        self._defaults = self._chosen({})

    @property
    def defaults(self) -> dict[str, str]:
        """Task -> name of its default model."""
        return {task: model.name for task, model in self._defaults.items()}

    def default_of(self, model: Model) -> list[str]:
        """Returns the tasks that have a model as their default."""
        return [task for task in TASKS if self._defaults.get(task) is model]

    def put(self, model: Model) -> None:
        """Adds a model or replaces the one of the same name. Defaults stay; the log names other tasks that a new model can answer."""
        is_new = model.name not in self.models
        self.models = dict(sorted((self.models | {model.name: model}).items()))
        self._choose_again()
        for task in model.tasks if is_new else ():
            if (used := self._defaults.get(task)) not in (None, model):
                logger.info("the model %s can also answer /%s, which still uses %s", model.name, TASKS[task].path, used and used.name)

    def remove(self, name: str) -> None:
        """Removes a model; a task that loses its default uses the remaining model if there is only one."""
        self.models = {other: model for other, model in self.models.items() if other != name}  # another thread may read the old one
        self._choose_again()

    def _choose_again(self) -> None:
        """Chooses defaults after a change. A default does not change while its model is loaded, and the log reports each change."""
        before = self.defaults
        self._defaults = self._chosen(before)
        for task, spec in TASKS.items():
            old, new = before.get(task), self.defaults.get(task)
            if new is not None and old != new:
                logger.warning("/%s now uses the model %s%s", spec.path, new, "" if old is None else f" instead of {old}")
            elif new is None and len(able := self._able(task)) > 1:
                logger.warning(
                    "/%s has no default model, but %s can answer it; start with --default %s=NAME", spec.path, ", ".join(able), spec.path
                )

    def _able(self, task: str) -> list[str]:
        """Returns the names of the models that answer a task."""
        return able_models(self._answered(), task)

    def _answered(self) -> dict[str, Sequence[str]]:
        """Returns name -> tasks of each model."""
        return {name: model.tasks for name, model in self.models.items()}

    def _chosen(self, present: Mapping[str, str]) -> dict[str, Model]:
        """Returns task -> its default model, given the defaults before the change."""
        chosen = chosen_defaults(self._answered(), self.choices, by_name=self._by_name, present=present)
        return {task: self.models[name] for task, name in chosen.items()}

    def get(self, name: str) -> Model:
        """Returns the model with a name.

        Raises:
            NotFoundError: There is no such model; the message names the most similar ones.
        """
        if (model := self.models.get(name)) is None:
            if near := nearest(name, self.models):
                raise NotFoundError("no model `{name}` is loaded; did you mean `{models}`?", name=Sent(name), models=near)
            raise NotFoundError(
                "no model `{name}` is loaded; loaded are: {models}.", name=Sent(name), models=", ".join(self.models) or "none"
            )
        return model

    def for_task(self, task: str, name: str | None = None) -> Model:
        """Returns the named model, or the task's default model.

        Raises:
            NotFoundError: There is no such model, or no model for the task.
            InvalidValueError: The named model cannot answer the task.
        """
        if name is None:
            if (default := self._defaults.get(task)) is None:
                if able := self._able(task):
                    raise NotFoundError(
                        "several models can answer ({models}), and none of them is the default for {task}; set `model`, or "
                        "use the path /models/NAME.",
                        models=", ".join(f"`{model_name}`" for model_name in able),
                        task=task,
                    )
                models = ", ".join(f"{model.name} ({model.task})" for model in self.models.values()) or "none"
                if (derivation := TASKS[task].derivation) is None:
                    raise NotFoundError(
                        "no model for {task} is loaded; loaded are: {models}. The operator can export one with "
                        "`bert-export CHECKPOINT --task {task}`.",
                        task=task,
                        models=models,
                    )
                setting = f"a {derivation.base or ''} model".replace("  ", " ") + (derivation.needs and f" with {derivation.needs}")
                raise NotFoundError(
                    "no model for {task} is loaded, which needs {setting}; loaded are: {models}.",
                    task=task,
                    setting=setting,
                    models=models,
                )
            return default
        model = self.get(name)
        if task not in model.tasks:
            raise self._unfit(model, task)
        return model

    def _unfit(self, model: Model, task: str) -> InvalidValueError:
        """Returns the error for a model that cannot answer a task; for a derived task it names the models that can."""
        derivation = TASKS[task].derivation
        if derivation is None:
            return InvalidValueError(
                "the model `{model}` is for {own_task}, but this endpoint is for {task}; send a POST to /models/{model} instead.",
                model=model.name,
                own_task=model.task,
                task=task,
            )
        able = ", ".join(f"`{name}`" for name in self._able(task)) or "none that is loaded"
        if derivation.base not in (None, model.task):
            return InvalidValueError(
                "the model `{model}` is for {own_task}, but this endpoint is for {task}; send a POST to /models/{model} "
                "instead. Models for {task}: {models}.",
                model=model.name,
                own_task=model.task,
                task=task,
                models=able,
            )
        setting = derivation.needs
        if derivation.base is not None:
            labels = model.bundle.manifest.labels
            shown = ", ".join(f"`{label}`" for label in labels[:SHOWN_LABELS]) + (", ..." if len(labels) > SHOWN_LABELS else "")
            setting = f"{setting}, but its labels are {shown or 'none'}"
        return InvalidValueError(
            "the model `{model}` does not support {task}, which needs {setting}. Models for {task}: {models}.",
            model=model.name,
            task=task,
            setting=setting,
            models=able,
        )
