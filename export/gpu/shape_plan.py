"""The shape plan of a graph for a GPU: the lengths and row counts that its batches are padded to.

GPUs choose kernels, and TensorRT builds them, by shape: a few shapes, all warmed up, are worth the padding. Lengths are multiples of
8 (but for the last, the model's own), as half-precision kernels want them; each is at most half as long again as the one before
from 64 on, and so is each row count: a batch fills two thirds of its shape at least, and mostly much more.
"""

from __future__ import annotations

from bertserve.service.bundle.shape_plan import ShapeBucket, ShapePlan

MAX_TOKENS = 16384  # of a batch: enough to fill the largest GPUs (8 to 16 thousand tokens a launch)
_LEAST_ROWS = 8  # of the longest texts, in a plan that is a rectangle
_LENGTHS = (16, 32, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192)
_ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)


def plan(max_length: int, *, masks: bool, rectangle: bool) -> ShapePlan:
    """Returns the shape plan for a model.

    Args:
        max_length: Its usable length in tokens.
        masks: Whether the graph takes the positions of masks.
        rectangle: Whether all lengths have the same row counts. TensorRT reserves memory for the longest text in the largest batch,
            which then is as many tokens as any other largest batch.
    """
    lengths = [*(length for length in _LENGTHS if length < max_length), max_length]
    last = max(MAX_TOKENS // max_length, _LEAST_ROWS)
    buckets = tuple(
        ShapeBucket(length=n, rows=tuple(r for r in _ROWS if r == 1 or (r <= last if rectangle else r * n <= MAX_TOKENS))) for n in lengths
    )
    tokens = max(bucket.length * bucket.rows[-1] for bucket in buckets)
    # a mask counts as a token beside its own, so that no batch has more than half as many masks as tokens; one text may have any number
    return ShapePlan(buckets=buckets, masks=_powers_of_two(max(tokens // 2, max_length)) if masks else ())


def _powers_of_two(last: int) -> tuple[int, ...]:
    """Returns the powers of two up to the first that is not below `last`."""
    return tuple(2**i for i in range((last - 1).bit_length() + 1))
