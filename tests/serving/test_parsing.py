"""The JSON structure of a body has limits, which are checked before it is parsed."""

import json

import pytest

from bertserve.service.body import json_text
from bertserve.service.body.reading import parse_json
from bertserve.service.errors import TooLargeError
from support.app_client import Send, error_of

MAX_CONTAINERS, MAX_KEYS, MAX_VALUES, MAX_DIGITS = (limit for _, limit, _ in json_text.JSON_LIMITS)
KEYS = ",".join(f'"{i}":0' for i in range(MAX_KEYS))


@pytest.mark.parametrize(
    ("raw", "what"),
    [
        ("[" + "[]," * MAX_CONTAINERS + "[]]", "lists and objects"),
        ("[" + "{}," * MAX_CONTAINERS + "{}]", "lists and objects"),
        ("[" * (MAX_CONTAINERS + 1), "lists and objects"),
        (f'{{{KEYS},"last":0}}', "keys"),
        ("[" + "0," * (MAX_VALUES + 1) + "0]", "values"),
        ("[" + ("1" * 4000 + ",") * 328 + "0]", "digits"),
        ('["' + '\\\\",' + '"",' * MAX_VALUES + '""]', "values"),
    ],
    ids=["lists", "objects", "depth", "keys", "numbers", "digits", "texts"],
)
def test_a_body_with_too_many_elements_is_refused_before_it_is_parsed(raw: str, what: str) -> None:
    """Elements are counted in the raw bytes, also of a body that is not valid JSON. A quote after an escaped backslash ends its text."""
    for body in (raw, raw + "]"):
        with pytest.raises(TooLargeError, match=f"[0-9]+ {what} and [0-9]+ "):
            parse_json(body.encode())


@pytest.mark.parametrize(
    "text",
    [
        "[" * 2 * MAX_CONTAINERS,
        '\\"[' * MAX_CONTAINERS * 2,
        "{:" * (MAX_KEYS + 1),
        "," * 2 * MAX_VALUES,
        "7" * 2 * MAX_DIGITS,
        "\\\\[" * MAX_CONTAINERS * 2,
    ],
)
def test_structure_within_a_text_does_not_count(text: str) -> None:
    assert parse_json(f'{{"inputs": "{text}"}}'.encode()) == {"inputs": json.loads(f'"{text}"')}


@pytest.mark.parametrize("path", ["/classify", "/models/classifier", "/v1/models/classifier:predict", "/v2/models/classifier/infer"])
def test_a_body_of_brackets_is_too_large(api: Send, path: str) -> None:
    raw = b'{"inputs": [' + b"[[]]," * MAX_CONTAINERS + b"[]]}"
    assert "131075 " in error_of(api("POST", path, content=raw), 413, "too_large")


_DIGITS = "9" * 4300
_ODD = ["NaN", f"-{_DIGITS}", _DIGITS, f"{_DIGITS}9", r'"\ud800"']
_TENSOR = '{"name": "inputs", "shape": [%s], "datatype": "BYTES", "data": [%s]}'


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/models/classifier:predict", '{"instances": [%s]}'),
        ("/v2/models/classifier/infer", f'{{"inputs": [{_TENSOR % ("%s", "0")}]}}'),
        ("/v2/models/classifier/infer", f'{{"inputs": [{_TENSOR % ("1", "%s")}]}}'),
        ("/v2/models/classifier/infer", f'{{"parameters": {{"timeout": %s}}, "inputs": [{_TENSOR % ("1", "0")}]}}'),
    ],
)
def test_an_odd_value_never_causes_a_server_error(api: Send, path: str, body: str) -> None:
    """The bodies of tasks are in test_hostile.py."""
    statuses = [api("POST", path, content=(body % value).encode()).status_code for value in _ODD]
    assert [value[:20] for value, status in zip(_ODD, statuses, strict=True) if status >= 500] == []


def test_the_limits_admit_the_largest_regular_bodies() -> None:
    """They admit lists up to the limit, as many pairs as `--max-inputs` can allow, and two tensors with 131072 token ids each."""
    assert len(parse_json(b"[" + b"[]," * (MAX_CONTAINERS - 2) + b"[]]")) == MAX_CONTAINERS - 1
    assert len(parse_json(json.dumps([{"text": "a,:[{", "text_pair": "b"}] * 16384).encode())) == 16384
    assert len(parse_json(b"[" + b",".join([b"[" + b"12023," * (2**17 - 1) + b"12023]"] * 2) + b"]")) == 2
