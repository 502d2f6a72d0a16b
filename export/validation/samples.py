"""The requests on which a graph is compared with its checkpoint, and the graph's answers to them.

A few requests are fixed, of every kind, on which it must answer alike: short and long texts, Unicode, pairs, windows. And some hundred are of
ordinary texts, on which the share of answers is measured that a graph of coarser numbers gives alike. `export/tasks` has those of each task.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from bertserve.export.tasks.catalog import TASKS
from bertserve.export.tasks.spec import LONG, NAMES, SENTENCE, TEXTS
from bertserve.service.backend.onnx_engine import Engine
from bertserve.service.bundle.manifest import SpecialPiece, Task, TokenizerSpec
from bertserve.service.tasks import catalog, multiple_choice
from bertserve.service.tasks.batch import ModelConfig, TaskModel, run_all
from bertserve.service.tasks.body import Limits, TaskBody
from bertserve.service.tasks.cost import Budget
from bertserve.service.text.tokenizer import Tokenizer
from bertserve.service.wire.json_text import to_plain
from bertserve.service.wire.reading import read_body

if TYPE_CHECKING:
    from bertserve.export.calibration import Texts

MAX_ADDED_TOKENS = 512  # that are sampled, of the thousands that some tokenizers have
_TOKENS_PER_TEXT = 16
_ATTENTION_TEXTS = 7  # of the built-in ones; each is run with the weights of all layers and heads
MAX_CHARS = 10**8  # of a user's text

MAX_FULL_LENGTH = 4096  # tokens; PyTorch holds attention of length x length for each head, 1 GiB for 16 heads, and twice for a moment


def text_requests(task: Task, texts: Texts, spec: TokenizerSpec) -> list[Any]:
    """Returns a request for each text, each passage and each pair.

    Args:
        task: Hugging Face name of the task; for embeddings, which decide nothing, there are none.
        texts: Ordinary texts, none of which the graph under test was made with.
        spec: What the manifest says of the tokenizer.
    """
    record = TASKS[task]
    texts = replace(texts, passages=tuple(passage for passage in texts.passages if passage not in texts.lines))
    if record.ordinary_requests is not None:
        return record.ordinary_requests(texts, spec)
    return [record.text_request(text, spec) for text in (*texts.lines, *texts.passages)]


def attention_texts() -> list[tuple[str, ...]]:
    """Returns texts and pairs, short and long, whose attention is compared."""
    pair = ("A man is eating food.", "Someone eats.")
    return [*((text,) for text in TEXTS[:_ATTENTION_TEXTS]), pair, (LONG,), (LONG * 2, NAMES), (LONG * 9,)]


def sample_requests(task: Task, spec: TokenizerSpec, prompts: Iterable[str] = ()) -> list[Any]:
    """Returns the fixed requests of a task, and those for what the model has of its own: added tokens, and prompts.

    Args:
        task: Hugging Face name of the task.
        spec: What the manifest says of the tokenizer. Without special tokens in its template an empty text has no tokens, and there is
            no answer to it.
        prompts: What may be put before a text to embed.
    """
    record = TASKS[task]
    if record.fixed_requests is not None:
        requests = record.fixed_requests(spec)
    else:
        requests = [record.text_request(text, spec) for text in ["", *TEXTS, NAMES * 5, LONG * 30]]
    requests += [record.text_request(text, spec) for text in _added_token_texts(spec)]
    requests += [replace(record.text_request(SENTENCE, spec), prompt=prompt) for prompt in prompts]
    bare = not any(isinstance(piece, SpecialPiece) for piece in spec.single)
    return [request for request in requests if request.chars] if bare else requests


def full_length_request(task: Task, spec: TokenizerSpec, count: Callable[[str], int]) -> Any:
    """Returns a request that fills the model's length, or about `MAX_FULL_LENGTH` tokens of a longer one.

    Args:
        task: Hugging Face name of the task.
        spec: The manifest's entry of the tokenizer.
        count: Returns the number of tokens of a text.
    """
    length = min(spec.max_length, MAX_FULL_LENGTH)
    # enough for the model to cut the text to its length; of a longer model nothing does, and special tokens and a second text need room
    wanted = length + length // 4 if length == spec.max_length else length - 32
    words = list(itertools.islice(itertools.cycle((NAMES + LONG).split()), length))
    text = " ".join(words[: length * wanted // count(" ".join(words))])
    record = TASKS[task]
    return record.text_request(text, spec) if record.full_length_request is None else record.full_length_request(text, length)


def _added_token_texts(spec: TokenizerSpec) -> list[str]:
    """Returns texts that spell every added token, a few in each text."""
    tokens = [token.token for token in spec.added_tokens][:MAX_ADDED_TOKENS]
    few = max(1, min(_TOKENS_PER_TEXT, spec.max_length // 8))
    return [" met ".join(f"{token} Ada {token}" for token in tokens[i : i + few]) for i in range(0, len(tokens), few)]


def read_request(task: str, document: Mapping[str, Any]) -> TaskBody:
    """Returns a body as the service reads it, of any length.

    Args:
        task: Hugging Face name of the task.
        document: The body.

    Raises:
        CallerError: It is not a valid body of the task.
    """
    return read_body(task, json.dumps(document).encode(), Limits(max_inputs=multiple_choice.MAX_CHOICES, max_chars=MAX_CHARS))


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
    return to_plain(
        run_all(catalog.TASKS[task].run(request, model), lambda encodings: [engine.run([encoding])[0] for encoding in encodings])
    )
