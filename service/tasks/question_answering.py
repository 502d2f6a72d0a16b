"""Extractive question answering: the span of a passage that answers a question, over all windows of the passage.

With `duplicates: "sum"` the answers equal those of the `question-answering` pipeline of transformers 5.2.0, the last version with
this pipeline, including its limit of candidates. The default, `"best"`, searches every span and gives equal texts their best
score, so that scores stay within [0, 1].
"""

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from pydantic import BaseModel, Field

from bertserve.service.body.task_body import LIST_LIMIT, MAX_TOP_K, AnyCase, ClosedModel, OffsetUnit, Stride, TaskBody, body_config, one_of
from bertserve.service.bundle.graph_spec import Outputs
from bertserve.service.bundle.manifest import ModelConfig
from bertserve.service.errors import CallerValue, InvalidParameterError, InvalidValueError
from bertserve.service.tasks import occlusion
from bertserve.service.tasks.answer_spans import BestAnswers, SummedAnswers
from bertserve.service.tasks.cost import ENTRY_BYTES, Cost, text_bytes
from bertserve.service.tasks.decide import CalibratedDecisionParameters, Decided, DecisionRule, decision_rule
from bertserve.service.tasks.decoding import Floats, activate
from bertserve.service.tasks.occlusion import OccludedText, WordImportance
from bertserve.service.tasks.step import Step, TaskGenerator, TaskModel, TextInput, copy_outputs
from bertserve.service.tasks.task_spec import TaskSpec
from bertserve.service.text.tokenizer import Encoding, Tokenizer, Tokens
from bertserve.service.text.windows import default_stride, windows
from bertserve.service.text.words import Unit, Word, convert_offsets, find_words, most_within

TASK = "question-answering"
DEFAULT_SEQ_LEN = 384  # tokens of a window, as in transformers
WINDOW_US = 64  # microseconds to decode a window, in addition to its spans
SPANS_PER_US = 16  # spans that are scored and sorted per microsecond


class QuestionAnsweringParameters(CalibratedDecisionParameters):
    """Parameters of question answering."""

    top_k: Annotated[int, Field(ge=1, le=MAX_TOP_K, description="Number of answers, at most `--max-top-k`; more than 1 gives a list.")] = 1
    doc_stride: Stride = None
    max_answer_len: Annotated[int, Field(ge=1, le=512, description="Maximum tokens of an answer.")] = 15
    max_seq_len: Annotated[
        int | None, Field(ge=1, description="Tokens of a window with the question; by default 384 or the model's limit.")
    ] = None
    handle_impossible_answer: Annotated[bool, Field(description='Allow "no answer" as an answer.')] = False
    align_to_words: Annotated[bool, Field(description="Extend answers to whole words.")] = True
    duplicates: Annotated[
        AnyCase[Literal["best", "sum"]], Field(description="Equal answers keep the best score, or add up as in transformers 5.2.0.")
    ] = "best"
    offset_unit: OffsetUnit = "code_points"
    explain: Annotated[bool, Field(description="Explain the best answer: n words in its window need n more runs.")] = False


@dataclass(slots=True)
class PassageWindows:
    """The tokens of a question and of its passage, and the windows of the passage: their token ranges, and an encoding for each.

    An encoding contains the question, and the window's part of the passage.
    """

    question: Tokens
    passage: Tokens
    token_ranges: Sequence[range]
    encodings: Sequence[Encoding]
    tokenizer: Tokenizer

    def probabilities(self, encoding: Encoding, count: int, row: Outputs) -> tuple[float, Floats, Floats]:
        """Returns the probability of "no answer", and of each of an encoding's `count` tokens of the passage to be the first and the last.

        Without [CLS], the probability of "no answer" is meaningless.
        """
        cls_positions = [] if self.tokenizer.spec.cls_index is None else [self.tokenizer.spec.cls_index]
        place = np.array([*cls_positions, *range(encoding.start, encoding.start + count)])
        start, end = activate(row["start_logits"][place], "softmax"), activate(row["end_logits"][place], "softmax")
        return float(start[0] * end[0]), start[len(cls_positions) :], end[len(cls_positions) :]


