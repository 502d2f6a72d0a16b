"""Which model answers a task where a request names none: the choice, and what a start refuses. Knows names and tasks, and no loaded model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from bertserve.service.bundle.default_models import read_defaults
from bertserve.service.errors import BundleError, SettingsError
from bertserve.service.tasks.catalog import TASKS

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
            raise SettingsError(f"--default {task}={name} names no loaded model of that task; there is {have}.")
    # of what bundles of any task may answer nobody chose several for one endpoint: there a request names the model
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
            f"several models could answer {which}: choose which one answers where a request names none, with --default {flag}, or take "
            "the first by name, with --default-by-name."
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
    found: dict[str, tuple[str, Path]] = {}
    for folder in read_defaults(folders):
        for task, name in _by_task(folder.models, f"`{folder.path}`").items():
            if task in by_flag or name in broken:
                continue
            if checked and task not in answered.get(name, ()):
                raise BundleError(
                    f"`{folder.path}` says that `{name}` answers {task}, and no model of that name and task is loaded; correct the file, or "
                    f"choose another with --default {TASKS[task].path}=NAME."
                )
            other, path = found.setdefault(task, (name, folder.path))
            if other != name:
                raise SettingsError(
                    f"`{path}` says that `{other}` answers {task}, and `{folder.path}` that `{name}` does; choose one with "
                    f"--default {TASKS[task].path}=NAME."
                )
    return {task: name for task, (name, _) in found.items()} | by_flag


def _by_task(given: Mapping[str, str], origin: str) -> dict[str, str]:
    """Returns task -> model name, tasks given by their Hugging Face name or by their path."""
    tasks = {spec.path: name for name, spec in TASKS.items()} | {name: name for name in TASKS}
    for task in given:
        if task not in tasks:
            raise SettingsError(f"{origin} names the task `{task}`; tasks are {', '.join(tasks)}.")
        if tasks[task] != task and tasks[task] in given:
            raise SettingsError(f"{origin} names a model for `{task}` and one for `{tasks[task]}`, which is the same task; leave one out.")
    return {tasks[task]: name for task, name in given.items()}
