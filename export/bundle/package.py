"""Writes manifest and model card and puts the finished bundle in place; there is never half a bundle."""

from __future__ import annotations

import os
import shutil
from contextlib import suppress
from pathlib import Path

from export.bundle.card import model_card
from export.errors import OutputExistsError
from export.signals import held_off
from service.bundle.files import CARD_FILE, MANIFEST_FILE
from service.bundle.manifest import Manifest


def check_free(target: Path, *, overwrite: bool) -> None:
    """Refuses early, before minutes of work.

    Raises:
        OutputExistsError: There is something at `target` and `overwrite` is false.
    """
    if os.path.lexists(target) and not overwrite:
        raise OutputExistsError(f"`{target}` exists; choose another --name or --output, or give --overwrite to replace it.")


def package(workspace: Path, target: Path, manifest: Manifest, *, card: str | None) -> None:
    """Completes the bundle in `workspace` and renames it to `target`.

    Args:
        workspace: Folder on the target's file system that holds the graphs and the tokenizer, and nothing else.
        target: `models/<name>`. What is there, be it a bundle, a file or a link, is renamed aside first and deleted last.
        manifest: The finished manifest.
        card: The checkpoint's own card, quoted in the bundle's.
    """
    (workspace / MANIFEST_FILE).write_text(manifest.model_dump_json(indent=1) + "\n", encoding="utf-8")
    sizes = {graph.file: sum((workspace / file.file).stat().st_size for file in graph.files) for graph in manifest.graphs}
    (workspace / CARD_FILE).write_text(model_card(manifest, sizes, card), encoding="utf-8")
    workspace.chmod(0o755)  # tempfile makes it private; another user may run the service
    with held_off():
        _put_in_place(workspace, target)


def _put_in_place(workspace: Path, target: Path) -> None:
    aside = target.with_name(f".{target.name}.old")
    try:
        if os.path.lexists(target):
            _remove(aside)
            target.rename(aside)
        workspace.rename(target)
    except BaseException:  # whatever stopped it, and wherever: the old bundle goes back
        if os.path.lexists(aside) and not os.path.lexists(target):
            aside.rename(target)
        raise
    with suppress(OSError):  # the bundle is in place; what is left of the old one is hidden, and the next export clears it
        _remove(aside)


def _remove(path: Path) -> None:
    """Removes a folder, a file or a link, if there is one."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
