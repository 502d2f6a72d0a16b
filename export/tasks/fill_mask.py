"""Fill-mask: the tokens that a model predicts for a mask."""

from collections.abc import Sequence
from statistics import fmean
from typing import Any

from bertserve.export.errors import UsageError
from bertserve.export.input_fields import JsonObject
from bertserve.export.int8_texts import SplitTexts
from bertserve.export.tasks.evaluation import TOP_1, MetricValue
from bertserve.export.tasks.export_task import ExportTask
from bertserve.export.tasks.sample_texts import RESERVED_TOKENS, SAMPLE_TEXTS, halves
from bertserve.service.bundle.graph_spec import OutputSpec
from bertserve.service.bundle.manifest import ModelConfig, TokenizerSpec
from bertserve.service.messages import plural
from bertserve.service.tasks.fill_mask import SPEC, FillMaskInput, FillMaskParameters


def _mask(tokenizer_spec: TokenizerSpec) -> str:
    assert tokenizer_spec.mask is not None, "a fill-mask model has one"
    return tokenizer_spec.mask.token


def _candidates(result: Any) -> list[list[dict[str, Any]]]:
    """Returns the candidates of each mask; for a text with one mask, the result has that mask's candidates directly."""
    return result if isinstance(result[0], list) else [result]


class _FillMask(ExportTask):
    task_spec = SPEC
    head = "ForMaskedLM"
    outputs = (OutputSpec(name="logits", kind="per_mask"),)
    gold_keys = ("target",)
    metric_names = (TOP_1,)

    def text_input(self, text: str, tokenizer_spec: TokenizerSpec) -> FillMaskInput:
        return FillMaskInput(f"{_mask(tokenizer_spec)} {text}", FillMaskParameters())

    def example(self, tokenizer_spec: TokenizerSpec) -> dict[str, Any]:
        return {"inputs": f"The king of {_mask(tokenizer_spec)} died in 1066.", "parameters": {"top_k": 1}}

    def sample_inputs(self, tokenizer_spec: TokenizerSpec) -> list[Any]:
        mask = _mask(tokenizer_spec)
        # a token has at least one character, so these texts fit; without its mask, a text would have nothing to compare
        short_texts = [text[: tokenizer_spec.max_length - RESERVED_TOKENS] for text in SAMPLE_TEXTS]
        sides = [(text[: len(text) // 2], text[len(text) // 2 :]) for text in short_texts]
        texts = [*(f"{a} {mask} {b}" for a, b in sides), f"A {mask} film with a {mask} cast."]
        return [FillMaskInput(text, FillMaskParameters()) for text in texts]

    def validation_inputs(self, texts: SplitTexts, tokenizer_spec: TokenizerSpec) -> list[Any]:
        """Returns an input for each text, with a mask instead of the word in its middle."""
        mask = _mask(tokenizer_spec)
        sides = [halves(text) for text in (*(line[: tokenizer_spec.max_length - RESERVED_TOKENS] for line in texts.lines), *texts.passages)]
        return [FillMaskInput(f"{start} {mask} {end.partition(' ')[2]}", FillMaskParameters()) for start, end in sides]

    def compared_value(self, result: Any, config: ModelConfig) -> Any:
        return [candidates[0]["token"] for candidates in _candidates(result)]

    def read_gold(self, document: JsonObject, config: ModelConfig) -> list[str] | None:
        """Reads `target`: the word of the mask, or a list with one word per mask."""
        target = document.get("target")
        if target is None:
            return None
        words = [target] if isinstance(target, str) else target
        if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
            raise ValueError("`target` must be a word, or a list with one for each mask.")
        return words

    def compute_metrics(self, golds: Sequence[Any], results: Sequence[Any], config: ModelConfig) -> dict[str, MetricValue]:
        matches = []
        for gold, result in zip(golds, results, strict=True):
            best_words = [candidates[0]["token_str"] for candidates in _candidates(result)]
            if len(best_words) != len(gold):
                raise UsageError(
                    f"a text has {plural(len(best_words), 'mask')} and {plural(len(gold), 'word')} as its `target`; give one for each mask."
                )
            matches += [token.strip().casefold() == word.strip().casefold() for token, word in zip(best_words, gold, strict=True)]
        return {TOP_1: (fmean(matches), "")}


EXPORT_TASK = _FillMask()
