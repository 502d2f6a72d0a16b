"""A graph that is to be timed, and what it takes to run it. Knows nothing of how it was made."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from bertserve.service.bundle.graph_spec import GraphSpec


@dataclass(frozen=True)
class BuiltGraph:
    """A graph.

    Attributes:
        path: The file.
        spec: Its entry in a manifest; its evidence is empty.
        pad_id: Token id of the padding, which the model has.
        bytes: Size of its files.
    """

    path: Path
    spec: GraphSpec
    pad_id: int
    bytes: int
