"""Zero-shot classification: how well each of the caller's labels fits a text, with a model of natural language inference.

Each label forms a hypothesis ("This example is politics."), and the model scores whether the text entails it, as in the
Hugging Face pipeline. There are two intended differences: only `{}` of the template is replaced, it is not a Python format string;
and softmax subtracts the maximum.
"""

from collections.abc import Sequence
from typing import Annotated, Any

import numpy as np
from pydantic import AfterValidator, BeforeValidator, Field
from pydantic_core import PydanticCustomError

from bertserve.service.body.task_body import TaskBody, TextOrTexts, body_config
from bertserve.service.bundle.manifest import ModelConfig
from bertserve.service.errors import CallerValue, InvalidParameterError
from bertserve.service.tasks import classify
from bertserve.service.tasks.classify import LabelScore
from bertserve.service.tasks.cost import ENTRY_BYTES, TEXT_CHARS, Cost, text_bytes
from bertserve.service.tasks.decide import Decided, DecisionParameters, decision_rule
from bertserve.service.tasks.decoding import activate
from bertserve.service.tasks.pairs import encode_pairs
from bertserve.service.tasks.step import EMPTY_WARNINGS, Step, TaskGenerator, TaskModel, TextInput
from bertserve.service.tasks.task_spec import Derivation, TaskSpec
from bertserve.service.text.windows import kept_tokens

TASK = "zero-shot-classification"
PLACEHOLDER = "{}"
MAX_LABELS = 200  # labels of a text; each is a pair to run
MAX_HYPOTHESIS_CHARS = 1000  # characters of a label, and of a template: each is read once for every label


def _split(value: Any) -> Any:
    """Returns the labels of a text with commas between them, like the Hugging Face pipeline; it stops soon after the limit of labels."""
    if not isinstance(value, str):
        return value
    labels = value.split(",", MAX_LABELS)
    return labels if len(labels) > MAX_LABELS else [label.strip() for label in labels if label.strip()]


def _check_labels(labels: list[str]) -> list[str]:
    if not labels or not all(label.strip() for label in labels):
        raise PydanticCustomError("labels", "must have at least one label, and no empty label")
    for index, label in enumerate(labels):
        if (first := labels.index(label)) < index:
            raise PydanticCustomError("labels", "must be distinct, but items {a} and {b} are equal", {"a": first, "b": index})
    return labels


def _check_template(template: str) -> str:
    if template.count(PLACEHOLDER) != 1:
        raise PydanticCustomError("template", "must have `{placeholder}` exactly once, where the label goes", {"placeholder": PLACEHOLDER})
    return template


class ZeroShotParameters(DecisionParameters):
    """Parameters of zero-shot classification."""

    candidate_labels: Annotated[
        list[Annotated[str, Field(max_length=MAX_HYPOTHESIS_CHARS)]],
        Field(fail_fast=True, max_length=MAX_LABELS),
        BeforeValidator(_split),
        AfterValidator(_check_labels),
        Field(description="The labels: a list, or one text separated by commas."),
    ]
    hypothesis_template: Annotated[
        str,
        AfterValidator(_check_template),
        Field(max_length=MAX_HYPOTHESIS_CHARS, description="The hypothesis; `{}` stands for the label."),
    ] = "This example is {}."
    multi_label: Annotated[bool, Field(description="Score each label by itself; otherwise the scores add up to 1.")] = False


def entailment(labels: Sequence[str]) -> int | None:
    """Returns the id of a model's first label that begins with "entail", ignoring case, or None.

    It is None for a model with one label, which cannot score a contradiction.
    """
    ids = [i for i, label in enumerate(labels) if label.lower().startswith("entail")]
    return ids[0] if ids and len(labels) > 1 else None


