"""Text classification: the labels or the value of a text or a pair. The metrics depend only on the head, not on the data."""

import itertools
import json
import sys
from collections.abc import Sequence
from statistics import fmean
from typing import Any

from bertserve.export.input_fields import JsonObject
from bertserve.export.int8_texts import SplitTexts
from bertserve.export.tasks import evaluation
from bertserve.export.tasks.evaluation import ACCURACY, F1, MACRO_F1, MATTHEWS, MEAN_ABSOLUTE_ERROR, MICRO_F1, PEARSON, SPEARMAN
from bertserve.export.tasks.export_task import ExportTask, TokenizerCall
from bertserve.export.tasks.sample_texts import LONG_TEXT, SAMPLE_TEXTS, SHORT_TEXT
from bertserve.service.bundle.graph_spec import Measure, OutputSpec
from bertserve.service.bundle.manifest import ModelConfig, TokenizerSpec
from bertserve.service.tasks.classify import SPEC, ClassifyParameters
from bertserve.service.tasks.step import TextInput

_SIGMOID_REMARK = (
    "the model's values go through a sigmoid and lie between 0 and 1, but the correct answers do not; if "
    'it was trained on values without a sigmoid, set "problem_type": "regression" in its config.json '
    "and export it again"
)


def _is_regression(config: ModelConfig) -> bool:
    """Returns whether the scores are values, one or several, instead of a choice of labels."""
    return len(config.labels) == 1 or config.activation == "none"


def _chosen_labels(result: Any, config: ModelConfig) -> frozenset[str]:
    """Returns the best label; for independent labels, all labels with a score of at least 0.5."""
    if config.activation == "sigmoid":
        return frozenset(item["label"] for item in result if item["score"] >= 0.5)
    return frozenset({result[0]["label"]})


def _label_name(value: Any, labels: Sequence[str]) -> str:
    name = str(value)
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < len(labels):
        if name in labels and labels[value] != name:
            raise ValueError(f'`label` is {value}, which is the id of {labels[value]} and also a name; write a name as a text, "{name}".')
        return labels[value]
    if name not in labels:
        raise ValueError(f"`label` is {json.dumps(value)}; the model has {', '.join(labels)}, or their ids from 0.")
    return name


def _constant(golds: Sequence[Any], predictions: Sequence[Any], kind: str) -> str:
    """Returns the reason why two series have no correlation; empty if they have one."""
    for series, name in ((golds, "correct answers are"), (predictions, "answers are")):
        if len(set(series)) == 1:
            return f"all {name} the same {kind}, so there is no correlation; 0 is shown instead"
    return ""


def _input(text: str, text_pair: str | None = None, **parameters: Any) -> TextInput[ClassifyParameters]:
    return TextInput(text, ClassifyParameters(**parameters), text_pair)


