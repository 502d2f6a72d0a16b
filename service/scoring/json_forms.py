"""Converts values of Arrow columns to JSON and CSV without loss; types that JSON lacks become texts in their usual format.

Decimals become their digits, bytes base64, dates, times and durations ISO 8601 with all digits, and numbers that are not finite
`NaN`, `Infinity` and `-Infinity`. A map becomes a list of pairs.
"""

from __future__ import annotations

import base64
import math
import uuid
from collections.abc import Callable, Mapping
from datetime import UTC, datetime, time, timedelta
from decimal import Decimal
from typing import Any

import pyarrow as pa

from bertserve.service.errors import InvalidValueError, SettingsError, StartError

Convert = Callable[[Any], Any]
_DIGITS = {"s": 0, "ms": 3, "us": 6, "ns": 9}
_NANOS = 1000  # in a microsecond, the resolution of Python's times


class _NoFormError(Exception):
    """A type cannot be converted to JSON."""


class JsonColumn:
    """Converts the values of one column."""

    def __init__(self, name: str, kind: Any) -> None:
        """Chooses the conversion of a column, by its Arrow type without dictionaries.

        Raises:
            SettingsError: The type cannot be converted to JSON.
        """
        self._name, self._kind = name, kind
        try:
            self._stored, self._convert = _form(kind)
        except _NoFormError as error:
            raise SettingsError(
                f"the column `{name}` has the type {error}, which JSON and CSV do not have; remove it, or write Parquet."
            ) from error

    def values(self, column: Any) -> list[Any]:
        """Returns the values of a chunked array; instead of a value that is not UTF-8, its error.

        Raises:
            StartError: A value cannot be converted.
        """
        try:
            values: list[Any] = (column if self._stored == self._kind else column.cast(self._stored)).to_pylist()
            return values if self._convert is None else [None if value is None else self._convert(value) for value in values]
        except UnicodeDecodeError:
            if len(column) == 1:
                return [InvalidValueError("the column `{column}` is not UTF-8; fix the text.", column=self._name)]
            half = len(column) // 2
            return [*self.values(column.slice(0, half)), *self.values(column.slice(half))]
        except (pa.ArrowException, ValueError, OverflowError) as error:
            raise StartError(
                f"the column `{self._name}` ({self._kind}) has a value that JSON and CSV cannot represent: {error}; "
                "fix it, or write Parquet."
            ) from error


def plain(kind: Any) -> Any:
    """Returns a type without dictionaries, whose values differ between batches, and without views, which pyarrow's `take` lacks."""
    types = pa.types
    if types.is_dictionary(kind):
        return plain(kind.value_type)
    if types.is_string_view(kind) or types.is_binary_view(kind):
        return pa.large_string() if types.is_string_view(kind) else pa.large_binary()
    if types.is_struct(kind):
        return pa.struct([field.with_type(plain(field.type)) for field in kind])
    if types.is_map(kind):
        return pa.map_(kind.key_field.with_type(plain(kind.key_type)), kind.item_field.with_type(plain(kind.item_type)), kind.keys_sorted)
    if _is_list(kind):
        return _list_of(kind, kind.value_field.with_type(plain(kind.value_type)))
    return kind


def _is_list(kind: Any) -> bool:
    types = pa.types
    return bool(
        types.is_list(kind)
        or types.is_large_list(kind)
        or types.is_fixed_size_list(kind)
        or types.is_list_view(kind)
        or types.is_large_list_view(kind)
    )


def _list_of(kind: Any, item: Any) -> Any:
    """Returns the same type of list with other items."""
    if item.type == kind.value_type:
        return kind
    if pa.types.is_fixed_size_list(kind):
        return pa.list_(item, kind.list_size)
    return pa.list_(item) if pa.types.is_list(kind) else pa.large_list(item)


