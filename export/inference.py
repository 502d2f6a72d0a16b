"""Converts texts to a graph's inputs, runs graphs unchanged with ONNX Runtime on the CPU, and compares their outputs."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from bertserve.export.checkpoint.checkpoint import Checkpoint
from bertserve.export.checkpoint.signature import MASK_INDEX
from bertserve.export.int8_texts import MAX_LINE_TOKENS, PASSAGE_COUNTS, SplitTexts
from bertserve.export.progress import parallel_map
from bertserve.export.tasks import EXPORT_TASKS
from bertserve.service.bundle.graph_spec import InputSpec
from bertserve.service.engine.onnx_engine import build_feed
from bertserve.service.engine.sessions import session_options
from bertserve.service.text.tokenizer import Encoding, Tokenizer
from bertserve.service.text.windows import kept_of_pair

BATCH_TEXTS, BATCH_TOKENS = 16, 1024  # maximum texts and tokens of a batch, which bound its memory; a single text can have more tokens

Feed = Mapping[str, NDArray[Any]]
TextToCut = tuple[Sequence[int], int]  # the token ids of a text, and the maximum number to keep


def make_feeds(
    texts: SplitTexts, checkpoint: Checkpoint, tokenizer: Tokenizer, inputs: Sequence[InputSpec] | None = None, *, padding: int = 0
) -> list[Feed]:
    """Returns the graph's inputs for each text, then for each pair, as the task uses them; each is a batch of one.

    Lines are cut to `MAX_LINE_TOKENS`, and pairs of lines to twice as many. Passages, and pairs of the user's file, are cut to the longest
    length in `PASSAGE_COUNTS` or to the model's length, whichever is shorter. For fill-mask, one token in eight is masked. By default,
    `inputs` are the traced graph's. A number of tokens `padding` is added on the right.
    """
    task, longest = EXPORT_TASKS[checkpoint.task], max(PASSAGE_COUNTS)
    tokenized_pairs = [_tokenize(tokenizer, pair, longest) for pair in texts.pairs]
    user_pairs = [(pair[0], pair[1]) for pair in tokenized_pairs if len(pair) == 2]  # shorter if a text is left out
    lines = _tokenize(tokenizer, texts.lines, MAX_LINE_TOKENS)
    passages = _tokenize(tokenizer, texts.passages, longest)
    singles, pairs = task.make_singles_and_pairs(lines, passages, user_pairs, checkpoint.tokenizer)
    mask_id = None if checkpoint.tokenizer.mask is None else checkpoint.tokenizer.mask.id
    encodings = [_assemble_single(tokenizer, *text, mask_id=mask_id, first_mask=i) for i, text in enumerate(singles)]
    for (first, _), (second, max_tokens) in pairs:
        encodings.append(_assemble_pair(tokenizer, first, second, max(2 * MAX_LINE_TOKENS, max_tokens), long_second=task.needs_pairs))
    inputs, pad_id = checkpoint.inputs if inputs is None else inputs, checkpoint.tokenizer.pad_id
    return [build_feed([encoding], inputs, (1, len(encoding) + padding), pad_id=pad_id) for encoding in encodings]


def _tokenize(tokenizer: Tokenizer, texts: Sequence[str], max_tokens: int) -> list[TextToCut]:
    """Returns the tokens of texts, without texts that are empty inputs: only control characters, and no special tokens."""
    without_specials = tokenizer.max_text_tokens(pair=False) == tokenizer.spec.max_length
    return [(entry.ids, max_tokens) for entry in tokenizer.tokenize(texts) if not without_specials or len(entry)]


def _assemble_single(tokenizer: Tokenizer, text: Sequence[int], max_tokens: int, *, mask_id: int | None, first_mask: int) -> Encoding:
    """Returns a text; with a mask, every eighth token is masked, from `first_mask % 8` on."""
    ids = list(text[: min(tokenizer.max_text_tokens(pair=False), max_tokens)])
    if mask_id is None:
        return tokenizer.assemble(ids)
    ids = ids or [mask_id]
    masks = list(range(first_mask % min(8, len(ids)), len(ids), 8))
    for mask in masks:
        ids[mask] = mask_id
    return tokenizer.assemble(ids, masks=masks)


def _assemble_pair(tokenizer: Tokenizer, first: Sequence[int], second: Sequence[int], max_tokens: int, *, long_second: bool) -> Encoding:
    """Returns a pair, cut to `max_tokens`; with `long_second`, the first text is short, as a question before its passage."""
    max_tokens = min(tokenizer.max_text_tokens(pair=True), max_tokens)
    a, b = map(len, kept_of_pair(len(first), len(second), max_tokens, "right"))
    if long_second:
        a = min(len(first), min(max_tokens, 2 * MAX_LINE_TOKENS) // 4)
        b = max_tokens - a
    return tokenizer.assemble(first[:a], second[:b])


def run_each(session: Any, feeds: Sequence[Feed], names: Sequence[str] | None = None) -> list[list[NDArray[Any]]]:
    """Returns the outputs `names` (None: all) for each of the inputs; the session must have a single thread."""
    return list(parallel_map(lambda feed: session.run(names, dict(feed)), feeds))


def batch_by_length(feeds: Sequence[Feed]) -> list[Feed]:
    """Returns the inputs as batches of texts with the same number of tokens, so that no text is padded.

    The longest come first; otherwise, one core would work on them at the end while the others are idle.
    """
    by_length: dict[int, list[Feed]] = {}
    for feed in feeds:
        by_length.setdefault(token_count(feed), []).append(feed)
    batched_feeds = []
    for length, group in sorted(by_length.items(), reverse=True):
        size = max(1, min(BATCH_TEXTS, BATCH_TOKENS // max(1, length)))
        batched_feeds += [_join(group[start : start + size], length) for start in range(0, len(group), size)]
    return batched_feeds


def token_count(feed: Feed) -> int:
    """Returns the number of tokens of a text or, in a batch, of each of its texts."""
    return next(int(value.shape[1]) for value in feed.values() if value.ndim == 2)


def _join(feeds: Sequence[Feed], length: int) -> Feed:
    """Returns the inputs of several texts of the same length as one batch; mask positions count through the whole batch."""
    return {
        name: np.concatenate([feed[name] + i * length if name == MASK_INDEX.name else feed[name] for i, feed in enumerate(feeds)])
        for name in feeds[0]
    }


def compute_outputs(path: Path, feeds: Sequence[Feed]) -> list[NDArray[np.float32]]:
    """Returns each output of a graph over all feeds, flattened, float32; the order depends only on the feeds."""
    return [
        output.astype(np.float32, copy=False)
        for output in concatenate_runs(run_each(open_cpu_session(path, threads=1), batch_by_length(feeds)))
    ]


def concatenate_runs(runs: Sequence[Sequence[NDArray[Any]]]) -> list[NDArray[Any]]:
    """Returns each output over all runs, flattened."""
    return [np.concatenate([value.ravel() for value in values]) for values in zip(*runs, strict=True)]


def rms_error(expected: Sequence[NDArray[np.float32]], actual: Sequence[NDArray[np.float32]]) -> float:
    """Returns the largest root mean square difference of an output, relative to its standard deviation; empty outputs are skipped."""
    pairs = [pair for pair in zip(expected, actual, strict=True) if pair[0].size]
    return float(np.max([np.sqrt(np.mean((a - b) ** 2)) / max(float(a.std()), 1e-12) for a, b in pairs]))  # Python's max can drop NaN


def open_cpu_session(path: Path, *, threads: int = 0) -> Any:
    """Returns a CPU session that runs the graph unchanged, with a number of threads per run; 0 for one per core."""
    return ort.InferenceSession(str(path), session_options(threads), providers=["CPUExecutionProvider"])
