"""Paths: which ones no route ever sees, and which one a wrong one was meant to be."""

from __future__ import annotations

import difflib
import functools
import re
from collections.abc import Sequence

from starlette.types import Scope

from bertserve.service.errors import MalformedRequestError, NotFoundError
from bertserve.service.tasks.catalog import TASKS

_SHOWN_CHARS = 64  # of a path, in a message; of one of kilobytes it would also take long to find the nearest
_NAME = re.compile(r"\{(\w+)\}")
# control characters, what is not UTF-8, and `.` or `..` as a whole segment: a proxy in front may read such a path in another way
_AMBIGUOUS = re.compile(r"[\x00-\x1f\x7f-\x9f\ufffd]|/\.\.?(?:/|\Z)")
_ENCODED_SLASH = re.compile(rb"%(?:2f|5c)", re.IGNORECASE)


def check_path(scope: Scope) -> None:
    """Refuses a path that a proxy in front may have read as another one.

    Args:
        scope: The request's.

    Raises:
        MalformedRequestError: It has a control character, an encoded slash or backslash, a dot segment, or bytes that are not UTF-8.
    """
    raw = scope.get("raw_path") or b""
    if _AMBIGUOUS.search(scope["path"]) is not None or (b"%" in raw and _ENCODED_SLASH.search(raw) is not None):
        raise MalformedRequestError(
            "the path `{path}` has a control character, an encoded slash, a dot segment or bytes that are not UTF-8; send "
            "the plain path, see /docs.",
            path=scope["path"][:_SHOWN_CHARS],
        )


def no_such_path(path: str, known: tuple[str, ...]) -> NotFoundError:
    """Returns the error of a path that there is not.

    Args:
        path: The path.
        known: Those that there are; `{name}` in one is a model's name, `{version}` its version.
    """
    shown = path[:_SHOWN_CHARS]
    found = _nearest(shown, known)
    if found is not None:
        return NotFoundError("there is no path `{path}`; did you mean `{near}`? See /docs.", path=shown, near=found)
    tasks = ", ".join(f"/{spec.path}" for spec in TASKS.values())
    return NotFoundError("there is no path `{path}`; models answer a POST to {tasks} or /models/NAME, see /docs.", path=shown, tasks=tasks)


@functools.lru_cache(maxsize=256)
def _nearest(path: str, known: tuple[str, ...]) -> str | None:
    """Returns the path that is meant, if any is near: anyone may ask for many, so it compares a path with all of them in one go."""
    steps = path.split("/")
    filled = [_filled(template.split("/"), steps) for template in known if template.count("/") < len(steps)]
    lowered = {"/".join(each).lower(): each for each in reversed(filled)}
    near = difflib.get_close_matches(path.lower(), lowered, n=max(len(lowered), 1))
    return next(("/".join(lowered[each]) for each in near if _is_like(steps, lowered[each])), None)


def _filled(template: Sequence[str], steps: Sequence[str]) -> list[str]:
    """Returns a path with the names that the given one has at their places: those of a model and of a version are taken to be right."""
    given = [*steps, *[""] * len(template)]
    names = [_NAME.search(step) for step in template]
    return [
        step if found is None else step.replace(found[0], given[i].partition(":")[0] or found[1].upper())
        for i, (step, found) in enumerate(zip(template, names, strict=True))
    ]


def _is_like(steps: Sequence[str], other: Sequence[str]) -> bool:
    """Returns whether each step of a path of equal length is like the given one's; a shorter one, whose steps may be others, always is."""
    return len(steps) > len(other) or all(
        difflib.get_close_matches(step.lower(), [each.lower()]) for step, each in zip(steps, other, strict=True)
    )
