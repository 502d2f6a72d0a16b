"""Which task a body at a model's own path is for: the model's, or another one that bundles of its task answer."""

from __future__ import annotations

from typing import Any

from pydantic_core import from_json

from service.tasks.catalog import TASKS


def requested_task(task: str, raw: bytes) -> str:
    """Returns which task a body asks a model for.

    Args:
        task: The model's own.
        raw: The body, which may be no JSON; who reads it will say so.
    """
    # the key's bytes are looked for first, since hardly any body has them
    derived = ((spec.name, spec.derivation) for spec in TASKS.values() if spec.derivation is not None and spec.derivation.takes(task))
    possible = [(name, derivation.marker) for name, derivation in derived if f'"{derivation.marker[-1]}"'.encode() in raw]
    if not possible:
        return task
    try:
        body = from_json(raw)
    except ValueError:
        return task
    return next((name for name, marker in possible if _has(body, marker)), task)


def _has(value: Any, keys: tuple[str, ...]) -> bool:
    """Returns whether an object has a key, and within it the next, to the last."""
    for key in keys:
        if not isinstance(value, dict) or key not in value:
            return False
        value = value[key]
    return True
