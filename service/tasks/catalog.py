"""The list of all tasks, and the tasks of a bundle and of a body. A new task needs its import and its entry here."""

from collections.abc import Mapping
from typing import Any

from bertserve.service.bundle.files import Bundle
from bertserve.service.bundle.manifest import Manifest
from bertserve.service.errors import StartError
from bertserve.service.messages import SHOWN_CHARS
from bertserve.service.tasks import (
    attention,
    classify,
    embed,
    fill_mask,
    multiple_choice,
    question_answering,
    rerank,
    similarity,
    token_classification,
    zero_shot,
)
from bertserve.service.tasks.task_spec import TaskSpec

TASKS: Mapping[str, TaskSpec] = {
    spec.name: spec
    for spec in (
        classify.SPEC,
        token_classification.SPEC,
        question_answering.SPEC,
        fill_mask.SPEC,
        multiple_choice.SPEC,
        embed.SPEC,
        similarity.SPEC,
        rerank.SPEC,
        zero_shot.SPEC,
        attention.SPEC,
    )
}


def find_spec(bundle: Bundle) -> TaskSpec:
    """Returns the task of a bundle.

    Raises:
        StartError: No bundles exist for this task, or the manifest lacks a field that the task needs.
    """
    manifest = bundle.manifest
    spec = TASKS.get(manifest.task)
    if spec is None or spec.derivation is not None:
        known = ", ".join(other.name for other in TASKS.values() if other.derivation is None)
        raise StartError(f"bundle `{bundle.path}` is for the task `{manifest.task[:SHOWN_CHARS]}`; this version serves {known}.")
    if (missing := spec.missing_field(manifest)) is not None:
        raise StartError(f"bundle `{bundle.path}` has a wrong manifest: {missing}; export it again.")
    return spec


def answered_tasks(manifest: Manifest) -> tuple[str, ...]:
    """Returns the names of all tasks that a bundle answers, its own task first."""
    derived = (
        spec.name
        for spec in TASKS.values()
        if spec.derivation is not None and spec.derivation.base in (None, manifest.task) and spec.derivation.compatible(manifest)
    )
    return (manifest.task, *derived)


def requested_task(task: str, value: Any) -> str:
    """Returns the task that a body requests, by default the model's own; `value` is its JSON, which can also be invalid."""
    derived = ((spec.name, spec.derivation) for spec in TASKS.values() if spec.derivation is not None)
    return next((name for name, derivation in derived if derivation.base in (None, task) and _has(value, derivation.discriminator)), task)


def _has(value: Any, keys: tuple[str, ...]) -> bool:
    """Returns whether an object has a path of nested keys."""
    for key in keys:
        if not isinstance(value, dict) or key not in value:
            return False
        value = value[key]
    return True
