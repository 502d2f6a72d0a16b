"""All errors of the service with their HTTP status.

A `StartError` stops a start or a command, and a request causes a `CallerError`. The service causes the other errors of requests. A message
says what is wrong, with the value, and what to change. The response shows the whole message; the log, a placeholder for each `CallerValue`.
"""

import math
import traceback
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

from bertserve.service.messages import SHOWN_CHARS


class BertServeError(Exception):
    """Base class of all errors.

    Attributes:
        status: HTTP status of a response with this error.
        error_type: Its error type.
        headers: Headers of a response with this error.
        message: The sentence, with all values.
        template: The sentence with the name of each value in braces.
        values: The values by name.
        input_index: Index of the input that caused the error, if a single input did.
    """

    status: int = HTTPStatus.INTERNAL_SERVER_ERROR.value
    error_type: str = "internal"
    headers: Mapping[str, str] = {}
    input_index: int | None = None

    def __init__(self, template: str, /, **values: Any) -> None:
        """Creates the message.

        Args:
            template: A literal, so that it contains no text of a request. Without values, its braces are plain text.
            **values: The values by name; each value that the caller sent is a `CallerValue`.
        """
        self.template = template
        self.values = values
        self.message = template.format(**values) if values else template
        super().__init__(self.message)

    @property
    def for_log(self) -> str:
        """The message, with names of placeholders in place of the values that the caller sent."""
        if not self.values:
            return self.template
        return self.template.format(
            **{name: f"{{{name}}}" if isinstance(value, CallerValue) else value for name, value in self.values.items()}
        )

    def prefix_input(self, *, is_list: bool, input_name: str = "inputs") -> None:
        """Puts the wrong input before the message: `inputs[i]` for a list, otherwise `inputs` or the name of the field that replaces it."""
        if self.input_index is not None:
            self.add_prefix(f"{input_name}[{self.input_index}]: " if is_list else f"{input_name}: ")
            self.input_index = None

    def add_prefix(self, prefix: str) -> None:
        """Puts a text that contains nothing of the request before the message."""
        self.message, self.template = prefix + self.message, prefix + self.template


class CallerValue:
    """A value that the caller sent, for an error: the response shows it, the log shows the name of its placeholder instead.

    Sizes and positions that the service counted are not the caller's, nor are names that the service knows.
    """

    __slots__ = ("_value",)

    def __init__(self, value: object) -> None:
        """Wraps a value; a text is cut to `SHOWN_CHARS` characters."""
        self._value = value[:SHOWN_CHARS] if isinstance(value, str) else value

    def __format__(self, spec: str) -> str:
        return format(self._value, spec)


class StartError(BertServeError):
    """The process must not start, or a command must stop, for example because a bundle is broken, or an execution provider is missing."""


class SettingsError(StartError):
    """A flag or environment variable is wrong, or two of them contradict each other."""


class DeviceLostError(StartError):
    """The GPU failed in a way that ends all work of this process on it."""


class CallerError(BertServeError):
    """The request cannot be answered without a change."""


class MalformedRequestError(CallerError):
    """The body is not valid JSON for the endpoint."""

    status, error_type = 400, "malformed"


class TooLargeError(CallerError):
    """The body, a list, a text or the tokens of the request exceed a limit."""

    status, error_type = 413, "too_large"


class InvalidValueError(CallerError):
    """The body is well-formed, but a value in it is not allowed."""

    status, error_type = 422, "invalid_value"


class InvalidParameterError(InvalidValueError):
    """A parameter is not possible with this model, whatever the inputs are."""

    def prefix_input(self, *, is_list: bool, input_name: str = "inputs") -> None:
        """Puts `parameters` before the message, because the input that met the error is not its cause."""
        super().prefix_input(is_list=False, input_name="parameters")


CLIENT_GONE = 499  # the status if the caller closed the connection while it waited; HTTPStatus has none for it
# The error type of `HttpError` by status, and headers of its responses. After a slow request, the rest of the body might never arrive, so
# the connection closes.
HTTP_ERRORS: Mapping[int, tuple[str, Mapping[str, str]]] = {
    HTTPStatus.UNAUTHORIZED: ("unauthorized", {"WWW-Authenticate": "Bearer"}),
    HTTPStatus.FORBIDDEN: ("forbidden", {}),
    HTTPStatus.NOT_FOUND: ("not_found", {}),
    HTTPStatus.METHOD_NOT_ALLOWED: ("method_not_allowed", {}),
    HTTPStatus.REQUEST_TIMEOUT: ("too_slow", {"Connection": "close"}),
    HTTPStatus.CONFLICT: ("conflict", {}),
    HTTPStatus.UNSUPPORTED_MEDIA_TYPE: ("content_encoding", {}),
    HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE: ("head_too_large", {}),
    CLIENT_GONE: ("client_gone", {}),
}


class HttpError(CallerError):
    """The request fails because of its API key, path, model, method, headers or speed, independent of its inputs."""

    def __init__(self, status: int, template: str, /, *, headers: Mapping[str, str] = {}, **values: Any) -> None:
        """Creates the error with a status of `HTTP_ERRORS`, and with further headers of its response."""
        super().__init__(template, **values)
        self.error_type, status_headers = HTTP_ERRORS[status]
        self.status, self.headers = int(status), {**status_headers, **headers}


class RefusedError(BertServeError):
    """The queue is full, or another limit is reached for now.

    Attributes:
        reason: `queue_full` or `deadline`, which are labels of the refusal metric, or `key`.
        retry_after_s: Predicted seconds until the same request would be admitted.
    """

    status, error_type = 429, "overloaded"

    def __init__(self, template: str, /, *, reason: str, retry_after_s: float, **values: Any) -> None:
        super().__init__(template, **values)
        self.reason = reason
        self.retry_after_s = retry_after_s
        self.headers = {"Retry-After": str(max(1, math.ceil(retry_after_s)))}


class ExpiredError(BertServeError):
    """The request was admitted, but its deadline passed before its last item could start."""

    status, error_type = 504, "expired"


class UnavailableError(BertServeError):
    """The service is stopping or cannot answer: the GPU failed, an inference thread died, or all hang. Another instance can answer."""

    status, error_type = 503, "unavailable"
    headers: Mapping[str, str] = {"Retry-After": "1"}


class EngineError(BertServeError):
    """The graph failed, or returned a wrong number of rows or scores that are not finite."""

    error_type = "engine"


def traceback_places(error: Exception) -> str:
    """Returns the places in an exception's traceback for the log, the innermost first. They contain no text of a request or a file."""
    frames = traceback.extract_tb(error.__traceback__)[::-1]
    return " < ".join(f"{frame.name} ({frame.filename.rpartition('/')[2]}:{frame.lineno})" for frame in frames)


def status_and_type(error: Exception) -> tuple[int, str]:
    """Returns the status and the error type of an exception, which is internal if it is not a BertServeError."""
    described = error if isinstance(error, BertServeError) else BertServeError
    return described.status, described.error_type


def error_for_caller(error: BaseException) -> Exception:
    """Returns an error of a run, or one in its place if it has no message for callers."""
    if isinstance(error, MemoryError):
        return EngineError("there is not enough memory for the request; send less at once; the operator can give the service more memory.")
    if not isinstance(error, Exception):  # a panic of a native library, or an exit; futures do not accept these
        return EngineError("the request's work ended with {name}. This is a bug.", name=type(error).__name__)
    return error
