"""What a checkpoint's card says in its front matter of license, language and data: a bundle is redistributed under what is said there.

---
license: apache-2.0
language: [en]
datasets: [stanfordnlp/sst2]
---
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub.repocard import metadata_load

logger = logging.getLogger("bertserve.export")


@dataclass(frozen=True)
class CardMetadata:
    """The hub's fields of a card, by their names there; each is empty where the card does not have it.

    Attributes:
        license: The hub's ids of licenses; `other` is described by the next two.
        license_name: Name of a license that has no id.
        license_link: Where that license is.
        language: Codes of languages.
        datasets: The hub's ids of what it was trained on.
    """

    license: tuple[str, ...] = ()
    license_name: str | None = None
    license_link: str | None = None
    language: tuple[str, ...] = ()
    datasets: tuple[str, ...] = ()


def read_card_metadata(card: Path) -> CardMetadata:
    """Reads the front matter of a checkpoint's README.md; what is no text, or no list of it, is left out and logged as a warning.

    Args:
        card: The file, which may be missing.
    """
    try:
        found = (metadata_load(card) if card.is_file() else None) or {}
    except Exception as error:  # noqa: BLE001 - YAML raises whatever its constructors do, such as IndexError for an empty number
        reason = (str(error).splitlines() or [""])[0] or type(error).__name__
        logger.warning("the front matter of `%s` is no YAML object (%s), so its license and languages are unknown.", card, reason)
        return CardMetadata()
    return CardMetadata(
        license=_texts(card, found, "license"),
        license_name=_text(card, found, "license_name"),
        license_link=_text(card, found, "license_link"),
        language=_texts(card, found, "language"),
        datasets=_texts(card, found, "datasets"),
    )


def _text(card: Path, found: dict[Any, Any], key: str) -> str | None:
    """Returns a field that is one text."""
    value = found.get(key)
    if value is None or isinstance(value, str):
        return value or None
    _leave_out(card, key, value, "a text")
    return None


def _texts(card: Path, found: dict[Any, Any], key: str) -> tuple[str, ...]:
    """Returns a field that is a text or a list of texts."""
    value = found.get(key)
    items = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(item, str) for item in items):
        _leave_out(card, key, value, "a text or a list of texts")
        return ()
    return tuple(item for item in items if item)


def _leave_out(card: Path, key: str, value: object, expected: str) -> None:
    shown = repr(value)
    logger.warning(
        "`%s` in the front matter of `%s` is %s and not %s, so it is left out; put a text in quotes where YAML reads something else (`no`).",
        key,
        card,
        shown if len(shown) <= 80 else f"{shown[:80]}…",
        expected,
    )
