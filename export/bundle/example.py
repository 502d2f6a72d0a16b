"""The request that a bundle stores with its graph's answer, for `bert-serve check` to ask again."""

from __future__ import annotations

import json

from bertserve.export.checkpoint.checkpoint import Checkpoint
from bertserve.export.evidence.predict import predict
from bertserve.export.tasks.catalog import TASKS
from bertserve.service.backend.onnx_engine import OnnxEngine
from bertserve.service.bundle.manifest import Example
from bertserve.service.tasks import choose
from bertserve.service.tasks.body import Limits
from bertserve.service.text.tokenizer import Tokenizer
from bertserve.service.wire.reading import read_body


def answer_example(checkpoint: Checkpoint, tokenizer: Tokenizer, engine: OnnxEngine) -> Example:
    """Returns a request body and the graph's answer to it, as they are sent over HTTP."""
    example = TASKS[checkpoint.task].example(checkpoint.tokenizer_spec(""))
    body = read_body(checkpoint.task, json.dumps(example).encode(), Limits(max_inputs=choose.MAX_CHOICES, max_chars=1000))
    (request,) = body.requests(checkpoint)
    return Example(request=example, result=body.answer([predict(checkpoint.task, request, tokenizer, engine, checkpoint)]))
