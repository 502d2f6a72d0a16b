"""ModelRunner: runs batches of a model's texts, measures them, and splits those whose outputs would be too large."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from typing import Any

from bertserve.service.bundle.graph_spec import GraphSpec
from bertserve.service.engine.cost_model import CostModel
from bertserve.service.engine.engines import Engines
from bertserve.service.errors import BertServeError
from bertserve.service.metrics import ModelMetrics
from bertserve.service.models.request_run import Text
from bertserve.service.tasks.decoding import Row
from bertserve.service.tracing.trace import Trace

logger = logging.getLogger("bertserve.model")

# Limit of a run's logits over the vocabulary: 8 MiB, and the same again while the bias is added. One text with 64 masks fits if the
# vocabulary has 32,768 tokens; the logits of a full batch of masks would need gigabytes.
MAX_LOGITS = 2**21
# Limit of a run's attention weights, which are in memory twice, 16 MiB each. The weights of one text may be a quarter of it.
MAX_WEIGHTS = 2**22


class ModelRunner:
    """Runs the graph of a model for the scheduler. It does not refer to the model, so the model is freed when it is unloaded."""

    def __init__(
        self,
        graph: GraphSpec,
        engines: Engines,
        cost: CostModel,
        metrics: ModelMetrics,
        *,
        labels: Mapping[str, str],
        vocabulary_size: int,
        batch_variant: bool = False,
    ) -> None:
        """Combines its parts.

        Args:
            graph: The description of the graph.
            engines: Run the graph.
            cost: Predicts the seconds of a run on an inference thread, and learns from each run.
            metrics: The metrics of the model.
            labels: Attributes of the model in traces.
            vocabulary_size: Number of logits of each mask.
            batch_variant: Whether texts share a batch even if the graph is not batch-invariant.
        """
        self.shares_batches = graph.batch_invariant or batch_variant
        self.seconds = cost.seconds
        self.shape = graph.shape
        self.engines = engines
        self._graph = graph
        self._cost = cost
        self._metrics = metrics
        self._labels = labels
        self._logits_per_mask = vocabulary_size if any(output.kind == "per_mask" for output in graph.outputs) else 0

    def run(self, payloads: Sequence[Text], *, multi_threaded: bool = False) -> Sequence[Row]:
        """Returns the outputs of each text that its task keeps.

        Raises:
            EngineError: The graph fails; `input_index` is the index of the input, if there is one text.
        """
        if len(payloads) > 1 and self._gives_too_much(payloads):
            half = len(payloads) // 2
            return [
                *self.run(payloads[:half], multi_threaded=multi_threaded),
                *self.run(payloads[half:], multi_threaded=multi_threaded),
            ]
        lengths = [len(text.encoding.ids) for text in payloads]
        rows, length = self._graph.shape(len(payloads), max(lengths)) or (len(payloads), max(lengths))
        single = self.engines.single_threaded
        engine = self.engines.for_multi_threaded_run(rows * length) if multi_threaded else single
        start = time.perf_counter()
        for text in payloads:
            if text.run.started is None:
                text.run.started = start
        error = None
        try:
            outputs = engine.run([text.encoding for text in payloads])
        except BertServeError as caught:
            error = caught
            if len(payloads) == 1:
                error.input_index = payloads[0].index
            raise
        finally:
            if traces := [text.run.trace for text in payloads if text.run.trace is not None]:
                self._trace(list(dict.fromkeys(traces)), lengths, rows * length, start, multi_threaded=engine is not single, error=error)
        seconds = time.perf_counter() - start
        if engine is single:
            self._cost.observe(rows, length, seconds)
        else:
            self._metrics.multi_threaded_runs.inc()
        self._metrics.inference_seconds.observe(seconds)
        self._metrics.batch_rows.observe(len(payloads))
        self._metrics.tokens_real.inc(sum(lengths))
        self._metrics.tokens_padded.inc(rows * length - sum(lengths))
        if len(outputs) != len(payloads):
            return outputs  # the scheduler refuses them
        return [row if text.keep is None else text.keep(text.place, row) for text, row in zip(payloads, outputs, strict=True)]

    def _gives_too_much(self, texts: Sequence[Text]) -> bool:
        """Returns whether a run would return too many logits over the vocabulary or attention weights at the same time."""
        if self._logits_per_mask and sum(len(text.encoding.masks) for text in texts) * self._logits_per_mask > MAX_LOGITS:
            return True
        if not self._graph.gives_attentions:
            return False
        maps = sum(len(text.encoding.maps) for text in texts)
        return maps * max(len(text.encoding.ids) for text in texts) ** 2 > MAX_WEIGHTS

    def _trace(
        self,
        traces: Sequence[Trace],
        lengths: Sequence[int],
        padded: int,
        start: float,
        *,
        multi_threaded: bool,
        error: Exception | None,
    ) -> None:
        """Records a span of a run that ends now, for the traced requests in it."""
        real = sum(lengths)
        batch = {"rows": len(lengths), "tokens": real, "padded_tokens": padded - real, "multi_threaded": multi_threaded}
        attributes: dict[str, Any] = {f"bertserve.{name}": value for name, value in self._labels.items()}
        attributes |= {f"bertserve.batch.{name}": value for name, value in batch.items()}
        kind = None if error is None else type(error).__name__
        traces[0].tracer.batch(traces, f"batch {self._labels['model']}", start, time.perf_counter(), attributes=attributes, error=kind)
