"""A graph that answers requests as the service does: with the service's tokenizer, engine and decoder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bertserve.service.bundle.graph_spec import GraphSpec
from bertserve.service.bundle.manifest import TokenizerSpec
from bertserve.service.engine.onnx_engine import Engine, OnnxEngine, Row
from bertserve.service.errors import EngineError
from bertserve.service.providers import Provider
from bertserve.service.tasks import catalog
from bertserve.service.tasks.batch import ModelConfig, TaskModel, run_all
from bertserve.service.tasks.json_text import to_plain
from bertserve.service.text.tokenizer import Encoding, Tokenizer


@dataclass(frozen=True)
class Answer:
    """The answer of a graph, or of a checkpoint, to a request.

    Attributes:
        encodings: The encodings of its first batch, which are its windows, choices or texts; empty for a checkpoint.
        rows: The outputs for each.
        result: The result that a client gets; None if the outputs are not decoded.
    """

    encodings: Sequence[Encoding]
    rows: Sequence[Row]
    result: Any


@dataclass(frozen=True, eq=False)
class ServedGraph:
    """A graph with all that answers requests. Each encoding runs alone.

    Attributes:
        graph: Its entry in the manifest.
        engine: The engine that runs it.
        tokenizer: The bundle's tokenizer.
        task: The Hugging Face name of its task.
        config: The properties of its model: a manifest or a checkpoint.
    """

    graph: GraphSpec
    engine: Engine
    tokenizer: Tokenizer
    task: str
    config: ModelConfig

    @property
    def name(self) -> str:
        """Its provider and precision, such as `cpu/int8`."""
        return f"{self.graph.provider}/{self.graph.precision}"

    def encode(self, request: Any) -> Sequence[Encoding]:
        """Returns the encodings of a request's first batch."""
        return next(catalog.TASKS[self.task].run(request, self._model())).encodings

    def answer(self, request: Any) -> Answer:
        """Returns the answer to a request.

        Raises:
            CallerError: The task cannot answer the request.
            EngineError: A run fails, or its outputs are not finite.
        """
        encodings = self.encode(request)
        rows = self._run(encodings)
        return Answer(encodings, rows, self.decode(request, rows, alone=False))

    def decode(self, request: Any, rows: Sequence[Row], *, alone: bool = True) -> Any:
        """Returns the result for outputs of the first batch, such as a checkpoint's; unless `alone`, this graph runs later batches.

        Raises:
            EngineError: The task needs later batches, but `alone` is set.
        """
        first = [rows]

        def execute(encodings: Sequence[Encoding]) -> Sequence[Row]:
            if first:
                return first.pop()
            if alone:
                raise EngineError(
                    "it needs more than one run (`joint` or `explain`), which is not compared with a checkpoint; remove that parameter."
                )
            return self._run(encodings)

        return to_plain(run_all(catalog.TASKS[self.task].run(request, self._model()), execute))

    def _run(self, encodings: Sequence[Encoding]) -> list[Row]:
        return [row for encoding in encodings for row in self.engine.run([encoding])]

    def _model(self) -> TaskModel:
        return TaskModel(self.tokenizer, self.config)


def open_engine(folder: Path, graph: GraphSpec, tokenizer: TokenizerSpec, provider: Provider) -> OnnxEngine:
    """Opens a graph of a bundle in a session.

    Raises:
        ProviderError: This machine cannot run the graph on the provider; the message says what is missing.
    """
    return OnnxEngine(folder / graph.file, graph, pad_id=tokenizer.pad_id, padding_side=tokenizer.padding_side, provider=provider)
