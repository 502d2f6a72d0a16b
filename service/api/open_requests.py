"""OpenRequests: the requests to models that are open at the same time, and their limits."""

from collections import Counter

from bertserve.service.errors import RefusedError, UnavailableError
from bertserve.service.settings import Settings


class OpenRequests:
    """Counts the requests to models without a complete response, in total and by the name of their key."""

    def __init__(self, settings: Settings) -> None:
        self._max = settings.max_concurrent
        self._max_per_key = settings.max_concurrent_per_key
        self._count = 0
        self._count_by_key: Counter[str | None] = Counter()

    def admit(self, key: str | None) -> None:
        """Counts a request, which must be released.

        Raises:
            UnavailableError: --max-concurrent requests are open.
            RefusedError: --max-concurrent-per-key requests with its key are open.
        """
        if self._count >= self._max:
            raise UnavailableError(
                "{count} requests are open, and --max-concurrent allows no more; send the request again later, or to another replica.",
                count=self._count,
            )
        if self._max_per_key is not None and self._count_by_key[key] >= self._max_per_key:
            raise RefusedError(
                "the key `{key}` has {count} open requests, and --max-concurrent-per-key allows no more; wait for an answer before the "
                "next request.",
                key=key,
                count=self._max_per_key,
                reason="key",
                retry_after_s=1,
            )
        self._count += 1
        self._count_by_key[key] += 1

    def release(self, key: str | None) -> None:
        """Removes an admitted request from the counts."""
        self._count -= 1
        self._count_by_key[key] -= 1
