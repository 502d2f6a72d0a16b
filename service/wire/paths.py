"""The path of each task."""

from __future__ import annotations

from collections.abc import Mapping

from service.tasks import answer, classify, embed, fill_mask, ner, rerank, similarity, zero_shot

PATHS: Mapping[str, str] = {
    classify.TASK: "classify",
    ner.TASK: "ner",
    answer.TASK: "answer",
    fill_mask.TASK: "fill-mask",
    embed.TASK: "embed",
    similarity.TASK: "similarity",
    rerank.TASK: "rerank",
    zero_shot.TASK: "zero-shot",
}
