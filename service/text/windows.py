"""Index arithmetic on the tokens of long texts: truncation and overlapping windows. It uses only integers, no tokenizer."""

from bertserve.service.bundle.manifest import Side
from bertserve.service.errors import CallerValue, InvalidValueError

# Maximum windows of one text; a stride close to the window's length would need one window per token.
MAX_WINDOWS = 4096


def kept_tokens(count: int, keep: int, side: Side) -> range:
    """Returns the range of `count` tokens that is kept, if at most `keep` tokens are kept and the end `side` is cut."""
    keep = min(keep, count)
    return range(count - keep, count) if side == "left" else range(keep)


def too_long_error(total: int, max_tokens: int, remedy: str) -> InvalidValueError:
    """Returns the error of a text that has `total` tokens, more than `max_tokens`; its sentence ends with `remedy`."""
    return InvalidValueError(
        "the text has {total} tokens and the model takes {max_tokens}; shorten it, {remedy}.",
        total=total,
        max_tokens=max_tokens,
        remedy=remedy,
    )


def kept_of_pair(a: int, b: int, max_tokens: int, side: Side) -> tuple[range, range]:
    """Returns the ranges kept of two texts, `max_tokens` in total; the longer is cut first, like Hugging Face's `longest_first`."""
    shorter = min(a, b, max_tokens // 2)  # both are cut if each has more than half of the tokens
    keep_a, keep_b = (max_tokens - shorter, shorter) if a > b else (shorter, max_tokens - shorter)
    return kept_tokens(a, keep_a, side), kept_tokens(b, keep_b, side)


def windows(
    count: int, max_tokens: int, stride: int | None = None, side: Side = "right", *, field: str = "stride", remedy: str = ""
) -> list[range]:
    """Cuts `count` tokens into windows of at most `max_tokens`, neighbors overlapping by `stride` tokens, in the order of the text.

    There is always at least one window, which can be empty. The first window starts with the first token, and the last one ends with the
    last token. The window at the end `side`, at which a text would be cut, can be shorter than the others.

    `max_tokens` is not positive if another text fills the windows. Errors say what the caller can do about such a text with `remedy`,
    which is empty for a single text, and name the stride by its `field`.

    Raises:
        InvalidValueError: The text needs too many windows, or windows are too small for the text or for `stride`.
    """
    if count <= max_tokens:
        return [range(count)]
    if max_tokens <= 0:
        raise InvalidValueError(
            "the first text leaves no room for the second text, which has {count} tokens; {remedy}.", count=count, remedy=remedy
        )
    stride = default_stride(max_tokens) if stride is None else stride
    if max_tokens <= stride:
        raise InvalidValueError(
            "`{field}` is {stride}, which is too large for windows of {max_tokens} tokens; make `{field}` smaller{otherwise}.",
            field=field,
            stride=CallerValue(stride),
            max_tokens=max_tokens,
            otherwise=f", or {remedy}" if remedy else "",
        )
    starts = range(0, max(count - stride, 1), max_tokens - stride)
    if len(starts) > MAX_WINDOWS:
        raise InvalidValueError(
            "a text of {count} tokens needs {starts_count} windows of {max_tokens} tokens that share {stride}, and "
            "{limit} are allowed; make the stride smaller or the text shorter.",
            count=count,
            starts_count=len(starts),
            max_tokens=max_tokens,
            stride=CallerValue(stride),
            limit=MAX_WINDOWS,
        )
    ranges = [range(start, min(start + max_tokens, count)) for start in starts]
    return [range(count - window.stop, count - window.start) for window in reversed(ranges)] if side == "left" else ranges


def default_stride(max_tokens: int) -> int:
    """Returns the default overlap of windows of `max_tokens` tokens: 128, but at most half a window."""
    return min(128, max_tokens // 2)
