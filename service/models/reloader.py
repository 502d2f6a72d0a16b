"""Reloader: loads, reloads and unloads models without interrupting others. It follows the models folders; a loaded model never changes."""

import asyncio
import logging
import os
import re
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from http import HTTPStatus
from pathlib import Path
from typing import Any, TypeVar

from bertserve.service.bundle import files
from bertserve.service.errors import BertServeError, CallerValue, HttpError, InvalidValueError, StartError, traceback_places
from bertserve.service.metrics import Metrics
from bertserve.service.models.model import Model
from bertserve.service.models.registry import Registry

logger = logging.getLogger("bertserve.loading")

T = TypeVar("T")
LoadModel = Callable[[Path, Model | None], Model]  # `load_model`, for a bundle's folder and the model that is served


class Reloader:
    """Changes the models of a registry; it belongs to one event loop.

    A request keeps the model that it started with, so a replaced model finishes its requests, and its memory is freed after the last one.
    If a model cannot be loaded, the old one stays. Shutdown does not wait for a load.
    """

    def __init__(self, folders: Sequence[Path], load: LoadModel, *, registry: Registry, metrics: Metrics) -> None:
        """Takes the models folders; `load` is called in a thread. The registry also gets the errors of models that could not be loaded."""
        self._folders = folders
        self._load = load
        self._registry = registry
        self._metrics = metrics
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="load")  # not the loop's own pool, for which the end of the loop waits
        self._lock = asyncio.Lock()

    async def load(self, name: str) -> Model:
        """Loads a model from the folders, and replaces the loaded model of the same name.

        Raises:
            HttpError: No folder has a bundle of that name.
            InvalidValueError: It cannot be loaded; the old model stays.
        """
        async with self._lock:
            try:
                path = await self._in_thread(files.find_bundle, self._folders, name)
                if path is None:
                    self._clear_error(name)
                    raise HttpError(
                        HTTPStatus.NOT_FOUND, "no models folder has a bundle `{name}`; put it there first.", name=CallerValue(name)
                    )
                model = await self._replace(path)
            except StartError as error:
                raise InvalidValueError(
                    "the model `{model}` cannot be loaded, so nothing changed: {cause}",
                    model=name,
                    cause=without_folders(error.message, self._folders),
                ) from error
            await self._in_thread(self._registry.warn_of_next_start)
            return model

    async def unload(self, name: str) -> None:
        """Removes a model, whose open requests are still answered; and the error of a model that could not be loaded.

        Raises:
            HttpError: There is no such model and no such error.
        """
        async with self._lock:
            if name in self._registry.models or name not in self._registry.broken:
                self._remove(self._registry.get(name))
            self._clear_error(name)
            await self._in_thread(self._registry.warn_of_next_start)

    async def refresh(self) -> None:
        """Loads new and changed models, unloads removed ones, and logs the folders that cannot be loaded."""
        async with self._lock:
            try:
                bundles = {path.name: path for path in await self._in_thread(files.find_bundles, self._folders)}
            except StartError as error:
                logger.error("cannot reload the models: %s", error.message)
                return
            for name, path in bundles.items():
                try:
                    await self._replace(path, only_changed=True)
                except StartError as error:
                    served = "the old version is still served" if name in self._registry.models else "it is not served"
                    logger.error("the model %s cannot be loaded, %s: %s", name, served, error.message)
            for name in sorted({*self._registry.models, *self._registry.broken} - bundles.keys()):
                self._clear_error(name)
                if name in self._registry.models:
                    self._remove(self._registry.models[name])
            await self._in_thread(self._registry.warn_of_next_start)

    async def _in_thread(self, function: Callable[..., T], *arguments: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._executor, function, *arguments)

    async def _replace(self, path: Path, *, only_changed: bool = False) -> Model:
        name = path.name
        old = self._registry.models.get(name)
        try:
            model = await self._in_thread(self._load, path, old if only_changed else None)
        except Exception as error:  # such as MemoryError: a refresh must continue with the other bundles
            if isinstance(error, BertServeError):
                message = error.message
            else:
                kind = type(error).__name__
                message = f"loading failed with {kind}; check the free memory and the thread limit, then load the model again."
                logger.error("loading the model %s failed with %s: %s", name, kind, traceback_places(error))
            self._registry.broken[name] = without_folders(message, [*self._folders, path.parent])
            self._metrics.broken_models.labels(name).set(1)
            if isinstance(error, StartError):
                raise
            raise StartError(message) from error
        self._clear_error(name)
        if model is not old:
            if old is not None:
                self._metrics.model_info.labels(*old.metric_labels).set(0)
            self._metrics.model_info.labels(*model.metric_labels).set(1)
            self._registry.replace_models(self._registry.models | {name: model})
            logger.info("the model %s is now served as version %s", name, model.bundle.version)
        return model

    def _remove(self, model: Model) -> None:
        self._registry.replace_models({name: other for name, other in self._registry.models.items() if other is not model})
        self._metrics.model_info.labels(*model.metric_labels).set(0)
        self._metrics.forget_reference(model.name)
        logger.info("the model %s is unloaded", model.name)

    def _clear_error(self, name: str) -> None:
        if self._registry.broken.pop(name, None) is not None:
            self._metrics.broken_models.labels(name).set(0)


def without_folders(message: str, folders: Sequence[Path]) -> str:
    """Returns an error's message for callers: it contains names of models folders instead of their paths."""
    paths = {str(path) for folder in folders for path in (folder, os.path.abspath(folder))} - {"."}
    pattern = "|".join(map(re.escape, sorted(paths, key=len, reverse=True)))
    # not a part of another path, such as `/data/models` or `/models-old` for the folder `/models`
    whole_path = rf"(?<![\w./-])({pattern})(/|(?![\w-]|\.\w))"
    return re.sub(whole_path, lambda match: "" if match[2] else Path(match[1]).name, message)
