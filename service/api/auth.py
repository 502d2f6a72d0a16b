"""Authentication: each route declares its access, and checks the caller before it runs.

The router matches a request to one route, and this route checks its own access. So there is no second list of paths that
decides about access. The service does not start if a route declares no access.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

from fastapi.routing import APIRoute
from starlette.routing import BaseRoute
from starlette.types import Receive, Scope, Send

from bertserve.service.api.request import REQUEST, Request
from bertserve.service.api_keys import Access, ApiKeys, digest_of
from bertserve.service.errors import ForbiddenError, RefusedError, UnauthorizedError
from bertserve.service.tasks.catalog import TASKS

METRICS = "/metrics"
# These paths are not traced, and they are answered even when no other connection is accepted. The set decides no access.
PROBES = frozenset(
    {
        "/health",
        "/health/live",
        "/health/ready",
        "/ping",
        "/v2/health/live",
        "/v2/health/ready",
        *(f"/{spec.path}/health" for spec in TASKS.values()),
    }
)
RETRY_AFTER_S = 1.0


class Caller(NamedTuple):
    """The owner of a request's key: its name in its file, whether it is an admin key, and its digest."""

    name: str
    admin: bool
    digest: bytes


class Authenticator:
    """Admits requests by the access of their route, and counts the open requests of each key."""

    def __init__(
        self,
        keys: ApiKeys | None = None,
        *,
        admin_keys: ApiKeys | None = None,
        public_health: bool = True,
        public_metrics: bool = True,
        max_concurrent_per_key: int | None = None,
    ) -> None:
        """Creates it.

        Args:
            keys: The keys that callers need; None admits all callers.
            admin_keys: The keys that can change models and call all other routes; None disables model management.
            public_health: Whether probes need no key.
            public_metrics: Whether `/metrics` needs no key.
            max_concurrent_per_key: Limit of open requests per key; None for no limit.
        """
        self.keys = keys
        self.admin_keys = admin_keys
        # other accesses always need a key
        self._open = {Access.PUBLIC: True, Access.PROBE: public_health, Access.METRICS: public_metrics}
        self._max_concurrent = max_concurrent_per_key
        self._running: Counter[Caller] = Counter()

    def enter(self, access: Access, headers: Iterable[tuple[bytes, bytes]]) -> Caller | None:
        """Admits a request; header names are in lower case. The code that calls it must pass the returned caller, if any, to `leave`.

        Returns:
            The owner of the request's key; None if the route needs no key.

        Raises:
            UnauthorizedError: The request has no key, or an unknown one.
            ForbiddenError: The route needs an admin key and the request has another key, or there are no admin keys.
            RefusedError: The key has its maximum number of open requests.
        """
        admin = access is Access.ADMIN
        if not admin and (self.keys is None or self._open.get(access, False)):
            return None
        if admin and self.admin_keys is None:
            raise ForbiddenError("model management is disabled; the operator can enable it with --admin-key-file.")
        caller = self._identify(headers)
        if admin and not caller.admin:
            raise ForbiddenError("the key `{caller}` may not change models; send an admin key.", caller=caller.name)
        if self._max_concurrent is not None and self._running[caller] >= self._max_concurrent:
            raise RefusedError(
                "the key `{caller}` has {running} open requests and {max_concurrent} are allowed; send the next one when one of "
                "them is answered.",
                caller=caller.name,
                running=self._running[caller],
                max_concurrent=self._max_concurrent,
                reason="key",
                retry_after_s=RETRY_AFTER_S,
                key=caller.name,
            )
        self._running[caller] += 1
        return caller

    def leave(self, caller: Caller) -> None:
        """Counts an admitted request as done."""
        self._running[caller] -= 1

    def check_again(self, caller: Caller | None) -> None:
        """Checks whether the key of an admitted request is still in its file, because a stream may have no end.

        Raises:
            UnauthorizedError: The key was removed.
        """
        if caller is not None:
            keys = self.admin_keys if caller.admin else self.keys
            if keys is None or not keys.has(caller.digest):
                raise UnauthorizedError("the API key was removed; ask the operator for another one.")

    def _identify(self, headers: Iterable[tuple[bytes, bytes]]) -> Caller:
        """Returns the owner of the key in the header `Authorization`.

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
                return Caller(name, admin, digest_of(key))
        raise UnauthorizedError("unknown API key; check it, or ask the operator for one.")


class GuardedRoute(APIRoute):
    """A route of FastAPI that checks its access before it runs. `openapi.endpoints` makes a subclass for each access."""

    access: Access

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves a request that the router has matched to this route; a wrong method gets status 405."""
        assert self.methods is not None, "FastAPI gives every route methods"
        if scope["method"] not in self.methods:
            await super().handle(scope, receive, send)
            return
        request: Request = scope[REQUEST]
        caller = request.caller = request.auth.enter(self.access, scope["headers"])
        try:
            await super().handle(scope, receive, send)
        finally:
            if caller is not None:
                request.auth.leave(caller)


def check_declared(routes: Iterable[BaseRoute]) -> None:
    """Checks at startup that all routes declare their access.

    Raises:
        TypeError: A route does not.
    """
    for route in routes:
        if not (isinstance(route, GuardedRoute) and isinstance(getattr(route, "access", None), Access)):
            raise TypeError(f"the route {getattr(route, 'path', route)!r} declares no access; use `endpoints` of service/api/openapi.py.")
