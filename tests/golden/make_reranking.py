"""Creates the golden answers for reranking with PyTorch.

    python tests/golden/make_reranking.py CHECKPOINT_DIR

The script reads the cases of `reranking.jsonl` and replaces the file. Each line has `id` and `request`, and

- `logits`: the logit of each text, from its pair with the query, which runs alone and without padding;
- `answer`: the texts by their sigmoid, best first; equal scores in the order of the texts.

Needs torch and transformers.
"""

from pathlib import Path
from typing import Any

import cases
import numpy as np
import torch
import transformers

from reference import Model

MAX_LENGTH = 512


class Reference(Model):
    """A cross-encoder in PyTorch."""

    def __init__(self, checkpoint: Path) -> None:
        super().__init__(checkpoint, transformers.AutoModelForSequenceClassification)
        if len(self.labels) != 1:
            raise SystemExit("The checkpoint has several labels; a cross-encoder with one is needed.")

    @torch.inference_mode()
    def logit(self, query: str, text: str, truncation_side: str) -> float:
        self.tokenizer.truncation_side = truncation_side
        encoding = self.tokenizer(
            [(query, text)],
            truncation="longest_first",
            max_length=MAX_LENGTH,
            split_special_tokens=True,  # special tokens in a text are text, as in the service
            return_tensors="pt",
        )
        return float(self.model(**encoding).logits[0, 0])


def golden(request: dict[str, Any], reference: Reference) -> dict[str, Any]:
    texts, side = request["texts"], request.get("truncation_direction", "right")
    logits = np.array([reference.logit(request["query"], text, side) for text in texts], dtype=np.float32)
    scores = logits if request.get("raw_scores") else 1 / (1 + np.exp(-logits))
    answer = [
        {"index": i, "score": float(scores[i])} | ({"text": texts[i]} if request.get("return_text") else {})
        for i in np.argsort(-scores, kind="stable").tolist()
    ]
    return {"logits": logits.tolist(), "answer": answer}


if __name__ == "__main__":
    cases.remake("reranking", __doc__, Reference, golden)
