"""A bundle on disk, the interface between the exporter and the service: file names, loading, verification.

A bundle is a folder `models/<name>/` with `manifest.json`, `tokenizer.json`, `README.md` and one or more graphs. The
manifest (`manifest.py`) contains everything that the service must know about a model; it reads and guesses nothing else.
In an ONNX file, it only reads the names of further files that the graph loads.
"""

import hashlib
import mmap
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import ValidationError

from bertserve.service.bundle.checkpoint_files import is_checkpoint
from bertserve.service.bundle.graph_spec import GraphSpec, Precision
from bertserve.service.bundle.manifest import NAME_PATTERN, NAME_RULE, Manifest
from bertserve.service.errors import StartError
from bertserve.service.messages import describe_validation_error

MANIFEST_FILE = "manifest.json"
TOKENIZER_FILE = "tokenizer.json"
CARD_FILE = "README.md"
# In a tensor with weights in another file, the key `location` and the length of its value. The length of the key, 8, can have a second
# byte.
_LOCATION_KEY = re.compile(rb"[\x08\x00]location(?:\x12([\x01-\x7f]))?", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Bundle:
    """A verified bundle: every file in the manifest exists, and its digest is correct."""

    path: Path
    manifest: Manifest
    version: str

    @property
    def tokenizer_path(self) -> Path:
        """Path of the tokenizer file."""
        return self.path / TOKENIZER_FILE

    def graph(self, provider: str, precision: Precision | Literal["auto"] = "auto") -> GraphSpec:
        """Returns the graph for a provider: the default one, or the one with this precision.

        Raises:
            StartError: The bundle has no such graph; the message lists its graphs.
        """
        for graph in self.manifest.graphs:
            if graph.provider == provider and (graph.default if precision == "auto" else graph.precision == precision):
                return graph
        names = ", ".join(graph.name for graph in self.manifest.graphs)
        omissions = "".join(
            f" At its export {omitted.precision} was tried: {omitted.reason}"
            for omitted in self.manifest.omitted
            if omitted.provider == provider and precision in ("auto", omitted.precision)
        )
        raise StartError(
            f"bundle `{self.manifest.name}` has no graph for provider `{provider}` and precision `{precision}`; it has "
            f"{names}. Choose another --provider or --precision, or export again with `bert-export --provider --precision`.{omissions}"
        )


def load_bundle(path: Path) -> Bundle:
    """Reads the manifest in a bundle's folder and verifies the digest of every file in it.

    Raises:
        StartError: A file is missing or altered, or the manifest is invalid; the message names bundle and file.
    """
    manifest, version = read_manifest(path)
    _verify(path / TOKENIZER_FILE, manifest.tokenizer.sha256)
    for graph in manifest.graphs:
        verify_graph(path, graph)
    return Bundle(path, manifest, version)


def verify_graph(path: Path, graph: GraphSpec) -> None:
    """Verifies the digests of a graph's files in the bundle's folder, and that the graph loads no other files.

    Raises:
        StartError: A file is missing or altered, or the graph loads another one; the message names the file.
    """
    for file in graph.files:
        _verify(path / file.file, file.sha256, file.size_bytes)
    _check_external_weights(path, graph)


def _check_external_weights(path: Path, graph: GraphSpec) -> None:
    """Refuses a graph that would load weights from a file without a verified digest, or from outside of the bundle."""
    file, listed = path / graph.file, {data.file for data in graph.data}
    if file.suffix.lower() == ".ort":  # ONNX Runtime's own format
        raise StartError(f"cannot load `{file}`: it is in ONNX Runtime's own format; export the bundle again.")
    with file.open("rb") as graph_file, mmap.mmap(graph_file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        locations = {content[key.end() : key.end() + (key[1] or b"\0")[0]] for key in _LOCATION_KEY.finditer(content)}
    for location in sorted(location.decode("utf-8", "replace") for location in locations):
        if location not in listed:
            raise StartError(
                f"cannot load `{file}`: it reads weights from `{location}`, which the manifest does not list; copy or export the bundle "
                "again."
            )
        if not (path / location).resolve().is_relative_to(path.resolve()):
            raise StartError(
                f"cannot load `{file}`: its weights in `{location}` are a link to a file outside of the bundle; put the file itself there."
            )


def read_manifest(path: Path) -> tuple[Manifest, str]:
    """Returns the manifest in a bundle's folder, and the bundle's version, which is the start of the manifest's digest.

    Raises:
        StartError: The folder's name is not allowed; or the manifest is missing or invalid, or names another bundle.
    """
    if not re.fullmatch(NAME_PATTERN, path.name):
        raise StartError(f"`{path}` cannot be a model, whose name has {NAME_RULE}; rename or move the folder.")
    try:
        raw = (path / MANIFEST_FILE).read_bytes()
        manifest = Manifest.model_validate_json(raw)
    except OSError as error:
        if is_checkpoint(path):
            raise StartError(_checkpoint_message(path)) from error
        raise StartError(f"`{path}` is not a bundle: {MANIFEST_FILE} cannot be read ({error.strerror}).") from error
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        if first["loc"] == ("format_version",) and isinstance(first["input"], int):
            raise StartError(
                f"`{path / MANIFEST_FILE}` has format {first['input']}, but this version reads format 1; update bertserve, "
                "or export the bundle again with this version."
            ) from error
        raise StartError(
            f"`{path / MANIFEST_FILE}` is not a manifest of this version: {describe_validation_error(first)}; export the bundle again."
        ) from error
    if manifest.name != path.name:
        raise StartError(f"the manifest of bundle `{path}` has the name `{manifest.name}`; give the folder the same name.")
    return manifest, hashlib.sha256(raw).hexdigest()[:12]


def find_bundles(folders: Sequence[Path]) -> list[Path]:
    """Returns the bundle folders in models folders, by name: all folders that are not hidden. A folder can also be a bundle itself.

    Raises:
        StartError: A folder does not exist, cannot be read or contains no bundles, or two bundles have the same name.
    """
    bundles: dict[str, Path] = {}
    for folder in folders:
        try:
            entries = _bundles_in(folder)
        except OSError as error:
            raise StartError(f"the models folder `{folder}` cannot be read ({error.strerror}); make it readable for this user.") from error
        for entry in entries:
            if entry.name in bundles:
                raise _duplicate_name_error(bundles[entry.name], entry)
            bundles[entry.name] = entry
    return [bundles[name] for name in sorted(bundles)]


def find_bundle(folders: Sequence[Path], name: str) -> Path | None:
    """Returns the bundle folder of that name, as `find_bundles` does, or None. Errors of other folders do not matter.

    Raises:
        StartError: Two bundles have the name.
    """
    # a models folder can be a bundle itself
    paths = [Path(os.path.abspath(folder)) if os.path.isfile(folder / MANIFEST_FILE) else folder / name for folder in folders]
    bundles = [path for path in paths if path.name == name and not name.startswith(".") and os.path.isdir(path)]
    if len(bundles) > 1:
        raise _duplicate_name_error(*bundles[:2])
    return bundles[0] if bundles else None


def _duplicate_name_error(first: Path, second: Path) -> StartError:
    return StartError(f"`{first}` and `{second}` are both called `{first.name}`; remove one, or export it with another --name.")


def _bundles_in(folder: Path) -> list[Path]:
    if not folder.is_dir():
        raise StartError(
            f"the models folder `{folder}` does not exist; give a folder of bundles with --models, or a checkpoint with --model."
        )
    if is_bundle(folder):
        return [Path(os.path.abspath(folder))]  # so that `.` gets its real name
    if is_checkpoint(folder):
        raise StartError(_checkpoint_message(folder))
    folders = sorted(entry for entry in folder.iterdir() if entry.is_dir() and not entry.name.startswith("."))
    if not folders:
        raise StartError(f"the models folder `{folder}` has no bundle; create one with `bert-export SOURCE --output {folder}`.")
    return folders


def is_bundle(folder: Path) -> bool:
    """Returns whether a folder contains a manifest."""
    return os.path.isfile(folder / MANIFEST_FILE)  # unlike Path's method, it accepts unreadable folders and names that are too long


def _checkpoint_message(checkpoint: Path) -> str:
    return (
        f"`{checkpoint}` is a checkpoint, not a bundle; serve it with `bert-serve serve --model {checkpoint}`, "
        f"or export it with `bert-export {checkpoint} --output MODELS_DIR`."
    )


def digest(path: Path) -> str:
    """Returns the sha256 of a file as lower-case hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _verify(path: Path, expected: str, size_bytes: int | None = None) -> None:
    try:
        size = path.stat().st_size
        if size_bytes not in (None, size):  # checked before gigabytes are read
            raise StartError(
                f"bundle file `{path}` has {size} bytes, but the manifest says {size_bytes}: it was altered or not "
                "copied completely; copy or export the bundle again."
            )
        actual = digest(path)
    except OSError as error:
        raise StartError(f"bundle file `{path}` cannot be read ({error.strerror}); copy or export the bundle again.") from error
    if actual != expected:
        raise StartError(
            f"bundle file `{path}` was altered: its sha256 is {actual[:12]}…, but the manifest says {expected[:12]}…; "
            "copy or export the bundle again."
        )
