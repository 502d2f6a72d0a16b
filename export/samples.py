"""The fixed inputs on which a graph must answer as its checkpoint does: short, long, unicode, pairs, windows."""

from __future__ import annotations

from service.tasks import classify

_LONG = (
    "The first half hour promises a great deal, and the cast is more than willing to deliver it. "
    "Then the script begins to repeat itself, the jokes wear thin, and nobody seems to know how to stop. "
)


def text_classification() -> list[classify.Request]:
    """Returns the samples for text classification."""
    texts = [
        "",
        "good",
        "A warm, funny and thoroughly engaging film.",
        "It isn't that the acting is bad; it's that there is none.",
        "¡Qué película más aburrida! 😴 看了两遍，还是觉得很好。",
        "naïve café — “quotes”, tabs\tand\r\nlines\u200b with zero width",
        "3.5/10, would not watch again @ £12.50!!!",
        _LONG,
        _LONG * 4,
        _LONG * 30,
    ]
    pairs = [
        ("A man is eating food.", "Someone eats."),
        ("", "only the second text"),
        (_LONG * 8, _LONG * 20),
        ("short question?", _LONG * 30),
    ]
    return [
        *(classify.Request(text) for text in texts),
        *(classify.Request(a, b) for a, b in pairs),
        classify.Request(_LONG * 30, window="mean"),
        classify.Request(_LONG * 40, window="max", stride=64),
    ]
