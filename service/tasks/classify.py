"""Text classification: a text or pair to labels and scores, like the Hugging Face pipeline.

There is one intended difference from the pipeline: a text over the model's length is truncated with a header instead of an
error, or scored window by window on request.
"""

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal, NotRequired

import numpy as np
from pydantic import Field
from typing_extensions import TypedDict

from bertserve.service.body.task_body import LIST_LIMIT, AnyCase, ClosedModel, Stride, TaskBody, body_config, one_of
from bertserve.service.bundle.graph_spec import Outputs
from bertserve.service.bundle.manifest import Manifest, ModelConfig, Side
from bertserve.service.errors import InvalidValueError
from bertserve.service.tasks import occlusion
from bertserve.service.tasks.cost import ENTRY_BYTES, Cost, longest_label
from bertserve.service.tasks.decide import DEFAULT_THRESHOLD, CalibratedDecisionParameters, Decided, decision_rule
from bertserve.service.tasks.decoding import Floats, activate
from bertserve.service.tasks.occlusion import OccludedText, WordImportance
from bertserve.service.tasks.step import EMPTY_WARNINGS, Step, TaskGenerator, TaskModel, TextInput
from bertserve.service.tasks.task_spec import TaskSpec
from bertserve.service.text.tokenizer import ReadSpan, Tokenizer, Tokens
from bertserve.service.text.windows import kept_of_pair, too_long_error, windows
from bertserve.service.text.words import Unit, find_words

TASK = "text-classification"
MAX_EXPLAINED = 8  # labels of a text, if they are scored independently; each lists all words in the answer


class LabelScore(TypedDict):
    """One label with its score and, on request, the importance of each word."""

    label: Annotated[str, Field(examples=["positive"])]
    score: Annotated[float, Field(examples=[0.997])]
    explanation: NotRequired[Annotated[list[WordImportance], Field(description="Importance of each word for the score, with `explain`.")]]


class ClassifyParameters(CalibratedDecisionParameters):
    """Parameters of text classification."""

    top_k: Annotated[int | None, Field(ge=1, description="Number of labels to return; by default all.")] = None
    function_to_apply: Annotated[
        AnyCase[Literal["softmax", "sigmoid", "none"]] | None,
        Field(description="Function from logits to scores, instead of the model's own."),
    ] = None
    truncation: Annotated[bool, Field(description="Truncate long texts; otherwise they are an error.")] = True
    window: Annotated[
        AnyCase[Literal["mean", "max"]] | None,
        Field(description="Score all windows of a long text and combine the scores, instead of truncating."),
    ] = None
    stride: Stride = None
    explain: Annotated[bool, Field(description="Explain the best label: n words need n more runs.")] = False
    offset_unit: Annotated[AnyCase[Unit] | None, Field(description="With `explain`, the unit of `start` and `end`.")] = None


