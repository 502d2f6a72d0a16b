"""The forms that the answer to one row of a task may have, as plain descriptions: what a column needs that has one type."""

from __future__ import annotations

import types
from collections.abc import Iterator
from typing import Annotated, Any, NotRequired, Union, get_args, get_origin, get_type_hints

from pydantic import BaseModel
from typing_extensions import is_typeddict

from bertserve.service.tasks.spec import TaskSpec


def answer_forms(spec: TaskSpec) -> list[Any]:
    """Returns the forms, likely ones first: a scalar type, a list with the form of its items, or a mapping of names to forms."""
    # without what only some requests ask for, which would be an empty field of each row; then with it
    answers = [_form(option, whole) for whole in (False, True) for option in _options(spec.answer)]
    # of a body that is answered like a list of one, each answer is that of a list
    items = [answer[0] for answer in answers if isinstance(answer, list)]
    forms = items if spec.body.always_list else [*answers, *items]
    return [form for index, form in enumerate(forms) if form not in forms[:index]]


def _options(annotation: Any) -> Iterator[Any]:
    if get_origin(annotation) in (Annotated, NotRequired):
        yield from _options(get_args(annotation)[0])
    elif get_origin(annotation) in (Union, types.UnionType):
        for option in get_args(annotation):
            if option is not types.NoneType:
                yield from _options(option)
    else:
        yield annotation


def _form(annotation: Any, whole: bool) -> Any:
    kind = next(_options(annotation))
    if get_origin(kind) in (list, tuple):  # a tuple, such as a pair of offsets, has items of one type
        return [_form(get_args(kind)[0], whole)]
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        # `get_type_hints` also has what pydantic keeps for itself
        hints = get_type_hints(kind, include_extras=True)
        return {name: _form(hints[name], whole) for name in kind.model_fields}
    if is_typeddict(kind):
        hints = get_type_hints(kind, include_extras=True)
        required = {name for name in kind.__required_keys__ if get_origin(hints[name]) is not NotRequired}
        return {name: _form(hint, whole) for name, hint in hints.items() if whole or name in required}
    return kind
