"""Share: what the lines of one stream hold of the queue together, and how much of it they may hold. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from bertserve.service.errors import RefusedError

# A text of ASCII has at most four times the tokens that its characters let expect (`estimate_tokens`): one a character.
UNDERESTIMATED = 4

# A share is at most this part of the queue, so that a stream leaves room to other callers.
PARTS_OF_QUEUE = 4

# Most bytes of the answers that the requests of a share make at once, unless there is only one: the results take several times as much memory.
MAX_ANSWER_BYTES = 2**23

# Reason of a refusal: other requests of the share hold all that it may have.
SHARE_FULL = "share_full"


@dataclass(slots=True, eq=False)
class Share:
    """A part of the queue.

    Attributes:
        tokens: Tokens that its open requests hold.
        answer_bytes: Bytes of the answers of its open requests, at most, as far as they are known.
        requests: How many are open.
        priority: Virtual start time of its next request: its requests start one after the other, as the items of one request do.
    """

    tokens: int = 0
    answer_bytes: int = 0
    requests: int = 0
    priority: float = 0.0

    def reservation(self, estimate: int, max_queue_tokens: int) -> int:
        """Returns the tokens that a request holds until its real number is known: the largest possible one, up to a whole share.

        A request that is larger than a share is the only one in it.

        Args:
            estimate: About how many tokens it has.
            max_queue_tokens: Most tokens of the queue.

        Raises:
            RefusedError: Other requests leave no room for them; the reason is `SHARE_FULL`.
        """
        limit = max_queue_tokens // PARTS_OF_QUEUE
        tokens = max(estimate, min(UNDERESTIMATED * estimate, limit))
        if self.tokens and self.tokens + tokens > limit:
            raise RefusedError(
                "the lines of this stream have {tokens} tokens in the queue and {limit} are allowed; wait for their answers.",
                tokens=self.tokens,
                limit=limit,
                reason=SHARE_FULL,
                retry_after_s=0.0,
            )
        return tokens

    def check_answer(self, own: int, size: int) -> None:
        """Checks that an answer can be made at the same time as those of other requests.

        Args:
            own: Bytes that the request counts already.
            size: Bytes of its answer.

        Raises:
            RefusedError: They have too many bytes together; the reason is `SHARE_FULL`.
        """
        others = self.answer_bytes - own
        if others and others + size > MAX_ANSWER_BYTES:
            raise RefusedError(
                "the answers to other lines of this stream need {others} bytes and {limit} are allowed at once; wait for them.",
                others=others,
                limit=MAX_ANSWER_BYTES,
                reason=SHARE_FULL,
                retry_after_s=0.0,
            )
