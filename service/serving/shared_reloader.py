"""SharedReloader: a Reloader of one worker of several. What one is asked, all do, in one order; whoever asked hears what became of it in each.

A worker that takes the place of another begins with the models that that one served, and goes on where it ended. Workers change one
after the other, so for a moment one answers by the old model and another by the new one; no request is answered by both.
"""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import suppress
from typing import Any

from bertserve.service.errors import BertServeError, NotFoundError, PartialChangeError, UnavailableError
from bertserve.service.serving.change_log import Change, ChangeLog, Outcome, Progress
from bertserve.service.serving.model import Model
from bertserve.service.serving.reloader import Reloader

logger = logging.getLogger("bertserve.loading")

POLL_S = 0.1
# How long others may take, once the worker that was asked is done: they load the same.
WAIT_S = 60.0
WAIT_FACTOR = 10.0
_NOT_YET = Outcome(error="it has not done it yet")


class SharedReloader(Reloader):
    """Changes the models of all workers."""

    def __init__(self, *args: Any, log: ChangeLog, index: int, workers: int, **kwargs: Any) -> None:
        """Creates it; `follow` makes the changes.

        Args:
            *args: A Reloader's.
            log: The log of all workers.
            index: Of this one.
            workers: How many there are.
            **kwargs: A Reloader's.
        """
        super().__init__(*args, **kwargs)
        self._log, self._index, self._workers = log, index, workers
        self._asked: dict[int, BertServeError | None] = {}  # number of a change that was asked here -> why this worker could not make it
        self._progress = log.progress(index) or Progress()
        if (number := self._progress.trying) > self._progress.done:  # not again: it may be what the worker ended of
            self._progress.outcomes[number] = Outcome(error="it ended while it did this")
            self._progress.done = number

    async def follow(self) -> None:
        """Makes the changes that all are to make, for as long as the process serves."""
        self._publish()
        while True:
            with suppress(OSError):  # there may be no descriptor; it is looked at again
                while (change := self._log.read(self._progress.done + 1)) is not None:
                    await self._make(self._progress.done + 1, change)
            await asyncio.sleep(POLL_S)

    async def on_hangup(self) -> None:
        """Does nothing: the supervisor has put the change into the log."""

    async def load(self, name: str) -> Model:
        """Has all workers load the model of that name as the folders have it now.

        Raises:
            NotFoundError: No folder has a bundle of that name.
            InvalidValueError: It cannot be loaded; what was served is served on.
            PartialChangeError: Some workers loaded it and others did not, or another version.
            UnavailableError: The others cannot be told.
        """
        await self._ask(Change("load", name))
        return self._registry.get(name)

    async def unload(self, name: str) -> None:
        """Has all workers take a model out of service.

        Raises:
            NotFoundError: No worker has such a model.
            PartialChangeError: Some workers have not done it.
            UnavailableError: The others cannot be told.
        """
        await self._ask(Change("unload", name))

    def differing(self) -> dict[str, list[dict[str, Any]]]:
        """Returns what each worker has of the models that they do not all serve in one version, by name."""
        known = {index: progress for index in range(self._workers) if (progress := self._progress_of(index)) is not None}
        names = {name for progress in known.values() for name in progress.served}
        return {
            name: [
                {"index": index, "version": progress.served.get(name)}
                | ({"broken": progress.broken[name]} if name in progress.broken else {})
                for index, progress in known.items()
            ]
            for name in sorted(names)
            if len({progress.served.get(name) for progress in known.values()}) > 1
        }

    async def _ask(self, change: Change) -> None:
        try:
            number = self._log.append(change)
        except OSError as error:
            raise UnavailableError(
                "the other workers cannot be told of the change ({strerror}), and nothing changed; try again later.",
                strerror=error.strerror,
            ) from error
        self._asked[number] = None
        try:
            outcomes = await self._outcomes(number)
        finally:
            own_error = self._asked.pop(number)
        done = {index: outcome for index, outcome in outcomes.items() if outcome.error is None}
        if not done and own_error is not None and _NOT_YET not in outcomes.values():
            raise own_error
        versions = {outcome.version for outcome in done.values()}
        failed = {
            index: outcome.error
            for index, outcome in outcomes.items()
            if outcome.error and not (change.what == "unload" and outcome.missing)
        }
        if not failed and len(versions) == 1:
            return
        why = "; ".join(f"not by worker {index} ({error})" for index, error in failed.items()) or "in different versions"
        by = ", ".join(map(str, done)) or "none"
        raise PartialChangeError(
            "the {what} of `{name}` was done by worker {by}, and {why}. Workers may serve different models now, which "
            "/models shows; mend the cause, and send the request again.",
            what=change.what,
            name=change.name[:64],
            by=by,
            why=why,
        )

    async def _outcomes(self, number: int) -> dict[int, Outcome]:
        """Waits until each worker has made a change, or could not; returns what became of it, by index."""
        start, end = time.monotonic(), float("inf")
        while True:
            found = {index: self._outcome(index, number) for index in range(self._workers)}
            now = time.monotonic()
            if end == float("inf") and found[self._index] is not _NOT_YET:
                end = now + max(WAIT_S, WAIT_FACTOR * (now - start))
            if now > end or _NOT_YET not in found.values():
                return found
            await asyncio.sleep(POLL_S)

    def _outcome(self, index: int, number: int) -> Outcome:
        progress = self._progress_of(index)
        return _NOT_YET if progress is None else progress.outcomes.get(number, _NOT_YET)

    def _progress_of(self, index: int) -> Progress | None:
        try:
            return self._log.progress(index)
        except OSError:
            return None

    async def _make(self, number: int, change: Change) -> None:
        self._progress.trying = number
        self._publish()
        try:
            outcome = await self._made(change)
        except BertServeError as error:
            if number in self._asked:
                self._asked[number] = error
            outcome = Outcome(error=error.message, missing=isinstance(error, NotFoundError))
        except Exception as error:  # noqa: BLE001 - the next change must be made all the same, and whoever asked must hear of this one
            logger.error("the %s of a model failed with %s", change.what, type(error).__name__)
            outcome = Outcome(error=f"it failed with {type(error).__name__}, which is a bug")
        self._progress.outcomes[number] = outcome
        self._progress.done = number
        self._publish()

    async def _made(self, change: Change) -> Outcome:
        if change.what == "load":
            return Outcome(version=(await super().load(change.name)).bundle.version)
        if change.what == "unload":
            await super().unload(change.name)
        else:
            await super().refresh()
        return Outcome()

    def _publish(self) -> None:
        self._progress.served = {name: model.bundle.version for name, model in self._registry.models.items()}
        self._progress.broken = dict(self._broken)
        self._progress.defaults = self._registry.defaults
        try:
            self._log.publish(self._index, self._progress)
        except OSError as error:
            logger.error("other workers cannot be told which models this one has (%s)", error.strerror)
