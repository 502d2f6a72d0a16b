"""Extractive question answering: the span of a passage that answers a question, over all windows of the passage.

With `duplicates: "sum"` the answers are those of the `question-answering` pipeline of transformers 5.2.0, the last to have
one, its candidate limit included. The default, `"best"`, searches every span, and gives equal texts their best score, so
that scores stay within [0, 1].
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from pydantic import BaseModel, BeforeValidator, Field, Tag

from service.errors import InvalidValueError
from service.tasks.body import LIST, PAIR, STOP, Closed, OffsetUnit, TaskBody, TaskParameters, body_config, lower, one_of
from service.tasks.decoding.offsets import rebase
from service.tasks.decoding.scores import Row, activate
from service.tasks.decoding.spans import BestAnswers, SpanTexts, SummedAnswers, score_spans
from service.tasks.encoded import Encoded, ModelConfig
from service.tasks.spec import TaskSpec, copied
from service.text.tokenizer import Tokenizer, Tokens, estimate_tokens
from service.text.windows import windows

TASK = "question-answering"
DEFAULT_SEQ_LEN = 384
DEFAULT_STRIDE = 128
ANSWER_VALUES = 128  # An answer takes the memory of so many numbers.


class AnswerParameters(TaskParameters):
    """Parameters of question answering."""

    top_k: Annotated[int, Field(ge=1, le=1000, description="How many answers to return; a list if over 1.")] = 1
    doc_stride: Annotated[
        int | None, Field(ge=0, description="Tokens that neighboring windows share; half of max_seq_len, at most 128.")
    ] = None
    max_answer_len: Annotated[int, Field(ge=1, le=512, description="Most tokens of an answer.")] = 15
    max_question_len: Annotated[int | None, Field(ge=1, description="Without effect, as in transformers.")] = None
    max_seq_len: Annotated[int | None, Field(ge=1, description="Tokens of a window, question included; 384, at most the model's.")] = None
    handle_impossible_answer: Annotated[bool, Field(description='Whether "no answer" may be the answer.')] = False
    align_to_words: Annotated[bool, Field(description="Whether answers are widened to whole words.")] = True
    duplicates: Annotated[
        Literal["best", "sum"],
        BeforeValidator(lower),
        Field(description="Equal answers keep their best score, or add up as in transformers 5.2.0."),
    ] = "best"
    offset_unit: OffsetUnit = "code_points"


DEFAULTS = AnswerParameters()


@dataclass(frozen=True, slots=True)
class Request:
    """One question about one passage.

    Attributes:
        question: The question.
        context: The passage.
        parameters: How.
    """

    question: str
    context: str
    parameters: AnswerParameters = DEFAULTS

    @property
    def chars(self) -> int:
        """Characters that have to be tokenized."""
        return len(self.question) + len(self.context)


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedPassage(Encoded):
    """The windows of a passage, with its tokens.

    Attributes:
        passage: The whole passage's.
        cuts: Which of them each window has.
        cls_index: Where [CLS] stands in a window, -1 for its end, or None: the model has no token that stands for "no answer".
    """

    passage: Tokens
    cuts: list[range]
    cls_index: int | None


def estimate(request: Request, max_length: int) -> int:
    """Returns a cheap guess of the tokens that the request will cost, over all windows."""
    question, passage = estimate_tokens(request.question), estimate_tokens(request.context)
    length = min(request.parameters.max_seq_len or DEFAULT_SEQ_LEN, max_length)
    stride = min(length // 2, DEFAULT_STRIDE) if request.parameters.doc_stride is None else request.parameters.doc_stride
    room = length - 3 - question
    # without room encode says so, and that is the better error
    return min(question + passage, length) if passage <= room or room <= stride else (passage // (room - stride) + 1) * length


def encode(request: Request, tokenizer: Tokenizer) -> EncodedPassage:
    """Returns one encoding per window of the passage.

    Raises:
        InvalidValueError: The question or the passage is empty, a window has no room for question and stride, or "no answer" is asked
            for where nothing stands for it.
    """
    if request.parameters.handle_impossible_answer and tokenizer.cls_index is None:
        raise InvalidValueError('this model has no [CLS], which stands for "no answer"; leave `handle_impossible_answer` out.')
    question, passage = tokenizer.tokenize([request.question, request.context])
    for name, tokens in (("question", question), ("context", passage)):
        if not len(tokens):
            raise InvalidValueError(f"`{name}` is empty; give a text.")
    length = request.parameters.max_seq_len or min(DEFAULT_SEQ_LEN, tokenizer.max_length)
    if length > tokenizer.max_length:
        raise InvalidValueError(f"`max_seq_len` is {length}, the model takes {tokenizer.max_length}; make it smaller.")
    stride = min(length // 2, DEFAULT_STRIDE) if request.parameters.doc_stride is None else request.parameters.doc_stride
    room = length - (tokenizer.max_length - tokenizer.room(pair=True)) - len(question)
    if len(passage) > room and room <= stride:
        raise InvalidValueError(
            f"a window of {length} tokens has room for {max(room, 0)} of the passage beside a question of {len(question)}, and "
            f"`doc_stride` is {stride}; make `doc_stride` or the question smaller, or `max_seq_len` greater."
        )
    cuts = windows(len(passage), room, stride) if len(passage) > room else [range(len(passage))]
    encodings = [tokenizer.assemble(question.ids, passage.ids[cut.start : cut.stop]) for cut in cuts]
    return EncodedPassage(encodings=encodings, passage=passage, cuts=cuts, cls_index=tokenizer.cls_index)


def decode(request: Request, encoded: EncodedPassage, rows: Sequence[Row], config: ModelConfig) -> dict[str, Any] | list[dict[str, Any]]:
    """Returns the best answer, or a list of them if `top_k` is over 1.

    Args:
        request: The request.
        encoded: What `encode` returned.
        rows: One row per window with the outputs `start_logits` and `end_logits`, float32 [length].
        config: Not needed.

    Returns:
        `{answer, score, start, end}` each; offsets are of the passage, in the request's unit, end exclusive.
    """
    parameters, passage = request.parameters, encoded.passage
    summed = parameters.duplicates == "sum"
    # the reference leaves out combining marks that the tokenizer strips
    offsets = passage.offsets if summed else passage.spans(request.context)
    texts = SpanTexts(request.context, offsets, passage.word_ids if parameters.align_to_words else None)
    found = SummedAnswers(texts, limit=_limit(request)) if summed else BestAnswers(texts, top_k=parameters.top_k, count=len(passage))
    nulls = []
    for encoding, cut, row in zip(encoded.encodings, encoded.cuts, rows, strict=True):
        none = [] if encoded.cls_index is None else [encoded.cls_index]
        place = np.array([*none, *range(encoding.start, encoding.start + len(cut))])
        start, end = activate(row["start_logits"][place], "softmax"), activate(row["end_logits"][place], "softmax")
        nulls.append(float(start[0] * end[0]))  # asked for only where there is a [CLS]
        # a window's spans, which are thousands, are let go of before the next one's
        found.add(score_spans(start[len(none) :], end[len(none) :], cut, parameters.max_answer_len))
    answers = found.answers()
    if parameters.handle_impossible_answer:
        answers.append({"answer": "", "score": min(nulls), "start": 0, "end": 0})
    answers = sorted(answers, key=lambda answer: -answer["score"])[: parameters.top_k]
    rebase(answers, request.context, parameters.offset_unit)
    return answers if parameters.top_k > 1 else answers[0]


def _limit(request: Request) -> int:
    """Returns how many spans of a window transformers 5.2.0 looks at."""
    return 2 * request.parameters.top_k + 10 if request.parameters.align_to_words else request.parameters.top_k


def held(request: Request, encoded: EncodedPassage, config: ModelConfig) -> int:
    """Returns how many numbers a passage holds until it is answered: two logits a token, and the answers whose scores add up."""
    answers = len(encoded.cuts) * _limit(request) if request.parameters.duplicates == "sum" else request.parameters.top_k
    return 2 * sum(map(len, encoded.encodings)) + ANSWER_VALUES * answers


class Question(Closed):
    """A question and the passage that has the answer."""

    question: str
    context: str


class AnswerBody(TaskBody):
    """Body of a question answering request."""

    model_config = body_config(inputs={"question": "Where was the bridge built?", "context": "The bridge was built in Porto in 1886."})
    parameters_type: ClassVar[type[TaskParameters]] = AnswerParameters

    inputs: Annotated[
        Annotated[Question, Tag(PAIR)] | Annotated[list[Question], STOP, Tag(LIST)],
        one_of("{question, context} or a list of these", PAIR, LIST),
        Field(description="A question with its passage, or a list of these."),
    ]
    parameters: AnswerParameters | None = None

    @classmethod
    def modern(cls, value: dict[str, Any]) -> dict[str, Any]:
        """Puts a question and its context into `inputs`: huggingface_hub 0.25 sends them at the top."""
        if "inputs" in value or not {"question", "context"} <= value.keys():
            return value
        question = {name: value[name] for name in ("question", "context")}
        return {"inputs": question} | {name: given for name, given in value.items() if name not in question}

    def request(self, item: Any, parameters: AnswerParameters) -> Request:
        """Returns the request of a question."""
        return Request(item.question, item.context, parameters)


class Answer(BaseModel):
    """One answer; offsets are code points of the passage unless asked otherwise, end exclusive."""

    answer: Annotated[str, Field(examples=["Porto"])]
    score: Annotated[float, Field(examples=[0.965])]
    start: Annotated[int, Field(examples=[24])]
    end: Annotated[int, Field(examples=[29])]


SPEC = TaskSpec(
    name=TASK,
    path="answer",
    title="Answer questions from passages of any length",
    body=AnswerBody,
    answer=Answer | list[Answer] | list[list[Answer]],
    estimate=estimate,
    encode=encode,
    decode=decode,
    reduce=copied,
    held=held,
    load_mix="qa",
)
