"""What a model's tokenizer does alone, as jobs of the same queue that no graph runs: texts to tokens, and ids of tokens to texts.

Every model can do it, whatever its task. Bodies and answers are those of Text Embeddings Inference.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, BeforeValidator, Field

from service.errors import InvalidValueError
from service.tasks.body import STOP, TextOrTexts, body_config
from service.tasks.decoding.scores import Row
from service.tasks.encoded import Encoded, ModelConfig
from service.tasks.foreign_body import ForeignBody
from service.tasks.spec import TaskSpec
from service.text.tokenizer import Tokenizer, estimate_tokens

TOKENIZE, DECODE = "tokenize", "decode"
_CHARS_PER_TOKEN = 4  # of English
_VALUES_PER_TOKEN = 5  # that its object in the answer is as long as


class Token(BaseModel):
    """A token. `start` and `stop` are its place in the text, in code points; a special token has none."""

    id: int
    text: str
    special: bool
    start: int | None = None
    stop: int | None = None


@dataclass(frozen=True, slots=True)
class TextRequest:
    """A text to tokenize.

    Attributes:
        text: The text.
        add_special_tokens: Whether the special tokens of the model stand around its tokens.
    """

    text: str
    add_special_tokens: bool = True

    @property
    def chars(self) -> int:
        """Characters that have to be tokenized."""
        return len(self.text)


@dataclass(frozen=True, slots=True)
class IdsRequest:
    """Ids of tokens to make a text of.

    Attributes:
        ids: The ids.
        skip_special_tokens: Whether special tokens are left out.
    """

    ids: list[int]
    skip_special_tokens: bool = True

    @property
    def chars(self) -> int:
        """About as many characters as they stand for."""
        return _CHARS_PER_TOKEN * len(self.ids)


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedResult(Encoded):
    """A result that is there already, beside encodings of which there are none.

    Attributes:
        result: The result.
    """

    result: Any


def tokenize(request: TextRequest, tokenizer: Tokenizer) -> EncodedResult:
    """Returns the tokens of a text, of any length."""
    (tokens,) = tokenizer.tokenize([request.text])
    found = [
        {"id": id_, "text": request.text[start:stop], "special": False, "start": start, "stop": stop}
        for id_, (start, stop) in zip(tokens.ids, tokens.offsets, strict=True)
    ]
    if request.add_special_tokens:
        whole = tokenizer.assemble(tokens.ids)
        special = [{"id": id_, "text": tokenizer.token(id_), "special": True, "start": None, "stop": None} for id_ in whole.ids.tolist()]
        found = special[: whole.start] + found + special[whole.start + len(found) :]
    return EncodedResult(encodings=[], values=_VALUES_PER_TOKEN * len(found), result=found)


def to_text(request: IdsRequest, tokenizer: Tokenizer) -> EncodedResult:
    """Returns the text of ids.

    Raises:
        InvalidValueError: The vocabulary has no such id.
    """
    unknown = next((id_ for id_ in dict.fromkeys(request.ids) if tokenizer.token(id_) is None), None)
    if unknown is not None:
        raise InvalidValueError(f"there is no token of id {unknown}; this model has {tokenizer.vocabulary_size}, the first of them 0.")
    return EncodedResult(encodings=[], result=tokenizer.decode(request.ids, skip_special=request.skip_special_tokens))


def decode(request: Any, encoded: EncodedResult, rows: Sequence[Row], config: ModelConfig) -> Any:
    """Returns the result."""
    return encoded.result


class TokenizeBody(ForeignBody):
    """Body of a request for tokens."""

    model_config = body_config(inputs="A warm, funny film.")

    inputs: TextOrTexts
    add_special_tokens: Annotated[bool, Field(description="Put the special tokens of the model around the text's.")] = True

    def requests(self, config: ModelConfig | None = None) -> list[Any]:
        """Returns one request per text."""
        return [TextRequest(text, self.add_special_tokens) for text in self.items]

    def answer(self, results: list[Any], user_agent: str = "") -> Any:
        """Returns a list of tokens for each text, also where there is one alone."""
        return results


_Id = Annotated[int, Field(ge=0, le=2**31 - 1)]
_Ids = Annotated[list[_Id], STOP]


def _lists(value: Any) -> Any:
    """Returns a list of lists for a list of ids."""
    return [value] if isinstance(value, list) and value and not isinstance(value[0], list) else value


class DecodeBody(ForeignBody):
    """Body of a request for texts."""

    model_config = body_config(ids=[[101, 2023, 102]])
    counted: ClassVar[str] = "`ids` has {} items"
    subject: ClassVar[str] = "ids"

    ids: Annotated[
        list[_Ids],
        STOP,
        BeforeValidator(_lists, json_schema_input_type=_Ids | Annotated[list[_Ids], STOP]),
        Field(description="A list of token ids, or a list of such lists."),
    ]
    skip_special_tokens: Annotated[bool, Field(description="Leave special tokens out.")] = True

    @property
    def items(self) -> list[list[int]]:
        """The lists of ids."""
        return self.ids

    @property
    def is_list(self) -> bool:
        """Always: one list of ids was made the only one of a list."""
        return True

    def texts_of(self, item: Any) -> Iterable[str]:
        """Returns nothing: ids are no text."""
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
            title="Show the tokens of texts",
            body=TokenizeBody,
            answer=list[list[Token]],
            estimate=lambda request, max_length: estimate_tokens(request.text),
            encode=tokenize,
            decode=decode,
        ),
        TaskSpec(
            name=DECODE,
            path=DECODE,
            title="Make texts of token ids",
            body=DecodeBody,
            answer=list[str],
            estimate=lambda request, max_length: len(request.ids) + 1,
            encode=to_text,
            decode=decode,
        ),
    )
}
