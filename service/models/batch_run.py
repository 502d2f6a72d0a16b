"""Runs a batch of encodings. Only a part of it runs at once if its outputs would be too large."""

from collections.abc import Sequence

from bertserve.service.bundle.graph_spec import Outputs
from bertserve.service.engine.onnx_engine import OnnxEngine
from bertserve.service.models.request_progress import EncodingItem

# Limit of a run's logits over the vocabulary and attention weights: 8 MiB, and the same again while they are computed. One text with 64
# masks fits if the vocabulary has 32,768 tokens; the logits of a full batch of masks would need gigabytes. The attention weights of one
# text can need at most two sevenths of it.
MAX_OUTPUT_VALUES = 2**21


def run_within_limits(engine: OnnxEngine, items: Sequence[EncodingItem], vocabulary_size: int) -> list[Outputs]:
    """Returns what the tasks keep of the outputs of each item. A batch with too many values in its outputs runs in halves.

    Raises:
        EngineError: The graph fails.
    """
    encodings = [item.encoding for item in items]
    if len(items) > 1:
        longest, half = max(len(encoding.ids) for encoding in encodings), len(items) // 2
        values = sum(len(encoding.masks) * vocabulary_size + len(encoding.maps) * longest**2 for encoding in encodings)
        if values > MAX_OUTPUT_VALUES:
            return [row for part in (items[:half], items[half:]) for row in run_within_limits(engine, part, vocabulary_size)]
    outputs = engine.run(encodings, small_outputs=all(item.step.small_outputs for item in items))
    return [item.step.keep(item.place, row) for item, row in zip(items, outputs, strict=True)]
