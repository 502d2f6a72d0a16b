"""The cache of exports: a folder for each digest of a source and its options, with the one bundle in it. Nothing in it is ever changed."""

from __future__ import annotations

import fcntl
import logging
import os
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import TypeVar

from bertserve.service.bundle.files import MANIFEST_FILE
from bertserve.service.errors import SettingsError, StartError
from bertserve.service.providers import PROVIDERS
from bertserve.service.settings import SourceSettings
from bertserve.service.sources import exporter
from bertserve.service.sources.source import Source, read_source

logger = logging.getLogger("bertserve.sources")

S = TypeVar("S", bound=SourceSettings)

_SIGNALED = 128  # exit codes from here on are of signals


def with_sources(settings: S, *, export: bool = True) -> S:
    """Returns settings whose `models` are the folders of all that `--model` names, exported where that is needed.

    The folders of `--models` stay where they were given; their default does not.

    Args:
        settings: The settings.
        export: Whether a checkpoint is exported that is not in the cache; otherwise that is an error.

    Raises:
        StartError: A source is wrong, or the exporter or the room for the cache is missing.
        SystemExit: bert-export failed and has said why, or a signal stopped it.
    """
    try:
        return _with_sources(settings, export) if settings.model else settings
    except KeyboardInterrupt:  # while it waits for another start, or reads weights
        raise SystemExit(128 + signal.SIGINT) from None


def _with_sources(settings: S, export: bool) -> S:
    sources = [read_source(text) for text in settings.model]
    for i, source in enumerate(sources):
        if twin := next((other for other in sources[:i] if other.name == source.name), None):
            raise SettingsError(
                f"--model names `{source.name}` twice, as `{twin.where}` and `{source.where}`; give one as NAME={source.where}."
            )
    options = export_options(settings)
    folder = cache_folder(settings)
    given = settings.models if "models" in settings.model_fields_set else ()
    made = [Path(source.where) if source.is_bundle else obtain(source, options, folder, export=export) for source in sources]
    return settings.model_copy(update={"models": (*given, *made)})


def obtain(source: Source, options: Sequence[str], cache: Path, *, export: bool = True) -> Path:
    """Returns the bundle of a checkpoint: the one in the cache, or a new one.

    Args:
        source: The checkpoint.
        options: Flags of the export.
        cache: The cache's folder.
        export: Whether one may be made.

    Raises:
        StartError: It is not there and may not be made, or the exporter is not installed, or the cache cannot be written.
        SystemExit: The export failed or was stopped.
    """
    folder = cache / source.key(options)
    bundle = folder / source.name
    if not _is_there(bundle):
        if not export:
            raise StartError(
                f"`{source.where}` was not exported yet with these settings; `bert-serve serve --model {source.where}` does that."
            )
        command = exporter.command()
        with _locked(folder) as lock:
            if not _is_there(bundle):  # another start may have made it while this one waited
                logger.info("%s is exported once, as %s; that takes minutes, and with --precision fp32 one", source.where, bundle)
                flags = [
                    "--output",
                    str(folder),
                    "--name",
                    source.name,
                    *options,
                    *(["--revision", source.revision] if source.revision else []),
                ]
                code = exporter.run([*command, *flags, "--", source.where], lock=lock)
                if code == exporter.GRAPH_MISSING and _is_there(bundle):
                    logger.warning("%s is served without the graph that the line above names", source.where)
                elif code != 0:
                    if code < _SIGNALED:
                        logger.error(
                            "flags that the line above names are those of `bert-export`: give them there, and its bundle to --models"
                        )
                    raise SystemExit(code)
                return bundle
    logger.info("%s was exported before, as %s", source.where, bundle)
    return bundle


def export_options(settings: SourceSettings) -> list[str]:
    """Returns the flags of an export for these settings: graphs for the provider asked for, in the precision asked for.

    Raises:
        SettingsError: fp16, which is for GPUs, is asked for on a CPU.
    """
    providers = {"auto": ["cpu"], "cpu": ["cpu"]}.get(settings.provider, [settings.provider])
    if settings.provider == "auto":
        providers += [record.name for record in PROVIDERS.values() if record.automatic and _is_installed(record.package)]
    if settings.provider not in ("auto", "cpu") and settings.allow_provider_fallback:
        providers.insert(0, "cpu")
    precision: str = settings.precision
    if precision == "fp16":
        if providers == ["cpu"]:
            with_fp16 = next(record.name for record in PROVIDERS.values() if precision in record.precisions)
            raise SettingsError(f"--precision is `fp16`, which is for GPUs; give --provider {with_fp16}, or another precision.")
        if settings.allow_provider_fallback:
            precision = "auto"  # the CPU has no such graph, and needs one of its own
        else:
            providers = providers[-1:]
    if precision == "int8":
        if "cpu" not in providers:
            raise SettingsError("--precision is `int8`, which is for CPUs; give --provider cpu, or another precision.")
        providers = ["cpu"]
    return ["--provider", ",".join(providers), *([] if precision == "auto" else ["--precision", precision])]


def cache_folder(settings: SourceSettings) -> Path:
    """Returns the folder of the cache: --cache-dir, or `bertserve` in the user's own.

    Raises:
        SettingsError: None was given, and the user has none.
    """
    if settings.cache_dir is not None:
        return settings.cache_dir
    if own := os.environ.get("XDG_CACHE_HOME"):
        return Path(own) / "bertserve"
    try:
        return Path.home() / ".cache" / "bertserve"
    except RuntimeError as error:
        raise SettingsError("--model needs a folder for what it exports, and this user has no home; give --cache-dir.") from error


def _is_installed(package: str) -> bool:
    """Returns whether a package of onnxruntime is installed; importing it would start its threads."""
    try:
        distribution(package)
    except PackageNotFoundError:
        return False
    return True


def _is_there(bundle: Path) -> bool:
    """Returns whether a bundle is in place; bert-export renames it there as a whole."""
    return (bundle / MANIFEST_FILE).is_file()


@contextmanager
def _locked(folder: Path) -> Iterator[int]:
    """Makes a folder and holds its lock, so that of several starts one exports and the others wait; yields the lock's descriptor."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / ".lock").open("w", encoding="ascii")
    except OSError as error:
        raise StartError(f"--model cannot keep what it exports in `{folder}` ({error.strerror}); give another --cache-dir.") from error
    with lock:
        with suppress(OSError):  # on a file system without locks each exports, and the last one's bundle stays: they are the same
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                logger.warning("another start exports into %s; this one waits for it", folder)
                fcntl.flock(lock, fcntl.LOCK_EX)
        yield lock.fileno()
