"""RequestProgress: the inputs of a request on their way from texts to results; Prediction: its results."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Any

from bertserve.service.bundle.graph_spec import Outputs
from bertserve.service.errors import BertServeError, TooLargeError
from bertserve.service.scheduling.records import Item
from bertserve.service.tasks.cost import ZERO_COST, Cost
from bertserve.service.tasks.step import ScoredLabels, Step, TaskGenerator, TaskResult
from bertserve.service.text.tokenizer import Encoding, ReadSpan

if TYPE_CHECKING:
    from bertserve.service.tracing import RequestSpan


@dataclass(slots=True)
class Prediction:
    """The results of a request, with its times in seconds.

    Attributes:
        results: One per input, in order.
        truncated: Indices of inputs whose text was cut.
        warnings: Further warnings for the caller: index of the input, and text as `topic; message`.
        tokens: Tokens that the model read, including special tokens, plus one for each mask to be filled.
        tokenize_s: Seconds to tokenize all inputs.
        queue_s: Seconds until its first run started, without `tokenize_s`.
        inference_s: Seconds from the start of its first run to the end of its last one.
        decode_s: Seconds to decode all inputs.
        response_bytes: Approximate bytes of the results as JSON.
        read_spans: The spans that the model read of a single input, if it is cut or was read in several windows.
        scored_labels: The predictions of all inputs with calibrated scores, for the metrics.
        abstentions: Number of inputs without a decision, although one was requested.
    """

    results: list[Any] = field(default_factory=list)
    truncated: list[int] = field(default_factory=list)
    warnings: list[tuple[int, str]] = field(default_factory=list)
    tokens: int = 0
    tokenize_s: float = 0.0
    queue_s: float = 0.0
    inference_s: float = 0.0
    decode_s: float = 0.0
    response_bytes: int = 0
    read_spans: Sequence[ReadSpan] = ()
    scored_labels: list[ScoredLabels] = field(default_factory=list)
    abstentions: int = 0


def truncation_warning(max_tokens: int, cut_inputs: str = "") -> str:
    """Returns the warning of a truncated text; `cut_inputs` are the number and the name of the cut ones of several inputs."""
    return f"truncation; {cut_inputs}cut to the model's {max_tokens} tokens"


@dataclass(slots=True, eq=False, repr=False)
class EncodingItem(Item):
    """One encoding of one input.

    Attributes:
        encoding: The encoding to run.
        progress: Its request.
        input_index: Index of its input in the request.
        step: The step of its task.
        place: Index of the encoding in the step.
    """

    encoding: Encoding
    progress: "RequestProgress"
    input_index: int
    step: Step
    place: int


@dataclass(slots=True, eq=False)
class RequestProgress:
    """The progress of one request: the scheduler's `Work`. Only one thread at a time continues it.

    Attributes:
        generators: The running tasks, one per input.
        max_tokens: Maximum tokens of the request, with the reserve for later steps and decoding.
        chars: Characters of all inputs.
        trace: Records the stages, if the request is traced.
        steps: The step to run of each input that is tokenized; None once the input has its result.
        held_tokens: The tokens of the queue that it needs.
        cost: Cost of the steps so far in addition to their tokens.
        prediction: The prediction so far.
        started: Time at which the first run started, or None; in seconds of `time.perf_counter`, as all times here.
        ended: Time at which the last run ended.
    """

    generators: Sequence[TaskGenerator]
    max_tokens: int
    chars: int = 0
    trace: "RequestSpan | None" = None
    steps: list[Step | None] = field(default_factory=list)
    held_tokens: int = 0
    cost: Cost = ZERO_COST
    prediction: Prediction = field(default_factory=Prediction)
    started: float | None = None
    ended: float = 0.0

    def prepare(self) -> list[EncodingItem]:
        """Tokenizes all inputs, and returns their first encodings, as `proceed` does.

        Raises:
            TooLargeError: The request is larger than the queue takes, or its cost exceeds a limit.
            InvalidValueError: An input cannot be encoded; `input_index` is its index.
        """
        start = time.perf_counter()
        prediction, items = self.prediction, []
        try:
            for index, generator in enumerate(self.generators):
                step = next(generator)
                self.steps.append(step)
                prediction.results.append(None)
                items += self._items(index, step)
                prediction.warnings += [(index, warning) for warning in step.warnings]
                if step.truncated:
                    prediction.truncated.append(index)
                prediction.read_spans = step.read_spans if index == 0 else ()
                self.cost = step.cost if index == 0 else self.cost + step.cost
                self.held_tokens = prediction.tokens + self.cost.extra_tokens
                # checked after each input, because the windows of one text can contain a thousand times as many tokens as the text
                if self.held_tokens > self.max_tokens:
                    raise TooLargeError(
                        "the request has at least {tokens} tokens, including all windows and decoding, and the queue takes "
                        "{most} of one request; send fewer or shorter texts at once, make `stride`, `beam` or `top_k` smaller, or remove "
                        "`explain`; the operator can raise --max-queue-tokens.",
                        tokens=self.held_tokens,
                        most=self.max_tokens,
                    )
                self.cost.check()
        except BertServeError as error:
            error.input_index = index
            raise
        end = time.perf_counter()
        prediction.tokenize_s = end - start
        if self.trace is not None:
            self.trace.add_stage("tokenize", start, end)
        return items or self.proceed([])

    def proceed(self, rows: Sequence[Outputs]) -> list[EncodingItem]:
        """Continues the open inputs with a row for each of their encodings.

        Returns:
            The items of the next encodings; none if the request is done.

        Raises:
            InvalidValueError: An input cannot be decoded; `input_index` is its index.
            TooLargeError: Its cost exceeds a limit.
        """
        start = self.ended = time.perf_counter()
        remaining, items = iter(rows), []
        try:
            for index, step in enumerate(self.steps):
                if step is not None:
                    items += self._continue(index, list(islice(remaining, len(step.encodings))))
        except BertServeError as error:
            error.input_index = index
            raise
        end = time.perf_counter()
        self.prediction.decode_s += end - start
        if self.trace is not None:
            self.trace.add_stage("decode", start, end)
        return items

    def complete(self, start: float) -> Prediction:
        """Returns the prediction of a request that is done, with its times; `start` is the time of its arrival."""
        prediction = self.prediction
        # wall clock times that do not overlap, so that the times of a request with several runs add up too
        started = self.ended if self.started is None else self.started
        prediction.queue_s = max(started - start - prediction.tokenize_s, 0.0)
        prediction.inference_s = self.ended - started
        prediction.response_bytes = self.cost.response_bytes
        return prediction

    def _items(self, index: int, step: Step) -> list[EncodingItem]:
        """Returns the items of the encodings in an input's step, and counts their tokens."""
        # a mask counts as one more token, because its projection onto the vocabulary costs about as much
        items = [
            EncodingItem(len(encoding.ids) + len(encoding.masks), encoding, self, index, step, place)
            for place, encoding in enumerate(step.encodings)
        ]
        self.prediction.tokens += sum(item.tokens for item in items)
        return items

    def _continue(self, index: int, rows: Sequence[Outputs]) -> list[EncodingItem]:
        """Continues an input until it has another step to run, which it returns, or a result."""
        try:
            while True:
                step = self.generators[index].send(rows)
                self.cost += step.cost
                self.cost.check()
                self.steps[index] = step
                if step.encodings:
                    return self._items(index, step)
                rows = []
        except StopIteration as ended:
            result: TaskResult = ended.value
            self.prediction.results[index] = result.value
            self.prediction.scored_labels += result.scored_labels
            self.prediction.abstentions += result.abstained
            self.steps[index] = None
            return []
