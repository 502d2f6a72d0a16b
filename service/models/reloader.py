"""Reloader: loads, reloads and unloads models without interrupting others. It follows the models folders; a loaded model never changes.

With several workers, a change is requested from one of them, and all make it. For a moment, one worker answers with the old model and
another with the new one, but each request uses only one of them.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

from bertserve.service.bundle import files
from bertserve.service.bundle.files import Bundle
from bertserve.service.errors import (
    BertServeError,
    BundleError,
    CallerError,
    InvalidValueError,
    NotFoundError,
    PartialChangeError,
    Sent,
    ServerError,
    StartError,
    UnavailableError,
    traceback_places,
)
from bertserve.service.metrics import Metrics
from bertserve.service.models.loading import verify
from bertserve.service.models.model import Model
from bertserve.service.models.registry import Registry
from bertserve.service.models.workers import Change, Report, WorkerContext
from bertserve.service.scheduling.daemon_thread import on_thread
from bertserve.service.tasks.catalog import TASKS

logger = logging.getLogger("bertserve.loading")

THREAD = "load"


class Reloader:
    """Changes the models of a registry; it belongs to one event loop.

    A request keeps the model that it started with, so a replaced model finishes its requests, and its memory is freed after the last one.
    If a model cannot be loaded, the old one stays. The end of the service does not wait for a load.
    """

    def __init__(
        self,
        folders: Sequence[Path],
        load: Callable[[Bundle], Model],
        *,
        registry: Registry,
        broken: dict[str, str],
        metrics: Metrics,
        check_start: Callable[[], None],
    ) -> None:
        """Creates it.

        Args:
            folders: The models folders.
            load: Creates a warmed-up model from a verified bundle; called in a thread.
            registry: The loaded models.
            broken: Name -> error, for models that could not be loaded; this class keeps it up to date.
            metrics: Shows loaded and broken models.
            check_start: Raises a StartError if the next start would refuse the bundles in the folders; called in a thread.
        """
        self._folders = folders
        self._load = load
        self._registry = registry
        self._broken = broken
        self._metrics = metrics
        self._check_start = check_start
        self._lock = asyncio.Lock()
        self._refresh_waits = False  # for the lock

    async def load(self, name: str) -> Model:
        """Loads a model from the folders, and replaces the loaded model of the same name.

        Raises:
            NotFoundError: No folder has a bundle of that name.
            InvalidValueError: It cannot be loaded; the old model stays.
        """
        async with self._lock:
            await self._forget_missing(name)
            try:
                path = (await on_thread(self._find, name=THREAD)).get(name)
                if path is None:
                    raise NotFoundError("no models folder has a bundle `{name}`; put it there first.", name=Sent(name))
                model = await self._replace(path)
            except StartError as error:
                raise InvalidValueError(
                    "the model `{model}` cannot be loaded, so nothing changed: {cause}",
                    model=name,
                    cause=without_folders(error.message, self._folders),
                ) from error
            await self._warn_of_next_start()
            return model

    async def unload(self, name: str) -> None:
        """Removes a model; its open requests are still answered.

        Raises:
            NotFoundError: There is no such model.
        """
        async with self._lock:
            await self._forget_missing(name)
            self._remove(self._registry.get(name))

    def differing(self) -> dict[str, list[dict[str, Any]]]:
        """Returns the state of each worker, by model name, for models that differ between workers; empty for a single worker."""
        return {}

    async def refresh(self) -> None:
        """Updates the registry to the folders: loads new and changed models, unloads removed ones, and logs folders that cannot be loaded.

        It does nothing if another call waits for the current change to end, because that call will see the same folders.
        """
        if self._refresh_waits:
            return
        self._refresh_waits = True
        async with self._lock:
            self._refresh_waits = False
            try:
                bundles = await on_thread(self._find, name=THREAD)
            except StartError as error:
                logger.error("cannot reload the models: %s", error.message)
                return
            for name, path in bundles.items():
                try:
                    await self._replace(path, only_changed=True)
                except StartError as error:
                    served = "the old version is still served" if name in self._registry.models else "it is not served"
                    logger.error("the model %s cannot be loaded, %s: %s", name, served, error.message)
            for model in list(self._registry.models.values()):
                if model.name not in bundles:
                    self._remove(model)
            for name in [name for name in self._broken if name not in bundles]:
                self._clear_error(name)
            await self._warn_of_next_start()

    async def _warn_of_next_start(self) -> None:
        """Logs an error that would make the next start fail; the loaded models are not affected."""
        try:
            await on_thread(self._check_start, name=THREAD)
        except StartError as error:
            logger.warning("the next start with these settings will fail: %s", error.message)

    def _find(self) -> dict[str, Path]:
        return {path.name: path for path in files.find_bundles(self._folders)}

    async def _forget_missing(self, name: str) -> None:
        """Removes the error of a broken bundle whose folder is gone."""
        if name in self._broken and not await on_thread(lambda: os.path.isdir(files.find_bundle(self._folders, name)), name=THREAD):
            self._clear_error(name)

    async def _replace(self, path: Path, *, only_changed: bool = False) -> Model:
        name = path.name
        old = self._registry.models.get(name)
        try:
            bundle = await on_thread(lambda: verify(path, metrics=self._metrics), name=THREAD)
            if only_changed and old is not None and bundle.version == old.bundle.version:
                self._clear_error(name)
                return old
            model = await on_thread(lambda: self._load(bundle), name=THREAD)
        except Exception as error:  # such as MemoryError: a refresh must continue with the other bundles
            if isinstance(error, BertServeError):
                message = error.message
            else:
                message = f"loading failed with {type(error).__name__}; check the free memory and the limit on threads, and load it again."
                logger.error("loading the model %s failed with %s: %s", name, type(error).__name__, traceback_places(error))
            self._broken[name] = without_folders(message, [*self._folders, path.parent])
            self._metrics.broken_models.labels(name).set(1)
            raise error if isinstance(error, StartError) else BundleError(message) from error
        if old is not None:
            self._hide(old, unless=model)
        self._registry.put(model)
        self._clear_error(name)
        logger.info("the model %s is now served as version %s", name, model.bundle.version)
        return model

    def _remove(self, model: Model) -> None:
        self._registry.remove(model.name)
        self._hide(model)
        logger.info("the model %s is no longer served", model.name)

    def _clear_error(self, name: str) -> None:
        if self._broken.pop(name, None) is not None:
            self._metrics.broken_models.labels(name).set(0)

    def _hide(self, model: Model, *, unless: Model | None = None) -> None:
        """Sets a model's series in the metrics to 0, unless another model has the same; a worker's metrics cannot remove a series."""
        if unless is None or model.labels != unless.labels:
            self._metrics.model_info.labels(*model.labels).set(0)


def without_folders(message: str, folders: Sequence[Path]) -> str:
    """Returns an error's message for callers: it has names of models folders instead of their paths."""
    paths = {str(path) for folder in folders for path in (folder, os.path.abspath(folder))}
    for path in sorted(paths, key=len, reverse=True):
        message = message.replace(f"{path}/", "").replace(path, Path(path).name) if path != "." else message
    return message


