"""Access to routes: the levels that they declare, the API keys of a file, and the `Authenticator`, which checks both.

Only SHA-256 digests of keys are stored, and they are compared in constant time.

A line of the file is `NAME sha256:DIGEST`, as `bert-serve new-key NAME` prints it, or a key in plain text. Blank lines and lines
that begin with `#` are ignored. A key is random and long, so one round of SHA-256 is enough: it cannot be guessed. A key in plain text
is named `default` if it is the only one in its file, otherwise `line-N`.
"""

import hashlib
import hmac
import logging
import re
import secrets
from collections.abc import Iterable
from enum import Enum
from http import HTTPStatus
from pathlib import Path

from bertserve.service.errors import HttpError, SettingsError
from bertserve.service.messages import SHOWN_CHARS, plural

logger = logging.getLogger("bertserve.keys")

_NAME = "[A-Za-z0-9._-]{1,64}"
_NAME_AND_DIGEST = re.compile(f"({_NAME})[ \t]+sha256:([0-9a-f]{{64}})")
_PLAIN = re.compile("[!-~]{1,512}")
_FLAG, _ADMIN_FLAG = "--api-key-file", "--admin-key-file"


class Access(Enum):
    """The callers that a route admits."""

    PUBLIC = "everyone"
    PROBE = "everyone, unless health checks need a key"
    METRICS = "everyone, unless metrics need a key"
    KEY = "callers with a key, if the service has keys"
    ADMIN = "callers with an admin key"


class Authenticator:
    """Admits requests by the access of their route, and by the keys in files, which can be read again during requests."""

    def __init__(
        self, key_file: Path | None = None, *, admin_key_file: Path | None = None, public_health: bool = True, public_metrics: bool = True
    ) -> None:
        """Reads the files: without `key_file` all callers are admitted, and without `admin_key_file` none can change models.

        Admin keys can also call all other routes. `public_health` and `public_metrics` are whether probes and `/metrics` need no key.

        Raises:
            SettingsError: A file cannot be read, or contains no key or an invalid line.
        """
        files = {_ADMIN_FLAG: admin_key_file, _FLAG: key_file}
        self._files = {flag: path for flag, path in files.items() if path is not None}
        self._digests = {flag: _read(flag, path) for flag, path in self._files.items()}
        self.requires_key = key_file is not None
        # other accesses always need a key
        self._public = {Access.PUBLIC: True, Access.PROBE: public_health, Access.METRICS: public_metrics}

    def reload(self) -> None:
        """Reads the files again; after an error in one, it logs the error and keeps the keys of that file."""
        for flag, path in self._files.items():
            if path.exists() and not path.is_file():  # a pipe can be read only once, and opening it can block
                logger.warning("%s `%s` is not a regular file, so it is not read again", flag, path)
                continue
            try:
                self._digests[flag] = digests = _read(flag, path)
            except SettingsError as error:
                logger.error("the current keys stay: %s", error)
            else:
                logger.info("read %s of %s: %s", plural(len(digests), "key"), flag, ", ".join(digests))

    def identify(self, access: Access, headers: Iterable[tuple[bytes, bytes]]) -> tuple[str | None, bool]:
        """Identifies the caller of a route by the headers of the request, whose names are in lower case.

        Returns:
            The name of the request's key in its file, None if the route needs no key; and whether the key is sufficient for the route.

        Raises:
            HttpError: The header `Authorization` is missing, repeated, or gives another scheme or an unknown key (401); or the route needs
                an admin key, and there are none (403).
        """
        admin = access is Access.ADMIN
        if not admin and (not self.requires_key or self._public.get(access, False)):
            return None, True
        if admin and _ADMIN_FLAG not in self._files:
            raise HttpError(HTTPStatus.FORBIDDEN, "model management is disabled; the operator can enable it with --admin-key-file.")
        values = [value for name, value in headers if name == b"authorization"]
        scheme, _, key = values[0].partition(b" ") if values else (b"", b"", b"")
        if len(values) != 1 or scheme.lower() != b"bearer":  # if there are several headers, a proxy can have checked another one
            raise HttpError(HTTPStatus.UNAUTHORIZED, "an API key is required; send one header `Authorization: Bearer KEY`.")
        digest = _digest(key.strip())
        for flag, digests in self._digests.items():
            # compares all digests, for constant time
            if names := [name for name, known_digest in digests.items() if hmac.compare_digest(known_digest, digest)]:
                return names[-1], not admin or flag == _ADMIN_FLAG
        raise HttpError(HTTPStatus.UNAUTHORIZED, "unknown API key; check it, or ask the operator for one.")


def _read(flag: str, path: Path) -> dict[str, bytes]:
    """Returns the digest of each key in a file, by name; `flag` is the setting that names the file.

    Raises:
        SettingsError: The file cannot be read, or contains no key or an invalid line, which is not quoted, because it can be a key.
    """
    try:
        lines = path.read_text(encoding="utf-8").split("\n")  # other characters, such as U+2028 in a comment, do not end a line
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not text"
        raise SettingsError(f"{flag} `{path}` cannot be read: {reason}.") from error
    entries = [(number, line.strip()) for number, line in enumerate(lines, 1) if line.strip() and not line.strip().startswith("#")]
    if not entries:
        raise SettingsError(f"{flag} `{path}` is empty; put a key on each line, or what `bert-serve new-key NAME` prints.")
    digests: dict[str, bytes] = {}
    for number, line in entries:
        if match := _NAME_AND_DIGEST.fullmatch(line):
            name, digest = match[1], bytes.fromhex(match[2])
        elif _PLAIN.fullmatch(line) and not line.startswith("sha256:"):  # a digest without its name is not a key
            name, digest = "default" if len(entries) == 1 else f"line-{number}", _digest(line.encode())
        else:
            raise SettingsError(
                f"line {number} of {flag} `{path}` is not a key: write `NAME sha256:DIGEST`, as `bert-serve new-key NAME` prints it, or a "
                "key of at most 512 ASCII characters without spaces."
            )
        if name in digests:
            raise SettingsError(f"line {number} of {flag} `{path}` has the duplicate name `{name}`; give each key its own name.")
        digests[name] = digest
    return digests


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def new_key(name: str) -> tuple[str, str]:
    """Creates a key with a name for logs and metrics.

    Returns:
        The key for the caller, and the line for the file of keys.

    Raises:
        SettingsError: The name is not allowed in such a file.
    """
    if not re.fullmatch(_NAME, name):
        raise SettingsError(
            f"the name `{name[:SHOWN_CHARS]}` is not a valid key name: use 1 to 64 of the letters a-z and A-Z, digits, `.`, `_` and `-`."
        )
    key = secrets.token_urlsafe(32)
    return key, f"{name} sha256:{_digest(key.encode()).hex()}"
