"""A classifier with the segment recurrence of Transformer-XL, as a module for `bert-export --module`.

Transformer-XL reads a text in segments. A token sees earlier tokens of its segment, and the last states of the previous segment. Each
state is computed once, so a mask over the whole text gives the same numbers as a loop over segments. Positions are relative.

    bert-export --module recurrent.py:make --trust-module --output models

The folder of this file must also contain `tokenizer.json` and the trained weights, `recurrent.safetensors`.
"""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

FOLDER = Path(__file__).parent
SEGMENT, MEMORY = 16, 8


class Layer(torch.nn.Module):
    """A layer of Transformer-XL: attention with relative positions, and a feed-forward block."""

    def __init__(self, width: int, heads: int) -> None:
        """Creates a layer with random weights."""
        super().__init__()
        self.heads, self.scale = heads, (width // heads) ** -0.5
        self.query, self.key, self.value, self.output, self.position = (torch.nn.Linear(width, width, bias=False) for _ in range(5))
        self.content_bias, self.position_bias = (torch.nn.Parameter(torch.zeros(heads, 1, width // heads)) for _ in range(2))
        self.norm, self.block_norm = torch.nn.LayerNorm(width), torch.nn.LayerNorm(width)
        self.block = torch.nn.Sequential(torch.nn.Linear(width, 2 * width), torch.nn.ReLU(), torch.nn.Linear(2 * width, width))

    def split(self, states: Tensor) -> Tensor:
        """Splits the last dimension into heads: [..., length, width] -> [..., heads, length, width / heads]."""
        return states.unflatten(-1, (self.heads, -1)).transpose(-3, -2)

    def forward(self, states: Tensor, distance: Tensor, positions: Tensor, bias: Tensor) -> Tensor:
        """Returns the next states, [rows, length, width].

        Args:
            states: The states, [rows, length, width].
            distance: Distance between each pair of tokens, [length, length].
            positions: The vectors of the distances.
            bias: 0 if a token sees another one, otherwise a large negative number, [length, length].
        """
        query, key, value = (self.split(part(states)) for part in (self.query, self.key, self.value))
        by_content = (query + self.content_bias) @ key.transpose(-1, -2)
        by_position = (query + self.position_bias) @ self.split(self.position(positions)).transpose(-1, -2)
        by_position = by_position.gather(-1, distance.expand(states.shape[0], self.heads, -1, -1))
        weights = ((by_content + by_position) * self.scale + bias).softmax(-1)
        states = self.norm(states + self.output((weights @ value).transpose(-3, -2).flatten(-2)))
        return self.block_norm(states + self.block(states))


class Recurrent(torch.nn.Module):
    """The classifier: it reads the state of the last token."""

    def __init__(self, tokens: int = 200, width: int = 32, heads: int = 4, layers: int = 2, labels: int = 3) -> None:
        """Creates a classifier with random weights."""
        super().__init__()
        self.embedding = torch.nn.Embedding(tokens, width)
        self.layers = torch.nn.ModuleList([Layer(width, heads) for _ in range(layers)])
        self.labels = torch.nn.Linear(width, labels)
        angles = torch.arange(SEGMENT + MEMORY)[:, None] / 10000 ** (torch.arange(0, width, 2) / width)
        self.register_buffer("positions", torch.cat([angles.sin(), angles.cos()], dim=-1), persistent=False)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Returns logits, [rows, labels], for ids and mask, [rows, length]."""
        place = torch.arange(input_ids.shape[1])
        distance = place[:, None] - place
        oldest = place // SEGMENT * SEGMENT - MEMORY
        seen = (distance >= 0) & (place >= oldest[:, None])
        bias = torch.where(seen, 0.0, -10000.0)
        distance = distance.clamp(0, SEGMENT + MEMORY - 1)
        states = self.embedding(input_ids)
        for layer in self.layers:
            states = layer(states, distance, self.positions, bias)
        last = attention_mask.sum(1) - 1
        return self.labels(states[torch.arange(input_ids.shape[0]), last])


def make() -> dict[str, Any]:
    """Returns the module, with the information that `bert-export` needs."""
    module = Recurrent()
    module.load_state_dict(load_file(FOLDER / "recurrent.safetensors"))
    return {
        "module": module,
        "tokenizer": "tokenizer.json",
        "task": "text-classification",
        "labels": ["negative", "neutral", "positive"],
        "pad_token": "[PAD]",
        "max_length": 128,
    }