# Seconds for the other workers to finish after the requested worker, because they load the same model.
WAIT_S = 60.0
WAIT_FACTOR = 10.0


class SharedReloader(Reloader):
    """Changes the models of all workers."""

    def __init__(self, *args: Any, worker: WorkerContext, **kwargs: Any) -> None:
        """Creates it with the arguments of a Reloader; `worker` has the channel to the supervisor."""
        super().__init__(*args, **kwargs)
        assert worker.tell is not None
        self._index, self._workers, self._tell = worker.index, worker.workers, worker.tell
        self._numbers = itertools.count()
        self._reports: dict[int, Report] = {}
        self._asked: dict[Change, dict[int, Report]] = {}  # changes that were requested from this worker -> the reports about them
        self._news = asyncio.Event()  # set, and replaced, when a report about one of these changes arrives
        self._making: asyncio.Task[None] | None = None

    async def load(self, name: str) -> Model:
        """Makes all workers load a model from the folders.

        Raises:
            NotFoundError: No folder has a bundle of that name.
            InvalidValueError: The bundle cannot be loaded; nothing changes.
            PartialChangeError: Some workers did not load it, or workers loaded different versions.
            UnavailableError: The supervisor cannot be reached.
        """
        await self._change_all("load", name)
        return self._registry.get(name)

    async def unload(self, name: str) -> None:
        """Makes all workers remove a model.

        Raises:
            NotFoundError: No worker has such a model.
            PartialChangeError: Some workers have not removed it.
            UnavailableError: The supervisor cannot be reached.
        """
        await self._change_all("unload", name)

    async def _warn_of_next_start(self) -> None:
        """Logs an error that would make the next start fail; it is the same for all workers, so only the first one logs it."""
        if self._index == 0:
            await super()._warn_of_next_start()

    def differing(self) -> dict[str, list[dict[str, Any]]]:
        """Returns the state of each worker, by model name, for models whose version or endpoints differ between workers."""
        reports = [self._reports[index] for index in sorted(self._reports)]
        names = sorted({name for report in reports for name in report.served})
        states = {name: [_state(report, name) for report in reports] for name in names}
        return {
            name: workers for name, workers in states.items() if len({(state["version"], *state["default_of"]) for state in workers}) > 1
        }

    def report(self, change: Change | None = None, error: BertServeError | None = None) -> None:
        """Reports the models of this worker to the supervisor: once after its start, and after each change."""
        registry = self._registry
        served = {name: model.bundle.version for name, model in registry.models.items()}
        with suppress(OSError):  # the supervisor has ended, and this worker ends too
            self._tell(Report(self._index, served, dict(self._broken), registry.defaults, change, error, registry.choices))

    def receive(self, message: Change | Report) -> None:
        """Makes a change from the supervisor, or stores the report of a worker; called in the event loop."""
        if isinstance(message, Change):
            self._making = asyncio.ensure_future(self._make(message))  # the reference is needed, because the loop keeps no task alive
            return
        self._reports[message.index] = message
        self._metrics.differing_models.set(len(self.differing()))
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
        except Exception as error:  # noqa: BLE001 - later changes must still be made, and the caller must get this error
            logger.error("the %s of a model failed with %s", change.action, type(error).__name__)
            self.report(change, ServerError("it failed with {kind}, which is a bug", kind=type(error).__name__))
        else:
            self.report(change)

    async def _change_all(self, action: Literal["load", "unload"], name: str) -> None:
        """Makes all workers apply a change, and waits for their reports.

        Raises:
            BertServeError: No worker could make the change; it is the error of this worker.
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
                "cannot tell the other workers of the change ({strerror}), so nothing changed; try again later.",
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
            failures = "; ".join(f"not on worker {index} ({error})" for index, error in failed.items() if error) or "in different versions"
            raise PartialChangeError(
                "the {what} of `{name}` succeeded on worker {by}, but {failures}. Workers may now serve different models, "
                "see /models; fix the cause, and send the request again.",
                what=action,
                name=name if done else Sent(name),  # no worker has a model of this name, so it is only the caller's text
                by=", ".join(map(str, done)) or "none",
                failures=failures,
            )

    async def _until(self, done: Callable[[], bool]) -> None:
        while not done():
            await self._news.wait()


def _state(report: Report, name: str) -> dict[str, Any]:
    """Returns what a worker reported about a model."""
    default_of = [f"/{TASKS[task].path}" for task, default in report.defaults.items() if default == name]
    broken = {"broken": report.broken[name]} if name in report.broken else {}
    return {"index": report.index, "version": report.served.get(name), "default_of": default_of} | broken


def _failure(report: Report | None, change: Change) -> str | None:
    """Returns the reason why a worker did not make a change; None if it did."""
    if report is None:
        return "it has not finished yet"
    if report.error is None or (change.action == "unload" and isinstance(report.error, NotFoundError)):
        return None
    if isinstance(report.error, NotFoundError):  # its message quotes the caller
        return "it found no such bundle"
    return report.error.message
