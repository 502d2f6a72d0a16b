"""Multiple choice: the best continuation of a text among several. Each choice is a separate row."""

import json
from collections.abc import Sequence
from statistics import fmean
from typing import Any

from bertserve.export.input_fields import JsonObject, read_input
from bertserve.export.int8_texts import SplitTexts
from bertserve.export.tasks.evaluation import ACCURACY, MetricValue
from bertserve.export.tasks.export_task import ExportTask, TokenizerCall
from bertserve.export.tasks.sample_texts import LONG_TEXT, NAMES_TEXT, SAMPLE_TEXTS, SHORT_TEXT
from bertserve.service.bundle.graph_spec import OutputSpec
from bertserve.service.bundle.manifest import ModelConfig, TokenizerSpec
from bertserve.service.tasks.multiple_choice import SPEC, MultipleChoiceInput


class _MultipleChoice(ExportTask):
    task_spec = SPEC
    head = "ForMultipleChoice"
    outputs = (OutputSpec(name="logits", kind="per_text"),)
    needs_pairs = True
    gold_keys = ("label",)
    metric_names = (ACCURACY,)

    def text_input(self, text: str, tokenizer_spec: TokenizerSpec) -> MultipleChoiceInput:
        return MultipleChoiceInput(text, (SHORT_TEXT, text))

    def example(self, tokenizer_spec: TokenizerSpec) -> dict[str, Any]:
        choices = ["waited for the water to boil.", "rode it to the railway station."]
        return {"inputs": {"prompt": "She put the kettle on and", "choices": choices}}

    def compared_value(self, result: Any, config: ModelConfig) -> Any:
        return result[0]["index"]

    def sample_inputs(self, tokenizer_spec: TokenizerSpec) -> list[Any]:
        choices = tuple(SAMPLE_TEXTS[:4])
        return [
            *(MultipleChoiceInput(text, choices) for text in ["", *SAMPLE_TEXTS, LONG_TEXT * 30]),
            MultipleChoiceInput("A man is eating food.", ("Someone eats.", "")),
            MultipleChoiceInput("Who met Charles Babbage?", ("Ada Lovelace", "Maria Agnesi", "the Royal Society"), NAMES_TEXT),
            MultipleChoiceInput("What was said?", (LONG_TEXT * 20, "nothing"), LONG_TEXT * 8),
        ]

    def validation_inputs(self, texts: SplitTexts, tokenizer_spec: TokenizerSpec) -> list[Any]:
        """Returns inputs with each text as one of four choices, after the line before the group. A single text would not be a choice."""
        groups = [(i, side[i : i + 4]) for side in (texts.lines, texts.passages) for i in range(0, len(side) - 1, 4)]
        return [MultipleChoiceInput(texts.lines[(i - 1) % len(texts.lines)], group) for i, group in groups]

    def tokenizer_call(self, input_: MultipleChoiceInput, tokenizer_spec: TokenizerSpec) -> TokenizerCall:
        # lists, as in `run_swag`, because transformers would omit an empty second text of a single pair
        return ([input_.first] * len(input_.choices), list(input_.second_texts)), {}

    def read_gold(self, document: JsonObject, config: ModelConfig) -> int | None:
        """Reads `label`: the index of the correct choice, or the choice itself."""
        label, inputs = document.get("label"), read_input(document)
        if label is None:
            return None
        choices = inputs.get("choices") if isinstance(inputs, dict) else None
        if not isinstance(choices, list):
            raise ValueError("it has a `label` but no `choices`.")
        if isinstance(label, str) and choices.count(label) == 1:
            return choices.index(label)
        if isinstance(label, bool) or not isinstance(label, int) or not 0 <= label < len(choices):
            raise ValueError(f"`label` is {json.dumps(label)}; it must be one of the {len(choices)} choices, or its index from 0.")
        return label

    def compute_metrics(self, golds: Sequence[Any], results: Sequence[Any], config: ModelConfig) -> dict[str, MetricValue]:
        return {ACCURACY: (fmean([result[0]["index"] == gold for gold, result in zip(golds, results, strict=True)]), "")}


EXPORT_TASK = _MultipleChoice()
