"""Tasks that bundles of another task can answer: what they are called, what bundle they take, and what it must have."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from service.bundle.manifest import Manifest
from service.tasks import classify, embed, rerank, similarity, zero_shot
from service.tasks.encoded import ModelConfig


@dataclass(frozen=True, slots=True)
class Use:
    """What a task takes.

    Attributes:
        of: Task of the bundles.
        fits: Whether a bundle of that task can do it.
        needs: In words, what it must have; empty where all bundles of that task fit.
    """

    of: str
    fits: Callable[[ModelConfig], bool]
    needs: str


USES: Mapping[str, Use] = {
    zero_shot.TASK: Use(classify.TASK, zero_shot.fits, zero_shot.NEEDS),
    rerank.TASK: Use(classify.TASK, rerank.fits, rerank.NEEDS),
    similarity.TASK: Use(embed.TASK, similarity.fits, ""),
}


def tasks_of(manifest: Manifest) -> tuple[str, ...]:
    """Returns all tasks that a bundle answers, its own first."""
    return (manifest.task, *(task for task, use in USES.items() if use.of == manifest.task and use.fits(manifest)))
