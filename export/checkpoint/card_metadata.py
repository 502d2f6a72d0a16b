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

import yaml  # type: ignore[import-untyped]
from huggingface_hub.repocard import REGEX_YAML_BLOCK

logger = logging.getLogger("bertserve.export")

MAX_CARD_BYTES = 2**20


class _WithoutAliases(yaml.SafeLoader):  # type: ignore[misc]
    """Reads YAML in which nothing is repeated by reference: ten short lines of that are gigabytes once they are written out."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        """Returns the next node.

        Raises:
            ValueError: It is an alias.
        """
        if self.check_event(yaml.AliasEvent):
            raise ValueError("it has an alias")
        return super().compose_node(parent, index)


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
    """Reads the front matter of a checkpoint's README.md; what is neither text nor a list of texts is left out and logged as a warning.

    Args:
        card: The file, which may be missing.
    """
    try:
        found = _front_matter(read_card(card) or "")
    except Exception as error:  # noqa: BLE001 - YAML raises whatever its constructors do, such as IndexError for an empty number
        reason = (str(error).splitlines() or [""])[0] or type(error).__name__
        logger.warning("the front matter of `%s` is not a YAML object (%s), so its license and languages are unknown.", card, reason)
        return CardMetadata()
    return CardMetadata(
        license=_texts(card, found, "license"),
        license_name=_text(card, found, "license_name"),
        license_link=_text(card, found, "license_link"),
        language=_texts(card, found, "language"),
        datasets=_texts(card, found, "datasets"),
    )


def read_card(card: Path, errors: str = "strict") -> str | None:
    """Returns the text of a checkpoint's README.md; None where there is none, or one of more than a mebibyte.

    Args:
        card: The file, which may be missing.
        errors: What is done where it is not UTF-8, as of `str.decode`.

    Raises:
        UnicodeDecodeError: It is not UTF-8, and `errors` is `strict`.
    """
    if not card.is_file():
        return None
    if card.stat().st_size > MAX_CARD_BYTES:
        logger.warning("`%s` has more than %d bytes, so it is left out, and its license and languages are unknown.", card, MAX_CARD_BYTES)
        return None
    return card.read_text(encoding="utf-8-sig", errors=errors)


def _front_matter(text: str) -> dict[Any, Any]:
    """Returns the YAML object at the beginning of a card; an empty one where there is none.

    Raises:
        Exception: It is not valid YAML, has aliases or is not an object.
    """
    match = REGEX_YAML_BLOCK.search(text)
    found = yaml.load(match.group(2), Loader=_WithoutAliases) if match else None  # noqa: S506 - a loader of plain values
    if found is not None and not isinstance(found, dict):
        raise ValueError("it is a list or a value")
    return found or {}


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
