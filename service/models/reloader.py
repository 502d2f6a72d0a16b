"""Reloader: loads, reloads and unloads models without interrupting others. It follows the models folders; a loaded model never changes."""

import asyncio
import logging
import os
import re
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from http import HTTPStatus
from pathlib import Path
from typing import Any, TypeVar

from bertserve.service.bundle import files
from bertserve.service.errors import BertServeError, CallerValue, HttpError, InvalidValueError, StartError, traceback_places
from bertserve.service.models.default_models import configured_defaults
from bertserve.service.models.model import Model
from bertserve.service.models.registry import Registry
from bertserve.service.settings import Settings
from bertserve.service.tasks.catalog import answered_tasks

logger = logging.getLogger("bertserve.loading")

T = TypeVar("T")
LoadModel = Callable[[Path, Model | None], Model]  # `load_model`, for a bundle's folder and the model that is served


class Reloader:
    """Loads the models of a registry, and changes them later; it belongs to one event loop.

    A request keeps the model that it started with, so a replaced model finishes its requests, and its memory is freed after the last one.
    If a model cannot be loaded, the old one stays. Shutdown does not wait for a load.
    """

    def __init__(self, settings: Settings, load: LoadModel, registry: Registry) -> None:
        """Creates a reloader for the models folders in the settings; it calls `load` on a separate thread."""
        self._settings = settings
        self._load_model = load
        self._registry = registry
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="load")  # not the loop's own pool, for which the end of the loop waits
        self._lock = asyncio.Lock()

    def start(self, paths: Sequence[Path], *, parallel_loads: int) -> None:
        """Loads the first models, from these bundles.

        Several load in parallel, each on one core as during inference, because the warm-up runs are timed.

        Raises:
            StartError: A bundle or the choice of a default model is wrong.
        """
        models = []
        # while a model loads, it needs memory for its file in addition to its sessions
        with ThreadPoolExecutor(min(parallel_loads, 4), thread_name_prefix="load") as pool:
            loads = [(path, pool.submit(self._load_or_explain, path)) for path in paths]
            try:
                for path, load in loads:
                    try:
                        models.append(load.result())
                    except StartError as error:
                        if not self._settings.skip_broken:
                            raise
                        self._keep_error(path, error)
            finally:
                pool.shutdown(wait=False, cancel_futures=True)  # after an error or Ctrl-C: cancels the loads that have not started
        self._registry.start(models)

    async def load(self, name: str) -> Model:
        """Loads a model from the folders, and replaces the loaded model of the same name.

        Raises:
            HttpError: No folder contains a bundle of that name.
            InvalidValueError: It cannot be loaded; the old model stays.
        """
        async with self._lock:
            try:
                path = await self._in_thread(files.find_bundle, self._settings.models, name)
                if path is None:
                    self._registry.clear_error(name)
                    raise HttpError(
                        HTTPStatus.NOT_FOUND, "no models folder has a bundle `{name}`; put it there first.", name=CallerValue(name)
                    )
                model = await self._replace(path)
            except StartError as error:
                raise InvalidValueError(
                    "the model `{model}` cannot be loaded, so nothing changed: {cause}",
                    model=name,
                    cause=without_folders(error.message, self._settings.models),
                ) from error
            await self._in_thread(self._warn_of_next_start)
            return model

    async def unload(self, name: str) -> None:
        """Removes a model, whose open requests are still answered; and the error of a model that could not be loaded.

        Raises:
            HttpError: There is no such model and no such error.
        """
        async with self._lock:
            if name in self._registry.models or name not in self._registry.broken:
                self._registry.remove(self._registry.get(name))
            self._registry.clear_error(name)
            await self._in_thread(self._warn_of_next_start)

    async def refresh(self) -> None:
        """Loads new and changed models, unloads removed ones, and logs the folders that cannot be loaded."""
        async with self._lock:
            try:
                bundles = {path.name: path for path in await self._in_thread(files.find_bundles, self._settings.models)}
            except StartError as error:
                logger.error("cannot reload the models: %s", error.message)
                return
            for path in bundles.values():
                with suppress(StartError):
                    await self._replace(path, only_changed=True)
            for name in sorted({*self._registry.models, *self._registry.broken} - bundles.keys()):
                self._registry.clear_error(name)
                if name in self._registry.models:
                    self._registry.remove(self._registry.models[name])
            await self._in_thread(self._warn_of_next_start)

    async def _in_thread(self, function: Callable[..., T], *arguments: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._executor, function, *arguments)

    async def _replace(self, path: Path, *, only_changed: bool = False) -> Model:
        served = self._registry.models.get(path.name) if only_changed else None
        try:
            model = await self._in_thread(self._load_or_explain, path, served)
        except StartError as error:
            self._keep_error(path, error)
            raise
        self._registry.add(model)
        return model

    def _load_or_explain(self, path: Path, served: Model | None = None) -> Model:
        """Loads a bundle in this thread. An unexpected error, such as MemoryError, must not affect other bundles.

        Raises:
            StartError: It cannot be loaded.
        """
        try:
            return self._load_model(path, served)
        except StartError:
            raise
        except Exception as error:
            kind = type(error).__name__
            logger.error("loading the model %s failed with %s: %s", path.name, kind, traceback_places(error))
            hint = error.message if isinstance(error, BertServeError) else "check the free memory and the thread limit, then load it again."
            raise StartError(f"loading failed with {kind}; {hint}") from error

    def _keep_error(self, path: Path, error: StartError) -> None:
        served = "the old version is still served" if path.name in self._registry.models else "it is not served"
        logger.error("the model %s cannot be loaded, %s: %s", path.name, served, error.message)
        self._registry.keep_error(path.name, without_folders(error.message, self._settings.models))

    def _warn_of_next_start(self) -> None:
        """Logs why a start with the same settings would fail, by the manifests of the bundles that are in the models folders now."""
        tasks, broken = dict[str, tuple[str, ...]](), dict(self._registry.broken)
        try:
            for path in files.find_bundles(self._settings.models):
                try:
                    if path.name in broken:
                        raise StartError(broken[path.name])
                    tasks[path.name] = answered_tasks(files.read_manifest(path)[0])
                except StartError as error:
                    if not self._settings.skip_broken:
                        raise
                    broken[path.name] = error.message
            configured_defaults(self._settings, tasks, broken)
        except StartError as error:
            logger.warning("the next start with these settings will fail: %s", error.message)


def without_folders(message: str, folders: Sequence[Path]) -> str:
    """Returns an error's message for callers: it contains names of models folders instead of their paths."""
    paths = {str(path) for folder in folders for path in (folder, os.path.abspath(folder))} - {"."}
    pattern = "|".join(map(re.escape, sorted(paths, key=len, reverse=True)))
    # not a part of another path, such as `/data/models` or `/models-old` for the folder `/models`
    whole_path = rf"(?<![\w./-])({pattern})(/|(?![\w-]|\.\w))"
    return re.sub(whole_path, lambda match: "" if match[2] else Path(match[1]).name, message)
