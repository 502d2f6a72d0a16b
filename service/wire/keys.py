"""Keys of a body: one that is not known would silently do nothing, so it is an error that names the nearest. Knows no JSON and no HTTP."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from bertserve.service.errors import InvalidValueError, nearest
from bertserve.service.tasks.body import TaskBody

# Keys that clients of other services send beside `inputs`, with the values that ask for nothing but what happens anyway; None is any value.
HARMLESS: Mapping[str, Sequence[Any] | None] = {
    "options": None,  # of the Inference API, in which `OPTIONS` stand
    "use_cache": None,
    "wait_for_model": None,
    "user": None,  # of the OpenAI API: on whose behalf
    "stream": (False, None),  # answers come whole
    "encoding_format": ("float", None),  # where nothing is a vector
}
# What the Inference API, and the clients that were made for it, have in `options`: how to wait for a model, and whose cache to look into.
OPTIONS = ("use_cache", "wait_for_model", "use_gpu", "dont_load_model", "retry_on_error", "includeCredentials", "taskHint", "signal")
_SHOWN_CHARS = 64  # of a key, in a message


def check_keys(value: Mapping[str, Any], body: type[TaskBody]) -> None:
    """Lets a body pass whose keys are known, or harmless.

    Args:
        value: The body.
        body: What it is to be.

    Raises:
        InvalidValueError: A key is unknown, or asks for what there is not; the message says where it belongs, or names the nearest.
    """
    if value.keys() <= body.names:
        return
    # stops at the first one that is wrong, so a body of a million costs no more
    for name, given in value.items():
        if name in body.names or (given is None and body.null_is_nothing):
            continue
        if name not in HARMLESS:
            raise _unknown(name, body)
        allowed = HARMLESS[name]
        if allowed is not None and given not in allowed:
            raise InvalidValueError(
                "`{name}` asks for an answer of a form that this endpoint does not have; leave `{name}` out.", name=name
            )
        if name == "options" and given is not None:
            _check_options(given, body)


def listed(names: Sequence[str]) -> str:
    """Returns names for a message."""
    return ", ".join(f"`{name}`" for name in names)


def unknown_within(name: str, where: str, known: Sequence[str], body: type[TaskBody]) -> InvalidValueError:
    """Returns the error of an unknown name in an object within a body.

    Args:
        name: The name.
        where: The object, as `parameters` or `inputs[3]`.
        known: The names that it may have.
        body: The body's class.
    """
    if where == "parameters" and name in body.names:
        return InvalidValueError(
            "`parameters` has no `{name}`; put it beside {known}.", name=name[:_SHOWN_CHARS], known=listed(required(body))
        )
    return unknown_name(name, f"`{where}`", known)


def unknown_name(name: str, holder: str, known: Sequence[str]) -> InvalidValueError:
    """Returns the error of an unknown name.

    Args:
        name: The name.
        holder: What does not have it, in words.
        known: The names that it has.
    """
    near = nearest(name.lower(), known)
    hint = f"did you mean `{near}`? " if near else ""
    rest = f"{hint}{'Known' if hint else 'known'} are {listed(known)}" if known else "leave it out"
    return InvalidValueError("{holder} has no `{name}`; {rest}.", holder=holder, name=name[:_SHOWN_CHARS], rest=rest)


def check_names(given: Iterable[str], known: Sequence[str], holder: str) -> None:
    """Refuses the first name that is not known.

    Raises:
        InvalidValueError: There is one; the message has the nearest.
    """
    wrong = next((name for name in given if name not in known), None)
    if wrong is not None:
        raise unknown_name(wrong, holder, known)


def required(body: type[TaskBody]) -> list[str]:
    """Returns the keys that a body must have: `inputs`, or what stands in its place."""
    return [name for name, field in body.model_fields.items() if field.is_required() and name != "parameters"]


def _unknown(name: str, body: type[TaskBody]) -> InvalidValueError:
    """Returns the error of an unknown name at the top of a body."""
    shown, beside = name[:_SHOWN_CHARS], listed(required(body))
    known = [known for known in dict.fromkeys([*required(body), "parameters", *body.model_fields]) if known in body.names]
    parameters = list(body.parameters_type.model_fields)
    if name in parameters:
        return InvalidValueError("the body takes no `{name}` beside {beside}; put it within `parameters`.", name=shown, beside=beside)
    near = nearest(name.lower(), known)
    within = None if near else nearest(name.lower(), parameters)
    hint = f"did you mean `{near}`? " if near else f"did you mean `{within}` within `parameters`? " if within else ""
    return InvalidValueError(
        "the body takes no `{name}`; {hint}{detail} are {known}.",
        name=shown,
        hint=hint,
        detail="Known" if hint else "known",
        known=listed(known),
    )


def _check_options(options: Any, body: type[TaskBody]) -> None:
    if not isinstance(options, dict):
        raise InvalidValueError("`options` is wrong: input should be an object; leave it out, or mend it.")
    wrong = next((name for name in options if name not in OPTIONS), None)
    if wrong is not None:
        belongs = " put it within `parameters`." if wrong in body.parameters_type.model_fields else ""
        raise InvalidValueError(
            "`options` has no `{wrong}`;{belongs}", wrong=wrong[:_SHOWN_CHARS], belongs=belongs or f" known are {listed(OPTIONS)}."
        )
