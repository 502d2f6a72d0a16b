"""The default model of each task: the operator's choice, or else the only candidate."""

from collections.abc import Collection, Mapping
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from bertserve.service.errors import SettingsError, StartError
from bertserve.service.messages import describe_validation_error, quote_names
from bertserve.service.settings import Settings
from bertserve.service.tasks.catalog import TASKS

DEFAULTS_FILE = "defaults.json"
_DEFAULTS = TypeAdapter(dict[str, str])

ModelTasks = Mapping[str, Collection[str]]  # name of a model -> tasks that it answers; sorted by name


def choose_defaults(
    settings: Settings, models: ModelTasks, configured: Mapping[str, str], broken: Collection[str], before: Mapping[str, str]
) -> dict[str, str]:
    """Returns task -> its default model: the configured one, its base task's, the one before, or the only or first candidate.

    A task whose configured model is `broken` has no other default: its path must not answer with another model.
    """
    defaults = {}
    for task in TASKS:
        names = candidates(models, task)
        operators = (configured.get(task), configured.get(base_task(task) or ""))
        chosen = [name for name in (*operators, before.get(task)) if name in names]
        if not chosen and (len(names) == 1 or settings.allow_implicit_default) and not any(name in broken for name in operators):
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
    defaults = choose_defaults(settings, models, configured, broken, before={})
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


def _read_configured(settings: Settings, models: ModelTasks, broken: Mapping[str, str]) -> dict[str, str]:
    tasks = {key: spec.name for spec in TASKS.values() for key in (spec.path, spec.name)}
    sources: dict[str, Mapping[str, str]] = {"--default": settings.default}
    sources |= {f"`{path}`": _read_file(path) for folder in settings.models if (path := folder / DEFAULTS_FILE).exists()}
    for source, names in sources.items():
        for key in names:
            if key not in tasks:
                raise SettingsError(f"{source} has the unknown task `{key}`; known tasks are {', '.join(tasks)}.")
    by_flag = {tasks[key] for key in settings.default}
    chosen, source_of = dict[str, str](), dict[str, str]()  # by task
    chosen_broken = dict[str, str]()  # likewise; a broken model is only chosen if no other one is
    for source, names in sources.items():
        for key, name in names.items():
            task = tasks[key]
            if source != "--default" and task in by_flag:
                continue
            if name in broken:
                chosen_broken.setdefault(task, name)
                continue
            start = f"{source} makes `{name}` the default for `{key}`, but "
            use_flag = f"choose one with --default {TASKS[task].path}=NAME"
            if chosen.setdefault(task, name) != name:
                raise SettingsError(f"{start}{source_of[task]} makes it `{chosen[task]}`; {use_flag}.")
            source_of.setdefault(task, source)
            if name not in (candidate_names := candidates(models, task)):
                loaded = quote_names(candidate_names)
                raise SettingsError(f"{start}no model of that name is loaded for that task; loaded are {loaded}. Fix it, or {use_flag}.")
    return chosen_broken | chosen


def _read_file(path: Path) -> dict[str, str]:
    try:
        return _DEFAULTS.validate_json(path.read_bytes(), strict=True)
    except (OSError, ValidationError) as error:
        reason = error.strerror if isinstance(error, OSError) else describe_validation_error(error.errors(include_url=False)[0])
        example = '{"text-classification": "sentiment"}'
        raise StartError(f"`{path}` must be a JSON object of tasks and model names, such as {example}: {reason}.") from error
