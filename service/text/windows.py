"""Index arithmetic on the tokens of long texts: truncation, and windows that overlap. Plain integers, no tokenizer."""

from __future__ import annotations

from service.errors import InvalidValueError

# Of one text; a stride just short of a window would make one for each token.
MAX_WINDOWS = 4096


def truncate_longest_first(a: int, b: int, room: int) -> tuple[int, int]:
    """Returns how many tokens of two texts to keep, the longer one cut first, as Hugging Face's `longest_first`.

    Args:
        a: Tokens of the first text.
        b: Tokens of the second text.
        room: Tokens that both may have together.
    """
    if a + b <= room:
        return a, b
    short = min(a, b)
    kept_long = max(short, room - short)
    if short + kept_long > room:
        short, kept_long = room // 2, room - room // 2
    return (kept_long, short) if a > b else (short, kept_long)


def windows(count: int, room: int, stride: int) -> list[range]:
    """Cuts `count` tokens into windows of at most `room`, neighbors overlapping by `stride` tokens.

    There is always one window, also of nothing, and the last one ends with the last token.

    Args:
        count: Tokens of the text.
        room: Tokens of a full window, greater than `stride`.
        stride: Tokens that a window shares with the one before.

    Raises:
        InvalidValueError: There are more windows than a text may have.
    """
    starts = range(0, max(count - stride, 1), room - stride)
    if len(starts) > MAX_WINDOWS:
        raise InvalidValueError(
            f"a text of {count} tokens needs {len(starts)} windows of {room} that share {stride}, and {MAX_WINDOWS} are allowed; "
            "make the stride or the text smaller."
        )
    return [range(start, min(start + room, count)) for start in starts]


def default_stride(room: int) -> int:
    """Returns the overlap of windows of `room` tokens where the caller names none: 128, at most half a window."""
    return min(128, room // 2)
