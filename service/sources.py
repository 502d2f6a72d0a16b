"""Resolves `--model` to folders of bundles: a bundle, a checkpoint folder or a hub id; and the cache of exports.

The cache contains a folder for each digest of a source and its options, which contains one bundle and never changes. Checkpoint files are
only read for their digest: bert-export decides whether they are a checkpoint. It runs as a separate process.
"""

import fcntl
import hashlib
import json
import logging
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.metadata import distributions
from importlib.util import find_spec
from itertools import combinations
from pathlib import Path
from types import FrameType
from typing import TypeVar

from bertserve.service import __version__
from bertserve.service.bundle.checkpoint_files import ADAPTER_CONFIG_FILE, FILE_PATTERNS, MODULES_FILE, is_checkpoint, may_be_hub_id
from bertserve.service.bundle.files import MANIFEST_FILE, digest, is_bundle
from bertserve.service.bundle.manifest import NAME_PATTERN, NAME_RULE
from bertserve.service.errors import SettingsError, StartError
from bertserve.service.messages import install_command
from bertserve.service.providers import PROVIDERS
from bertserve.service.settings import ModelSettings

logger = logging.getLogger("bertserve.sources")

MODULE = "bertserve.export.cli"
_GRAPH_MISSING = 4  # bert-export's exit code if a graph failed and the bundle lacks it

S = TypeVar("S", bound=ModelSettings)


@dataclass(frozen=True, slots=True)
class ModelSource:
    """The origin of a model: a folder, or a hub id with an optional branch, tag or commit."""

    name: str
    location: str
    revision: str | None = None

    def key(self, options: Sequence[str]) -> str:
        """Returns the name of its export: a digest of its files, or of hub id and revision, and of the export's flags.

        Raises:
            StartError: A file cannot be read.
        """
        content: list[object] = [self.location, self.revision]
        if os.path.isdir(self.location):
            try:
                content = [[(path.name, digest(path)) for folder in _folders(Path(self.location)) for path in _files(folder)]]
            except OSError as error:
                raise StartError(f"the checkpoint `{self.location}` cannot be read: `{error.filename}`, {error.strerror}.") from error
        return hashlib.sha256(json.dumps([__version__, self.name, list(options), *content]).encode()).hexdigest()[:32]


def read_source(text: str) -> ModelSource:
    """Reads `SOURCE`, `NAME=SOURCE` or, for a hub id, `ID@REVISION`.

    Raises:
        SettingsError: The folder does not exist, or the name is not a valid model name.
        StartError: The folder is neither a checkpoint nor a bundle.
    """
    name, equals, location = text.partition("=")
    if not equals or os.path.exists(text):  # unlike Path's method, it accepts a name that is too long, and refuses an empty one
        name, location = "", text
    location = os.path.expanduser(location) if location.startswith("~") else location
    if os.path.exists(location):
        return _read_folder(text, name, Path(location))
    if not may_be_hub_id(location):
        raise SettingsError(f"--model is `{text}`: the folder `{location}` does not exist.")
    hub_id, _, revision = location.partition("@")
    return ModelSource(_check_name(name or hub_id.rpartition("/")[2], text), hub_id, revision or None)


def _read_folder(text: str, name: str, folder: Path) -> ModelSource:
    own_name = Path(os.path.abspath(folder)).name
    if is_bundle(folder):
        if name not in ("", own_name):
            raise SettingsError(
                f"--model is `{text}`: a bundle is served under its own name, `{own_name}`; export its checkpoint with another --name."
            )
    elif not is_checkpoint(folder):
        inside = [path for path in folder.glob("*") if is_bundle(path) or is_checkpoint(path)]
        hint = f"the newest in it is --model {max(inside, key=os.path.getmtime)}" if inside else "give the folder of one"
        raise StartError(
            f"`{folder}` is neither a checkpoint, which has a `config.json`, nor a bundle, which has a `{MANIFEST_FILE}`; {hint}, "
            f"or give a folder of bundles with --models {folder}."
        )
    return ModelSource(_check_name(name or own_name, text), str(folder))


