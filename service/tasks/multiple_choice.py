"""Multiple choice: the best of several choices for a question or a text, as in SWAG and RACE.

Each choice forms a pair with its question or text, and the model gives it one logit; the scores are the softmax over a question's choices.
Pairs are as in the `run_swag` and RACE examples of transformers: without a context, the question and the choice; with one, the context
and "question choice", joined by a space. As there, a pair over the model's length is truncated, the longer text first, with a warning.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated, Any, Self

import numpy as np
from pydantic import AfterValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from bertserve.service.body.task_body import LIST_LIMIT, ClosedModel, TaskBody, body_config, one_of
from bertserve.service.bundle.manifest import ModelConfig
from bertserve.service.tasks.cost import ENTRY_BYTES, TEXT_CHARS, Cost, text_bytes
from bertserve.service.tasks.decoding import activate, best_first
from bertserve.service.tasks.pairs import encode_pairs, longest_first
from bertserve.service.tasks.rerank import ScoredText
from bertserve.service.tasks.step import Step, TaskGenerator, TaskModel, TaskResult
from bertserve.service.tasks.task_spec import TaskSpec

TASK = "multiple-choice"
MIN_CHOICES, MAX_CHOICES = 2, 64  # choices of a question; each is a pair to run


class MultipleChoiceParameters(ClosedModel):
    """Parameters of multiple choice."""

    truncation: Annotated[bool, Field(description="Truncate long pairs, the longer text first; otherwise they are an error.")] = True


@dataclass(slots=True)
class MultipleChoiceInput:
    """One question, or text that a choice completes, with two or more choices; `context` is the text that the question is about."""

    question: str
    choices: tuple[str, ...]
    context: str | None = None
    parameters: MultipleChoiceParameters = field(default_factory=MultipleChoiceParameters)

    @property
    def first(self) -> str:
        """The first text of every pair."""
        return self.question if self.context is None else self.context

    @property
    def second_texts(self) -> Iterator[str]:
        """The second text of each choice's pair, one by one: a long question is not in memory once per choice."""
        return (choice if self.context is None else f"{self.question} {choice}" for choice in self.choices)

    @property
    def chars(self) -> int:
        """Characters to tokenize; each choice counts `TEXT_CHARS` more. With a context, each choice tokenizes the question again."""
        repeated = TEXT_CHARS + (0 if self.context is None else len(self.question) + 1)
        return len(self.first) + repeated * len(self.choices) + sum(map(len, self.choices))


def rank_choices(input_: MultipleChoiceInput, model: TaskModel) -> TaskGenerator:
    """Returns `{index, score, text}` of each choice, best first; equal scores keep the order of the choices.

    The rows have the output `logits`, float32 [1]; there is one row per choice.

    Raises:
        InvalidValueError: A pair is too long and `truncation` is false.
    """
    cut = longest_first(model.tokenizer, must_fit=not input_.parameters.truncation, field="choices", option="truncation")
    encodings, truncated = encode_pairs(model.tokenizer, input_.first, input_.second_texts, cut)
    cost = Cost(ENTRY_BYTES * len(input_.choices) + sum(map(text_bytes, input_.choices)))
    rows = yield Step(encodings, cost, truncated=truncated)
    scores = activate(np.concatenate([row["logits"] for row in rows]), "softmax")
    return TaskResult([{"index": i, "score": float(scores[i]), "text": input_.choices[i]} for i in best_first(scores)])


def _check_choices(choices: list[str]) -> list[str]:
    if not MIN_CHOICES <= len(choices) <= MAX_CHOICES:
        raise PydanticCustomError("choices", "must have {least} to {most} choices", {"least": MIN_CHOICES, "most": MAX_CHOICES})
    return choices


class ChoiceQuestion(ClosedModel):
    """A question, or a text to complete, and its choices."""

    choices: Annotated[
        list[str], LIST_LIMIT, AfterValidator(_check_choices), Field(json_schema_extra={"minItems": MIN_CHOICES, "maxItems": MAX_CHOICES})
    ]
    question: str | None = None
    prompt: str | None = None
    context: str | None = None

    @model_validator(mode="after")
    def _one_of_both_names(self) -> Self:
        if (self.question is None) == (self.prompt is None):
            raise PydanticCustomError("question", "must have exactly one of `question` and `prompt`, which mean the same")
        return self


class MultipleChoiceBody(TaskBody):
    """Body of a multiple choice request."""

    model_config = body_config(
        inputs={"prompt": "She put the kettle on and", "choices": ["waited for it to boil.", "rode it to the station."]},
        parameters={"truncation": False},
    )

    inputs: Annotated[
        ChoiceQuestion | Annotated[list[ChoiceQuestion], LIST_LIMIT],
        one_of("{question, choices} or a list of these"),
        Field(description="One or more questions with choices."),
    ]
    parameters: MultipleChoiceParameters | None = None

    @property
    def count(self) -> int:
        """Number of pairs of a question and a choice."""
        return sum(len(item.choices) for item in self.items)

    def task_inputs(self, config: ModelConfig) -> list[Any]:
        """Returns one input per question."""
        parameters: MultipleChoiceParameters = self.parameters or self.default_parameters
        # an empty context counts as missing, as in CSV files
        return [
            MultipleChoiceInput(item.question or item.prompt or "", tuple(item.choices), item.context or None, parameters)
            for item in self.items
        ]


SPEC = TaskSpec(
    name=TASK,
    path="choose",
    title="Choose the best answer or continuation",
    body=MultipleChoiceBody,
    response_type=list[ScoredText] | list[list[ScoredText]],
    function=rank_choices,
    widths=lambda manifest: {"logits": 1},
)
