"""Writes manifest and model card and moves the finished bundle into place; a bundle is there whole or not at all."""

from __future__ import annotations

import os
import shutil
from contextlib import suppress
from pathlib import Path

from bertserve.export.bundle.card import model_card
from bertserve.export.errors import OutputExistsError
from bertserve.export.signals import ignore_signals
from bertserve.service.bundle.files import CARD_FILE, MANIFEST_FILE
from bertserve.service.bundle.manifest import Manifest


def refuse_existing(target: Path, *, overwrite: bool) -> None:
    """Refuses an existing target before minutes of work.

    Raises:
        OutputExistsError: `target` exists and `overwrite` is false.
    """
    if os.path.lexists(target) and not overwrite:
        raise OutputExistsError(f"`{target}` exists; choose another --name or --output, or give --overwrite to replace it.")


def package_bundle(workspace: Path, target: Path, manifest: Manifest, *, card: str | None) -> None:
    """Completes the bundle in `workspace` and renames it to `target`.

    Args:
        workspace: Folder on the target's file system that holds the graphs and the tokenizer, and nothing else.
        target: `models/<name>`. An existing bundle, file or link there is renamed aside first and deleted last.
        manifest: The finished manifest.
        card: The checkpoint's own card, which the bundle's card quotes.
    """
    (workspace / MANIFEST_FILE).write_text(manifest.model_dump_json(indent=1) + "\n", encoding="utf-8")
    sizes = {graph.file: sum((workspace / file.file).stat().st_size for file in graph.files) for graph in manifest.graphs}
    (workspace / CARD_FILE).write_text(model_card(manifest, sizes, card), encoding="utf-8")
    workspace.chmod(0o755)  # tempfile makes it private; another user may run the service
    with ignore_signals():
        _move_into_place(workspace, target)


def _move_into_place(workspace: Path, target: Path) -> None:
    aside = target.with_name(f".{target.name}.old")
    try:
        if os.path.lexists(target):
            _remove(aside)
            target.rename(aside)
        workspace.rename(target)
    except BaseException:  # whatever stopped it, the old bundle is restored
        if os.path.lexists(aside) and not os.path.lexists(target):
            aside.rename(target)
        raise
    with suppress(OSError):  # the new bundle is in place; the remains of the old one are hidden, and the next export removes them
        _remove(aside)


def _remove(path: Path) -> None:
    """Removes a folder, a file or a link, if it exists."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
