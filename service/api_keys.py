"""Access levels of routes, and the API keys of a file.

Only SHA-256 digests of keys are stored, and they are compared in constant time.

A line of the file is `NAME sha256:DIGEST`, as `bert-serve new-key NAME` prints it, or a key in plain text. Blank lines and lines
that begin with `#` are ignored. A key is random and long, so one round of SHA-256 is enough: it cannot be guessed.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import re
import secrets
from enum import Enum
from pathlib import Path

from bertserve.service.errors import SHOWN_CHARS, SettingsError, plural

logger = logging.getLogger("bertserve.keys")

_NAME = "[A-Za-z0-9._-]{1,64}"
_DIGEST = re.compile(f"({_NAME})[ \t]+sha256:([0-9a-f]{{64}})")
_PLAIN = re.compile("[!-~]{1,512}")
ONLY = "default"  # the name of a plain-text key that is the only one in its file


class Access(Enum):
    """The callers that a route admits."""

    PUBLIC = "everyone"
    PROBE = "everyone, unless health checks need a key"
    METRICS = "everyone, unless metrics need a key"
    KEY = "callers with a key, if the service has keys"
    ADMIN = "callers with an admin key"


class ApiKeys:
    """The keys of a file, which can be read again during requests."""

    def __init__(self, path: Path, *, flag: str = "--api-key-file") -> None:
        """Reads a file of keys; `flag` is the setting that names the file, for messages.

        Raises:
            SettingsError: The file cannot be read, has no key, or has an invalid line.
        """
        self._path = path
        self._flag = flag
        self._digests = self._read()

    def holder(self, key: bytes) -> str | None:
        """Returns the name of a key, or None if it is unknown."""
        key_digest = digest_of(key)
        owner = None
        for name, digest in self._digests.items():  # compares all digests, for constant time
            if hmac.compare_digest(digest, key_digest):
                owner = name
        return owner

    def reload(self) -> None:
        """Reads the file again; after an error it logs the error and keeps the current keys."""
        if self._path.exists() and not self._path.is_file():  # a pipe has its content only once, and to open it can wait for ever
            logger.warning("%s `%s` is not a regular file, so it is not read again", self._flag, self._path)
            return
        try:
            self._digests = self._read()
        except SettingsError as error:
            logger.error("the current keys stay: %s", error)
        else:
            logger.info("read %s of %s: %s", plural(len(self._digests), "key"), self._flag, ", ".join(self._digests))

    def _read(self) -> dict[str, bytes]:
        try:
            lines = self._path.read_text(encoding="utf-8").split("\n")  # other characters, such as U+2028 in a comment, do not end a line
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or "it is not text"
            raise SettingsError(f"{self._flag} `{self._path}` cannot be read: {reason}.") from error
        entries = [(number, line.strip()) for number, line in enumerate(lines, 1) if line.strip() and not line.strip().startswith("#")]
        if not entries:
            raise SettingsError(f"{self._flag} `{self._path}` is empty; put a key on each line, or what `bert-serve new-key NAME` prints.")
        digests: dict[str, bytes] = {}
        for number, line in entries:
            name, digest = self._entry(number, line, alone=len(entries) == 1)
            if name in digests:
                raise SettingsError(
                    f"line {number} of {self._flag} `{self._path}` has the duplicate name `{name}`; give each key its own name."
                )
            digests[name] = digest
        return digests

    def _entry(self, number: int, line: str, *, alone: bool) -> tuple[str, bytes]:
        """Returns the name and digest of a line; a message never quotes the line, because it may be a key."""
        if named := _DIGEST.fullmatch(line):
            return named[1], bytes.fromhex(named[2])
        if _PLAIN.fullmatch(line) and not line.startswith("sha256:"):  # a digest without its name is not a key
            return ONLY if alone else f"line-{number}", digest_of(line.encode())
        raise SettingsError(
            f"line {number} of {self._flag} `{self._path}` is not a key: write `NAME sha256:DIGEST`, as `bert-serve "
            "new-key NAME` prints it, or a key of at most 512 ASCII characters without spaces."
        )


def digest_of(key: bytes) -> bytes:
    """Returns the digest by which a file knows a key."""
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
    return key, f"{name} sha256:{hashlib.sha256(key.encode()).hexdigest()}"
