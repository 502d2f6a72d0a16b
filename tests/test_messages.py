"""The errors that a request can cause: their templates, and whose values these have."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from string import Formatter

from bertserve.service import errors
from bertserve.service.errors import BertServeError, CallerError, ServerError

SERVICE = Path(errors.__file__).parent
OPTIONS = {"reason", "retry_after_s"}  # arguments of errors that are not values of the template

# The values that the log may have, because no caller can choose them: the service counted or made them, or they come from its operator.
# An entry is the name of a placeholder and the code of its value, or only one of these if they are equal.
OWN = """
a=first[label]; allowed; answer_bytes=self.answer_bytes; b=index; body_bytes=size;
caller=name; cause=without_folders(error.message, self._folders); chars; chars=longest; column; count; count=self._open;
counted=body.counted.format(body.count); describe=_describe(embedding); detail=error; example=example_of(body);
example=json.dumps(example); expected; field=name; given=received;
holder; i; instead; kind; kind=type(error).__name__; known=listed(required(body)); known=mask;
known=prompts or 'none, so remove `prompt_name`'; known=texts; last=count - 1; least=-count; length; limit; limit=self.header_timeout_s;
limit=max_bytes; limit=self.max_header_bytes; longest; max_batch_tokens=self.max_batch_tokens; max_body_bytes=state.settings.max_body_bytes;
max_chars=limits.max_chars; max_inputs=limits.max_inputs; max_length=tokenizer.max_length;
max_queue_tokens; max_queue_tokens=self.max_queue_tokens; max_timeout_ms=self._state.settings.max_timeout_ms;
max_top_k=limits.max_top_k; message; missing; model=model.name; model=name; models;
models=', '.join((f'`{model_name}`' for model_name in able)); models=', '.join(self.models) or 'none'; models=able; models=near; most=limit;
most=max_queue_tokens; most_heads=MAX_VALUES // length ** 2; most_tokens=math.isqrt(MAX_VALUES // len(maps));
name=spec.name; name=tensor.name; name=twice[0]; name=type(error).__name__; of;
own_task=model.task; paths; pieces; place; problem; problem=kinds.get(type(value), 'null'); queue_tokens=self.queue_tokens;
remedy; remedy=_replacement(name, known) or remedy; remedy=_replacement(name, parameters) or remedy; room;
room=max(room, 0); room=room - 1; rows; seconds; setting; span; task; tasks; tensor=name;
texts=len(slots) ** len(masks); timeout_s; tokens; total; values; wait; waiting_chars=self._chars; what=unit; where; whose=owner;
why; width; words
"""


def kinds(kind: type[BertServeError]) -> set[str]:
    return {kind.__name__}.union(*(kinds(below) for below in kind.__subclasses__()))


ERRORS = kinds(CallerError) | kinds(ServerError)


def calls() -> Iterator[tuple[str, ast.expr, dict[str, ast.expr]]]:
    """Yields the place, the template and the values of each error, and of each validator's error, which becomes a part of an error."""
    for path in sorted(SERVICE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_bytes())):
            if not isinstance(node, ast.Call):
                continue
            place, called = f"{path.relative_to(SERVICE)}:{node.lineno}", ast.unparse(node.func).rpartition(".")[2]
            if called in ERRORS:
                yield place, node.args[0], {str(keyword.arg): keyword.value for keyword in node.keywords if keyword.arg not in OPTIONS}
            elif called == "PydanticCustomError":
                _, template, *context = node.args
                pairs = [pair for each in context if isinstance(each, ast.Dict) for pair in zip(each.keys, each.values, strict=True)]
                values = {ast.literal_eval(key): value for key, value in pairs if key is not None}
                yield place, template, {name: value for name, value in values.items() if name in placeholders(template)}


def placeholders(template: ast.expr) -> set[str]:
    return {field for _, field, _, _ in Formatter().parse(ast.literal_eval(template)) if field}


def is_constant(value: ast.expr) -> bool:
    return isinstance(value, ast.Constant) or (isinstance(value, ast.Name) and value.id.isupper())


def entry(name: str, value: ast.expr) -> str:
    code = ast.unparse(value)
    return name if name == code else f"{name}={code}"


def test_each_template_is_a_literal_and_gets_its_values() -> None:
    """The log shows templates, so a template has no text of a caller. A placeholder without a value would be answered with 500."""
    wrong = []
    for place, template, values in calls():
        if not is_constant(template) or (isinstance(template, ast.Constant) and values and placeholders(template) != values.keys()):
            wrong.append(place)
    assert [] == wrong


def test_each_value_of_a_caller_is_hidden_from_the_log() -> None:
    """Each value is a constant, a length, `Sent` or, from `show`, a description or `Sent`; all others are reviewed."""
    hidden, shown = set(), {}
    for place, _, values in calls():
        for name, value in values.items():
            called = ast.unparse(value.func) if isinstance(value, ast.Call) else None
            if isinstance(value, ast.Call) and called == "Sent":
                hidden.add(entry(name, value.args[0]))
            elif called not in ("len", "show") and not is_constant(value):
                shown[entry(name, value)] = place
    own = set(re.split(r";\s+", OWN.strip()))
    assert {} == {value: place for value, place in shown.items() if value not in own}, "wrap what a caller sends in `Sent`"
    assert set() == hidden & own, "use another name for a value that another error must hide"
