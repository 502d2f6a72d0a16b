"""The templates of errors, which the log shows: none has a text of a caller, and each gets its values."""

import ast
from pathlib import Path
from string import Formatter

from bertserve.service import errors
from bertserve.service.errors import BertServeError, StartError

SERVICE = Path(errors.__file__).parent
OPTIONS = {"headers", "reason", "retry_after_s"}  # arguments of errors that are not values of the template


def kinds(kind: type[BertServeError]) -> set[str]:
    return {kind.__name__}.union(*(kinds(below) for below in kind.__subclasses__()))


def test_each_template_is_a_literal_and_gets_its_values() -> None:
    """A placeholder without a value would be answered with 500. Values of callers are tested in tests/serving/test_logs.py."""
    names, places = kinds(BertServeError) - kinds(StartError), []
    for path in sorted(SERVICE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_bytes())):
            if not isinstance(node, ast.Call) or ast.unparse(node.func).rpartition(".")[2] not in names:
                continue
            template, values = node.args[-1], {keyword.arg for keyword in node.keywords} - OPTIONS
            literal = isinstance(template, ast.Constant) and (
                not values or values == {name for _, name, _, _ in Formatter().parse(template.value) if name}
            )
            if not literal and not (isinstance(template, ast.Name) and template.id.isupper()):
                places.append(f"{path.relative_to(SERVICE)}:{node.lineno}")
    assert places == []
