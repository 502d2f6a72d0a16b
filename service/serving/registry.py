"""Registry: finds loaded models by name and by task; and which model answers a task where a request names none."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from bertserve.service.errors import BundleError, InvalidValueError, NotFoundError, SettingsError, fault, nearest
from bertserve.service.serving.model import Model
from bertserve.service.tasks.catalog import TASKS

DEFAULTS_FILE = "defaults.json"
_DEFAULTS = TypeAdapter(dict[str, str])


@dataclass(frozen=True, slots=True)
class FolderDefaults:
    """What one folder says.

    Attributes:
        path: Of its file.
        models: Task -> name of a model, tasks as `--default` takes them.
    """

    path: Path
    models: dict[str, str]


def read_defaults(folders: Sequence[Path]) -> list[FolderDefaults]:
    """Returns what the models folders say, in their order; most say nothing.

    Raises:
        BundleError: A file cannot be read, or is no JSON object of names.
    """
    return [_read_file(path) for folder in folders if (path := folder / DEFAULTS_FILE).exists()]


def _read_file(path: Path) -> FolderDefaults:
    try:
        return FolderDefaults(path, _DEFAULTS.validate_json(path.read_bytes(), strict=True))
    except OSError as error:
        raise BundleError(f"`{path}` cannot be read ({error.strerror}); make it readable, or remove it.") from error
    except ValidationError as error:
        raise BundleError(
            f'`{path}` is not a JSON object of tasks and model names, such as {{"text-classification": "sentiment"}}: '
            f"{fault(error.errors(include_url=False)[0])}."
        ) from error


Answered = Mapping[str, Sequence[str]]  # name of a model -> the tasks that it answers, in the order of names


def chosen_defaults(answered: Answered, wanted: Mapping[str, str], *, by_name: bool, present: Mapping[str, str]) -> dict[str, str]:
    """Returns task -> name of the model that its endpoint uses, of the tasks that have one.

    Args:
        answered: The models.
        wanted: Task -> name, as chosen by the operator; a derived task uses the one of its base task, where that can do it.
        by_name: Whether the first by name is used where several could be and none is wanted.
        present: Task -> name, as used before.
    """
    chosen: dict[str, str] = {}
    for task, spec in TASKS.items():
        able = able_models(answered, task)
        base = None if spec.derivation is None else wanted.get(spec.derivation.base or "")
        named = next((name for name in (wanted.get(task), base, present.get(task)) if name in able), None)
        if named is None and (len(able) == 1 or by_name):
            named = next(iter(able), None)
        if named is not None:
            chosen[task] = named
    return chosen


def check_defaults(answered: Answered, wanted: Mapping[str, str], *, by_name: bool) -> None:
    """Checks that a start knows which model each endpoint uses.

    Raises:
        SettingsError: A wanted model is not there or not of its task, or a task has several models and none of them is wanted.
    """
    defaults = chosen_defaults(answered, wanted, by_name=by_name, present={})
    for task, name in wanted.items():
        if defaults.get(task) != name:
            have = ", ".join(f"{each}={model}" for model, tasks in answered.items() for each in tasks)
            raise SettingsError(f"--default is {task}={name}, but no model of that name is loaded for that task; loaded are {have}.")
    # a task that bundles of any task can do is left out: with several such models, a request names the model
    own = [task for task, spec in TASKS.items() if spec.derivation is None or spec.derivation.base is not None]
    open_ = {task: able_models(answered, task) for task in own if task not in defaults}
    # a default of the base task settles a derived one that has the same models
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
    given: Mapping[str, str], folders: Sequence[Path], answered: Answered, broken: Mapping[str, str], *, checked: bool
) -> dict[str, str]:
    """Returns task -> name of a model: what the models folders say, and over it what `--default` does.

    Args:
        given: What `--default` says.
        folders: The models folders.
        answered: The models.
        broken: Name -> why it could not be loaded; what a folder says of such a model does not count.
        checked: Whether a model that a folder names must be there.

    Raises:
        BundleError: A folder names a model that is not there, or its file cannot be read.
        SettingsError: Two folders contradict each other, or a task does not exist or is named twice.
    """
    by_flag = _by_task(given, "--default")
    defaults: dict[str, tuple[str, Path]] = {}
    for folder in read_defaults(folders):
        for task, name in _by_task(folder.models, f"`{folder.path}`").items():
            if task in by_flag or name in broken:
                continue
            if checked and task not in answered.get(name, ()):
                raise BundleError(
                    f"`{folder.path}` makes `{name}` the default for {task}, but no model of that name and task is loaded; "
                    f"fix the file, or choose another with --default {TASKS[task].path}=NAME."
                )
            other, path = defaults.setdefault(task, (name, folder.path))
            if other != name:
                raise SettingsError(
                    f"`{path}` makes `{other}` the default for {task}, but `{folder.path}` makes `{name}` the default; "
                    f"choose one with --default {TASKS[task].path}=NAME."
                )
    return {task: name for task, (name, _) in defaults.items()} | by_flag


def _by_task(given: Mapping[str, str], origin: str) -> dict[str, str]:
    """Returns task -> model name, tasks given by their Hugging Face name or by their path."""
    tasks = {spec.path: name for name, spec in TASKS.items()} | {name: name for name in TASKS}
    for task in given:
        if task not in tasks:
            raise SettingsError(f"{origin} has the unknown task `{task}`; known tasks are {', '.join(tasks)}.")
        if tasks[task] != task and tasks[task] in given:
            raise SettingsError(f"{origin} names a model for `{task}` and one for `{tasks[task]}`, which is the same task; remove one.")
    return {tasks[task]: name for task, name in given.items()}


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
                logger.info("the model %s can also answer /%s, which still uses %s", model.name, TASKS[task].path, used and used.name)

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
                        "several models can answer ({models}), and none of them is the default for {task}; set `model`, or "
                        "use the path /models/NAME.",
                        models=", ".join(f"`{each}`" for each in able),
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
                raise NotFoundError(
                    "no model for {task} is loaded, which needs {setting}; loaded are: {models}.",
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
                "several models are loaded; set `model` to one of {models}.", models=", ".join(f"`{known}`" for known in self.models)
            )
        if not self.models:
            raise NotFoundError("no model is loaded.")
        return next(iter(self.models.values()))

    def _unfit(self, model: Model, task: str) -> InvalidValueError:
        """Returns why a model cannot do a task, and which can where that is more than a matter of the model's task."""
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
