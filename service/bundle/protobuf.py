"""Reads the framing of protobuf messages, which ONNX files are, without a schema and without copies."""

from __future__ import annotations

from collections.abc import Iterator

LONGEST_VARINT = 63  # bits before the last byte's
_VARINT, _FIXED64, _BYTES, _GROUP, _END_OF_GROUP, _FIXED32 = range(6)


def fields(message: memoryview) -> Iterator[tuple[int, int | memoryview]]:
    """Yields the number and value of each field of a message; numbers of fixed size are passed over.

    ONNX has no groups. If there is one its fields are given out as the message's own.

    Raises:
        ValueError: It is not a message.
        IndexError: It ends within a field.
    """
    at = 0
    while at < len(message):
        key, at = read_varint(message, at)
        number, form = (key & 0xFFFFFFFF) >> 3, key & 7  # protobuf reads keys of 32 bits
        if form == _VARINT:
            value, at = read_varint(message, at)
            yield number, value
        elif form == _BYTES:
            length, at = read_varint(message, at)
            if at + length > len(message):
                raise ValueError("a field ends behind its message")
            yield number, message[at : at + length]
            at += length
        elif form in (_FIXED32, _FIXED64):
            at += 4 if form == _FIXED32 else 8
        elif form not in (_GROUP, _END_OF_GROUP):
            raise ValueError(f"a field of form {form}")


def read_varints(packed: memoryview) -> Iterator[int]:
    """Yields the numbers of a packed field.

    Raises:
        ValueError: One is too long.
        IndexError: The field ends within one.
    """
    at = 0
    while at < len(packed):
        value, at = read_varint(packed, at)
        yield value


def read_varint(data: memoryview, at: int) -> tuple[int, int]:
    """Returns a number of protobuf's variable length, and where the next field begins.

    Raises:
        ValueError: It is too long.
        IndexError: The data ends within it.
    """
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
        if shift > LONGEST_VARINT:
            raise ValueError("a number of more than ten bytes")
