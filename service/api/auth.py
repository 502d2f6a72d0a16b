"""Authenticator: admits callers by their keys and by the access that a route declares."""

from __future__ import annotations

from collections.abc import Iterable

from bertserve.service.api_keys import Access, ApiKeys
from bertserve.service.errors import ForbiddenError, UnauthorizedError

METRICS = "/metrics"


class Authenticator:
    """Admits requests by the access of their route."""

    def __init__(
        self,
        keys: ApiKeys | None = None,
        *,
        admin_keys: ApiKeys | None = None,
        public_health: bool = True,
        public_metrics: bool = True,
    ) -> None:
        """Takes the keys and the access that they give.

        Args:
            keys: The keys that callers need; None admits all callers.
            admin_keys: The keys that can change models and call all other routes; None disables model management.
            public_health: Whether probes need no key.
            public_metrics: Whether `/metrics` needs no key.
        """
        self.keys = keys
        self.admin_keys = admin_keys
        # other accesses always need a key
        self._open = {Access.PUBLIC: True, Access.PROBE: public_health, Access.METRICS: public_metrics}

    def reload(self) -> None:
        """Reads the files of keys again; after an error in a file, it logs the error and keeps the old keys."""
        for keys in (self.keys, self.admin_keys):
            if keys is not None:
                keys.reload()

    def check(self, access: Access, headers: Iterable[tuple[bytes, bytes]]) -> str | None:
        """Admits a request; header names are in lower case.

        Returns:
            The name of the request's key in its file; None if the route needs no key.

        Raises:
            UnauthorizedError: The request has no key, or an unknown one.
            ForbiddenError: The route needs an admin key and the request has another key, or there are no admin keys.
        """
        admin = access is Access.ADMIN
        if not admin and (self.keys is None or self._open.get(access, False)):
            return None
        if admin and self.admin_keys is None:
            raise ForbiddenError("model management is disabled; the operator can enable it with --admin-key-file.")
        name, is_admin = self._identify(headers)
        if admin and not is_admin:
            raise ForbiddenError("the key `{caller}` may not change models; send an admin key.", caller=name)
        return name

    def _identify(self, headers: Iterable[tuple[bytes, bytes]]) -> tuple[str, bool]:
        """Returns the name of the key in the header `Authorization`, and whether it is an admin key.

        Raises:
            UnauthorizedError: The header is missing, occurs twice, has another scheme, or has an unknown key.
        """
        values = [value for name, value in headers if name == b"authorization"]
        if not values:
            raise UnauthorizedError("an API key is required; send the header `Authorization: Bearer KEY`.")
        if len(values) > 1:  # a proxy may have checked the other one
            raise UnauthorizedError("the request has several `Authorization` headers; send one.")
        scheme, _, key = values[0].partition(b" ")
        if scheme.lower() != b"bearer":
            raise UnauthorizedError("the scheme of the `Authorization` header is not Bearer; send `Authorization: Bearer KEY`.")
        key = key.strip()
        for keys, admin in ((self.admin_keys, True), (self.keys, False)):
            name = None if keys is None else keys.holder(key)
            if name is not None:
                return name, admin
        raise UnauthorizedError("unknown API key; check it, or ask the operator for one.")
