"""Reads a checkpoint's card, whose front matter gives the license, languages and data sets. A bundle gets the same license."""

from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]
from huggingface_hub.repocard import REGEX_YAML_BLOCK

from bertserve.export.errors import first_line, warn

MAX_CARD_BYTES = 2**20  # the card is read as a whole, and copied to the bundle
MAX_FRONT_MATTER_CHARS, MAX_NESTING = 2**16, 32  # levels of brackets, each of which takes YAML a millisecond
# the hub's names of the fields of `Source` from the card, and whether each can be a list
CARD_FIELDS = {"license": True, "language": True, "datasets": True, "license_name": False, "license_link": False}
_OPENING, _CLOSING = (yaml.FlowSequenceStartToken, yaml.FlowMappingStartToken), (yaml.FlowSequenceEndToken, yaml.FlowMappingEndToken)


def read_card_metadata(card: Path | None) -> dict[str, Any]:
    """Reads the front matter of a card from `find_card`, if any, as fields of the manifest's `Source`; a missing field is empty.

    Values other than texts and lists of texts are ignored with a warning.
    """
    try:
        metadata = {} if card is None else _front_matter(card.read_text(encoding="utf-8-sig"))
    except Exception as error:  # noqa: BLE001 - YAML raises any error of its constructors, such as IndexError for an empty number
        warn(f"the front matter of `{card}` is not a YAML object ({first_line(error)}), so its license and languages are unknown.")
        metadata = {}
    return {name: _read_field(card, name, metadata.get(name), is_list=is_list) for name, is_list in CARD_FIELDS.items()}


def find_card(folder: Path) -> Path | None:
    """Returns a checkpoint's README.md; None if it does not exist, or with a warning if it leaves the checkpoint or exceeds a mebibyte."""
    card = folder / "README.md"
    if not card.is_file():
        return None
    reason = None
    home, target = folder.resolve(), card.resolve()
    is_blob = home.parent.name == "snapshots" and target.parent == home.parent.parent / "blobs"  # in the cache of the hub
    if card.is_symlink() and not is_blob and not target.is_relative_to(home):
        reason = "is a link to a file outside of the checkpoint"
    elif card.stat().st_size > MAX_CARD_BYTES:
        reason = f"has more than {MAX_CARD_BYTES} bytes"
    if reason:
        warn(f"`{card}` {reason}, so it is ignored, and its license and languages are unknown.")
        return None
    return card


def _front_matter(text: str) -> dict[Any, Any]:
    """Returns the YAML object at the start of a card; empty if there is none."""
    match = REGEX_YAML_BLOCK.search(text)
    if match is None:
        return {}
    if len(match.group(2)) > MAX_FRONT_MATTER_CHARS:
        raise ValueError(f"it has more than {MAX_FRONT_MATTER_CHARS} characters")
    depth = 0  # open brackets
    for token in yaml.scan(match.group(2), Loader=yaml.SafeLoader):
        if isinstance(token, yaml.AliasToken):
            raise ValueError("it has an alias")  # ten short lines with aliases can expand to gigabytes
        depth += isinstance(token, _OPENING) - isinstance(token, _CLOSING)
        if depth > MAX_NESTING:
            raise ValueError(f"it has more than {MAX_NESTING} nested brackets")
    metadata = yaml.safe_load(match.group(2))
    if metadata is not None and not isinstance(metadata, dict):
        raise ValueError("it is a list or a value")
    return metadata or {}


def _read_field(card: Path | None, name: str, value: Any, *, is_list: bool) -> Any:
    """Returns the texts of a field: a text or None, or a tuple of texts if it can be a list."""
    items = value if is_list and isinstance(value, list) else [value]
    if value is None:
        items = []
    elif not all(isinstance(item, str) for item in items):
        expected = "a text or a list of texts" if is_list else "a text"
        warn(
            f"`{name}` in the front matter of `{card}` is {value!r:.80} instead of {expected}, so it is ignored; quote texts that YAML "
            "reads as something else (`no`)."
        )
        items = []
    texts = tuple(item for item in items if item)
    return texts if is_list else next(iter(texts), None)