def classify(input_: TextInput[ClassifyParameters], model: TaskModel) -> TaskGenerator:
    """Returns labels and scores, best first; equal scores keep the order of the labels. With `explain`, it also runs variants of the text.

    The rows have the output `logits`, float32 [labels]; there is one row per window.

    Raises:
        InvalidValueError: The text is too long and `truncation` is false, windows are too small for `stride`, a model of pairs got a single
            text, or `explain` got a text with too many words or several windows.
    """
    parameters, config = input_.parameters, model.config
    step, read_texts = _first_step(input_, model.tokenizer)
    activation = parameters.function_to_apply or config.activation
    can_calibrate = parameters.function_to_apply is None and config.activation != "none"
    rule = decision_rule(parameters, model, config.labels, can_calibrate=can_calibrate, probabilities=activation != "none")
    returned = min(parameters.top_k or len(config.labels), len(config.labels))
    max_explained = min(returned, MAX_EXPLAINED) if activation == "sigmoid" else 1
    step.cost = Cost(returned * (ENTRY_BYTES + longest_label(config.labels)) + rule.decision_bytes)
    if parameters.explain:
        words = sum(len(text.words) for text in read_texts)
        texts = [text.tokens.text for text in read_texts]
        subject = "the pair" if len(texts) > 1 else "the text"
        step.cost += occlusion.cost(words, len(step.encodings[0]), texts, subject=subject, remedy="shorten it", explained=max_explained)
    rows = yield step
    scores = [activate(row["logits"], activation) for row in rows]
    combine = np.max if parameters.window == "max" else np.mean
    combined: Floats = combine(scores, axis=0) if len(scores) > 1 else scores[0]
    calibrated, order = rule.ranked(combined, activation)
    scored: list[LabelScore] = [{"label": config.labels[i], "score": float(calibrated[i])} for i in order]
    if parameters.explain:
        # the best label, and all independent labels that are more likely than not
        explained = order[: max(1, sum(item["score"] >= DEFAULT_THRESHOLD for item in scored[:max_explained]))]

        def read_scores(row: Outputs, *_: Any) -> Floats:
            return rule.calibrated(activate(row["logits"], activation), activation)[explained]

        yield from occlusion.explain(
            scored[: len(explained)], read_texts, model.tokenizer, read_scores, parameters.offset_unit or "code_points"
        )
    # regression values and independent labels do not exclude each other; logits are about the labels of the model's own scores
    exclusive = activation == "softmax" or (activation == "none" and config.activation == "softmax")
    return rule.answer_or_labels(scored, scored[:returned], exclusive=exclusive)


def _first_step(input_: TextInput[ClassifyParameters], tokenizer: Tokenizer) -> tuple[Step, list[OccludedText]]:
    """Returns the encodings of an input without their cost, and for `explain` the text or both texts with the words to leave out."""
    if tokenizer.spec.pairs_only and not input_.text_pair:
        raise InvalidValueError(
            "this model classifies pairs of texts, and the second text is missing; give a pair, such as "
            '{"text": "It began to rain.", "text_pair": "We went inside."}.'
        )
    # an empty second text counts as missing, as in the pipeline
    texts = [input_.text, input_.text_pair] if input_.text_pair else [input_.text]
    fields = ("text", "text_pair") if input_.text_pair else ("",)
    tokens = tokenizer.tokenize(texts)
    max_tokens = tokenizer.max_text_tokens(pair=len(texts) > 1)
    whole = [range(len(text_tokens.ids)) for text_tokens in tokens]
    is_long = sum(map(len, whole)) > max_tokens
    # the tokens of each text, for each encoding
    token_ranges, spans = _cut(input_, fields, tokens, max_tokens, tokenizer.spec.truncation_side) if is_long else ([whole], ())
    encodings = [
        tokenizer.assemble(*[text_tokens.ids[kept.start : kept.stop] for text_tokens, kept in zip(tokens, ranges, strict=True)])
        for ranges in token_ranges
    ]
    step = Step(
        encodings,
        truncated=is_long and input_.parameters.window is None,
        warnings=() if any(map(str.strip, texts)) else EMPTY_WARNINGS,
        read_spans=spans,
    )
    return step, _occluded_texts(fields, tokens, token_ranges) if input_.parameters.explain else []


def _cut(
    input_: TextInput[ClassifyParameters], fields: Sequence[str], tokens: Sequence[Tokens], max_tokens: int, side: Side
) -> tuple[list[list[range]], tuple[ReadSpan, ...]]:
    """Returns the tokens of each text for each encoding of an input over the model's length, and the spans that the model reads."""
    parameters, lengths = input_.parameters, list(map(len, tokens))
    if parameters.window is not None:  # each window of a pair contains the whole first text and a part of the second
        remedy = "shorten the first text" if len(lengths) > 1 else ""
        ranges = windows(lengths[-1], max_tokens - sum(lengths[:-1]), parameters.stride, side, remedy=remedy)
        return [[*map(range, lengths[:-1]), token_range] for token_range in ranges], tokens[-1].read_spans(ranges, fields[-1])
    if not parameters.truncation:
        raise too_long_error(sum(lengths), max_tokens, "or set `truncation` to true or `window` to `mean` or `max`")
    kept = kept_of_pair(lengths[0], sum(lengths[1:]), max_tokens, input_.truncation_side or side)[: len(lengths)]
    spans = [text_tokens.read_spans([part], field)[0] for field, text_tokens, part in zip(fields, tokens, kept, strict=True)]
    return [list(kept)], tuple(spans)


