"""Access: what a route can declare, and the API keys of a file.

Only SHA-256 digests of keys are kept, and they are compared in constant time.

A line of the file is `NAME sha256:DIGEST`, as `bert-serve new-key NAME` prints it, or a key in plain text. Blank lines and lines
that begin with `#` do not count. A key is random and long, so one round of SHA-256 is enough: there is nothing to guess.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import re
import secrets
from enum import Enum
from pathlib import Path

from bertserve.service.errors import SettingsError, plural

logger = logging.getLogger("bertserve.keys")

_NAME = "[A-Za-z0-9._-]{1,64}"
_DIGEST = re.compile(f"({_NAME})[ \t]+sha256:([0-9a-f]{{64}})")
_PLAIN = re.compile("[!-~]{1,512}")
ONLY = "default"  # the name of a key that is alone in its file, in plain text


class Access(Enum):
    """The callers that a route admits."""

    PUBLIC = "everyone"
    PROBE = "everyone, unless health checks need a key"
    METRICS = "everyone, unless metrics need a key"
    KEY = "callers with a key, if the service has keys"
    ADMIN = "callers with an admin key"


class ApiKeys:
    """The keys of a file, which may be read again while requests come."""

    def __init__(self, path: Path, *, flag: str = "--api-key-file") -> None:
        """Reads a file of keys.

        Args:
            path: The file.
            flag: The setting that names it, for messages.

        Raises:
            SettingsError: It cannot be read, has no key, or has a line that is none.
        """
        self._path = path
        self._flag = flag
        self._digests = self._read()

    @property
    def names(self) -> list[str]:
        """The names of all keys."""
        return list(self._digests)

    def holder(self, key: bytes) -> str | None:
        """Returns the name of a key, or None for one that is not among them."""
        given = hashlib.sha256(key).digest()
        owner = None
        for name, digest in self._digests.items():  # all of them, whichever it is
            if hmac.compare_digest(digest, given):
                owner = name
        return owner

    def reload(self) -> None:
        """Reads the file again; where that fails, logs why and keeps the keys that there are."""
        try:
            self._digests = self._read()
        except SettingsError as error:
            logger.error("cannot reload the API keys: %s", error)
        else:
            logger.info("read %s: %s", plural(len(self._digests), "API key"), ", ".join(self._digests))

    def _read(self) -> dict[str, bytes]:
        try:
            lines = self._path.read_text(encoding="utf-8").split("\n")  # no other character ends a line, as U+2028 in a comment would
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
        """Returns name and digest of a line; a message never quotes it, because it can be a key."""
        if named := _DIGEST.fullmatch(line):
            return named[1], bytes.fromhex(named[2])
        if _PLAIN.fullmatch(line) and not line.startswith("sha256:"):  # else whoever reads a digest without its name has a key
            return ONLY if alone else f"line-{number}", hashlib.sha256(line.encode()).digest()
        raise SettingsError(
            f"line {number} of {self._flag} `{self._path}` is not a key: write `NAME sha256:DIGEST`, as `bert-serve "
            "new-key NAME` prints it, or a key of at most 512 ASCII characters without spaces."
        )


def new_key(name: str) -> tuple[str, str]:
    """Makes a key.

    Args:
        name: What logs and metrics call it.

    Returns:
        The key, for the caller, and the line for the file of keys.

    Raises:
        SettingsError: The name cannot stand in such a file.
    """
    if not re.fullmatch(_NAME, name):
        raise SettingsError(
            f"the name `{name[:64]}` is not a valid key name: use 1 to 64 of the letters a-z and A-Z, digits, `.`, `_` and `-`."
        )
    key = secrets.token_urlsafe(32)
    return key, f"{name} sha256:{hashlib.sha256(key.encode()).hexdigest()}"