def classify_zero_shot(input_: TextInput[ZeroShotParameters], model: TaskModel) -> TaskGenerator:
    """Returns the labels with their scores, best first; of equal scores, the later label is first, as in the pipeline.

    The rows have the output `logits`, float32 [labels of the model]; there is one row per label of the caller.

    Raises:
        InvalidParameterError: A hypothesis leaves no tokens for the text.
    """
    config, parameters, labels = model.config, input_.parameters, input_.parameters.candidate_labels
    rule = decision_rule(parameters, model, labels, can_calibrate=False)
    tokenizer, max_tokens = model.tokenizer, model.tokenizer.max_text_tokens(pair=True)

    def cut_text(index: int, text: int, hypothesis: int) -> tuple[range, range]:
        if max_tokens - hypothesis < min(text, 1):
            raise InvalidParameterError(
                "the hypothesis of the label `{label}` has {hypothesis_count} tokens and at most {max_tokens} are allowed; "
                "shorten the label or `hypothesis_template`.",
                label=CallerValue(labels[index]),
                hypothesis_count=hypothesis,
                max_tokens=max_tokens - 1,
            )
        return kept_tokens(text, max_tokens - hypothesis, tokenizer.spec.truncation_side), range(hypothesis)

    hypotheses = [parameters.hypothesis_template.replace(PLACEHOLDER, label) for label in labels]
    encodings, truncated = encode_pairs(tokenizer, input_.text, hypotheses, cut_text)
    # some clients get the text with the labels
    cost = Cost(text_bytes(input_.text) + sum(ENTRY_BYTES + text_bytes(label) for label in labels) + rule.decision_bytes)
    rows = yield Step(encodings, cost, truncated=truncated, warnings=() if input_.text.strip() else EMPTY_WARNINGS)
    entails = entailment(config.labels)
    assert entails is not None, "a derived task runs only on compatible models"
    logits = np.stack([row["logits"] for row in rows])
    if parameters.multi_label or len(rows) == 1:
        contradicts = -1 if entails == 0 else 0
        scores = activate(logits[:, [contradicts, entails]], "softmax")[:, 1]
    else:
        scores = activate(logits[:, entails], "softmax")
    order = np.argsort(scores, kind="stable")[::-1]
    scored = [{"label": labels[i], "score": float(scores[i])} for i in order.tolist()]
    return rule.answer_or_labels(scored, scored, exclusive=not parameters.multi_label)


class ZeroShotBody(TaskBody):
    """Body of a zero-shot classification request."""

    model_config = body_config(inputs="The new phone has a better camera.", parameters={"candidate_labels": ["technology", "politics"]})

    inputs: TextOrTexts
    # without `parameters`, the error names the missing field in them
    parameters: Annotated[ZeroShotParameters, Field(validate_default=True, default_factory=dict)]

    @property
    def count(self) -> int:
        """Number of pairs of a text and a label."""
        return len(self.items) * len(self.parameters.candidate_labels)

    def task_inputs(self, config: ModelConfig) -> list[Any]:
        """Returns one input per text; each label counts the characters of its hypothesis, and `TEXT_CHARS` more."""
        labels, template = self.parameters.candidate_labels, self.parameters.hypothesis_template
        other_chars = sum(map(len, labels)) + len(labels) * (len(template) + TEXT_CHARS)
        return [TextInput(text, self.parameters, other_chars=other_chars) for text in self.items]


SPEC = TaskSpec(
    name=TASK,
    path="zero-shot",
    title="Classify texts by your own labels",
    body=ZeroShotBody,
    response_type=list[LabelScore] | list[list[LabelScore]] | Decided | list[Decided],
    function=classify_zero_shot,
    derivation=Derivation(
        base=classify.TASK,
        compatible=lambda manifest: entailment(manifest.labels) is not None,
        needs="two or more labels, one of which begins with `entail`",
        discriminator=("parameters", "candidate_labels"),
    ),
    has_one_label=lambda input_, manifest: not (input_.parameters.multi_label or input_.parameters.decide),
)
