"""Token classification: the entities of a text."""

import json
from collections.abc import Sequence
from typing import Any

from bertserve.export.input_fields import JsonObject, read_input, read_text_list
from bertserve.export.tasks.evaluation import ENTITY_F1, MetricValue, Span, micro_f1, result_spans, spans_of_tags, widen_to_words
from bertserve.export.tasks.export_task import ExportTask, TokenizerCall
from bertserve.export.tasks.sample_texts import NAMES_TEXT, SAMPLE_TEXTS
from bertserve.export.tasks.tags import read_tags
from bertserve.service.bundle.graph_spec import Measure, OutputSpec
from bertserve.service.bundle.manifest import ModelConfig, TokenizerSpec
from bertserve.service.tasks.step import TextInput
from bertserve.service.tasks.token_classification import SPEC, TokenClassificationParameters

# the correct entities of a text, and start and end of the tagged words; no words if the entities are exact to the character
Entities = tuple[set[Span], Sequence[tuple[int, int]]]


def _find_words(words: Sequence[str], text: Any) -> list[tuple[int, int]]:
    """Returns start and end of each word in a text that contains the words in this order."""
    offsets, end = [], 0
    for word in words:
        start = text.find(word, end) if isinstance(text, str) else -1
        if start < 0:
            raise ValueError(f"the token {json.dumps(word)} is not in the text at its position.")
        end = start + len(word)
        offsets.append((start, end))
    return offsets


def _read_entity(entity: dict[str, Any]) -> Span:
    start, end, label = entity["start"], entity["end"], entity.get("label", entity.get("entity_group"))
    if not (type(start) is type(end) is int and 0 <= start < end and isinstance(label, str)):
        raise ValueError
    return start, end, label


class _TokenClassification(ExportTask):
    task_spec = SPEC
    head = "ForTokenClassification"
    outputs = (OutputSpec(name="logits", kind="per_token"),)
    labeled = True
    gold_keys = ("entities", "tags")
    metric_names = (ENTITY_F1,)

    def text_input(self, text: str, tokenizer_spec: TokenizerSpec) -> TextInput[TokenClassificationParameters]:
        return TextInput(text, TokenClassificationParameters())

    def example(self, tokenizer_spec: TokenizerSpec) -> dict[str, Any]:
        return {"inputs": "Ada Lovelace wrote to Charles Babbage from London."}

    def tokenizer_call(self, input_: TextInput[TokenClassificationParameters], tokenizer_spec: TokenizerSpec) -> TokenizerCall:
        return (input_.text,), {"stride": input_.parameters.stride}

    def agreement_measure(self, config: ModelConfig) -> Measure:
        return "span_f1"

    def compared_value(self, result: Any, config: ModelConfig) -> Any:
        return result_spans(result)

    def sample_inputs(self, tokenizer_spec: TokenizerSpec) -> list[Any]:
        stride = min(64, tokenizer_spec.max_length // 8)
        return [
            *(self.text_input(text, tokenizer_spec) for text in [*SAMPLE_TEXTS, NAMES_TEXT * 5]),
            *(TextInput(NAMES_TEXT, TokenClassificationParameters(aggregation_strategy=s)) for s in ("none", "first", "max", "average")),
            self.text_input(NAMES_TEXT * 40, tokenizer_spec),
            TextInput(NAMES_TEXT * 40, TokenClassificationParameters(aggregation_strategy="first", stride=stride)),
        ]

    def read_gold(self, document: JsonObject, config: ModelConfig) -> Entities | None:
        """Reads `entities`, a list of `{start, end, label}`, or `tags`, one per item of `tokens`."""
        if document.get("entities") is not None:
            try:
                return {_read_entity(entity) for entity in document["entities"]}, ()
            except (TypeError, KeyError, AttributeError, ValueError) as error:
                raise ValueError("`entities` must be a list of {start, end, label}, offsets in code points, end exclusive.") from error
        if document.get("tags") is None:
            return None
        if "tokens" not in document:
            raise ValueError("`tags` need `tokens`, the words that they belong to.")
        tags, words = read_text_list(document, "tags"), read_text_list(document, "tokens")
        if len(tags) != len(words):
            raise ValueError(f"the number of `tags` is {len(tags)}, and of `tokens` {len(words)}; give one tag for each token.")
        offsets = _find_words(words, read_input(document))
        spellings = tuple(sorted({*config.labels, *tags}))  # the labels of the data can differ from the model's
        tag_of = dict(zip(spellings, read_tags(spellings) or spellings, strict=True))
        return spans_of_tags([tag_of[tag] for tag in tags], offsets), offsets

    def data_parameters(self, line_parameters: Sequence[JsonObject], golds: Sequence[Any]) -> list[JsonObject]:
        """Extends entities to whole words if correct answers are given by word, unless a line sets this itself."""
        return [
            {"aggregation_strategy": "first"} | parameters if gold is not None and gold[1] else parameters
            for parameters, gold in zip(line_parameters, golds, strict=True)
        ]

    def compute_metrics(self, golds: Sequence[Any], results: Sequence[Any], config: ModelConfig) -> dict[str, MetricValue]:
        expected = [spans for spans, _ in golds]
        spans = [widen_to_words(result_spans(result), words) for (_, words), result in zip(golds, results, strict=True)]
        remark = "" if any((*expected, *spans)) else "no input has an entity, and none was found; 0 is shown instead"
        return {ENTITY_F1: (micro_f1(expected, spans), remark)}


EXPORT_TASK = _TokenClassification()
