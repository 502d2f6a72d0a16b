"""Answers a request with a graph through the service's own tokenizer, engine and decoder, without its queues."""

from __future__ import annotations

from typing import Any

from bertserve.service.backend.onnx_engine import Engine
from bertserve.service.tasks.batch import ModelConfig, TaskModel, run_all
from bertserve.service.tasks.catalog import TASKS
from bertserve.service.tasks.cost import Budget
from bertserve.service.text.tokenizer import Tokenizer
from bertserve.service.wire.json_text import to_plain


def predict(task: str, request: Any, tokenizer: Tokenizer, engine: Engine, config: ModelConfig) -> Any:
    """Returns the result that a client would read from the service's answer, each window run alone.

    Args:
        task: Hugging Face name of the task.
        request: A request of it.
        tokenizer: The bundle's tokenizer.
        engine: The graph.
        config: Labels and activation: a manifest, or a checkpoint.
    """
    model = TaskModel(tokenizer, config, Budget())
    return to_plain(run_all(TASKS[task].run(request, model), lambda encodings: [engine.run([encoding])[0] for encoding in encodings]))
