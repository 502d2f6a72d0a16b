"""Bodies of the Open Inference Protocol: any bytes are either read or refused with a `CallerError`."""

from __future__ import annotations

import json
import math
import struct
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bertserve.service.errors import CallerError, InvalidValueError
from bertserve.service.wire.call import Content
from bertserve.service.wire.infer_body import Output, Tensor, read_infer_body, write_infer_answer

TEXTS = st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=9), max_size=9)


def packed(texts: list[str]) -> bytes:
    return b"".join(struct.pack("<I", len(text.encode())) + text.encode() for text in texts)


@given(TEXTS)
def test_binary_texts_survive_a_round_trip(texts: list[str]) -> None:
    data = Output(np.array(texts, object), binary=True).packed()

    assert packed(texts) == data
    assert texts == Tensor("a", "BYTES", (len(texts), 1), memoryview(data)).texts()


@given(
    st.binary(max_size=64),
    st.lists(st.integers(0, 2**40), min_size=1, max_size=3),
    st.sampled_from(["BYTES", "INT64", "INT32", "BOOL", "FP32"]),
)
def test_any_tensor_data_is_read_or_refused(data: bytes, shape: list[int], datatype: str) -> None:
    """The number of values matches the shape, or reading raises an `InvalidValueError`. A huge shape costs no time."""
    tensor = Tensor("a", datatype, tuple(shape), memoryview(data))
    for read in (tensor.texts, lambda: tensor.integers("INT64", "INT32", "BOOL")):
        try:
            found = read()
        except InvalidValueError:
            continue
        assert math.prod(shape) == np.size(found)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["name", "shape", "datatype", "data", "parameters"]), inner)
    ),
    max_leaves=9,
)
TENSOR = st.fixed_dictionaries(
    {
        "name": st.sampled_from(["inputs", "a"]) | JSON,
        "shape": st.lists(st.integers(-1, 3), max_size=3) | JSON,
        "datatype": st.sampled_from(["BYTES", "INT64"]) | JSON,
    },
    optional={"data": JSON, "parameters": st.fixed_dictionaries({"binary_data_size": st.integers(-1, 9) | JSON}) | JSON},
)


@given(st.fixed_dictionaries({"inputs": st.lists(TENSOR, max_size=3) | JSON}), st.binary(max_size=16), st.integers(-20, 3) | st.none())
def test_any_body_is_read_or_refused(value: Any, rest: bytes, off: int | None) -> None:
    head = json.dumps(value).encode()
    try:
        _, tensors = read_infer_body(head + rest, None if off is None else str(len(head) + off))
        for tensor in tensors.values():
            tensor.texts() if tensor.datatype == "BYTES" else tensor.integers("INT64")
    except CallerError as error:
        assert error.message


@given(st.binary(max_size=40), st.text(max_size=6))
def test_random_bytes_are_refused(raw: bytes, header: str) -> None:
    for length in (None, header):
        with pytest.raises(CallerError):
            read_infer_body(raw, length)


def test_an_answer_can_mix_binary_and_json_outputs() -> None:
    outputs = {
        "a": Output(np.array([[1, 2], [3, 4]], np.float32), binary=True),
        "b": Output(np.array([5], np.int64), binary=False),
        "c": Output(np.array(["x", "é"], object), binary=True),
    }
    answer = write_infer_answer({"model_name": "m"}, outputs)

    assert isinstance(answer, Content)
    size, data = int(answer.headers["inference-header-content-length"]), b"".join(answer.pieces)
    assert [
        {"name": "a", "datatype": "FP32", "shape": [2, 2], "parameters": {"binary_data_size": 16}},
        {"name": "b", "datatype": "INT64", "shape": [1], "data": [5]},
        {"name": "c", "datatype": "BYTES", "shape": [2], "parameters": {"binary_data_size": 11}},
    ] == json.loads(data[:size])["outputs"]
    assert struct.pack("<4f", 1, 2, 3, 4) + packed(["x", "é"]) == data[size:]
