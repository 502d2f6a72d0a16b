"""Zero-shot classification: how well each of the caller's labels fits a text, by a model of natural language inference.

Each label makes a hypothesis ("This example is politics."), and the model says whether the text entails it, as in the
Hugging Face pipeline. Differences, on purpose: the template is no Python format string, only its `{}` stands for the label;
softmax subtracts the maximum.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from service.errors import InvalidValueError
from service.tasks.classify import LabelScore
from service.tasks.encoded import Encoded, ModelConfig
from service.tasks.scores import Row, activate
from service.text.tokenizer import Tokenizer, estimate_tokens

TASK = "zero-shot-classification"
TEMPLATE = "This example is {}."
PLACE = "{}"
NEEDS = "two or more labels of which one begins with `entail`"


@dataclass(frozen=True, slots=True)
class Request:
    """One text and the labels that may fit it.

    Attributes:
        text: The text.
        labels: At least one, distinct.
        hypothesis_template: A sentence with `{}` once, where the label goes.
        multi_label: Whether each label is scored by itself; else they share a total of 1.
    """

    text: str
    labels: tuple[str, ...]
    hypothesis_template: str = TEMPLATE
    multi_label: bool = False

    @property
    def chars(self) -> int:
        """Characters that have to be tokenized."""
        return len(self.text) + sum(map(len, self.labels)) + len(self.labels) * len(self.hypothesis_template)


def entailment(labels: Sequence[str]) -> int | None:
    """Returns the id of a model's first label that begins with "entail", in any case, or None.

    A model of one label says nothing about what contradicts, so it has none.
    """
    ids = [i for i, label in enumerate(labels) if label.lower().startswith("entail")]
    return ids[0] if ids and len(labels) > 1 else None


def fits(head: ModelConfig) -> bool:
    """Returns whether a text classification model is one of natural language inference."""
    return entailment(head.labels) is not None


def estimate(request: Request, max_length: int) -> int:
    """Returns a cheap guess of the tokens of all pairs of text and hypothesis."""
    shared = estimate_tokens(request.text) + estimate_tokens(request.hypothesis_template)
    return sum(min(shared + estimate_tokens(label), max_length) for label in request.labels)


def encode(request: Request, tokenizer: Tokenizer) -> Encoded:
    """Returns one encoding per label: the text, cut if need be, and the whole hypothesis.

    Raises:
        InvalidValueError: A hypothesis leaves no room for the text.
    """
    text, *hypotheses = tokenizer.tokenize([request.text, *(request.hypothesis_template.replace(PLACE, label) for label in request.labels)])
    room, encodings, truncated = tokenizer.room(pair=True), [], False
    for label, hypothesis in zip(request.labels, hypotheses, strict=True):
        left = room - len(hypothesis)
        if left < min(len(text), 1):
            raise InvalidValueError(
                f"the hypothesis of the label `{label[:64]}` has {len(hypothesis)} tokens and the model takes {room - 1} beside a text; "
                "shorten the label or `hypothesis_template`."
            )
        truncated |= len(text) > left
        encodings.append(tokenizer.assemble(text.ids[:left], hypothesis.ids))
    return Encoded(encodings=encodings, truncated=truncated)


def decode(request: Request, encoded: Encoded, rows: Sequence[Row], head: ModelConfig) -> list[LabelScore]:
    """Returns the labels with their scores, best first; of equal ones the later label first, as in the pipeline.

    Args:
        request: The request.
        encoded: Not needed.
        rows: One row per label with the output `logits`, float32 [labels of the model].
        head: The model's labels.
    """
    entails = entailment(head.labels)
    assert entails is not None, "only models that fit are asked"
    logits = np.stack([row["logits"] for row in rows])
    if request.multi_label or len(rows) == 1:
        contradicts = -1 if entails == 0 else 0
        scores = activate(logits[:, [contradicts, entails]], "softmax")[:, 1]
    else:
        scores = activate(logits[:, entails], "softmax")
    order = np.argsort(scores, kind="stable")[::-1]
    return [{"label": request.labels[i], "score": float(scores[i])} for i in order.tolist()]
