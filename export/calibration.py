"""What a graph's tensors look like on real text: the inputs of its matrices, and its outputs, for quantization.

The built-in texts (`calibration.txt`) were written for this project: reviews, encyclopedic sentences, passages, questions,
everyday messages. Texts of one's own domain and language are better: `bert-export --calibration FILE`.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from export.checkpoint.checkpoint import Checkpoint
from export.errors import CheckpointError
from export.progress import track
from service.bundle.graph_spec import InputSpec
from service.text.tokenizer import Encoding, Tokenizer

BUILT_IN = Path(__file__).with_name("calibration.txt")
MAX_TOKENS = 128
MAX_TEXTS = 1000
ROWS_PER_TEXT = 14

Feed = dict[str, NDArray[np.int32 | np.int64]]


@dataclass(frozen=True)
class Activations:
    """What one tensor was on the calibration texts.

    Attributes:
        rows: A sample of its rows, float32 [n, width].
        high: Largest value of each channel over all rows, float32 [width].
        low: Smallest value of each channel, float32 [width].
    """

    rows: NDArray[np.float32]
    high: NDArray[np.float32]
    low: NDArray[np.float32]

    @property
    def peak(self) -> NDArray[np.float32]:
        """Largest magnitude of each channel, float32 [width]."""
        return np.maximum(self.high, -self.low)


def read_texts(path: Path) -> list[str]:
    """Returns the texts of a file, one a line.

    Raises:
        CheckpointError: The file cannot be read, or holds fewer than 16 texts.
    """
    try:
        texts = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()][:MAX_TEXTS]
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"the calibration texts `{path}` cannot be read: {error}.") from error
    if len(texts) < 16:
        raise CheckpointError(f"`{path}` holds {len(texts)} texts, and calibration needs 16 at least, one a line; some hundred are better.")
    return texts


def make_feeds(texts: Sequence[str], checkpoint: Checkpoint, tokenizer: Tokenizer, inputs: Sequence[InputSpec] | None = None) -> list[Feed]:
    """Returns the graph's inputs for each text, a batch of one without padding.

    Question answering gets a text and the next one as a pair, fill-mask a text with one token in eight masked.

    Args:
        texts: The texts.
        checkpoint: Its task decides what is made of them.
        tokenizer: The service's tokenizer.
        inputs: What the graph takes, where that is not what the traced one does.
    """
    tokens = [entry.ids for entry in tokenizer.tokenize(texts)]
    taken = checkpoint.inputs if inputs is None else inputs
    return [_feed(_encoding(tokens, i, checkpoint, tokenizer), taken) for i in range(len(tokens))]


def _encoding(tokens: Sequence[Sequence[int]], i: int, checkpoint: Checkpoint, tokenizer: Tokenizer) -> Encoding:
    if checkpoint.task == "question-answering":
        room = min(tokenizer.room(pair=True), 2 * MAX_TOKENS)
        a, b = tokens[i][: room // 4], tokens[(i + 1) % len(tokens)]
        return tokenizer.assemble(a, b[: room - len(a)])
    ids = list(tokens[i][: min(tokenizer.room(pair=False), MAX_TOKENS)])
    if checkpoint.mask is None:
        return tokenizer.assemble(ids)
    ids = ids or [checkpoint.mask.id]
    masks = list(range(i % min(8, len(ids)), len(ids), 8))
    for mask in masks:
        ids[mask] = checkpoint.mask.id
    return tokenizer.assemble(ids, masks=masks)


def _feed(encoding: Encoding, inputs: Sequence[InputSpec]) -> Feed:
    values: dict[str, Any] = {
        "token_ids": [encoding.ids],
        "attention_mask": [[1] * len(encoding)],
        "type_ids": [encoding.type_ids],
        "mask_index": encoding.masks,
        "lengths": [len(encoding)],
    }
    return {spec.name: np.array(values[spec.fill], dtype=spec.dtype) for spec in inputs}


def pad(feed: Feed, inputs: Sequence[InputSpec], *, pad_id: int, tokens: int) -> Feed:
    """Returns the inputs of one text with some padding behind it, where a mask has other values.

    Args:
        feed: The inputs without.
        inputs: What the graph takes.
        pad_id: Token id of the padding.
        tokens: How much of it.
    """
    fills = {"token_ids": pad_id, "attention_mask": 0, "type_ids": 0}
    return {
        spec.name: np.pad(feed[spec.name], ((0, 0), (0, tokens)), constant_values=fills[spec.fill])
        if spec.fill in fills
        else feed[spec.name]
        for spec in inputs
    }


def observe(path: Path, tensors: Sequence[str], feeds: Sequence[Feed]) -> dict[str, Activations]:
    """Runs a graph that gives out these tensors, and returns what each of them was.

    The samples of a large model are larger than the model. They are mapped from temporary files, which are removed with them.

    Args:
        path: The graph, in the folder for these files; each tensor is one of its outputs, [..., width].
        tensors: Their names.
        feeds: Its inputs.
    """
    rng = np.random.default_rng(0)
    session = open_session(path)
    bounds: dict[str, tuple[NDArray[np.float32], NDArray[np.float32]]] = {}
    with contextlib.ExitStack() as stack:
        rows = {name: stack.enter_context(tempfile.TemporaryFile(dir=path.parent)) for name in tensors}
        for feed in track(feeds, "observe activations", unit="texts"):
            for name, value in zip(tensors, session.run(list(tensors), feed), strict=True):
                flat = value.reshape(-1, value.shape[-1])
                # the first and the last token are special ones, and carry the largest values of all
                chosen = np.unique(np.r_[0, len(flat) - 1, rng.choice(len(flat), min(len(flat), ROWS_PER_TEXT - 2), replace=False)])
                rows[name].write(flat[chosen].data)
                high, low = bounds.get(name, (flat[0], flat[0]))
                bounds[name] = (np.maximum(high, flat.max(axis=0)), np.minimum(low, flat.min(axis=0)))
        return {name: Activations(_mapped(rows[name], len(bounds[name][0])), *bounds[name]) for name in tensors}


def _mapped(file: IO[bytes], width: int) -> NDArray[np.float32]:
    """Returns the rows that a file holds, float32 [n, width]; they outlive the file."""
    file.flush()
    return np.asarray(np.memmap(file, dtype=np.float32, mode="r")).reshape(-1, width)


def outputs(path: Path, feeds: Sequence[Feed]) -> list[NDArray[np.float32]]:
    """Returns each output of a graph over all feeds, flattened."""
    session = open_session(path)
    runs = [session.run(None, feed) for feed in feeds]
    return [np.concatenate([value.ravel() for value in values]) for values in zip(*runs, strict=True)]


def relative_error(expected: Sequence[NDArray[np.float32]], actual: Sequence[NDArray[np.float32]]) -> float:
    """Returns the root mean square difference of outputs over their standard deviation, the worst output's."""
    return max(float(np.sqrt(np.mean((a - b) ** 2)) / max(float(a.std()), 1e-12)) for a, b in zip(expected, actual, strict=True))


def open_session(path: Path) -> Any:
    """Returns a CPU session that runs the graph as it is written."""
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_BASIC
    options.log_severity_level = 3
    return ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
