"""Reranking: how well each of several texts answers a query, with a cross-encoder, which reads query and text together.

A cross-encoder is a text classification model with one label. Answers are as in Hugging Face's Text Embeddings
Inference: the sigmoid of the model's one logit, whatever its own activation is, or on request the logit. With two labels, the name of
one must say that it is the relevant one: `relevant...`, or `yes` next to `no`. Its probability is then the score, and its log odds are
the logit, so the sigmoid of the logit is the score here too. `LABEL_0` and `LABEL_1` do not say which is relevant, and the wrong one
would reverse the order.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar

import numpy as np
from pydantic import BaseModel, Field

from bertserve.service.body.task_body import LIST_LIMIT, TaskBody, Truncate, TruncationDirection, body_config
from bertserve.service.bundle.manifest import Activation, ModelConfig, Side
from bertserve.service.tasks import classify
from bertserve.service.tasks.cost import ENTRY_BYTES, TEXT_CHARS, Cost, text_bytes
from bertserve.service.tasks.decide import DEFAULT_THRESHOLD, CalibratedDecisionParameters, Decided, decision_rule
from bertserve.service.tasks.decoding import activate, best_first
from bertserve.service.tasks.pairs import encode_pairs, longest_first
from bertserve.service.tasks.step import Step, TaskGenerator, TaskModel
from bertserve.service.tasks.task_spec import Derivation, TaskSpec

TASK = "text-ranking"
RELEVANT = "relevant"


def relevant_label(labels: Sequence[str]) -> int | None:
    """Returns the id of the label that ranks texts: the only one, `yes` of `yes` and `no`, or the one of two that begins with "relevant".

    Case is ignored.
    """
    names = [label.lower() for label in labels]
    if sorted(names) == ["no", "yes"]:
        return names.index("yes")
    ids = [i for i, name in enumerate(names) if len(names) == 1 or name.startswith(RELEVANT)]
    return ids[0] if len(ids) == 1 and len(labels) <= 2 else None


@dataclass(slots=True)
class RerankInput:
    """A query, the texts to rank, and the options of `RerankBody`.

    Attributes:
        must_fit: Whether a pair that is too long is an error; otherwise it is truncated.
        truncation_side: The end to truncate; None for the model's own.
    """

    query: str
    texts: Sequence[str]
    parameters: CalibratedDecisionParameters = field(default_factory=CalibratedDecisionParameters)
    raw_scores: bool = False
    return_text: bool = False
    must_fit: bool = False
    truncation_side: Side | None = None

    @property
    def chars(self) -> int:
        """Characters to tokenize; each text counts `TEXT_CHARS` more."""
        return len(self.query) + sum(map(len, self.texts)) + len(self.texts) * TEXT_CHARS


class RerankBody(TaskBody):
    """Body of a rerank request in the format of Text Embeddings Inference. Query and texts are one input, with one list as its result."""

    model_config = body_config(query="What is a panda?", texts=["A panda is a bear.", "The bridge was built in 1886."], return_text=True)
    input_name: ClassVar[str] = "texts"
    is_list: ClassVar[bool] = False

    query: Annotated[str, Field(description="The query to rank by.")]
    texts: Annotated[list[str], LIST_LIMIT, Field(description="The texts to rank.")]
    raw_scores: Annotated[bool, Field(description="Return logits instead of probabilities.")] = False
    return_text: Annotated[bool, Field(description="Include each text in the answer.")] = False
    truncate: Truncate = None
    truncation_direction: TruncationDirection = None
    parameters: CalibratedDecisionParameters | None = None

    def texts_by_input(self) -> Iterator[Sequence[str]]:
        """Yields the query and the texts."""
        yield self.query, *self.texts

    def task_inputs(self, config: ModelConfig) -> list[Any]:
        """Returns the only input."""
        parameters = self.parameters or self.default_parameters
        must_fit, side = self.truncate is False, self.truncation_direction
        return [RerankInput(self.query, self.texts, parameters, self.raw_scores, self.return_text, must_fit, side)]


def rerank(input_: RerankInput, model: TaskModel) -> TaskGenerator:
    """Returns `{index, score}` of each text, and `text` on request, best first by their logits; equal ones keep the order of the texts.

    Each text forms a pair with the query; if a pair is too long, the longer text is truncated first. The rows have the output `logits`,
    float32 [1], or [2] for a model with two labels.

    Raises:
        InvalidValueError: A pair is too long and must fit.
    """
    config = model.config
    label = relevant_label(config.labels)
    assert label is not None, "a derived task runs only on compatible models"
    name = config.labels[label]
    rule = decision_rule(input_.parameters, model, [name], can_calibrate=not input_.raw_scores, probabilities=not input_.raw_scores)
    cut = longest_first(model.tokenizer, input_.truncation_side, must_fit=input_.must_fit, field="texts", option="truncate")
    encodings, truncated = encode_pairs(model.tokenizer, input_.query, input_.texts, cut)
    returned_texts = input_.texts if input_.return_text else []
    cost = Cost(ENTRY_BYTES * len(encodings) + sum(map(text_bytes, returned_texts)) + rule.decision_bytes)
    rows = yield Step(encodings, cost, truncated=truncated)
    if not rows:
        return rule.answer_or_decision([], [], None, ())
    logits = np.stack([row["logits"] for row in rows])
    log_odds = logits[:, label]
    if len(config.labels) == 2 and config.activation == "softmax":
        log_odds = log_odds - logits[:, 1 - label]
    activation: Activation = "none" if input_.raw_scores else "sigmoid"
    scores = activate(rule.calibrated(log_odds, "none", label), activation)
    order = best_first(log_odds)  # rounding can make scores equal: in float32 the sigmoid of a logit above 16 is 1
    ranked: list[dict[str, Any]] = [
        {"index": i, "score": float(scores[i])} | ({"text": input_.texts[i]} if input_.return_text else {}) for i in order
    ]
    scored_labels = [([name] if item["score"] >= DEFAULT_THRESHOLD else [], item["score"]) for item in ranked]
    # the threshold of label sets does not apply to relevance
    least = DEFAULT_THRESHOLD if rule.for_label_sets else rule.least_score(name, DEFAULT_THRESHOLD)
    relevant = [item["index"] for item in ranked if item["score"] >= least]
    return rule.answer_or_decision(relevant, ranked, ranked[0]["score"], scored_labels)


class ScoredText(BaseModel):
    """The index and score of a text of the request."""

    index: Annotated[int, Field(examples=[1])]
    score: Annotated[float, Field(examples=[0.98])]
    text: Annotated[str | None, Field(examples=["A panda is a bear."])] = None


SPEC = TaskSpec(
    name=TASK,
    path="rerank",
    title="Rank texts by a query",
    body=RerankBody,
    response_type=list[ScoredText] | Decided,
    function=rerank,
    derivation=Derivation(
        base=classify.TASK,
        compatible=lambda manifest: relevant_label(manifest.labels) is not None,
        needs=f"exactly one label, as a cross-encoder has, or two labels, `yes` and `no` or one of which begins with `{RELEVANT}` "
        "(set `id2label` in the checkpoint's config.json, and export it again)",
        discriminator=("texts",),
    ),
)
