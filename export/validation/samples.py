"""The requests for comparing a graph with its checkpoint: fixed ones of every kind, and ordinary texts for int8."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from bertserve.export.tasks.catalog import TASKS
from bertserve.export.tasks.spec import LONG, NAMES, SENTENCE
from bertserve.service.bundle.manifest import SpecialPiece, Task, TokenizerSpec
from bertserve.service.tasks import embed
from bertserve.service.tasks.batch import ModelConfig

if TYPE_CHECKING:
    from bertserve.export.calibration import Texts

MAX_ADDED_TOKENS = 512  # maximum number of samples; some tokenizers have thousands
_TOKENS_PER_TEXT = 16

MAX_FULL_LENGTH = 4096  # in tokens; PyTorch needs attention of length x length per head, 1 GiB for 16 heads, and for a moment twice as much


def text_requests(task: Task, texts: Texts, spec: TokenizerSpec) -> list[Any]:
    """Returns a request for each text, passage and pair; none for embeddings, which decide nothing."""
    texts = replace(texts, passages=tuple(passage for passage in texts.passages if passage not in texts.lines))
    return TASKS[task].ordinary_requests(texts, spec)


def sample_requests(task: Task, spec: TokenizerSpec, config: ModelConfig, count: Callable[[str], int] | None = None) -> list[Any]:
    """Returns the fixed requests of a task, and requests for the model's own added tokens and prompts.

    With `count`, which counts tokens, the last request has the model's maximum length, or about `MAX_FULL_LENGTH` tokens if that is shorter.
    """
    record = TASKS[task]
    requests = record.fixed_requests(spec)
    tokens = [token.token for token in spec.added_tokens][:MAX_ADDED_TOKENS]
    step = max(1, min(_TOKENS_PER_TEXT, spec.max_length // 8))
    for start in range(0, len(tokens), step):
        text = " met ".join(f"{token} Ada {token}" for token in tokens[start : start + step])
        requests.append(record.text_request(text, spec))
    prompts = config.embedding.prompts.values() if config.embedding else ()
    requests += [replace(record.text_request(SENTENCE, spec), prompt=prompt) for prompt in prompts]
    if not any(isinstance(piece, SpecialPiece) for piece in spec.single):
        requests = [request for request in requests if request.chars]  # an empty text has no tokens, and no answer
    if count is not None:
        length = min(spec.max_length, MAX_FULL_LENGTH)
        # enough tokens for the model to cut the text; below the model's length nothing is cut, and special tokens and a second text need space
        target_length = length + length // 4 if length == spec.max_length else length - 32
        words = list(itertools.islice(itertools.cycle((NAMES + LONG).split()), length))
        text = " ".join(words[: length * target_length // count(" ".join(words))])
        requests.append(record.text_request(text, spec))
    if config.embedding is None:
        return requests
    own = embed.resolve(embed.EmbedParameters(), config.embedding)  # the bundle's pooling and layers
    return [replace(own, text=request.text, prompt=request.prompt) for request in requests]
