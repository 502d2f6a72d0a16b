"""How token labels spell where entities begin and end, told by the labels themselves.

bio     B-PER I-PER O           also I-PER alone; what the Hugging Face pipeline understands
bioes   B- I- E- S- O           E ends an entity, S is one of one token
bilou   B- I- L- U- O           the same with other letters
plain   PER LOC O               no prefixes at all
"""

from __future__ import annotations

from functools import cache
from typing import Literal

Scheme = Literal["bio", "bioes", "bilou", "plain"]
# First letters of labels that begin an entity, and that end one.
BEGINS: dict[Scheme, str] = {"bio": "B", "bioes": "BS", "bilou": "BU", "plain": ""}
ENDS: dict[Scheme, str] = {"bio": "", "bioes": "ES", "bilou": "LU", "plain": ""}


@cache
def scheme_of(labels: tuple[str, ...]) -> Scheme:
    """Returns the scheme of a model's labels.

    What begins with B and goes on with I must end, so in a scheme with endings each tag that has one of these has an ending too; and
    some tag has an ending beside another letter, so that `E-MAIL` and `S-BAHN` are plain labels.
    """
    tags: dict[str, set[str]] = {}
    for label in labels:
        if label[1:2] == "-":
            tags.setdefault(label[2:], set()).add(label[0])
    spellings: tuple[Scheme, Scheme] = ("bioes", "bilou")
    for scheme in spellings:
        ends = set(ENDS[scheme])
        spelled = [letters & {*"BI", *ends} for letters in tags.values()]
        if any(letters & ends and len(letters) > 1 for letters in spelled) and all(letters & ends for letters in spelled if letters):
            return scheme
    return "bio" if any(letters & {*"BI"} for letters in tags.values()) else "plain"


def split(label: str, scheme: Scheme) -> tuple[str, str]:
    """Returns a label's letter and its tag; a label without a letter of its scheme is all tag."""
    letters = "BI" + ENDS[scheme] if scheme != "plain" else ""
    return (label[0], label[2:]) if label[1:2] == "-" and label[0] in letters else ("", label)
