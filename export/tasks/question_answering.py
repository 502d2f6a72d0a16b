"""Question answering: the span of a passage that answers a question."""

from collections.abc import Sequence
from statistics import fmean
from typing import Any

from bertserve.export.input_fields import JsonObject
from bertserve.export.int8_texts import SplitTexts
from bertserve.export.tasks.evaluation import EXACT_MATCH, F1, MetricValue, answer_f1, exact_match
from bertserve.export.tasks.export_task import ExportTask, TokenizerCall
from bertserve.export.tasks.sample_texts import LONG_TEXT, NAMES_TEXT, RESERVED_TOKENS, SAMPLE_TEXTS, halves
from bertserve.service.bundle.graph_spec import OutputSpec
from bertserve.service.bundle.manifest import ModelConfig, TokenizerSpec
from bertserve.service.tasks.question_answering import DEFAULT_SEQ_LEN, SPEC, QuestionAnsweringParameters
from bertserve.service.tasks.step import TextInput
from bertserve.service.text.windows import default_stride


def _best(result: Any) -> dict[str, Any]:
    return result[0] if isinstance(result, list) else result


def _input(question: str, context: str, **parameters: Any) -> TextInput[QuestionAnsweringParameters]:
    return TextInput(question, QuestionAnsweringParameters(**parameters), context)


class _QuestionAnswering(ExportTask):
    task_spec = SPEC
    head = "ForQuestionAnswering"
    outputs = (OutputSpec(name="start_logits", kind="per_token"), OutputSpec(name="end_logits", kind="per_token"))
    takes_pairs = True
    needs_pairs = True
    gold_keys = ("answers",)
    metric_names = (EXACT_MATCH, F1)

    def text_input(self, text: str, tokenizer_spec: TokenizerSpec) -> TextInput[QuestionAnsweringParameters]:
        return _input("Who met whom?", text, max_seq_len=tokenizer_spec.max_length)

    def example(self, tokenizer_spec: TokenizerSpec) -> dict[str, Any]:
        context = "The bridge was built in Porto in 1886 by Eiffel's company."
        return {"inputs": {"question": "Where was the bridge built?", "context": context}}

    def sample_inputs(self, tokenizer_spec: TokenizerSpec) -> list[Any]:
        names = ("Who met Charles Babbage?", "Where is the Royal Society?", "Who was invited, and from where?")
        return [
            *(_input("What was said?", text) for text in [*SAMPLE_TEXTS, LONG_TEXT * 30]),
            *(_input(question, NAMES_TEXT) for question in names),
            _input(names[0], NAMES_TEXT * 20, top_k=3),
        ]

    def validation_inputs(self, texts: SplitTexts, tokenizer_spec: TokenizerSpec) -> list[Any]:
        """Returns an input for each text and each passage, with a question about its end, and for each pair."""
        lines, passages, max_length = texts.lines, texts.passages, tokenizer_spec.max_length
        sides = [halves(line[: max_length - RESERVED_TOKENS]) for line in lines]
        # the question is about the text's end, and begins with the answer; another text after it makes the question harder
        contexts = [f"{start} {end} {lines[(i + 1) % len(lines)]}" for i, (start, end) in enumerate(sides)]
        sides += [halves(passage[: min(200, max_length - RESERVED_TOKENS)]) for passage in passages]
        # a window needs space for the question and the stride; each character of the question can be a token
        questions = [f"Who or what {(end or start)[: max(1, max_length // 2 - RESERVED_TOKENS)]}?" for start, end in sides]
        return [_input(*pair) for pair in (*zip(questions, [*contexts, *passages], strict=True), *texts.pairs)]

    def tokenizer_call(self, input_: TextInput[QuestionAnsweringParameters], tokenizer_spec: TokenizerSpec) -> TokenizerCall:
        length = min(input_.parameters.max_seq_len or DEFAULT_SEQ_LEN, tokenizer_spec.max_length)
        stride = input_.parameters.doc_stride
        return (input_.text, input_.text_pair), {"max_length": length, "stride": default_stride(length) if stride is None else stride}

    def compared_value(self, result: Any, config: ModelConfig) -> Any:
        return {name: _best(result)[name] for name in ("answer", "start", "end")}

    def read_gold(self, document: JsonObject, config: ModelConfig) -> list[str] | None:
        """Reads `answers`: texts, or SQuAD's `{text: [...], answer_start: [...]}`, or a list of `{text}`; empty for no answer."""
        answers = document.get("answers")
        if answers is None:
            return None
        if isinstance(answers, dict):
            answers = answers.get("text")
        texts = [item.get("text") if isinstance(item, dict) else item for item in answers] if isinstance(answers, list) else [None]
        if not all(isinstance(text, str) for text in texts):
            raise ValueError("`answers` must be a list of texts, or SQuAD's {text: [...]}; an empty one means that there is no answer.")
        return [str(text) for text in texts]

    def data_parameters(self, line_parameters: Sequence[JsonObject], golds: Sequence[Any]) -> list[JsonObject]:
        """Allows "no answer" for all questions if some have no answer, unless a line sets this itself."""
        defaults = {"handle_impossible_answer": True} if [] in golds else {}
        return [defaults | parameters for parameters in line_parameters]

    def compute_metrics(self, golds: Sequence[Any], results: Sequence[Any], config: ModelConfig) -> dict[str, MetricValue]:
        pairs = [(_best(result)["answer"], gold) for gold, result in zip(golds, results, strict=True)]
        return {
            EXACT_MATCH: (fmean([exact_match(answer, gold) for answer, gold in pairs]), ""),
            F1: (fmean([answer_f1(answer, gold) for answer, gold in pairs]), ""),
        }


EXPORT_TASK = _QuestionAnswering()
