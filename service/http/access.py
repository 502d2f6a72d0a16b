"""Access: which paths need a key, whose key a request has, and how many requests a key may have open at once."""

from __future__ import annotations

import re
from collections import Counter

from service.api_keys import ApiKeys
from service.errors import ForbiddenError, RefusedError, UnauthorizedError
from service.tasks.catalog import TASKS
from service.wire.routes import all_routes

METRICS = "/metrics"
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
# what a browser asks for without a key; the pages have a place for it, and say nothing of the models
DOCS = frozenset({"/", "/docs", "/openapi.json"})
DOCS_FILES = ("/docs/static/", "/playground/")
# what a log may quote of a path that was not routed: it is one of ours, and nothing that a caller made up
FIXED_PATHS = PROBES | DOCS | {METRICS, *(route.path for route in all_routes() if "{" not in route.path)}
_ADMIN = re.compile("/models/[^/]+/(load|reload|unload)|/v2/repository/models/[^/]+/(load|unload)")
_MODEL_PROBE = re.compile("/models/[^/]+/health|/v2/models/[^/]+/(versions/[^/]+/)?ready")
RETRY_AFTER_S = 1.0


class Access:
    """Lets requests in, and counts those that are in by the name of their key."""

    def __init__(
        self,
        keys: ApiKeys | None = None,
        *,
        admin_keys: ApiKeys | None = None,
        open_health: bool = True,
        open_metrics: bool = True,
        max_concurrent_per_key: int | None = None,
    ) -> None:
        """Creates it.

        Args:
            keys: The keys that callers must have; None lets everyone in.
            admin_keys: The keys that may change models, and do all that others may; None lets nobody change them.
            open_health: Whether probes need no key.
            open_metrics: Whether `/metrics` needs no key.
            max_concurrent_per_key: Most requests of one key at once; None is no limit.
        """
        self.keys = keys
        self.admin_keys = admin_keys
        self._open_health = open_health
        self._open_metrics = open_metrics
        self._max_concurrent = max_concurrent_per_key
        self._inside: Counter[str] = Counter()

    def enter(self, method: str, path: str, authorization: bytes) -> str | None:
        """Lets a request in; the caller must `leave` with what this returns.

        Args:
            method: Of the request.
            path: Of the request, decoded.
            authorization: Its header of that name; empty where it has none.

        Returns:
            The name of its key; None where none was asked for.

        Raises:
            UnauthorizedError: It has no key, or a wrong one.
            ForbiddenError: It changes models, and its key is no admin's.
            RefusedError: As many requests of its key as may be are inside.
        """
        admin = method == "POST" and _ADMIN.fullmatch(path) is not None
        if not admin and (self.keys is None or self._is_open(method, path)):
            return None
        if admin and self.admin_keys is None:
            raise ForbiddenError("nobody may change the models of this service; start it with --admin-key-file to let a key do so.")
        scheme, _, key = authorization.partition(b" ")
        if not authorization:
            raise UnauthorizedError("this service needs an API key: send the header `Authorization: Bearer KEY`.")
        if scheme.lower() != b"bearer":
            raise UnauthorizedError("the header `Authorization` is of another scheme; send `Authorization: Bearer KEY`.")
        holder = None if self.admin_keys is None else self.admin_keys.holder(key.strip())
        if holder is None and self.keys is not None:
            holder = self.keys.holder(key.strip())
            if admin and holder is not None:
                raise ForbiddenError(f"the key `{holder}` may not change models; that takes a key of --admin-key-file.")
        if holder is None:
            raise UnauthorizedError("the API key is not one of this service's; look at how it was copied, or ask its operator for one.")
        if self._max_concurrent is not None and self._inside[holder] >= self._max_concurrent:
            raise RefusedError(
                f"the key `{holder}` has {self._inside[holder]} requests under way and {self._max_concurrent} are allowed at once; "
                "send the next one when one of them is answered.",
                reason="key",
                retry_after_s=RETRY_AFTER_S,
                key=holder,
            )
        self._inside[holder] += 1
        return holder

    def leave(self, holder: str | None) -> None:
        """Counts a request that was let in as done."""
        if holder is not None:
            self._inside[holder] -= 1

    def _is_open(self, method: str, path: str) -> bool:
        """Returns whether a request is a probe or a scrape: those paths exactly, for a model's name may look like any of them."""
        if method != "GET":
            return False
        if path == METRICS:
            return self._open_metrics
        if path in DOCS or path.startswith(DOCS_FILES):
            return True
        return self._open_health and (path in PROBES or _MODEL_PROBE.fullmatch(path) is not None)