def _check_name(name: str, text: str) -> str:
    if not re.fullmatch(NAME_PATTERN, name):
        raise SettingsError(f"--model is `{text}`: `{name}` is not a valid model name, which has {NAME_RULE}; give NAME=SOURCE.")
    return name


def _folders(folder: Path) -> Iterator[Path]:
    """Yields the folders of a checkpoint, and of the base model if it is an adapter. bert-export reports wrong files."""
    for subfolder in _with_modules(folder):
        yield subfolder
        with suppress(OSError, ValueError, LookupError, TypeError):
            base_model = json.loads((subfolder / ADAPTER_CONFIG_FILE).read_bytes())["base_model_name_or_path"]
            if base_model and Path(base_model).is_dir():
                yield from _with_modules(Path(base_model))


def _with_modules(folder: Path) -> Iterator[Path]:
    """Yields a folder and the subfolders in its modules.json; other subfolders, such as training steps, do not belong to the checkpoint."""
    yield folder
    with suppress(OSError, ValueError, LookupError, TypeError):
        for module in json.loads((folder / MODULES_FILE).read_bytes()):
            if (subfolder := folder / module["path"]).is_dir():
                yield subfolder


def _files(folder: Path) -> list[Path]:
    return sorted({path for pattern in (*FILE_PATTERNS, "*.bin") for path in folder.glob(pattern) if path.is_file()})


def export_command(source: ModelSource) -> list[str]:
    """Returns the command to run bert-export for a source in this environment, without its arguments.

    Raises:
        StartError: bert-export is not installed.
    """
    package = MODULE.rpartition(".")[0]
    missing = [name for name in (package, "torch", "transformers", "onnx") if find_spec(name) is None]
    if missing:
        is_here = os.path.exists(source.location)
        raise StartError(
            ("" if is_here else f"there is no folder `{source.location}`, so it is taken as an id of the Hugging Face Hub; ")
            + f"a checkpoint must be exported before it is served, which needs {', '.join(missing)}; install the extra `export` "
            f"(`{install_command('export', 'cpu')}`), or give an exported bundle."
        )
    return [sys.executable, "-P", "-m", MODULE]  # -P: a folder `torch` in the working directory must not be imported


def run_export(argv: Sequence[str], *, lock: int) -> int:
    """Runs bert-export with its progress and errors on stderr; returns its exit code.

    SIGINT and SIGTERM are forwarded, and this process ends after it, because the export removes its own incomplete files.
    `lock` is the descriptor of a lock that is held until bert-export has ended, even if this process is killed.

    Raises:
        SystemExit: A signal stopped both processes.
    """
    # its output goes to stderr; in its own process group, so that Ctrl-C reaches it only once, from this process
    process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=2, pass_fds=(lock,), process_group=0)  # noqa: S603 - no shell
    signals: list[int] = []

    def forward(number: int, _: FrameType | None) -> None:
        signals.append(number)
        process.send_signal(number)

    previous_handlers = [(number, signal.signal(number, forward)) for number in (signal.SIGINT, signal.SIGTERM)]
    try:
        code = process.wait()
    finally:
        for number, handler in previous_handlers:
            signal.signal(number, handler)
    if signals:
        raise SystemExit(128 + signals[0])
    return code if code >= 0 else 128 - code


def with_sources(settings: S, *, export: bool = True) -> S:
    """Returns settings whose `models` include the folders of all `--model` sources, which are exported if necessary.

    The folders of `--models` stay if they were set; their default is removed. Without `export`, a checkpoint that is not in the cache is
    an error.

    Raises:
        StartError: A source is wrong, the exporter is missing, or the cache cannot be written.
        SystemExit: bert-export failed and has reported why, or a signal stopped it.
    """
    if not settings.model:
        return settings
    sources = [read_source(text) for text in settings.model]
    for first, second in combinations(sources, 2):
        if first.name == second.name:
            raise SettingsError(
                f"--model names `{first.name}` twice, as `{first.location}` and `{second.location}`; give one as NAME={second.location}."
            )
    options, cache = export_options(settings), cache_folder(settings)
    folders = settings.models if "models" in settings.model_fields_set else ()
    bundles = [get_or_export(source, options, cache, export=export) for source in sources]
    return settings.model_copy(update={"models": (*folders, *bundles)})


