"""TaskSpec: all that the rest of the service needs to know of a task. Routes, OpenAPI, docs and load tests follow from it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from service.bundle.manifest import Manifest
from service.tasks.body import TaskBody
from service.tasks.cost import Budget, Cost
from service.tasks.decoding.scores import Row
from service.tasks.encoded import Encoded, ModelConfig
from service.text.tokenizer import Tokenizer


class Estimate(Protocol):
    """Guesses the tokens that a request costs, all windows and the work of decoding counted, for admission. Cheap: nothing is tokenized."""

    def __call__(self, request: Any, max_length: int) -> int:
        """Returns the tokens, given the model's usable length."""
        ...


class Encode(Protocol):
    """Turns one request into the encodings that its graph runs."""

    def __call__(self, request: Any, tokenizer: Tokenizer) -> Encoded:
        """Returns the encodings, one per window, and what `decode` needs besides."""
        ...


class InputCost(Protocol):
    """Says what a request takes at most, as far as that is known before its graph runs."""

    def __call__(self, request: Any, encoded: Any, config: ModelConfig) -> Cost:
        """Returns the cost of what `encode` returned."""
        ...


class Decode(Protocol):
    """Turns the graph's outputs into the request's result."""

    def __call__(self, request: Any, encoded: Any, rows: Sequence[Row], config: ModelConfig, budget: Budget | None = None) -> Any:
        """Returns the result, given one row of outputs per encoding, or a `Further` of what has to run before there is one.

        What the outputs add to the cost is taken from the budget while it is collected; None is one of its own.
        """
        ...


class Reduce(Protocol):
    """Keeps of one encoding's outputs what decoding needs, as arrays of its own. Outputs are views of the padded batch."""

    def __call__(self, request: Any, encoded: Any, row: Row) -> Row:
        """Returns a row that `decode` takes like the outputs themselves."""
        ...


@dataclass(frozen=True, slots=True)
class Derivation:
    """Which bundles answer a task that is not their own, and by what a body asks them for it.

    Attributes:
        base: Task of the bundles; None where the task of a bundle does not matter.
        fits: Whether a bundle of that task can do it.
        needs: What the bundle must have, in words; empty where every bundle of that task fits.
        marker: Keys, each within the one before, that only a body of this task has. A body at a model's own path is for this
            task if it has them.
    """

    base: str | None
    fits: Callable[[ModelConfig], bool]
    needs: str
    marker: tuple[str, ...]

    def takes(self, task: str) -> bool:
        """Returns whether bundles of a task may do it."""
        return self.base in (None, task)


def _nothing(manifest: Manifest) -> str | None:
    return None


def copied(request: Any, encoded: Encoded, row: Row) -> Row:
    """Returns a row's outputs without the padding of their batch."""
    return {name: values.copy() for name, values in row.items()}


def inputs_body(inputs: Sequence[Any]) -> dict[str, Any]:
    """Returns a body with nothing but inputs; one alone is sent as itself."""
    return {"inputs": inputs[0] if len(inputs) == 1 else list(inputs)}


@dataclass(frozen=True, slots=True)
class TaskSpec:
    """A task.

    Attributes:
        name: Its Hugging Face name, as manifests and pipelines have it.
        path: Its endpoint, without the slash.
        title: What it does, in a few words, for OpenAPI.
        body: The body of a request. Its `parameters_type` declares the parameters, with limits and texts.
        answer: Type of the response's body, for OpenAPI.
        estimate: Guesses a request's tokens.
        encode: Turns a request into encodings.
        cost: Says what it takes beside the tokens of its encodings.
        decode: Turns outputs into a result.
        reduce: Keeps of one encoding's outputs what decoding needs: they are held until the request's last encoding has run. None
            where they are a few numbers.
        derivation: Set for a task that bundles of another task answer.
        missing: Returns what a manifest of this task lacks, in words, or None.
        load_body: Returns the body of a load test around its inputs, which are at least one.
        load_mix: The built-in mix of `bert-bench` whose inputs suit it.
    """

    name: str
    path: str
    title: str
    body: type[TaskBody]
    answer: Any
    estimate: Estimate
    encode: Encode
    cost: InputCost
    decode: Decode
    reduce: Reduce | None = None
    derivation: Derivation | None = None
    missing: Callable[[Manifest], str | None] = _nothing
    load_body: Callable[[Sequence[Any]], dict[str, Any]] = inputs_body
    load_mix: str = "short"
