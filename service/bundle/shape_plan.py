"""The only shapes that a graph is run in, where they are planned: lengths that rows are padded to, and how many rows of each."""

from __future__ import annotations

from bisect import bisect_left
from typing import Annotated

from pydantic import Field, model_validator

from bertserve.service.bundle.record import Record


class ShapeBucket(Record):
    """A length that rows are padded to, and the row counts that batches of it are filled up to, ascending."""

    length: Annotated[int, Field(ge=1)]
    rows: Annotated[tuple[int, ...], Field(strict=False, min_length=1)]


class ShapePlan(Record):
    """The only shapes that a graph is run in: what its warm-up runs, what its profiles span, what the scheduler makes batches for.

    Attributes:
        buckets: Ascending by length; the last length is the model's usable one. A longer bucket has no more rows than a shorter one.
        masks: Counts that `mask_index` is filled up to, ascending; empty for graphs without that input.
    """

    buckets: Annotated[tuple[ShapeBucket, ...], Field(strict=False, min_length=1)]
    masks: Annotated[tuple[int, ...], Field(strict=False)] = ()

    @model_validator(mode="after")
    def _in_order(self) -> ShapePlan:
        lengths = [bucket.length for bucket in self.buckets]
        for name, values in (("lengths", lengths), *(("rows", bucket.rows) for bucket in self.buckets), ("masks", self.masks)):
            if list(values) != sorted(set(values)) or min(values, default=1) < 1:
                raise ValueError(f"{name} of a shape plan must ascend from 1 or more, not {list(values)}")
        most = [bucket.rows[-1] for bucket in self.buckets]
        if most != sorted(most, reverse=True):
            raise ValueError(f"a longer bucket of a shape plan must not have more rows than a shorter one: {most}")
        return self

    @property
    def shapes(self) -> list[tuple[int, int]]:
        """All `(rows, length)`, the largest first: memory that it takes then serves the others."""
        return sorted(
            ((rows, b.length) for b in self.buckets for rows in b.rows), key=lambda shape: (shape[0] * shape[1], shape), reverse=True
        )

    def shape(self, rows: int, tokens: int) -> tuple[int, int] | None:
        """Returns the least `(rows, length)` that holds a batch, or None where it has more rows than any of its length.

        Args:
            rows: Rows of the batch.
            tokens: Its longest row; over the last length it counts as that, for masks to fill count as tokens.
        """
        bucket = self.buckets[min(bisect_left(self.buckets, tokens, key=lambda b: b.length), len(self.buckets) - 1)]
        i = bisect_left(bucket.rows, rows)
        return (bucket.rows[i], bucket.length) if i < len(bucket.rows) else None

    def within(self, tokens: int) -> ShapePlan:
        """Returns the plan without shapes of more than `tokens` padded tokens; every length keeps its least rows."""
        return ShapePlan(
            buckets=tuple(
                ShapeBucket(length=b.length, rows=tuple(n for n in b.rows if n == b.rows[0] or n * b.length <= tokens))
                for b in self.buckets
            ),
            masks=self.masks,
        )