def get_or_export(source: ModelSource, options: Sequence[str], cache: Path, *, export: bool = True) -> Path:
    """Returns a source that is a bundle, the bundle of a checkpoint from the cache, or a new one.

    Raises:
        StartError: It is not in the cache and must not be exported, the exporter is not installed, or the cache cannot be written.
        SystemExit: The export failed or was stopped.
    """
    if is_bundle(Path(source.location)):
        return Path(source.location)
    folder = cache / source.key(options)
    bundle = folder / source.name
    if is_bundle(bundle):
        logger.info("%s was exported before, as %s", source.location, bundle)
        return bundle
    if not export:
        raise StartError(
            f"`{source.location}` was not exported yet with these settings; run `bert-serve serve --model {source.location}` to export it."
        )
    command = export_command(source)
    with _locked(folder) as lock:
        if is_bundle(bundle):  # another start has created it during the wait
            return bundle
        logger.info("exporting %s, once, as %s; this takes minutes, or one minute with --precision fp32", source.location, bundle)
        revision = ["--revision", source.revision] if source.revision else []
        flags = ["--output", str(folder), "--name", source.name, *options, *revision]
        code = run_export([*command, *flags, "--", source.location], lock=lock)
    if code == _GRAPH_MISSING and is_bundle(bundle):
        logger.warning("serving %s without the graph that the line above names", source.location)
    elif code != 0:
        if code < 128:  # no signal has ended it
            logger.error(
                "the export failed; the line above names flags of `bert-export`: export with them, and serve the bundle with --model"
            )
        raise SystemExit(code)
    return bundle


def export_options(settings: ModelSettings) -> list[str]:
    """Returns the flags of an export for these settings: graphs for the requested provider and precision.

    Raises:
        SettingsError: The requested providers have no graphs in the requested precision.
    """
    provider, precision = settings.provider, settings.precision
    if provider == "auto":
        # by its metadata, because importing onnxruntime would start its threads
        providers = ["cpu", *(name for name, record in PROVIDERS.items() if record.automatic and any(distributions(name=record.package)))]
    else:
        providers = ["cpu", provider] if settings.allow_provider_fallback and provider != "cpu" else [provider]
    supporting = [name for name in providers if precision in ("auto", *PROVIDERS[name].precisions)]
    if not supporting:
        other = next(name for name, record in PROVIDERS.items() if precision in record.precisions)
        start = f"--precision is `{precision}`, which is not for --provider {provider}"
        raise SettingsError(f"{start}; give --provider {other}, or another precision.")
    if precision == "auto" or (precision == "fp16" and settings.allow_provider_fallback):
        return ["--provider", ",".join(providers)]  # with fp16, the CPU needs its own graph, and supports no graph in this precision
    return ["--provider", ",".join(supporting), "--precision", precision]


def cache_folder(settings: ModelSettings) -> Path:
    """Returns the folder of the cache: --cache-dir, or `bertserve` in the user's cache folder."""
    return settings.cache_dir or Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "bertserve"


@contextmanager
def _locked(folder: Path) -> Iterator[int]:
    """Creates a folder and holds its lock, because only one of several starts must export; yields the lock's descriptor."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / ".lock").open("w", encoding="ascii")
    except OSError as error:
        raise StartError(f"--model cannot write its exports to `{folder}` ({error.strerror}); give another --cache-dir.") from error
    with lock:
        with suppress(OSError):  # without file locks each start exports, and the last bundle stays; all of them are equal
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                logger.warning("waiting for another start that exports into %s", folder)
                fcntl.flock(lock, fcntl.LOCK_EX)
        yield lock.fileno()
