"""The request that a bundle stores, and the result that its graph gives, for `bert-serve check`."""

from __future__ import annotations

import json
from typing import Any

from export.checkpoint.load import Checkpoint
from export.evidence import predict
from service.backend.onnx_engine import OnnxEngine
from service.bundle.manifest import Example, Task
from service.text.tokenizer import Tokenizer
from service.wire.reading import Limits, read_body

# Requests whose answers are clear, so that another CPU's rounding does not change them.
EXAMPLES: dict[Task, dict[str, Any]] = {
    "text-classification": {"inputs": "This is a surprisingly touching film, and beautifully acted."},
    "token-classification": {"inputs": "Ada Lovelace wrote to Charles Babbage from London."},
    "question-answering": {
        "inputs": {"question": "Where was the bridge built?", "context": "The bridge was built in Porto in 1886 by Eiffel's company."}
    },
    "fill-mask": {"inputs": "The king of [MASK] died in 1066.", "parameters": {"top_k": 1}},
    "feature-extraction": {"inputs": "The bridge was built in Porto in 1886.", "parameters": {"dimensions": 8, "normalize": True}},
}


def answered(loaded: Checkpoint, tokenizer: Tokenizer, engine: OnnxEngine) -> Example:
    """Returns a request body and what the graph answers to it, in the form of the wire."""
    example = dict(EXAMPLES[loaded.task])
    if loaded.mask is not None:
        example["inputs"] = example["inputs"].replace("[MASK]", loaded.mask.token)
    body = read_body(loaded.task, json.dumps(example).encode(), Limits(max_inputs=1, max_chars=1000))
    (request,) = body.requests(loaded)
    return Example(request=example, result=body.answer([predict.answer(loaded.task, request, tokenizer, engine, loaded)]))
