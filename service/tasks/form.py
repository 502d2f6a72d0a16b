"""Form: how a task looks on the playground, as data. A task declares one, the page in `service/http/playground` shows it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

_TOWNS = (
    "Leeds Lyon Turin Bremen Cork Dundee Ghent Basel Lille Porto Bergen Graz Seville Verona Derby Exeter York Bath Oxford Nantes Toulouse "
    "Bologna Genoa Naples Hamburg Dresden Leipzig Zurich Geneva Lisbon"
)
# About 850 tokens, more than most models read at once.
CHRONICLE = " ".join(
    f"In {1851 + 3 * i} the town of {town} opened a railway station, and its first train, drawn by a small engine from Glasgow, was late by "
    f"{7 + i} minutes."
    for i, town in enumerate(_TOWNS.split())
)


@dataclass(frozen=True, slots=True)
class FormField:
    """A control.

    Attributes:
        name: Its name.
        label: What stands above it.
        to: Where its value goes in the body, such as `inputs.text`. `inputs` with nothing but a `text` are sent as that text.
        kind: What it is: a text, a text of which each line is an item, a box to tick, a choice of `options`, or a choice of one number of a
            list, which is sent as a list.
        value: What it has at first; `[MASK]` stands for the model's mask.
        rows: Height of a text.
        optional: Whether an empty text is not sent.
        options: Each value with its name; an empty value is not sent.
        counted: Key of a model's description, a list with as many items as there are numbers.
        each: Where each line goes too, each in a request of its own.
        most: How many lines are sent at most; 0 for all.
        unless: Name of a control; a tick is not sent while that one has a value.
        most_words: A tick is not sent if the texts have more words; 0 if it always is.
    """

    name: str
    label: str
    to: str
    kind: Literal["text", "lines", "tick", "choice", "number"] = "text"
    value: str | bool = ""
    rows: int = 3
    optional: bool = False
    options: tuple[tuple[str, str], ...] = ()
    counted: str = ""
    each: str = ""
    most: int = 0
    unless: str = ""
    most_words: int = 0


@dataclass(frozen=True, slots=True)
class FormExample:
    """Values to fill in.

    Attributes:
        name: What its button says.
        values: Values by the names of controls.
        pairs: Whether it is for models of pairs; None if it suits all.
    """

    name: str
    values: Mapping[str, str | bool]
    pairs: bool | None = None


@dataclass(frozen=True, slots=True)
class Form:
    """A tab of the page.

    Attributes:
        title: What it is called.
        about: What the task does, in a sentence.
        fields: Its controls; marks are drawn in the first one's text.
        view: How answers are shown: a name in `forms.js`. `json` suits any answer.
        parameters: Parameters that are always sent.
        examples: Values to fill in.
    """

    title: str
    about: str
    fields: tuple[FormField, ...]
    view: Literal["bars", "entities", "answers", "masks", "similarities", "vectors", "attention", "json"] = "json"
    parameters: Mapping[str, Any] = field(default_factory=dict)
    examples: tuple[FormExample, ...] = ()
