"""The texts of the samples on which graphs are compared with their checkpoints."""

LONG_TEXT = (
    "The first half hour promises a great deal, and the cast is more than willing to deliver it. "
    "Then the script begins to repeat itself, the jokes wear thin, and nobody seems to know how to stop. "
)
NAMES_TEXT = "Ada Lovelace met Charles Babbage in London, and the Royal Society of Sweden invited Maria Agnesi from Milan to Uppsala. "
RESERVED_TOKENS = 16  # part of a window for special tokens, and for words that an input adds to a text
SHORT_TEXT = "A warm, funny and thoroughly engaging film."
SAMPLE_TEXTS = [
    "good",
    SHORT_TEXT,
    "It isn't that the acting is bad; it's that there is none.",
    "¡Qué película más aburrida! 😴 看了两遍，还是觉得很好。",
    "naïve café — “quotes”, tabs\tand\r\nlines\u200b with zero width",
    "3.5/10, would not watch again @ £12.50!!!",
    NAMES_TEXT,
    LONG_TEXT,
    LONG_TEXT * 2,
    LONG_TEXT * 4,
]


def halves(text: str) -> tuple[str, str]:
    """Returns the first and the second half of a text's words."""
    words = text.split()
    return " ".join(words[: len(words) // 2]), " ".join(words[len(words) // 2 :])
