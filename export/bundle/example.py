"""The request that a bundle stores with its graph's answer, for `bert-serve check` to ask again."""

from __future__ import annotations

import json
from typing import Any

from bertserve.export.checkpoint.checkpoint import Checkpoint
from bertserve.export.evidence.predict import predict
from bertserve.service.backend.onnx_engine import OnnxEngine
from bertserve.service.bundle.manifest import Example, Task
from bertserve.service.tasks import choose
from bertserve.service.text.tokenizer import Tokenizer
from bertserve.service.wire.reading import Limits, read_body

# Requests whose answers are clear, so that another CPU's rounding does not change them.
EXAMPLES: dict[Task, dict[str, Any]] = {
    "text-classification": {"inputs": "This is a surprisingly touching film, and beautifully acted."},
    "token-classification": {"inputs": "Ada Lovelace wrote to Charles Babbage from London."},
    "question-answering": {
        "inputs": {"question": "Where was the bridge built?", "context": "The bridge was built in Porto in 1886 by Eiffel's company."}
    },
    "fill-mask": {"inputs": "The king of [MASK] died in 1066.", "parameters": {"top_k": 1}},
    "multiple-choice": {
        "inputs": {"prompt": "She put the kettle on and", "choices": ["waited for the water to boil.", "rode it to the railway station."]}
    },
    "feature-extraction": {"inputs": "The bridge was built in Porto in 1886.", "parameters": {"dimensions": 8, "normalize": True}},
}
PAIR = {"inputs": {"text": "She opened the door of the old house.", "text_pair": "Nobody had been inside for years."}}


def answer_example(checkpoint: Checkpoint, tokenizer: Tokenizer, engine: OnnxEngine) -> Example:
    """Returns a request body and the graph's answer to it, as they are sent over HTTP."""
    example = dict(PAIR if checkpoint.pairs_only else EXAMPLES[checkpoint.task])
    if checkpoint.mask is not None:
        example["inputs"] = example["inputs"].replace("[MASK]", checkpoint.mask.token)
    body = read_body(checkpoint.task, json.dumps(example).encode(), Limits(max_inputs=choose.MAX_CHOICES, max_chars=1000))
    (request,) = body.requests(checkpoint)
    return Example(request=example, result=body.answer([predict(checkpoint.task, request, tokenizer, engine, checkpoint)]))
