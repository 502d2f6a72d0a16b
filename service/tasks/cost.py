"""Cost: the resources of an input other than the tokens of its encodings, and the limits of a request, which are checked in advance.

The unit of decoding work is a step: about one microsecond of an inference thread, for example to decode a token or create an item of an
answer.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from bertserve.service.errors import TooLargeError

# Limits of one request. 1,024 vectors of 1,024 numbers are within all of them.
MAX_CHARS = 2**24  # characters to tokenize; a text that is tokenized again for each label or choice counts again
# Tokenizing a text has a fixed cost that equals this many characters; it counts for each text of a request after the first.
TEXT_CHARS = 32
MAX_MEMORY = 2**24  # numbers of four bytes in memory until it is answered: 64 MiB
MAX_MEMORY_TOGETHER = 2 * MAX_MEMORY  # for all requests of all workers
MAX_STEPS = 2**22  # about four seconds
MAX_ANSWER_BYTES = 2**23  # bytes of the answer as JSON; the event loop writes as many in 0.04 s

# Steps that count as one token in the queue: a small encoder needs about the same time per token.
STEPS_PER_TOKEN = 32
# Memory of the objects of an encoding while it waits, in numbers of four bytes.
ENCODING_MEMORY = 512
# Memory of a token with its offsets and its spelling, in numbers of four bytes.
TOKEN_MEMORY = 30
# Bytes of a float32 with its comma in an answer, and of a float64.
NUMBER_BYTES, SCORE_BYTES = 14, 22
_ESCAPED = re.compile(r'[\x00-\x1f"\\]')


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """The maximum cost of an input, as far as it is known before its graph runs.

    Attributes:
        answer_bytes: Length of its result as JSON. A part that depends on the outputs is taken from the task's budget later.
        steps: Work of decoding.
        memory: Numbers of four bytes in memory until it is answered.
        reserved_tokens: Additional tokens of the queue: for later batches, or for outputs much larger than those of a text.
    """

    answer_bytes: int
    steps: int = 0
    memory: int = 0
    reserved_tokens: int = 0

    def __add__(self, other: Cost) -> Cost:
        """Returns the sum of both costs."""
        return Cost(
            answer_bytes=self.answer_bytes + other.answer_bytes,
            steps=self.steps + other.steps,
            memory=self.memory + other.memory,
            reserved_tokens=self.reserved_tokens + other.reserved_tokens,
        )

    @property
    def queue_tokens(self) -> int:
        """Tokens of the queue in addition to the tokens of the encodings."""
        return self.reserved_tokens + self.steps // STEPS_PER_TOKEN

    def check(self) -> None:
        """Checks the limits of one request.

        Raises:
            TooLargeError: A limit is exceeded.
        """
        if self.memory > MAX_MEMORY:
            raise TooLargeError(
                "the request needs memory for at least {memory} numbers and {limit} are allowed; send fewer "
                "or shorter texts at once, or request less output for each.",
                memory=shown(self.memory),
                limit=MAX_MEMORY,
            )
        if self.answer_bytes > MAX_ANSWER_BYTES:
            raise _too_long_answer(self.answer_bytes)
        if self.steps > MAX_STEPS:
            raise _too_many_steps()


NOTHING = Cost(answer_bytes=0)


@dataclass(slots=True)
class Budget:
    """The limits of decoding one request. Tasks spend it for results whose size depends on the outputs.

    Attributes:
        answer_bytes: Bytes of the answer so far.
        steps: Steps so far.
    """

    answer_bytes: int = 0
    steps: int = 0

    def spend(self, *, steps: int = 0, answer_bytes: int = 0) -> None:
        """Spends a part of the budget.

        Raises:
            TooLargeError: The budget is exceeded.
        """
        self.steps += steps
        self.answer_bytes += answer_bytes
        if self.answer_bytes > MAX_ANSWER_BYTES:
            raise _too_long_answer(self.answer_bytes)
        if self.steps > MAX_STEPS:
            raise _too_many_steps()


def _too_long_answer(answer_bytes: int) -> TooLargeError:
    return TooLargeError(
        "the response would have at least {answer_bytes} bytes and {limit} are allowed; send fewer or shorter "
        "texts at once, or request less output for each: a smaller `top_k`, pooled tokens, or fewer labels, "
        "`layers` or `heads`.",
        answer_bytes=shown(answer_bytes),
        limit=MAX_ANSWER_BYTES,
    )


def _too_many_steps() -> TooLargeError:
    return TooLargeError(
        "the response would take too long to compute from the model's outputs; send fewer or shorter texts "
        "at once, or make `top_k` or `max_answer_len` smaller."
    )


def text_bytes(text: str) -> int:
    """Returns the bytes of a text in an answer, including its quotes; slightly more if characters are escaped."""
    plain = len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))
    return plain + 2 if text.isprintable() and '"' not in text and "\\" not in text else plain + 2 + 5 * len(_ESCAPED.findall(text))


@lru_cache(maxsize=256)
def longest_label(labels: Sequence[str]) -> int:
    """Returns the bytes of a model's longest label in an answer; it is cached by the tuple of labels."""
    return max(map(text_bytes, labels), default=2)


def shown(count: int) -> str:
    """Returns a number for a message; products of callers' values may have thousands of digits."""
    return str(count) if count < 10**12 else "more than 10^12"
