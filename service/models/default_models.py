"""The default model of each task: the operator's choice, or else the only candidate."""

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import NamedTuple

from pydantic import TypeAdapter, ValidationError

from bertserve.service.errors import SettingsError, StartError
from bertserve.service.messages import describe_validation_error, quote_names
from bertserve.service.settings import Settings
from bertserve.service.tasks.catalog import TASKS

DEFAULTS_FILE = "defaults.json"
_DEFAULTS = TypeAdapter(dict[str, str])

ModelTasks = Mapping[str, Collection[str]]  # name of a model -> tasks that it answers; sorted by name


def choose_defaults(settings: Settings, models: ModelTasks, configured: Mapping[str, str], before: Mapping[str, str]) -> dict[str, str]:
    """Returns task -> its default model: the configured one, its base task's, the one before, or the only or first candidate."""
    defaults = {}
    for task in TASKS:
        names = candidates(models, task)
        preferred = (configured.get(task), configured.get(base_task(task) or ""), before.get(task))
        chosen = [name for name in preferred if name in names]
        if not chosen and (len(names) == 1 or settings.allow_implicit_default):
            chosen = names
        if chosen:
            defaults[task] = chosen[0]
    return defaults


def configured_defaults(settings: Settings, models: ModelTasks, broken: Mapping[str, str]) -> dict[str, str]:
    """Returns task -> name of its default model for a start, as the operator chose: by `--default`, or else by `defaults.json` of a folder.

    Tasks are written by their Hugging Face name or by their path. `broken` gives the errors of other models. A task whose chosen model is
    broken needs no other choice.

    Raises:
        StartError: There are no models, or a file cannot be read, or is not a JSON object of names.
        SettingsError: A task is unknown or has two models, its model is not loaded or does not answer it, or a task with several models
            has no default.
    """
    if not models:
        raise StartError(f"no model can be loaded: {'; '.join(broken.values())}")
    configured = _read_configured(settings, models, broken)
    defaults = choose_defaults(settings, models, configured, before={})
    ambiguous = dict[str, list[str]]()  # task -> models, for tasks that lack a default and need one
    for task in TASKS:
        names, base = candidates(models, task), base_task(task)
        # A task that models of any task can answer needs no default: with several such models, a request names the model. The default
        # of the base task, which precedes its derived tasks, is also the default of a derived task with the same models.
        is_chosen = task in defaults or configured.get(task) in broken or configured.get(base or "") in broken
        if not is_chosen and len(names) > 1 and base is not None and ambiguous.get(base) != names:
            ambiguous[task] = names
    if ambiguous:
        which = "; ".join(f"/{TASKS[task].path} ({quote_names(names)})" for task, names in ambiguous.items())
        flag = ",".join(f"{TASKS[task].path}=NAME" for task in ambiguous)
        raise SettingsError(
            f"several models can answer {which}; choose the default with --default {flag}, or allow the first "
            "by name with --allow-implicit-default."
        )
    return configured


def candidates(models: ModelTasks, task: str) -> list[str]:
    """Returns the names of the models that answer a task."""
    return [name for name, tasks in models.items() if task in tasks]


def base_task(task: str) -> str | None:
    """Returns the task whose models answer a task: another one if it is derived; None if models of any task can answer it."""
    derivation = TASKS[task].derivation
    return task if derivation is None else derivation.base


class _Default(NamedTuple):
    origin: str  # the flag or the file
    key: str  # the task as it is written there
    task: str
    name: str  # the name of the model


def _read_configured(settings: Settings, models: ModelTasks, broken: Mapping[str, str]) -> dict[str, str]:
    by_flag = _defaults("--default", settings.default)
    files = [path for folder in settings.models if (path := folder / DEFAULTS_FILE).exists()]
    in_files = [default for path in files for default in _defaults(f"`{path}`", _read_file(path))]
    overridden = {default.task for default in by_flag}
    defaults = [*by_flag, *(default for default in in_files if default.task not in overridden)]
    chosen: dict[str, _Default] = {}
    for default in sorted(defaults, key=lambda default: default.name in broken):  # a broken model is only chosen if no other one is
        start = f"{default.origin} makes `{default.name}` the default for `{default.key}`, but "
        use_flag = f"choose one with --default {TASKS[default.task].path}=NAME"
        other = chosen.setdefault(default.task, default)
        if default.name in broken:
            continue
        if other.name != default.name:
            raise SettingsError(f"{start}{other.origin} makes it `{other.name}`; {use_flag}.")
        if default.name not in (names := candidates(models, default.task)):
            loaded = quote_names(names)
            raise SettingsError(f"{start}no model of that name is loaded for that task; loaded are {loaded}. Fix it, or {use_flag}.")
    return {task: default.name for task, default in chosen.items()}


def _defaults(origin: str, names: Mapping[str, str]) -> list[_Default]:
    tasks = {key: spec.name for spec in TASKS.values() for key in (spec.path, spec.name)}
    for key in names:
        if key not in tasks:
            raise SettingsError(f"{origin} has the unknown task `{key}`; known tasks are {', '.join(tasks)}.")
    return [_Default(origin, key, tasks[key], name) for key, name in names.items()]


def _read_file(path: Path) -> dict[str, str]:
    try:
        return _DEFAULTS.validate_json(path.read_bytes(), strict=True)
    except (OSError, ValidationError) as error:
        reason = error.strerror if isinstance(error, OSError) else describe_validation_error(error.errors(include_url=False)[0])
        example = '{"text-classification": "sentiment"}'
        raise StartError(f"`{path}` must be a JSON object of tasks and model names, such as {example}: {reason}.") from error
