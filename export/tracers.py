"""PyTorch's exporters, by the names that torch has for them."""

from __future__ import annotations

from typing import Literal

Tracer = Literal["dynamo", "torchscript"]
