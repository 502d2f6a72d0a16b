"""The fixed requests on which a graph must answer as its checkpoint does: short and long texts, Unicode, pairs, windows."""

from __future__ import annotations

from typing import Any

from service.bundle.manifest import Task
from service.tasks import answer, classify, embed, fill_mask, ner

_LONG = (
    "The first half hour promises a great deal, and the cast is more than willing to deliver it. "
    "Then the script begins to repeat itself, the jokes wear thin, and nobody seems to know how to stop. "
)
_NAMES = "Ada Lovelace met Charles Babbage in London, and the Royal Society of Sweden invited Maria Agnesi from Milan to Uppsala. "
_TEXTS = [
    "good",
    "A warm, funny and thoroughly engaging film.",
    "It isn't that the acting is bad; it's that there is none.",
    "¡Qué película más aburrida! 😴 看了两遍，还是觉得很好。",
    "naïve café — “quotes”, tabs\tand\r\nlines\u200b with zero width",
    "3.5/10, would not watch again @ £12.50!!!",
    _NAMES,
    _LONG,
    _LONG * 2,
    _LONG * 4,
]


def sample_requests(task: Task, max_length: int, mask: str | None) -> list[Any]:
    """Returns the requests of a task.

    Args:
        task: Hugging Face name of the task.
        max_length: The model's usable length in tokens.
        mask: The mask token, for fill-mask.
    """
    stride = min(64, max_length // 8)
    if task == "text-classification":
        return [
            *(classify.Request(text) for text in ["", *_TEXTS, _LONG * 30]),
            classify.Request("A man is eating food.", "Someone eats."),
            classify.Request("", "only the second text"),
            classify.Request(_LONG * 8, _LONG * 20),
            classify.Request("short question?", _LONG * 30),
            classify.Request(_LONG * 30, parameters=classify.ClassifyParameters(window="mean")),
            classify.Request(_LONG * 40, parameters=classify.ClassifyParameters(window="max", stride=stride)),
        ]
    if task == "token-classification":
        texts = [
            *(ner.Request(text) for text in [*_TEXTS, _NAMES * 5]),
            *(ner.Request(_NAMES, ner.NerParameters(aggregation_strategy=s)) for s in ("none", "first", "max", "average")),
        ]
        return [*texts, ner.Request(_NAMES * 40), ner.Request(_NAMES * 40, ner.NerParameters(aggregation_strategy="first", stride=stride))]
    if task == "question-answering":
        questions = [answer.Request("What was said?", text) for text in [*_TEXTS, _LONG * 30]]
        names = ("Who met Charles Babbage?", "Where is the Royal Society?", "Who was invited, and from where?")
        return [
            *questions,
            *(answer.Request(question, _NAMES) for question in names),
            answer.Request(names[0], _NAMES * 20, answer.AnswerParameters(top_k=3)),
        ]
    if task == "feature-extraction":
        return [embed.Request(text) for text in ["", *_TEXTS, _NAMES * 5, _LONG * 30]]
    # a token has at least one character, so these fit; of a text whose mask is cut off there would be nothing to compare
    short = [text[: max_length - 16] for text in _TEXTS]
    halves = [(text[: len(text) // 2], text[len(text) // 2 :]) for text in short]
    return [*(fill_mask.Request(f"{a} {mask} {b}") for a, b in halves), fill_mask.Request(f"A {mask} film with a {mask} cast.")]
