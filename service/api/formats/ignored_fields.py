"""Fields that clients of other services send next to `inputs`, and that change nothing here."""

from collections.abc import Mapping, Sequence
from typing import Any

from bertserve.service.body.reading import check_names
from bertserve.service.errors import InvalidValueError

# the values of each field that change nothing; None means any value
IGNORED_FIELDS: Mapping[str, Sequence[Any] | None] = {
    "options": None,  # the Inference API sends it, with the names in `CLIENT_OPTIONS`
    "use_cache": None,
    "wait_for_model": None,
    "user": None,  # the name of the end user, in the OpenAI API
    "stream": (False, None),  # answers are not streamed
    "encoding_format": ("float", None),  # only vectors have other formats
}
# Names in `options` of the Inference API and its clients. They are about waiting for a model and about caches.
CLIENT_OPTIONS = ("use_cache", "wait_for_model", "use_gpu", "dont_load_model", "retry_on_error", "includeCredentials", "taskHint", "signal")


def is_ignored(name: str, value: Any) -> bool:
    """Returns whether a field is in the list.

    Raises:
        InvalidValueError: It is, but its value asks for something that the service does not do.
    """
    if name not in IGNORED_FIELDS:
        return False
    allowed = IGNORED_FIELDS[name]
    if allowed is not None and value not in allowed:
        raise InvalidValueError("`{field}` asks for a response format that this endpoint does not have; remove `{field}`.", field=name)
    if name == "options" and value is not None:
        if not isinstance(value, dict):
            raise InvalidValueError("`options` must be an object; fix or remove it.")
        check_names(value, CLIENT_OPTIONS, "`options`")
    return True


def is_null_or_ignored(name: str, value: Any) -> bool:
    """Returns whether a field is null, whatever its name, or in the list: some clients send null for each unset field."""
    return value is None or is_ignored(name, value)
