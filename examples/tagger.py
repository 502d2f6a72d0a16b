"""A tagger with two LSTMs, as a module for `bert-export --module`.

    bert-export --module tagger.py:make --trust-module --output models

The folder of this file must also contain `tokenizer.json` and the trained weights, `tagger.safetensors`.
"""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

FOLDER = Path(__file__).parent
LABELS = ["O", "B-PER", "I-PER", "B-LOC", "I-LOC"]


class Tagger(torch.nn.Module):
    """An LSTM over each text, and another over the reversed text."""

    def __init__(self, tokens: int = 200, width: int = 16) -> None:
        """Creates a tagger with random weights."""
        super().__init__()
        self.embedding = torch.nn.Embedding(tokens, width)
        self.ahead = torch.nn.LSTM(width, width, batch_first=True)
        self.back = torch.nn.LSTM(width, width, batch_first=True)
        self.labels = torch.nn.Linear(2 * width, len(LABELS))

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Returns logits, [rows, length, labels], for ids and mask, [rows, length]."""
        words = self.embedding(input_ids)
        # each text is reversed within its own length, because padding must not change its result
        place, count = torch.arange(input_ids.shape[1]), attention_mask.sum(1, keepdim=True)
        reverse = torch.where(place < count, count - 1 - place, place)[:, :, None].expand_as(words)
        back = self.back(words.gather(1, reverse))[0].gather(1, reverse)
        return self.labels(torch.cat([self.ahead(words)[0], back], dim=-1))


def make() -> dict[str, Any]:
    """Returns the module, with the information that `bert-export` needs."""
    module = Tagger()
    module.load_state_dict(load_file(FOLDER / "tagger.safetensors"))
    return {
        "module": module,
        "tokenizer": "tokenizer.json",
        "task": "token-classification",
        "labels": LABELS,
        "pad_token": "[PAD]",
        "max_length": 128,
    }
