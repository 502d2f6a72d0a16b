"""One line of the report of `bert-export verify`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Check:
    """One line of the report.

    Attributes:
        name: What was checked.
        passed: Whether it is as it should be; None for what was measured and has no bound.
        detail: What was found.
        figures: The same for machines.
    """

    name: str
    passed: bool | None
    detail: str
    figures: dict[str, Any] = field(default_factory=dict)
