"""A task that bertserve does not have: the grade of a text, an integer from 0. It has only the service's and the exporter's parts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Annotated, Any, ClassVar

from pydantic import Field

from bertserve.export.tasks.spec import Document, ExportTask
from bertserve.service.bundle.graph_spec import OutputSpec
from bertserve.service.tasks.batch import Batch, ModelConfig, TaskModel, TaskRun
from bertserve.service.tasks.body import TaskBody, TaskParameters, body_config
from bertserve.service.tasks.cost import Cost
from bertserve.service.tasks.decoding import activate
from bertserve.service.tasks.spec import TaskSpec

NAME = "text-grading"


@dataclass(frozen=True, slots=True)
class GradeRequest:
    """One text to grade."""

    text: str

    @property
    def chars(self) -> int:
        return len(self.text)


class GradeParameters(TaskParameters):
    """The task has no parameters."""


class GradeBody(TaskBody):
    """Body of a request."""

    model_config = body_config(inputs="a good film")
    parameters_type: ClassVar[type[TaskParameters]] = GradeParameters

    inputs: Annotated[str, Field(description="A text.")]
    parameters: GradeParameters | None = None

    def request(self, item: Any, parameters: GradeParameters) -> GradeRequest:
        return GradeRequest(item)


def grade(request: GradeRequest, model: TaskModel) -> TaskRun:
    """Returns the grade and its score."""
    (tokens,) = model.tokenizer.tokenize([request.text])
    encoding = model.tokenizer.assemble(tokens.ids[: model.tokenizer.room(pair=False)])
    [row] = yield Batch([encoding], Cost(answer_bytes=64))
    scores = activate(row["logits"], "softmax")
    return {"grade": int(scores.argmax()), "score": float(scores.max())}


SPEC = TaskSpec(
    name=NAME,
    path="grade",
    title="Grade texts",
    body=GradeBody,
    answer=dict[str, Any],
    estimate=lambda request, max_length: min(len(request.text), max_length),
    run=grade,
)


def _score(golds: Sequence[Any], results: Sequence[Any], config: ModelConfig) -> dict[str, float]:
    return {"same grade": fmean([result["grade"] == gold for gold, result in zip(golds, results, strict=True)])}


def _read_grade(document: Document, config: ModelConfig) -> int | None:
    return document.get("grade")


TASK = ExportTask(
    name=NAME,
    head="ForTextGrading",
    auto_class="AutoModelForSequenceClassification",
    outputs=(OutputSpec(name="logits", kind="per_text"),),
    text_request=lambda text, spec: GradeRequest(text),
    example=lambda spec: {"inputs": "a good film"},
    decision=lambda result, config: result["grade"],
    read_gold=_read_grade,
    gold_keys=("grade",),
    metrics=("same grade",),
    score=_score,
)
