"""SharedReloader: the Reloader of one worker of several. All workers make the change that one of them is asked for.

Workers change one after the other, so for a moment one answers by the old model and another by the new one. No request is answered by both.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Literal

from bertserve.service.errors import BertServeError, CallerError, NotFoundError, PartialChangeError, ServerError, UnavailableError
from bertserve.service.serving.model import Model
from bertserve.service.serving.reloader import Reloader
from bertserve.service.serving.workers import Change, Report, WorkerContext

logger = logging.getLogger("bertserve.loading")

# How long the other workers may take once the worker that was asked is done: they load the same model.
WAIT_S = 60.0
WAIT_FACTOR = 10.0


class SharedReloader(Reloader):
    """Changes the models of all workers."""

    def __init__(self, *args: Any, worker: WorkerContext, **kwargs: Any) -> None:
        """Creates it.

        Args:
            *args: A Reloader's.
            worker: Which worker this is, and how it tells the supervisor.
            **kwargs: A Reloader's.
        """
        super().__init__(*args, **kwargs)
        assert worker.tell is not None
        self._index, self._workers, self._tell = worker.index, worker.workers, worker.tell
        self._numbers = itertools.count()
        self._reports: dict[int, Report] = {}
        self._asked: dict[Change, dict[int, Report]] = {}  # changes that this worker was asked for -> the reports on them
        self._news = asyncio.Event()  # set, and replaced, when there is a report on one of them
        self._making: asyncio.Task[None] | None = None

    async def load(self, name: str) -> Model:
        """Has all workers load the model of that name as the folders have it now.

        Raises:
            NotFoundError: No folder has a bundle of that name.
            InvalidValueError: The bundle cannot be loaded; nothing changes.
            PartialChangeError: Some workers loaded it and others did not, or another version.
            UnavailableError: The other workers cannot be told.
        """
        await self._change_all("load", name)
        return self._registry.get(name)

    async def unload(self, name: str) -> None:
        """Has all workers take a model out of service.

        Raises:
            NotFoundError: No worker has such a model.
            PartialChangeError: Some workers have not done it.
            UnavailableError: The other workers cannot be told.
        """
        await self._change_all("unload", name)

    def differing(self) -> dict[str, list[dict[str, Any]]]:
        """Returns what each worker has of the models that they do not all serve in one version, by name."""
        reports = dict(sorted(self._reports.items()))
        names = {name for report in reports.values() for name in report.served}
        return {
            name: [
                {"index": index, "version": report.served.get(name)} | ({"broken": report.broken[name]} if name in report.broken else {})
                for index, report in reports.items()
            ]
            for name in sorted(names)
            if len({report.served.get(name) for report in reports.values()}) > 1
        }

    def report(self, change: Change | None = None, error: BertServeError | None = None) -> None:
        """Reports to the supervisor what this worker serves: once after its start, and after each change."""
        served = {name: model.bundle.version for name, model in self._registry.models.items()}
        with suppress(OSError):  # the supervisor is gone, and this worker ends
            self._tell(Report(self._index, served, dict(self._broken), self._registry.defaults, change, error))

    def receive(self, message: Change | Report) -> None:
        """Makes a change that the supervisor sends, or keeps the report of a worker; called in the event loop."""
        if isinstance(message, Change):
            self._making = asyncio.ensure_future(self._make(message))  # the loop itself keeps no task alive
            return
        self._reports[message.index] = message
        if message.change in self._asked:
            self._asked[message.change][message.index] = message
            self._news.set()
            self._news = asyncio.Event()

    async def _make(self, change: Change) -> None:
        try:
            if change.action == "load":
                await super().load(change.name)
            elif change.action == "unload":
                await super().unload(change.name)
            else:
                await super().refresh()
        except BertServeError as error:
            self.report(change, error)
        except Exception as error:  # noqa: BLE001 - the next change must be made all the same, and whoever asked must hear of this one
            logger.error("the %s of a model failed with %s", change.action, type(error).__name__)
            self.report(change, ServerError("it failed with {kind}, which is a bug", kind=type(error).__name__))
        else:
            self.report(change)

    async def _change_all(self, action: Literal["load", "unload"], name: str) -> None:
        """Has all workers make a change, and waits for their reports.

        Raises:
            BertServeError: No worker could make it: the error of this one.
            PartialChangeError: Some workers could not make it, or loaded another version.
        """
        change, start = Change(action, name, self._index, next(self._numbers)), time.monotonic()
        reports = self._asked[change] = {}
        try:
            self._tell(change)
            await self._until(lambda: self._index in reports)
            with suppress(TimeoutError):
                wait_s = max(WAIT_S, WAIT_FACTOR * (time.monotonic() - start))
                await asyncio.wait_for(self._until(lambda: len(reports) == self._workers), wait_s)
        except OSError as error:
            raise UnavailableError(
                "the other workers cannot be told of the change ({strerror}), and nothing changed; try again later.",
                strerror=error.strerror,
            ) from error
        finally:
            del self._asked[change]
        done = sorted(index for index, report in reports.items() if report.error is None)
        own_error = reports[self._index].error
        if not done and len(reports) == self._workers and isinstance(own_error, CallerError):
            raise own_error
        failed = {index: _failure(reports.get(index), change) for index in range(self._workers)}
        versions = {reports[index].served.get(name) for index in done}
        if any(failed.values()) or len(versions) != 1:
            why = "; ".join(f"not by worker {index} ({error})" for index, error in failed.items() if error) or "in different versions"
            raise PartialChangeError(
                "the {what} of `{name}` was done by worker {by}, and {why}. Workers may serve different models now, which "
                "/models shows; mend the cause, and send the request again.",
                what=action,
                name=name[:64],
                by=", ".join(map(str, done)) or "none",
                why=why,
            )

    async def _until(self, done: Callable[[], bool]) -> None:
        while not done():
            await self._news.wait()


def _failure(report: Report | None, change: Change) -> str | None:
    """Returns why a worker does not have what a change asks for, or None."""
    if report is None:
        return "it has not done it yet"
    if report.error is None or (change.action == "unload" and isinstance(report.error, NotFoundError)):
        return None
    return report.error.message
