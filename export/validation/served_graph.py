"""A graph that answers inputs as the service does, with its reader, tokenizer, engine and decoder; its speed; the samples to answer."""

import itertools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from bertserve.export.tasks import EXPORT_TASKS
from bertserve.export.tasks.export_task import ExportTask
from bertserve.export.tasks.sample_texts import LONG_TEXT, NAMES_TEXT, SHORT_TEXT
from bertserve.service.body.json_text import to_plain
from bertserve.service.body.reading import validate_as
from bertserve.service.body.task_body import TRUSTED_LIMITS, TaskBody
from bertserve.service.bundle.graph_spec import GraphSpec, Outputs, Speed, Timing
from bertserve.service.bundle.manifest import Manifest, SpecialPart
from bertserve.service.engine.hardware import cpu_instructions, cpu_name
from bertserve.service.engine.onnx_engine import OnnxEngine
from bertserve.service.engine.sessions import unavailable_reason
from bertserve.service.errors import EngineError
from bertserve.service.providers import Provider
from bertserve.service.tasks import embed
from bertserve.service.tasks.step import Step, TaskModel, drive
from bertserve.service.text.tokenizer import Encoding, Tokenizer

if TYPE_CHECKING:
    from bertserve.export.checkpoint.checkpoint import Checkpoint

MAX_FULL_LENGTH = 4096  # tokens; PyTorch needs length x length numbers per head, which is 1 GiB for 16 heads, with a peak of twice as much


@dataclass(frozen=True)
class ModelAnswer:
    """An answer of a graph, or of a checkpoint, which gives only outputs.

    Attributes:
        rows: The outputs of its first batch.
        result: The result that a client gets; None for a checkpoint, whose outputs are decoded by the graph.
        encodings: The encodings of the first batch.
    """

    rows: Sequence[Outputs]
    result: Any = None
    encodings: Sequence[Encoding] = ()


@dataclass(frozen=True, eq=False)
class ServedGraph:
    """A graph with the tokenizer, engine and task that give its answers; each encoding runs in its own batch.

    `provider` can differ from the graph's.
    """

    graph: GraphSpec
    engine: OnnxEngine
    tokenizer: Tokenizer
    config: "Manifest | Checkpoint"
    provider: Provider = "cpu"

    @property
    def task(self) -> ExportTask:
        """The exporter's record of its task."""
        return EXPORT_TASKS[self.config.task]

    def predict(self, input_: Any) -> ModelAnswer:
        """Returns the answer.

        Raises:
            CallerError: The task cannot answer the input.
            EngineError: A run fails.
        """
        batches: list[tuple[Sequence[Encoding], Sequence[Outputs]]] = []

        def execute(step: Step) -> Sequence[Outputs]:
            rows = self._run_alone(step.encodings)
            batches.append((step.encodings, rows))
            # the checkpoint has only the whole outputs, but the service decodes the small ones
            return self._run_alone(step.encodings, small_outputs=step.small_outputs) if self.graph.small_outputs else rows

        result = self._run(input_, execute)
        encodings, rows = batches[0] if batches else ((), ())
        return ModelAnswer(rows, result, encodings)

    def decode(self, input_: Any, rows: Sequence[Outputs]) -> Any:
        """Returns the result for a checkpoint's outputs of the first batch.

        Raises:
            EngineError: The task needs more batches.
        """
        batches = [rows]

        def execute(_: Step) -> Sequence[Outputs]:
            if not batches:
                raise EngineError(
                    "it needs more than one run (`joint` or `explain`), which is not compared with a checkpoint; remove that parameter."
                )
            return batches.pop()

        return self._run(input_, execute)

    def _run_alone(self, encodings: Sequence[Encoding], *, small_outputs: bool = False) -> Sequence[Outputs]:
        return [row for encoding in encodings for row in self.engine.run([encoding], small_outputs=small_outputs)]

    def _run(self, input_: Any, execute: Callable[[Step], Sequence[Outputs]]) -> Any:
        """Returns the result, without the service's limits of cost; for `execute`, see `drive`."""
        return to_plain(drive(self.task.task_spec.function(input_, TaskModel(self.tokenizer, self.config)), execute))

    def predict_body(self, document: Mapping[str, Any]) -> Any:
        """Returns the response of the HTTP API to a request body."""
        body = validate_body(self.task, document)
        return body.to_response([self.predict(input_).result for input_ in body.task_inputs(self.config)])