def _form(kind: Any) -> tuple[Any, Convert | None]:
    """Returns the type for reading, and the conversion to JSON of values that are not null; None if values stay unchanged."""
    types = pa.types
    if _is_list(kind):
        stored, convert = _form(kind.value_type)
        return _list_of(kind, kind.value_field.with_type(stored)), None if convert is None else _of_list(convert)
    if types.is_struct(kind):
        fields = {field.name: _form(field.type) for field in kind}
        stored = pa.struct([field.with_type(fields[field.name][0]) for field in kind])
        converts = {name: convert for name, (_, convert) in fields.items() if convert is not None}
        return stored, _of_struct(converts) if converts else None
    if types.is_map(kind):
        (key, of_key), (item, of_item) = _form(kind.key_type), _form(kind.item_type)
        return pa.map_(kind.key_field.with_type(key), kind.item_field.with_type(item)), _of_map(of_key, of_item)
    if isinstance(kind, pa.BaseExtensionType):
        if kind == pa.uuid():
            return kind.storage_type, lambda value: str(uuid.UUID(bytes=value))
        return (kind.storage_type, bool) if kind == pa.bool8() else _form(kind.storage_type)
    return _time_form(kind) if types.is_temporal(kind) else _scalar_form(kind)


def _scalar_form(kind: Any) -> tuple[Any, Convert | None]:
    types = pa.types
    if types.is_null(kind) or types.is_boolean(kind) or types.is_integer(kind) or types.is_string(kind) or types.is_large_string(kind):
        return kind, None
    if types.is_floating(kind):
        return kind, _number
    if types.is_decimal(kind):
        return kind, lambda value: format(value, "f")
    if types.is_binary(kind) or types.is_large_binary(kind) or types.is_fixed_size_binary(kind):
        return kind, lambda value: base64.b64encode(value).decode()
    raise _NoFormError(kind)


def _time_form(kind: Any) -> tuple[Any, Convert | None]:
    types = pa.types
    if types.is_duration(kind):
        return pa.int64(), lambda value: _duration(value, _DIGITS[kind.unit])
    if types.is_timestamp(kind):
        try:
            zone = None if kind.tz is None else pa.lib.string_to_tzinfo(kind.tz)
        except (pa.ArrowException, KeyError) as error:  # the zone is unknown
            raise _NoFormError(kind) from error
        if kind.unit == "ns":
            return pa.int64(), lambda value: _timestamp(value, zone)
    if types.is_time64(kind) and kind.unit == "ns":
        return pa.int64(), _time
    if types.is_timestamp(kind) or types.is_time(kind) or types.is_date(kind):
        return kind, lambda value: value.isoformat()
    raise _NoFormError(kind)


def _of_list(convert: Convert) -> Convert:
    return lambda values: [None if value is None else convert(value) for value in values]


def _of_struct(converts: Mapping[str, Convert]) -> Convert:
    def convert(value: Mapping[str, Any]) -> dict[str, Any]:
        return {name: converts[name](item) if name in converts and item is not None else item for name, item in value.items()}

    return convert


def _of_map(of_key: Convert | None, of_item: Convert | None) -> Convert:
    def convert(pairs: list[tuple[Any, Any]]) -> list[list[Any]]:
        return [[key if of_key is None else of_key(key), item if of_item is None or item is None else of_item(item)] for key, item in pairs]

    return convert


def _number(value: float) -> float | str:
    if math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def _duration(value: int, digits: int) -> str:
    seconds = format(Decimal(abs(value)).scaleb(-digits).normalize(), "f")
    return f"{'-' if value < 0 else ''}PT{seconds}S"


def _timestamp(value: int, zone: Any) -> str:
    """Returns nanoseconds since 1970 as a time, in a zone or without one."""
    at = datetime(1970, 1, 1, tzinfo=UTC) + timedelta(microseconds=value // _NANOS)
    at = at.replace(tzinfo=None) if zone is None else at.astimezone(zone)
    return _with_nanos(at, value % _NANOS)


def _time(value: int) -> str:
    """Returns nanoseconds since midnight as a time."""
    at = datetime(1970, 1, 1, tzinfo=UTC) + timedelta(microseconds=value // _NANOS)
    return _with_nanos(at.time(), value % _NANOS)


def _with_nanos(at: datetime | time, nanos: int) -> str:
    if not nanos:
        return at.isoformat()
    text = at.isoformat(timespec="microseconds")
    end = text.index(".") + 7  # the zone comes after it
    return f"{text[:end]}{nanos:03d}{text[end:]}"