def answer_question(input_: TextInput[QuestionAnsweringParameters], model: TaskModel) -> TaskGenerator:
    """Returns the best answer, or a list of answers if `top_k` is over 1. With `explain`, it also runs variants of the best window.

    The texts of the input are the question and its passage.
    The rows have the outputs `start_logits` and `end_logits`, float32 [length]; there is one row per window. An answer is
    `{answer, score, start, end}`; offsets refer to the passage, in the request's unit, end exclusive.

    Raises:
        InvalidValueError: The question or the passage is empty, a window is too small for question and stride, "no answer" is requested
            from a model without a token for it, or there are too many words to explain.
    """
    parameters = input_.parameters
    is_summed = parameters.duplicates == "sum"
    rule = decision_rule(parameters, model, can_calibrate=not is_summed, probabilities=not is_summed)
    passage_windows = cut_passage(input_, model.tokenizer)
    spans = passage_windows.passage.read_spans(passage_windows.token_ranges, "context") if len(passage_windows.token_ranges) > 1 else ()
    rows = yield Step(passage_windows.encodings, _cost(passage_windows, parameters), copy_outputs, read_spans=spans)
    collector: SummedAnswers | BestAnswers = (SummedAnswers if is_summed else BestAnswers)(
        passage_windows.passage, top_k=parameters.top_k, align_to_words=parameters.align_to_words
    )
    scored_windows = list(zip(passage_windows.encodings, passage_windows.token_ranges, rows, strict=True))
    if is_summed and model.tokenizer.spec.truncation_side == "left":
        # transformers 5.2.0 keeps the first of equal answers, and starts with the last window
        scored_windows.reverse()
    no_answer_scores = []
    for encoding, window, row in scored_windows:
        score, start, end = passage_windows.probabilities(encoding, len(window), row)
        no_answer_scores.append(score)
        # each window's work is added by itself, so that an input over the limit stops early
        yield Step([], Cost(decode_us=collector.add(start, end, window, parameters.max_answer_len)))
    answers = collector.answers()
    no_answer = {"answer": "", "score": min(no_answer_scores), "start": 0, "end": 0}
    if parameters.handle_impossible_answer or not answers:  # without answers, every span is white space
        answers.append(no_answer)
    if rule.calibration is not None:
        for answer in answers:
            answer["score"] = float(_calibrated(answer["score"], rule, is_answer=answer is not no_answer)[0])
    # the answers keep their order if rounding makes calibrated scores equal
    answers = sorted(answers, key=itemgetter("score"), reverse=True)[: parameters.top_k]
    best = answers[0]
    if parameters.explain:
        assert isinstance(collector, BestAnswers), "summed scores are not explained"
        window = passage_windows.token_ranges[int(np.argmin(no_answer_scores))]
        span, window = (None, window) if best is no_answer else collector.span_and_window(best)
        yield from _explain(passage_windows, best, window, span, rule, parameters.offset_unit)
    # their length is only known now
    decision_bytes = rule.decision_bytes + text_bytes(best["answer"]) if rule.decision_requested else 0
    yield Step([], Cost(decision_bytes + sum(ENTRY_BYTES + text_bytes(answer["answer"]) for answer in answers)))
    convert_offsets(answers, passage_windows.passage.text, parameters.offset_unit)
    label = "no answer" if best is no_answer else "answer"
    decision = best["answer"] if best["score"] >= rule.least_score(label) else None
    result = answers if rule.decision_requested or parameters.top_k > 1 else best
    return rule.answer_or_decision(decision, result, best["score"], [([label], best["score"])], label)


def _calibrated(score: float, rule: DecisionRule, *, is_answer: bool) -> Floats:
    """Returns the calibrated score of an answer or of "no answer", float32 [1]."""
    return rule.calibrated(np.array([score], np.float32), "power", 0 if is_answer else 1)


def cut_passage(input_: TextInput[QuestionAnsweringParameters], tokenizer: Tokenizer) -> PassageWindows:
    """Returns the windows of a passage: one, or as many as `max_seq_len` and `doc_stride` require.

    Raises:
        InvalidValueError: The question or the passage is empty, a window is too small for question and stride, `max_seq_len` exceeds the
            model's length, or "no answer" is requested from a model without a token for it.
    """
    parameters = input_.parameters
    if parameters.handle_impossible_answer and tokenizer.spec.cls_index is None:
        raise InvalidParameterError(
            "this model has no [CLS] token, which `handle_impossible_answer` needs; remove `handle_impossible_answer`."
        )
    question, passage = tokenizer.tokenize([input_.text, input_.text_pair or ""])
    for name, tokens in (("question", question), ("context", passage)):
        if not len(tokens) or not tokens.text.strip():
            raise InvalidValueError("`{field}` is empty; give a text.", field=name)
    length = parameters.max_seq_len or min(DEFAULT_SEQ_LEN, tokenizer.spec.max_length)
    if length > tokenizer.spec.max_length:
        raise InvalidParameterError(
            "`max_seq_len` is {max_seq_len} and the model takes {max_length}; make it smaller.",
            max_seq_len=CallerValue(length),
            max_length=tokenizer.spec.max_length,
        )
    max_tokens = length - (tokenizer.spec.max_length - tokenizer.max_text_tokens(pair=True)) - len(question)
    stride = parameters.doc_stride
    if stride is None and default_stride(length) < max_tokens:
        stride = default_stride(length)  # as in transformers, which sets no default for a longer question
    remedy = "make `max_seq_len` greater or the question shorter"
    token_ranges = windows(len(passage), max_tokens, stride, tokenizer.spec.truncation_side, field="doc_stride", remedy=remedy)
    encodings = [tokenizer.assemble(question.ids, passage.ids[window.start : window.stop]) for window in token_ranges]
    return PassageWindows(question, passage, token_ranges, encodings, tokenizer)


