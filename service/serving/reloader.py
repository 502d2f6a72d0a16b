"""Reloader: loads, reloads and unloads models while others are served. The models folders are the truth; a model itself never changes."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from bertserve.service.bundle import files
from bertserve.service.bundle.files import Bundle
from bertserve.service.errors import BertServeError, BundleError, InvalidValueError, NotFoundError, StartError
from bertserve.service.metrics import Metrics
from bertserve.service.serving.loading import verify
from bertserve.service.serving.model import Model
from bertserve.service.serving.registry import Registry

logger = logging.getLogger("bertserve.loading")


class Reloader:
    """Changes which models a registry has; used from one event loop.

    A request holds the model that it began with, so the old one answers what it was asked, and its memory goes with its last request.
    A model that cannot be loaded leaves the old one in its place.
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
            load: Makes a warmed-up model of a verified bundle; called in a thread.
            registry: Where models are found.
            broken: Name -> why it could not be loaded; kept up to date.
            metrics: Where loaded and broken models are shown.
            check_start: Raises a StartError where the next start would refuse what the folders have; called in a thread.
        """
        self._folders = folders
        self._load = load
        self._registry = registry
        self._broken = broken
        self._metrics = metrics
        self._check_start = check_start
        self._lock = asyncio.Lock()

    async def load(self, name: str) -> Model:
        """Loads the model of that name as the folders have it now, in place of the one that is served.

        Raises:
            NotFoundError: No folder has a bundle of that name.
            InvalidValueError: It cannot be loaded; what was served is served on.
        """
        async with self._lock:
            try:
                path = (await asyncio.to_thread(self._find)).get(name)
                if path is None:
                    raise NotFoundError("no models folder has a bundle `{name}`; put it there first.", name=name[:64])
                model = await self._replace(path)
            except StartError as error:
                raise InvalidValueError(
                    "the model `{name}` cannot be loaded, and nothing changed: {without_folders}",
                    name=name[:64],
                    without_folders=without_folders(error.message, self._folders),
                ) from error
            await self._warn_of_next_start()
            return model

    async def unload(self, name: str) -> None:
        """Takes a model out of service; what it was asked already is answered.

        Raises:
            NotFoundError: No such model.
        """
        async with self._lock:
            self._remove(self._registry.get(name))

    def differing(self) -> dict[str, list[dict[str, Any]]]:
        """Returns what each worker has of the models that they do not all serve in one version, by name; alone there is none."""
        return {}

    async def refresh(self) -> None:
        """Makes the registry what the folders have: loads what is new or has another version, unloads what is gone. The log says what cannot be loaded."""
        async with self._lock:
            try:
                found = await asyncio.to_thread(self._find)
            except StartError as error:
                logger.error("the models stay as they are: %s", error.message)
                return
            for name, path in found.items():
                try:
                    await self._replace(path, only_changed=True)
                except StartError as error:
                    served = "the old one is served on" if name in self._registry.models else "it is not served"
                    logger.error("the model %s cannot be loaded, %s: %s", name, served, error.message)
            for model in list(self._registry.models.values()):
                if model.name not in found:
                    self._remove(model)
            for name in [name for name in self._broken if name not in found]:
                self._mend(name)
            await self._warn_of_next_start()

    async def _warn_of_next_start(self) -> None:
        """Logs what would keep the service down once it ends: what is served stays as it is until then."""
        try:
            await asyncio.to_thread(self._check_start)
        except StartError as error:
            logger.warning("the next start with these settings will fail: %s", error.message)

    def _find(self) -> dict[str, Path]:
        return {path.name: path for path in files.find_bundles(self._folders)}

    async def _replace(self, path: Path, *, only_changed: bool = False) -> Model:
        name = path.name
        old = self._registry.models.get(name)
        try:
            bundle = await asyncio.to_thread(verify, path, metrics=self._metrics)
            if only_changed and old is not None and bundle.version == old.bundle.version:
                self._mend(name)
                return old
            model = await asyncio.to_thread(self._load, bundle)
        except BertServeError as error:
            self._broken[name] = without_folders(error.message, [*self._folders, path.parent])
            self._metrics.broken_models.labels(name).set(1)
            raise error if isinstance(error, StartError) else BundleError(error.message) from error
        if old is not None:
            self._hide(old, unless=model)
        self._registry.put(model)
        self._mend(name)
        logger.info("the model %s is served as version %s now", name, model.bundle.version)
        return model

    def _remove(self, model: Model) -> None:
        self._registry.remove(model.name)
        self._hide(model)
        logger.info("the model %s is not served any more", model.name)

    def _mend(self, name: str) -> None:
        if self._broken.pop(name, None) is not None:
            self._metrics.broken_models.labels(name).set(0)

    def _hide(self, model: Model, *, unless: Model | None = None) -> None:
        """Sets a model's line in the metrics to 0, for workers' metrics cannot lose one; not where another model has the same."""
        if unless is None or model.labels != unless.labels:
            self._metrics.model_info.labels(*model.labels).set(0)


def without_folders(message: str, folders: Sequence[Path]) -> str:
    """Returns an error's message for callers: with the names of models folders in place of their paths."""
    paths = {str(path) for folder in folders for path in (folder, os.path.abspath(folder))}
    for path in sorted(paths, key=len, reverse=True):
        message = message.replace(f"{path}/", "").replace(path, Path(path).name) if path != "." else message
    return message
