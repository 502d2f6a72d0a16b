"""Answers a request with a graph through the service's own tokenizer, engine and decoder, without its queues."""

from __future__ import annotations

from typing import Any

from service.backend.onnx_engine import Engine
from service.tasks.catalog import TASKS
from service.tasks.encoded import ModelConfig
from service.text.tokenizer import Tokenizer
from service.wire.rendering import to_plain


def predict(task: str, request: Any, tokenizer: Tokenizer, engine: Engine, config: ModelConfig) -> Any:
    """Returns the result that a client would read from the service's answer, each window run alone.

    Args:
        task: Hugging Face name of the task.
        request: A request of it.
        tokenizer: The bundle's tokenizer.
        engine: The graph.
        config: Labels and activation: a manifest, or a checkpoint.
    """
    spec = TASKS[task]
    encoded = spec.encode(request, tokenizer)
    rows = [engine.run([encoding])[0] for encoding in encoded.encodings]
    return to_plain(spec.decode(request, encoded, rows, config))
