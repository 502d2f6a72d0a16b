"""Hypothesis strategies of bodies that a client should not send: valid bodies with one invalid part, and bytes that are not JSON."""

import gzip
import json
import os
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st

from bertserve.service.tasks.catalog import TASKS

CASES = int(os.environ.get("STRESS_CASES", "500"))  # number of cases of all hostile tests together
LEAKS = (
    "Traceback",
    "site-packages",
    ".py",
    "/tmp",
    "/home",
    "service.",
    "pydantic_core",
    "<class",
    "Input should",
    "String should",
    "Extra inputs",
)

SURROGATE, BIDI, ZERO_WIDTH, NUL = "\ud800", "\u202egood\u202c", "go\u200bod\ufeff", "a\0b"
TEXTS = (
    "",
    " \t\r\n\x0b\x0c\x85\u2028\u2029\u3000",
    NUL,
    SURROGATE,
    "\udfff\ud800",
    BIDI,
    ZERO_WIDTH,
    "\U0010ffff" * 3,
    "e\u0301\u0301\u0301" * 40,
    "\U0001f469\u200d\U0001f469\u200d\U0001f467" * 30,
    "\u0130\u0131\ufb01\u1e9e\u01c5",
    "[CLS] [SEP] [MASK] [PAD] [UNK] <s> </s> <mask> ##a",
    "../../etc/passwd\0.json",
    "{{7*7}} ${jndi:ldap://x} <script>alert(1)</script> ' OR 1=1 --",
    "a" * 5_000,
    "good " * 4_000,
    "\u00e9" * 10_000,
    "x\r\nSet-Cookie: a=b\r\n\r\n",
)
LARGE_TEXTS = ("a" * 1_000_000, "good " * 200_000, "\u4e2d" * 1_000_000, "\x00" * 1_000_000)
NUMBERS = (0, -1, 1, 2**31, 2**63, -(2**63) - 1, 10**400, 0.5, -0.0, 1e308, 5e-324, float("nan"), float("inf"), -float("inf"))
# literals at the edge of JSON's syntax, or outside it
LITERALS = ("1e400", "-1e400", "1E+2", "00", "0x10", "NaN", "Infinity", '"\\ud800"', '"\\u0000"', "[1,]", "{,}", "'good'", "// x", "nul")

texts = st.sampled_from(TEXTS) | st.text(st.characters(), max_size=30)
scalars = texts | st.sampled_from(NUMBERS) | st.none() | st.booleans() | st.integers() | st.floats()
values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=4), max_leaves=8
)


def cases(share: float) -> settings:
    """Returns settings for a share of all cases. `make test` runs the same cases every time, `make stress` runs new random ones."""
    return settings(max_examples=max(1, round(CASES * share)), derandomize="STRESS_CASES" not in os.environ)


def _example(task: str) -> dict[str, Any]:
    extra = TASKS[task].body.model_config["json_schema_extra"]
    [example] = extra["examples"]
    return json.loads(json.dumps(example))


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(place for key, child in inner for place in places(child, (*path, key)))]


def at(value: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        value = value[key]
    return value


def replace_at(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    if not path:
        return new
    copy = value.copy()
    copy[path[0]] = replace_at(value[path[0]], path[1:], new) if path[1:] else new
    return copy


@st.composite
def altered_bodies(draw: st.DrawFn, task: str) -> bytes:
    """Returns a task's example with some values replaced, and with parameters whose names can be misspelled."""
    body: Any = _example(task)
    names = [*TASKS[task].body.parameters_type.model_fields, "top_kk", "\0", "inputs", "model"]
    for _ in range(draw(st.integers(1, 3))):
        body = replace_at(body, draw(st.sampled_from(places(body))), draw(values))
        if isinstance(body, dict) and draw(st.booleans()):
            body["parameters"] = {draw(st.sampled_from(names)): draw(values)}
    return json.dumps(body).encode()  # lone surrogates are escaped, as some clients send them


@st.composite
def literal_bodies(draw: st.DrawFn, task: str) -> bytes:
    """Returns a task's example that contains a literal at the edge of JSON's syntax, or outside it."""
    body = _example(task)
    place = draw(st.sampled_from(places(body)[1:]))
    return json.dumps(replace_at(body, place, "\1")).replace('"\\u0001"', draw(st.sampled_from(LITERALS))).encode()


@st.composite
def broken_bodies(draw: st.DrawFn, task: str) -> bytes:
    """Returns a body that is truncated, in another encoding, compressed, nested deeply, large or random, or has a duplicate key."""
    whole = json.dumps(_example(task))
    kind = draw(st.integers(0, 7))
    if kind == 0:
        return whole.encode()[: draw(st.integers(0, len(whole)))]
    if kind == 1:
        return whole.encode(draw(st.sampled_from(["utf-16", "utf-32-be", "utf-8-sig", "cp037"])))
    if kind == 2:
        return gzip.compress(whole.encode())
    if kind == 3:
        depth = draw(st.sampled_from([10, 127, 128, 1_000, 100_000]))
        start, end = draw(st.sampled_from([("[", "]"), ('{"a":', "}"), ('{"inputs":', "}")]))
        return (start * depth + "1" + end * draw(st.sampled_from([depth, 0]))).encode()
    if kind == 4:
        return whole.replace("{", '{"inputs": 1, "parameters": {}, "model": "x", ', 1).encode()
    if kind == 5:
        return whole.encode().replace(b" ", draw(st.binary(max_size=8)))
    if kind == 6:
        return json.dumps(_example(task) | {"inputs": draw(st.sampled_from(LARGE_TEXTS))}).encode()
    return draw(st.binary(max_size=200))


def bodies(task: str) -> st.SearchStrategy[bytes]:
    """Returns a strategy of bodies that a client should not send to a task."""
    return altered_bodies(task) | altered_bodies(task) | literal_bodies(task) | broken_bodies(task)