def _occluded_texts(fields: Sequence[str], tokens: Sequence[Tokens], token_ranges: Sequence[Sequence[range]]) -> list[OccludedText]:
    """Returns the texts of an input as the model reads them; a text in several windows is refused."""
    if len(token_ranges) > 1:
        raise InvalidValueError(
            "`explain` needs a text that fits into one window, and this one needs {windows_count}; shorten it, or "
            "remove `window` to truncate it.",
            windows_count=len(token_ranges),
        )
    return [
        OccludedText(field, text_tokens, token_range, find_words(text_tokens, token_range))
        for field, text_tokens, token_range in zip(fields, tokens, token_ranges[0], strict=True)
    ]


class TextPair(ClosedModel):
    """A text and a second text."""

    text: str
    text_pair: str | None = None


_TextOrPair = Annotated[str | TextPair, one_of('a text, or a pair such as {"text": "a", "text_pair": "b"}')]
TextsOrPairs = Annotated[
    str | TextPair | Annotated[list[_TextOrPair], LIST_LIMIT],
    one_of("a text, {text, text_pair}, or a list of these"),
    Field(description="One or more texts or pairs."),
]


class ClassifyBody(TaskBody):
    """Body of a text classification request."""

    model_config = body_config(inputs="A warm, funny and thoroughly engaging film.", parameters={"top_k": 1})
    always_list: ClassVar[bool] = True

    inputs: TextsOrPairs
    parameters: ClassifyParameters | None = None

    def task_inputs(self, config: ModelConfig) -> list[Any]:
        """Returns one input per text or pair.

        Raises:
            InvalidValueError: `offset_unit` is set without `explain`, or `stride` without `window`.
        """
        parameters: ClassifyParameters = self.parameters or self.default_parameters
        if parameters.stride is not None and parameters.window is None:
            raise InvalidValueError("`stride` needs `window`; set `window` to `mean` or `max`, or remove `stride`.")
        if parameters.offset_unit is not None and not parameters.explain:
            raise InvalidValueError("`offset_unit` needs `explain`; set `explain` to true, or remove `offset_unit`.")
        return [
            TextInput(item, parameters) if isinstance(item, str) else TextInput(item.text, parameters, item.text_pair)
            for item in self.items
        ]


def _has_one_label(input_: TextInput[ClassifyParameters], manifest: Manifest) -> bool:
    parameters = input_.parameters
    if parameters.explain or parameters.decide or parameters.top_k not in (None, 1):
        return False
    function = parameters.function_to_apply or manifest.activation
    return len(manifest.labels) == 1 or function == "softmax" or (function == "none" and manifest.activation == "softmax")


def _explanation_bytes(input_: TextInput[ClassifyParameters], length: int) -> int:
    """Returns the maximum bytes of the explanation of a text of `length` tokens, which contains at most as many words."""
    return MAX_EXPLAINED * length * ENTRY_BYTES if input_.parameters.explain else 0


def missing_labels(manifest: Manifest) -> str | None:
    """Returns an error if a classification manifest lacks its labels, otherwise None."""
    return None if manifest.labels else f"`labels` must not be empty for {manifest.task}"


def logit_widths(manifest: Manifest) -> dict[str, int]:
    """Returns the number of values in `logits`: one per label."""
    return {"logits": len(manifest.labels)}


SPEC = TaskSpec(
    name=TASK,
    path="classify",
    title="Classify texts or pairs of texts",
    body=ClassifyBody,
    response_type=list[list[LabelScore]] | list[Decided],
    function=classify,
    missing_field=missing_labels,
    widths=logit_widths,
    has_one_label=_has_one_label,
    result_bytes=_explanation_bytes,
)
