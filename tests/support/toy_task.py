"""A test-only base task that counts the tokens of two texts. It shows what the file of a new task in service/tasks contains."""

from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import Field

from bertserve.service.body.task_body import ClosedModel, TaskBody, body_config
from bertserve.service.bundle.manifest import ModelConfig
from bertserve.service.tasks.cost import Cost
from bertserve.service.tasks.step import Step, TaskGenerator, TaskModel, TaskResult
from bertserve.service.tasks.task_spec import TaskSpec

TASK = "pair-counting"


class ToyParameters(ClosedModel):
    """Parameters of the toy task."""

    factor: Annotated[int, Field(ge=1, description="What the answer is multiplied by.")] = 1


@dataclass(frozen=True, slots=True)
class ToyInput:
    """Two texts and the factor of their answer."""

    left: str
    right: str
    factor: int

    @property
    def chars(self) -> int:
        """The number of characters to tokenize."""
        return len(self.left) + len(self.right)


class ToyPair(ClosedModel):
    """Two texts."""

    left: str
    right: str


class ToyBody(TaskBody):
    """Body of a request of the toy task."""

    model_config = body_config(inputs={"left": "a film", "right": "a book"})

    inputs: Annotated[ToyPair | list[ToyPair], Field(description="Two texts, or a list of such pairs.")]
    parameters: ToyParameters | None = None

    def task_inputs(self, config: ModelConfig) -> list[Any]:
        """Returns one input per pair."""
        parameters: ToyParameters = self.parameters or self.default_parameters
        return [ToyInput(item.left, item.right, parameters.factor) for item in self.items]


def count(input_: ToyInput, model: TaskModel) -> TaskGenerator:
    """Returns the number of tokens of both texts times the factor, and the number of the model's outputs."""
    left, right = model.tokenizer.tokenize([input_.left, input_.right])
    [row] = yield Step([model.tokenizer.assemble(left.ids, right.ids)], Cost(response_bytes=32))
    return TaskResult({"tokens": input_.factor * (len(left) + len(right)), "outputs": len(row["logits"])})


SPEC = TaskSpec(
    name=TASK,
    path="count",
    title="Count the tokens of two texts",
    body=ToyBody,
    response_type=dict[str, int] | list[dict[str, int]],
    function=count,
    widths=lambda manifest: {"logits": len(manifest.labels)},
)
