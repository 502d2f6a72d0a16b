"""Tokenizing and decoding as requests of the same queue, without a run of the graph: texts to tokens, and token ids to texts.

Every model supports them, whatever its task. Bodies and answers are those of Text Embeddings Inference.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, BeforeValidator, Field

from bertserve.service.errors import InvalidValueError, Sent
from bertserve.service.tasks.batch import PAUSE, Batch, ModelConfig, TaskModel, TaskRun
from bertserve.service.tasks.body import STOP, ForeignBody, TextOrTexts, body_config
from bertserve.service.tasks.cost import TOKEN_MEMORY, Cost, text_bytes
from bertserve.service.tasks.spec import TaskSpec
from bertserve.service.text.tokenizer import Tokenizer, Tokens, estimate_tokens

TOKENIZE, DECODE = "tokenize", "decode"
_CHARS_PER_TOKEN = 4  # of English text
TOKEN_BYTES, TOKEN_STEPS = 80, 2  # of a token's object in the answer, without its text
TOKENS_PER_PAUSE = 1024
OBJECT_MEMORY = 180  # memory of such an object in numbers of four bytes


class Token(BaseModel):
    """A token. `start` and `stop` are its position in the text, in code points; a special token has none."""

    id: int
    text: str
    special: bool
    start: int | None = None
    stop: int | None = None


@dataclass(frozen=True, slots=True)
class TextRequest:
    """A text to tokenize."""

    text: str
    add_special_tokens: bool = True

    @property
    def chars(self) -> int:
        """Characters to tokenize."""
        return len(self.text)


@dataclass(frozen=True, slots=True)
class IdsRequest:
    """Token ids to decode."""

    ids: list[int]
    skip_special_tokens: bool = True

    @property
    def chars(self) -> int:
        """Estimated number of characters of their text."""
        return _CHARS_PER_TOKEN * len(self.ids)


def tokenize(request: TextRequest, model: TaskModel) -> TaskRun:
    """Returns the tokens of a text of any length. No graph runs."""
    tokenizer = model.tokenizer
    (tokens,) = tokenizer.tokenize([request.text])
    before, after = _special_tokens(tokens, tokenizer) if request.add_special_tokens else ([], [])
    count = len(before) + len(tokens) + len(after)
    yield Batch(
        [],
        Cost(
            answer_bytes=TOKEN_BYTES * count + text_bytes(request.text),
            steps=TOKEN_STEPS * count,
            memory=(TOKEN_MEMORY + OBJECT_MEMORY) * len(tokens),
        ),
    )
    items = before
    for index, (id_, (start, stop)) in enumerate(zip(tokens.ids, tokens.offsets, strict=True)):
        items.append({"id": id_, "text": request.text[start:stop], "special": False, "start": start, "stop": stop})
        if not index % TOKENS_PER_PAUSE:
            yield PAUSE
    return [*items, *after]


def _special_tokens(tokens: Tokens, tokenizer: Tokenizer) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Returns the special tokens before and after a text, in the format of the answer."""
    whole = tokenizer.assemble(tokens.ids[:1])  # they are the same around a text of one token
    items = [{"id": id_, "text": tokenizer.token(id_) or "", "special": True, "start": None, "stop": None} for id_ in whole.ids.tolist()]
    return items[: whole.start], items[whole.start + len(tokens.ids[:1]) :]


def decode(request: IdsRequest, model: TaskModel) -> TaskRun:
    """Returns the text of token ids. No graph runs.

    Raises:
        InvalidValueError: An id is not in the vocabulary.
        TooLargeError: The text exceeds the budget.
    """
    tokenizer = model.tokenizer
    unknown = next((id_ for id_ in dict.fromkeys(request.ids) if tokenizer.token(id_) is None), None)
    if unknown is not None:
        raise InvalidValueError(
            "unknown token id {unknown}; this model has {vocabulary_size} token ids, starting at 0.",
            unknown=Sent(unknown),
            vocabulary_size=tokenizer.vocabulary_size,
        )
    yield Batch([], Cost(answer_bytes=2, steps=TOKEN_STEPS * len(request.ids)))
    (text,) = tokenizer.decode_all([request.ids], skip_special=request.skip_special_tokens)
    model.budget.spend(answer_bytes=text_bytes(text))  # its length is known only now
    return text


class TokenizeBody(ForeignBody):
    """Body of a request to tokenize texts."""

    model_config = body_config(inputs="A warm, funny film.")

    always_list: ClassVar[bool] = True
    inputs: TextOrTexts
    add_special_tokens: Annotated[bool, Field(description="Add the model's special tokens.")] = True

    def requests(self, config: ModelConfig | None = None) -> list[Any]:
        """Returns one request per text."""
        return [TextRequest(text, self.add_special_tokens) for text in self.items]


_Id = Annotated[int, Field(ge=0, le=2**31 - 1)]
_Ids = Annotated[list[_Id], STOP]


def _lists(value: Any) -> Any:
    """Returns a list of lists of ids; a single list is wrapped."""
    return value if not isinstance(value, list) or not value or isinstance(value[0], list) else [value]


class DecodeBody(ForeignBody):
    """Body of a request to decode token ids."""

    model_config = body_config(ids=[[101, 2023, 102]])
    counted: ClassVar[str] = "`ids` has {} items"
    subject: ClassVar[str] = "ids"

    ids: Annotated[
        list[_Ids],
        STOP,
        BeforeValidator(_lists, json_schema_input_type=_Ids | Annotated[list[_Ids], STOP]),
        Field(description="One or more lists of token ids."),
    ]
    skip_special_tokens: Annotated[bool, Field(description="Leave out special tokens.")] = True

    @property
    def items(self) -> list[list[int]]:
        """The lists of ids."""
        return self.ids

    @property
    def is_list(self) -> bool:
        """Always true: a single list of ids was wrapped in a list."""
        return True

    def texts_of(self, item: Any) -> Iterable[str]:
        """Returns nothing, because ids are not texts."""
        return ()

    def requests(self, config: ModelConfig | None = None) -> list[Any]:
        """Returns one request per list of ids."""
        return [IdsRequest(ids, self.skip_special_tokens) for ids in self.ids]


TOOLS: Mapping[str, TaskSpec] = {
    spec.name: spec
    for spec in (
        TaskSpec(
            name=TOKENIZE,
            path=TOKENIZE,
            title="Tokenize texts",
            body=TokenizeBody,
            answer=list[list[Token]],
            estimate=lambda request, max_length: estimate_tokens(request.text),
            run=tokenize,
        ),
        TaskSpec(
            name=DECODE,
            path=DECODE,
            title="Decode token ids to texts",
            body=DecodeBody,
            answer=list[str],
            estimate=lambda request, max_length: len(request.ids) + 1,
            run=decode,
        ),
    )
}
