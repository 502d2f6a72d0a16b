"""A graph that answers requests as the service does: with the service's reader, tokenizer, engine and decoder."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bertserve.export.tasks.catalog import TASKS
from bertserve.export.tasks.spec import ExportTask
from bertserve.service.bundle.graph_spec import GraphSpec
from bertserve.service.bundle.manifest import TokenizerSpec
from bertserve.service.engine.onnx_engine import Engine, OnnxEngine, Row
from bertserve.service.engine.sessions import why_not
from bertserve.service.errors import EngineError
from bertserve.service.providers import Provider
from bertserve.service.tasks import multiple_choice
from bertserve.service.tasks.batch import ModelConfig, TaskModel, run_all
from bertserve.service.tasks.body import Limits, TaskBody
from bertserve.service.tasks.json_text import to_plain
from bertserve.service.tasks.reading import validate_as
from bertserve.service.text.tokenizer import Encoding, Tokenizer

MAX_CHARS = 10**8  # of a user's text


@dataclass(frozen=True)
class Answer:
    """The answer of a graph to a request: the encodings of its first batch, their outputs, and the result that a client gets.

    The answer of a checkpoint has only outputs.
    """

    encodings: Sequence[Encoding]
    rows: Sequence[Row]
    result: Any


@dataclass(frozen=True, eq=False)
class ServedGraph:
    """A graph with all that answers requests, each encoding alone. It may run on another provider than its own."""

    graph: GraphSpec
    engine: Engine
    tokenizer: Tokenizer
    task: ExportTask
    config: ModelConfig
    provider: Provider = "cpu"

    @property
    def name(self) -> str:
        """Its provider and precision, such as `cpu/int8`."""
        return f"{self.graph.provider}/{self.graph.precision}"

    def answer(self, request: Any) -> Answer:
        """Returns the answer; raises CallerError for a request that the task cannot answer, and EngineError if a run fails."""
        batches: list[tuple[Sequence[Encoding], Sequence[Row]]] = []

        def execute(encodings: Sequence[Encoding]) -> Sequence[Row]:
            batches.append((encodings, [row for encoding in encodings for row in self.engine.run([encoding])]))
            return batches[-1][1]

        result = self._run(request, execute)
        return Answer(*(batches[0] if batches else ((), ())), result)

    def decode(self, request: Any, rows: Sequence[Row]) -> Any:
        """Returns the result for a checkpoint's outputs of the first batch; raises EngineError if the task needs more batches."""
        first = [rows]

        def execute(_: Sequence[Encoding]) -> Sequence[Row]:
            if not first:
                raise EngineError(
                    "it needs more than one run (`joint` or `explain`), which is not compared with a checkpoint; remove that parameter."
                )
            return first.pop()

        return self._run(request, execute)

    def _run(self, request: Any, execute: Callable[[Sequence[Encoding]], Sequence[Row]]) -> Any:
        return to_plain(run_all(self.task.served.run(request, TaskModel(self.tokenizer, self.config)), execute))

    def answer_body(self, document: Mapping[str, Any]) -> Any:
        """Returns the response of the HTTP API to a request body."""
        body = read_body(self.task, document)
        return body.answer([self.answer(request).result for request in body.requests(self.config)])


def read_body(task: ExportTask, document: Mapping[str, Any]) -> TaskBody:
    """Returns a request body as the service reads it, without a limit on its length."""
    return validate_as(task.served.body, document, Limits(max_inputs=multiple_choice.MAX_CHOICES, max_chars=MAX_CHARS))


def open_graph(
    folder: Path,
    graph: GraphSpec,
    spec: TokenizerSpec,
    tokenizer: Tokenizer,
    task: str,
    config: ModelConfig,
    provider: Provider | None = None,
) -> ServedGraph:
    """Opens a graph on a provider, by default its own, or the CPU if this machine lacks it; raises ProviderError if it cannot run there."""
    provider = provider or (graph.provider if why_not(graph.provider) is None else "cpu")
    engine = OnnxEngine(folder / graph.file, graph, pad_id=spec.pad_id, padding_side=spec.padding_side, provider=provider)
    return ServedGraph(graph, engine, tokenizer, TASKS[task], config, provider)