def validate_body(task: ExportTask, document: Mapping[str, Any]) -> TaskBody:
    """Returns a request body as the service reads it, with the limits of trusted files."""
    return validate_as(task.task_spec.body, document, TRUSTED_LIMITS)


def open_graph(
    folder: Path, graph: GraphSpec, tokenizer: Tokenizer, config: "Manifest | Checkpoint", provider: Provider | None = None
) -> ServedGraph:
    """Opens a graph on a provider, by default its own, or the CPU if this machine lacks it."""
    provider = provider or (graph.provider if unavailable_reason(graph.provider) is None else "cpu")
    spec = config.tokenizer
    engine = OnnxEngine(folder / graph.file, graph, pad_id=spec.pad_id, padding_side=spec.padding_side, provider=provider)
    return ServedGraph(graph, engine, tokenizer, config, provider)


def measure_latency(engine: OnnxEngine, *, max_length: int, pad_id: int) -> Speed:
    """Times single texts of up to `MAX_FULL_LENGTH` tokens on one thread, 3 to 15 runs each; the token `pad_id` fills the texts."""

    def median_ms(length: int) -> float:
        batch = [Encoding(np.full(length, pad_id, dtype=np.int64), np.zeros(length, dtype=np.int64), masks=(1,))]
        engine.run(batch)  # the first run is slower
        seconds: list[float] = []
        while len(seconds) < 3 or (len(seconds) < 15 and sum(seconds) < 0.5):
            start = time.perf_counter()
            engine.run(batch)
            seconds.append(time.perf_counter() - start)
        return round(1000 * statistics.median(seconds), 3)

    lengths = sorted({min(length, max_length) for length in (16, 64, 128, MAX_FULL_LENGTH)})
    timings = tuple(Timing(length=length, median_ms=median_ms(length)) for length in lengths)
    return Speed(cpu=cpu_name(), instructions=cpu_instructions(), threads=1, timings=timings)


def model_sample_inputs(config: "Manifest | Checkpoint", count: Callable[[str], int] | None = None) -> list[Any]:
    """Returns the sample inputs of a model's task, and inputs for its own added tokens and prompts.

    With `count`, which counts tokens, the last input has the model's maximum length, but at most about `MAX_FULL_LENGTH` tokens.
    """
    task, spec = EXPORT_TASKS[config.task], config.tokenizer
    inputs = task.sample_inputs(spec)
    tokens = [token.token for token in spec.added_tokens][:512]  # some tokenizers have thousands
    step = max(1, min(16, spec.max_length // 8))
    for start in range(0, len(tokens), step):
        text = " met ".join(f"{token} Ada {token}" for token in tokens[start : start + step])
        inputs.append(task.text_input(text, spec))
    prompts = config.embedding.prompts.values() if config.embedding else ()
    inputs += [replace(task.text_input(SHORT_TEXT, spec), prompt=prompt) for prompt in prompts]
    if not any(isinstance(part, SpecialPart) for part in spec.single):
        inputs = [input_ for input_ in inputs if input_.chars]  # an empty text has no tokens, and no answer
    if count is not None:
        length = min(spec.max_length, MAX_FULL_LENGTH)
        # at the model's own length, the text is longer, so that it is cut; at a shorter length, where nothing is cut, it leaves space for
        # special tokens and the second text of a pair
        target_length = length + length // 4 if length == spec.max_length else length - 32
        words = list(itertools.islice(itertools.cycle((NAMES_TEXT + LONG_TEXT).split()), length))
        text = " ".join(words[: length * target_length // count(" ".join(words))])
        inputs.append(task.text_input(text, spec))
    if config.embedding is None:
        return inputs
    [bundle_input] = embed.embed_inputs([""], embed.EmbedParameters(), config)  # with the bundle's pooling and layers
    return [replace(bundle_input, text=input_.text, prompt=input_.prompt) for input_ in inputs]
