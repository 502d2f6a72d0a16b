"""Cost: the resources of an input other than the tokens of its encodings, and the limits of a request.

Decoding counts in predicted microseconds of an inference thread: about one to decode a token, and a few to create an entry of an answer.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import orjson

from bertserve.service.errors import TooLargeError

# Limits of one request. 512 vectors of 1,024 numbers are within all of them.
# Characters of an input to tokenize; a text that is tokenized again for each label or choice counts again. In Korean, the slowest
# language, they take 14 s of a prepare thread.
MAX_TOKENIZED_CHARS = 2**20
# Tokenizing a text has a fixed cost that equals this many characters; it counts for each text of a request after the first.
TEXT_CHARS = 32
MAX_DECODE_US = 2**20  # about one second
MAX_RESPONSE_BYTES = 2**23  # bytes of the response as JSON; the event loop writes this many in 0.04 s
# Microseconds of decoding that count as one token in the queue: a small encoder needs about the same time per token.
US_PER_TOKEN = 32
# Microseconds to create an entry of an answer, such as an entity, or to label a token.
ENTRY_US = 4
# Bytes of an entry of an answer, without its texts: keys, score and offsets of a label, a word or an entity, or the brackets of a vector.
ENTRY_BYTES = 64
NUMBER_BYTES = 14  # bytes of a float32 with its comma in an answer


@dataclass(frozen=True, slots=True)
class Cost:
    """The maximum cost of an input.

    Attributes:
        response_bytes: Length of its result as JSON.
        decode_us: Predicted microseconds of an inference thread to decode its outputs.
        reserved_tokens: Additional tokens of the queue: for later steps, or for outputs much larger than the outputs of a text.
    """

    response_bytes: int = 0
    decode_us: int = 0
    reserved_tokens: int = 0

    def __add__(self, other: "Cost") -> "Cost":
        """Returns the sum of both costs."""
        return Cost(
            self.response_bytes + other.response_bytes, self.decode_us + other.decode_us, self.reserved_tokens + other.reserved_tokens
        )

    @property
    def extra_tokens(self) -> int:
        """Tokens of the queue in addition to the tokens of the encodings."""
        return self.reserved_tokens + self.decode_us // US_PER_TOKEN

    def check(self) -> None:
        """Checks the limits of one request.

        Raises:
            TooLargeError: A limit is exceeded.
        """
        if self.response_bytes > MAX_RESPONSE_BYTES:
            raise TooLargeError(
                "the response would have at least {response_bytes} bytes and {limit} are allowed; send fewer or shorter "
                "texts at once, or request less output for each: a smaller `top_k`, pooled tokens, or fewer labels, "
                "`layers` or `heads`.",
                response_bytes=self.response_bytes,
                limit=MAX_RESPONSE_BYTES,
            )
        if self.decode_us > MAX_DECODE_US:
            raise TooLargeError(
                "the response would take too long to compute from the model's outputs; send fewer or shorter texts "
                "at once, make `top_k` or `max_answer_len` smaller, or make windows longer."
            )


ZERO_COST = Cost()


def total_chars(chars: Sequence[int]) -> int:
    """Returns the characters to tokenize of all inputs of a request, given the characters of each input; at least one.

    Raises:
        TooLargeError: An input is too long.
    """
    if (longest := max(chars)) > MAX_TOKENIZED_CHARS:
        error = TooLargeError(
            "the input has {chars} characters to tokenize, counted again for each label or choice, and {limit} "
            "are allowed; send fewer or shorter texts at once.",
            chars=longest,
            limit=MAX_TOKENIZED_CHARS,
        )
        error.input_index = chars.index(longest)
        raise error
    return sum(chars) + TEXT_CHARS * (len(chars) - 1)


def text_bytes(text: str) -> int:
    """Returns the bytes of a text in an answer, including its quotes."""
    return len(orjson.dumps(text))


@lru_cache(maxsize=256)
def longest_label(labels: Sequence[str]) -> int:
    """Returns the bytes of a model's longest label in an answer; it is cached by the tuple of labels."""
    return max(map(text_bytes, labels), default=2)


def candidates_cost(text: str, tokens: int, candidates: int, *, masks: int = 1) -> Cost:
    """Returns the cost of candidates for one or several masks, each with the whole text of at most `tokens` tokens."""
    # some decoders put a space before each token
    return Cost(candidates * (ENTRY_BYTES * (1 + masks) + text_bytes(text) + tokens), decode_us=candidates * (ENTRY_US + tokens))