class _TextClassification(ExportTask):
    task_spec = SPEC
    head = "ForSequenceClassification"
    outputs = (OutputSpec(name="logits", kind="per_text"),)
    labeled = True
    activation = None  # the configuration defines it
    takes_pairs = True
    gold_keys = ("label",)
    metric_names = (ACCURACY, F1, MACRO_F1, MICRO_F1, MATTHEWS, PEARSON, SPEARMAN)

    def text_input(self, text: str, tokenizer_spec: TokenizerSpec) -> TextInput[ClassifyParameters]:
        return _input(text, SHORT_TEXT if tokenizer_spec.pairs_only else None)

    def sample_inputs(self, tokenizer_spec: TokenizerSpec) -> list[Any]:
        pairs = [
            _input("A man is eating food.", "Someone eats."),
            _input("", "only the second text"),
            _input(LONG_TEXT * 8, LONG_TEXT * 20),
            _input("short question?", LONG_TEXT * 30),
        ]
        if tokenizer_spec.pairs_only:
            return [*(_input(a, b) for a, b in itertools.pairwise(SAMPLE_TEXTS)), *pairs]
        stride = min(64, tokenizer_spec.max_length // 8)
        return [
            *(_input(text) for text in ["", *SAMPLE_TEXTS, LONG_TEXT * 30]),
            _input(LONG_TEXT * 30, window="mean"),
            _input(LONG_TEXT * 40, window="max", stride=stride),
            *([] if tokenizer_spec.pair is None else pairs),
        ]

    def validation_inputs(self, texts: SplitTexts, tokenizer_spec: TokenizerSpec) -> list[Any]:
        singles, pairs = self.make_singles_and_pairs(texts.lines, texts.passages, texts.pairs, tokenizer_spec)
        return [*map(_input, singles), *(_input(*pair) for pair in pairs)]

    def tokenizer_call(self, input_: TextInput[ClassifyParameters], tokenizer_spec: TokenizerSpec) -> TokenizerCall:
        texts = (input_.text, input_.text_pair) if input_.text_pair else (input_.text,)
        return texts, {"stride": input_.parameters.stride} if input_.parameters.window else {}

    def example(self, tokenizer_spec: TokenizerSpec) -> dict[str, Any]:
        if tokenizer_spec.pairs_only:
            return {"inputs": {"text": "She opened the door of the old house.", "text_pair": "Nobody had been inside for years."}}
        return {"inputs": "This is a surprisingly touching film, and beautifully acted."}

    def agreement_measure(self, config: ModelConfig) -> Measure:
        if _is_regression(config):
            return "spearman"
        return "set_f1" if config.activation == "sigmoid" else "label"

    def compared_value(self, result: Any, config: ModelConfig) -> Any:
        if not _is_regression(config):
            return _chosen_labels(result, config)
        scores = {item["label"]: item["score"] for item in result}
        # a request can ask for fewer labels; float32 agrees with PyTorch in five digits, and ranks of closer scores are only rounding
        return tuple(float(f"{scores.get(label, 0.0):.5g}") for label in config.labels)

    def read_gold(self, document: JsonObject, config: ModelConfig) -> Any:
        """Reads `label`: a name, an id, a list of these for several labels, or a number for a regression."""
        value = document.get("label")
        if value is None:
            return None
        if len(config.labels) == 1:
            if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= sys.float_info.max:
                raise ValueError(f"`label` must be a number, because the model has one label; it is {json.dumps(value)}.")
            return float(value)
        if _is_regression(config):
            raise ValueError("`label` is not supported for a model with several values; remove it.")
        labels = frozenset(_label_name(item, config.labels) for item in (value if isinstance(value, list) else [value]))
        if len(labels) != 1 and config.activation != "sigmoid":
            raise ValueError(f"`label` has {len(labels)} labels, but the labels of the model exclude each other; give one.")
        return labels

    def compute_metrics(self, golds: Sequence[Any], results: Sequence[Any], config: ModelConfig) -> dict[str, evaluation.MetricValue]:
        if len(config.labels) == 1:
            values = [float(result[0]["score"]) for result in results]
            constant_remark = _constant(golds, values, "value")
            sigmoid_remark = "" if config.activation == "none" or all(0 <= gold <= 1 for gold in golds) else _SIGMOID_REMARK
            return {
                PEARSON: (evaluation.pearson(golds, values), constant_remark or sigmoid_remark),
                SPEARMAN: (evaluation.spearman(golds, values), constant_remark),
                MEAN_ABSOLUTE_ERROR: (fmean(abs(value - gold) for value, gold in zip(values, golds, strict=True)), sigmoid_remark),
            }
        predictions = [_chosen_labels(result, config) for result in results]
        accuracy = {ACCURACY: (fmean(a == b for a, b in zip(golds, predictions, strict=True)), "")}
        if config.activation == "sigmoid":
            remark = "" if any((*golds, *predictions)) else "no input has a label, and none was found; 0 is shown instead"
            return accuracy | {MICRO_F1: (evaluation.micro_f1(golds, predictions), remark)}
        expected, predicted = ([label for (label,) in labels] for labels in (golds, predictions))
        correlation = {MATTHEWS: (evaluation.matthews(expected, predicted), _constant(golds, predictions, "label"))}
        if len(config.labels) > 2:
            return accuracy | {MACRO_F1: (evaluation.macro_f1(expected, predicted), "")} | correlation
        label = config.labels[1]
        right = sum(a == b == label for a, b in zip(expected, predicted, strict=True))
        remark = "" if label in (*expected, *predicted) else f"no input has the label {label}, and it was never found; 0 is shown instead"
        return accuracy | {F1: (evaluation.f1(right, predicted.count(label), expected.count(label)), remark)} | correlation


EXPORT_TASK = _TextClassification()
