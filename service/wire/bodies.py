"""Which body and which response a task has, and by what a body at a model's own path asks for another task than the model's."""

from __future__ import annotations

from typing import Any

from pydantic_core import from_json

from service.tasks import answer, classify, embed, fill_mask, ner, rerank, similarity, zero_shot
from service.tasks.uses import USES
from service.wire import heads, schemas
from service.wire.schemas import Body

BODIES: dict[str, type[Body]] = {
    classify.TASK: schemas.ClassifyBody,
    ner.TASK: schemas.NerBody,
    answer.TASK: schemas.AnswerBody,
    fill_mask.TASK: schemas.FillMaskBody,
    embed.TASK: heads.EmbedBody,
    similarity.TASK: heads.SimilarityBody,
    rerank.TASK: heads.RerankBody,
    zero_shot.TASK: heads.ZeroShotBody,
}
RESPONSES: dict[str, Any] = {
    classify.TASK: list[list[schemas.LabelScore]],
    ner.TASK: list[schemas.Entity] | list[list[schemas.Entity]],
    answer.TASK: schemas.Answer | list[schemas.Answer] | list[list[schemas.Answer]],
    fill_mask.TASK: list[schemas.Filled] | list[list[schemas.Filled]] | list[list[list[schemas.Filled]]],
    embed.TASK: heads.Vectors,
    similarity.TASK: list[float],
    rerank.TASK: list[heads.Ranked],
    zero_shot.TASK: heads.Labels,
}
# Keys, each within the one before, that only a body of this task has.
MARKS: dict[str, tuple[str, ...]] = {
    zero_shot.TASK: ("parameters", "candidate_labels"),
    rerank.TASK: ("texts",),
    similarity.TASK: ("inputs", "source_sentence"),
}
# By a bundle's task: what else may be asked for, the last key of its mark as a body spells it, and the mark.
_MARKS_OF = {of: [(task, f'"{MARKS[task][-1]}"'.encode(), MARKS[task]) for task, use in USES.items() if use.of == of] for of in BODIES}


def asked(task: str, raw: bytes) -> str:
    """Returns which task a body asks a model for: another one that bundles of its task may answer, or its own.

    Args:
        task: The model's own.
        raw: The body, which may be no JSON; who reads it will say so.
    """
    # the key's bytes are looked for first, since hardly any body has them
    near = [(other, mark) for other, key, mark in _MARKS_OF[task] if key in raw]
    if not near:
        return task
    try:
        body = from_json(raw)
    except ValueError:
        return task
    return next((other for other, mark in near if _has(body, mark)), task)


def _has(value: Any, keys: tuple[str, ...]) -> bool:
    """Returns whether an object has a key, and within it the next, to the last."""
    for key in keys:
        if not isinstance(value, dict) or key not in value:
            return False
        value = value[key]
    return True
