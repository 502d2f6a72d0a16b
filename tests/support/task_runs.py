"""Runs task functions on model outputs that a test provides, without a scheduler and a graph."""

from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np

from bertserve.service.bundle.graph_spec import Outputs
from bertserve.service.bundle.manifest import ModelConfig
from bertserve.service.tasks.classify import ClassifyParameters
from bertserve.service.tasks.question_answering import QuestionAnsweringParameters
from bertserve.service.tasks.step import Step, TaskGenerator, TaskModel, TextInput, drive
from bertserve.service.tasks.token_classification import TokenClassificationParameters
from bertserve.service.text.tokenizer import Encoding
from support.fakes import Head


class OneToken:
    """A tokenizer for decoding tests that makes one token of any text."""

    spec = SimpleNamespace(pairs_only=False, truncation_side="right", max_length=512)
    vocabulary_size = 1000

    def tokenize(self, texts: Sequence[str]) -> list[Any]:
        return [_Tokens() for _ in texts]

    def tokenize_lazily(self, texts: Sequence[str]) -> Iterator[Any]:
        return iter(self.tokenize(texts))

    def max_text_tokens(self, *, pair: bool) -> int:
        return 510 - pair

    def assemble(self, *texts: Sequence[int]) -> Encoding:
        return Encoding(np.ones(3, dtype=np.int64), np.zeros(3, dtype=np.int64))


class _Tokens:
    ids = (5,)

    def __len__(self) -> int:
        return 1


def classify_input(text: str, text_pair: str | None = None, **parameters: Any) -> TextInput[ClassifyParameters]:
    return TextInput(text, ClassifyParameters(**parameters), text_pair)


def ner_input(text: str, **parameters: Any) -> TextInput[TokenClassificationParameters]:
    return TextInput(text, TokenClassificationParameters(**parameters))


def answer_input(question: str, context: str, **parameters: Any) -> TextInput[QuestionAnsweringParameters]:
    return TextInput(question, QuestionAnsweringParameters(**parameters), context)


def generator_of(task: Any, request: Any, tokenizer: Any = None, config: ModelConfig | None = None) -> TaskGenerator:
    """Returns the generator of a task, which is a module with a `SPEC` or a `TaskSpec`, with `OneToken` and `Head()` by default."""
    generator: TaskGenerator = getattr(task, "SPEC", task).function(request, TaskModel(tokenizer or OneToken(), config or Head()))
    return generator


def encode(task: Any, request: Any, tokenizer: Any, config: ModelConfig | None = None) -> Step:
    """Returns the first step of a task."""
    return next(generator_of(task, request, tokenizer, config))


def decode(task: Any, request: Any, rows: Sequence[Outputs], config: ModelConfig | None = None, tokenizer: Any = None) -> Any:
    """Returns the result of a task, given the outputs of its only step."""
    remaining = [rows]
    return drive(generator_of(task, request, tokenizer, config), lambda step: remaining.pop())