def _cost(passage_windows: PassageWindows, parameters: QuestionAnsweringParameters) -> Cost:
    """Returns the cost of a passage before its answers are known: its spans and its explanation."""
    spans = sum(len(window) * min(parameters.max_answer_len, len(window)) for window in passage_windows.token_ranges)
    cost = Cost(decode_us=spans // SPANS_PER_US + WINDOW_US * len(passage_windows.token_ranges))
    if not parameters.explain:
        return cost
    words = len(find_words(passage_windows.question)) + most_within(find_words(passage_windows.passage), passage_windows.token_ranges)
    subject, remedy = "the question with a window of the passage", "make `max_seq_len` smaller"
    texts = [passage_windows.question.text, passage_windows.passage.text]
    return cost + occlusion.cost(words, max(map(len, passage_windows.encodings)), texts, subject=subject, remedy=remedy)


def _explain(
    passage_windows: PassageWindows, best: dict[str, Any], window: range, span: range | None, rule: DecisionRule, unit: Unit
) -> Generator[Step, Sequence[Outputs], None]:
    """Runs the variants of a window, and explains the best answer by the score of its span in each variant.

    `best` gets the explanation; `window` are the tokens of its window, and `span` its own tokens, None for "no answer".
    """
    words = [word for word in find_words(passage_windows.passage, window) if span is None or not _overlaps(word, best, span)]
    question = OccludedText(
        "question", passage_windows.question, range(len(passage_windows.question)), find_words(passage_windows.question)
    )

    def read_scores(row: Outputs, encoding: Encoding, text: OccludedText, word: Word) -> Floats:
        removed = 0 if text is question else len(word.tokens)
        score, start, end = passage_windows.probabilities(encoding, len(window) - removed, row)
        if span is not None:
            first = span.start - window.start - (removed if word.tokens.start < span.start else 0)
            score = start[first] * end[first + len(span) - 1]
        return _calibrated(score, rule, is_answer=span is not None)

    texts = [question, OccludedText("context", passage_windows.passage, window, words)]
    yield from occlusion.explain([best], texts, passage_windows.tokenizer, read_scores, unit)


def _overlaps(word: Word, answer: dict[str, Any], span: range) -> bool:
    """Returns whether a word is part of an answer, so that without the word there is no span to score."""
    by_tokens = word.tokens.start < span.stop and span.start < word.tokens.stop
    return by_tokens or (word.start < answer["end"] and answer["start"] < word.end)


class Question(ClosedModel):
    """A question and the passage that contains the answer."""

    question: str
    context: str


class QuestionAnsweringBody(TaskBody):
    """Body of a question answering request."""

    model_config = body_config(inputs={"question": "Where was the bridge built?", "context": "The bridge was built in Porto in 1886."})
    top_k_is_limited: ClassVar[bool] = True

    inputs: Annotated[
        Question | Annotated[list[Question], LIST_LIMIT],
        one_of("{question, context} or a list of these"),
        Field(description="One or more questions with their passages."),
    ]
    parameters: QuestionAnsweringParameters | None = None

    def task_inputs(self, config: ModelConfig) -> list[Any]:
        """Returns one input per question.

        Raises:
            InvalidValueError: `explain` is combined with summed scores.
        """
        parameters: QuestionAnsweringParameters = self.parameters or self.default_parameters
        if parameters.explain and parameters.duplicates == "sum":
            raise InvalidValueError(
                "`explain` cannot be combined with `duplicates` set to `sum`, which adds up the scores of several "
                "places; remove one of them."
            )
        return [TextInput(item.question, parameters, item.context) for item in self.items]


class Answer(BaseModel):
    """One answer; by default offsets count code points of the passage; `end` is exclusive."""

    answer: Annotated[str, Field(examples=["Porto"])]
    score: Annotated[float, Field(examples=[0.965])]
    start: Annotated[int, Field(examples=[24])]
    end: Annotated[int, Field(examples=[29])]
    explanation: Annotated[
        list[WordImportance],
        Field(
            description="Importance of each word for the best answer's score, with `explain`.",
            examples=[[{"word": "Where", "start": 0, "end": 5, "importance": 0.789, "field": "question"}]],
        ),
    ] = []


SPEC = TaskSpec(
    name=TASK,
    path="answer",
    title="Answer questions from passages of any length",
    body=QuestionAnsweringBody,
    response_type=Answer | list[Answer] | list[list[Answer]] | Decided | list[Decided],
    function=answer_question,
)
