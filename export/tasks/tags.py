"""Reads the labels of a tagger as tags of BIO, BIOES or BILOU, however its checkpoint spells them: `M-PER`, `B_PER`, `PER-B`, `b-per`.

The service reads only tags such as `B-PER`. A letter counts as a tag prefix only if another label with the same type has another letter of
the same scheme; `E-MAIL`, `S-BAHN` and `U-BAHN` are therefore names.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache

from bertserve.service.tasks.token_classification import OUTSIDE, split_tag

# the letters of BIOES, BILOU, BMES and BMEWO, and their spelling in a tag
_SCHEMES = ("BIES", "BILU", "BMES", "BMEW")
_SPELLINGS = dict(zip("BIMELSUW", "BIIELSUS", strict=True))
_FORMS = (re.compile(r"(?P<letter>[a-zA-Z])[\W_](?P<type>.+)"), re.compile(r"(?P<type>.+)[\W_](?P<letter>[a-zA-Z])"))


@lru_cache(maxsize=64)
def read_tags(labels: tuple[str, ...]) -> tuple[str, ...]:
    """Returns the tag of each label, by id: `O`, a letter of `BIESLU` and a type, or another name; empty if all labels are such tags."""
    letters = _letters_by_label(labels)
    tags = tuple(_tag(label, letters) for label in labels)
    return () if tags == labels else tags


def tag_like_labels(labels: Sequence[str]) -> list[str]:
    """Returns labels that look like tags but are read as names, such as `B` and `I` without a type, or `X-PER` in a model with `B-PER`."""
    letters, names = _letters_by_label(labels), _inside(labels)
    if len(names) > 1 and {name.upper() for name in names} <= _SPELLINGS.keys():
        return names
    groups = [group for form in _FORMS for group in _by_type(names, form).values()]
    similar_groups = [group for group in groups if len(set(group.values())) > 1 or {"B", "I"} & set(group.values())]
    return [name for name in names if name not in letters and any(name in group for group in similar_groups)]


def _letters_by_label(labels: Sequence[str]) -> dict[str, tuple[str, str]]:
    """Returns the letter, in its spelling in a tag, and the type of each label of the scheme that reads most labels."""
    readings: list[dict[str, tuple[str, str]]] = []
    for form in _FORMS:
        types = _by_type(labels, form)
        for scheme in _SCHEMES:
            groups = [set(group.values()) for group in types.values() if set(group.values()) <= set(scheme)]
            used = {letter for letters in groups if len(letters) > 1 for letter in letters}
            readings.append(_within(types, set(scheme) if used - {"B", "I"} else used))
    if best_reading := max(readings, key=len):
        return best_reading
    # no type has several letters, so the labels must have the usual spelling, or all begin with a letter
    usual_tags = {label: (label[0], label[2:]) for label in labels if re.fullmatch("[BI]-.+", label)}
    prefixed_tags = _within(_by_type(labels, _FORMS[0]), {"B", "I"})
    return prefixed_tags if len(prefixed_tags) == len(_inside(labels)) else usual_tags


def _inside(labels: Sequence[str]) -> list[str]:
    return [label for label in labels if label.upper() != OUTSIDE]


def _by_type(labels: Iterable[str], form: re.Pattern[str]) -> dict[str, dict[str, str]]:
    """Returns the labels of each type in a form, with their letters in upper case."""
    types: dict[str, dict[str, str]] = defaultdict(dict)
    for label in labels:
        if (match := form.fullmatch(label)) is not None:
            types[match["type"]][label] = match["letter"].upper()
    return types


def _within(types: Mapping[str, Mapping[str, str]], letters: set[str]) -> dict[str, tuple[str, str]]:
    return {label: (_SPELLINGS[letter], type_) for type_, group in types.items() for label, letter in group.items() if letter in letters}


def _tag(label: str, letters: Mapping[str, tuple[str, str]]) -> str:
    if label in letters:
        return "-".join(letters[label])
    if letters and label.upper() == OUTSIDE:
        return OUTSIDE
    # as the type of a tag, a name keeps its hyphen; in a model with tags, the pipeline drops other labels' part before the first hyphen
    is_name = "-" in label if not letters else split_tag(label)[0]
    return f"I-{label}" if is_name else label
