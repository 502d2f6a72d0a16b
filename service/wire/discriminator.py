"""Which task a body at a model's own path is for: the model's, or another one that bundles of its task answer."""

from __future__ import annotations

from typing import Any

from bertserve.service.tasks.catalog import TASKS


def requested_task(task: str, value: Any) -> str:
    """Returns which task a body asks a model for.

    Args:
        task: The model's own.
        value: The JSON value of the body, which may be no object; the reader of the body says so.
    """
    derived = ((spec.name, spec.derivation) for spec in TASKS.values() if spec.derivation is not None)
    return next((name for name, derivation in derived if derivation.takes(task) and _has(value, derivation.marker)), task)


def _has(value: Any, keys: tuple[str, ...]) -> bool:
    """Returns whether an object has a key, and within it the next, to the last."""
    for key in keys:
        if not isinstance(value, dict) or key not in value:
            return False
        value = value[key]
    return True
