"""Authentication: each route declares its access, and checks the caller before it runs.

The router matches a request to one route, and this route checks its own access. So there is no second list of paths that
decides about access. The service does not start if a route declares no access.
"""

from __future__ import annotations

from collections.abc import Iterable

from fastapi.routing import APIRoute
from starlette.routing import BaseRoute
from starlette.types import Receive, Scope, Send

from bertserve.service.api.request import REQUEST, Request
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
        """Creates it.

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


class GuardedRoute(APIRoute):
    """A route of FastAPI that checks its access before it runs. `openapi.endpoints` makes a subclass for each access."""

    access: Access

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves a request that the router has matched to this route; a wrong method gets status 405."""
        assert self.methods is not None, "FastAPI gives every route methods"
        if scope["method"] in self.methods:
            request: Request = scope[REQUEST]
            request.key = request.auth.check(self.access, scope["headers"])
        await super().handle(scope, receive, send)


def check_declared(routes: Iterable[BaseRoute]) -> None:
    """Checks at startup that all routes declare their access.

    Raises:
        TypeError: A route does not.
    """
    for route in routes:
        if not (isinstance(route, GuardedRoute) and isinstance(getattr(route, "access", None), Access)):
            raise TypeError(f"the route {getattr(route, 'path', route)!r} declares no access; use `endpoints` of service/api/openapi.py.")
