"""Creates the golden answers for text classification with PyTorch and the Hugging Face pipeline.

    python tests/golden/make_text_classification.py CHECKPOINT_DIR

The script reads the cases of `text_classification.jsonl` and replaces the file. Each line has `id` and `request`, and

- `logits`: for each input and each of its windows, the raw float32 logits of the window, which runs alone and without padding;
- `answer`: for each input, the labels and scores, best first. They come from the pipeline, which truncates the longest text of a
  pair first. The pipeline does not support `window`; if it is set, they come from the windows of the tokenizer.

Needs torch and transformers.
"""

from pathlib import Path
from typing import Any

import cases
import numpy as np
import torch
import transformers
from numpy.typing import NDArray

from reference import Model

Floats = NDArray[np.float32]
Item = str | dict[str, str]

MAX_LENGTH = 512
DEFAULT_STRIDE = 128


class Reference(Model):
    """A checkpoint in PyTorch, and the pipeline around it."""

    def __init__(self, checkpoint: Path) -> None:
        super().__init__(checkpoint, transformers.AutoModelForSequenceClassification, "text-classification")
        if self.model.config.problem_type != "single_label_classification":
            raise SystemExit("The checkpoint is not a single-label classifier, whose default activation is softmax.")

    def encode(self, item: Item) -> list[dict[str, list[int]]]:
        """Returns the one encoding of a text or pair, truncated as the pipeline does."""
        text, text_pair = _texts(item)
        encoding = self.tokenizer(text, text_pair, truncation="longest_first", max_length=MAX_LENGTH)
        return [dict(encoding)]

    def encode_windows(self, item: Item, stride: int) -> list[dict[str, list[int]]]:
        """Returns the encodings of all windows over a text, or over the second text of a pair."""
        text, text_pair = _texts(item)
        truncation = "only_second" if text_pair else True  # like the pipeline, this tokenizer drops an empty second text
        encoding = self.tokenizer(
            text, text_pair, truncation=truncation, max_length=MAX_LENGTH, stride=stride, return_overflowing_tokens=True
        )
        return [
            {"input_ids": ids, "token_type_ids": self._type_ids(ids), "attention_mask": [1] * len(ids)} for ids in encoding["input_ids"]
        ]

    def _type_ids(self, ids: list[int]) -> list[int]:
        """Returns 0 up to the first separator and 1 after it. Tokenizers returned wrong values in later windows of a pair."""
        first = ids.index(self.tokenizer.sep_token_id) + 1
        return [0] * first + [1] * (len(ids) - first)

    @torch.inference_mode()
    def logits(self, encoding: dict[str, list[int]]) -> Floats:
        batch = {name: torch.tensor([values]) for name, values in encoding.items()}
        logits: Floats = self.model(**batch).logits[0].numpy()
        return logits

    def pipeline_answer(self, item: Item, top_k: int | None, function: str | None) -> list[dict[str, Any]]:
        answer: list[dict[str, Any]] = self.pipeline(
            item, top_k=top_k, function_to_apply=function, truncation="longest_first", max_length=MAX_LENGTH, batch_size=1
        )
        return answer


def activate(logits: Floats, function: str | None) -> Floats:
    """Returns the scores of logits [..., labels]; the default function is softmax."""
    scores: Floats = logits
    if function == "sigmoid":
        one = np.float32(1)
        scores = one / (one + np.exp(-logits))
    elif function != "none":
        exponentials = np.exp(logits - logits.max(axis=-1, keepdims=True))
        scores = exponentials / exponentials.sum(axis=-1, keepdims=True)
    return scores


def rank(scores: Floats, labels: list[str], top_k: int | None) -> list[dict[str, Any]]:
    """Returns labels and scores, best first, equal scores by label id."""
    best_first = np.argsort(-scores, kind="stable")[:top_k]
    return [{"label": labels[i], "score": float(scores[i])} for i in best_first]


def golden(request: dict[str, Any], reference: Reference) -> dict[str, Any]:
    inputs, parameters = request["inputs"], request.get("parameters", {})
    items = inputs if isinstance(inputs, list) else [inputs]
    window, stride = parameters.get("window"), parameters.get("stride", DEFAULT_STRIDE)
    top_k, function = parameters.get("top_k"), parameters.get("function_to_apply")
    all_logits, answers = [], []
    for item in items:
        encodings = reference.encode_windows(item, stride) if window else reference.encode(item)
        logits = np.stack([reference.logits(encoding) for encoding in encodings])
        if window:
            scores = activate(logits, function)
            total = scores.max(axis=0) if window == "max" else scores.mean(axis=0)
            answer = rank(total, reference.labels, top_k)
        else:
            answer = reference.pipeline_answer(item, top_k, function)
        all_logits.append(logits.tolist())
        answers.append(answer)
    return {"logits": all_logits, "answer": answers}


def _texts(item: Item) -> tuple[str, str | None]:
    return (item, None) if isinstance(item, str) else (item["text"], item["text_pair"])


if __name__ == "__main__":
    cases.remake("text_classification", __doc__, Reference, golden)
