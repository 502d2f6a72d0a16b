"""Feature extraction: the vectors of a text. They are compared by cosine; there are no decisions and no correct answers."""

from collections.abc import Sequence
from typing import Any

from bertserve.export.input_fields import JsonObject
from bertserve.export.int8_texts import SplitTexts
from bertserve.export.tasks.export_task import ExportTask, TokenizerCall
from bertserve.service.bundle.graph_spec import Measure, OutputSpec
from bertserve.service.bundle.manifest import ModelConfig, TokenizerSpec
from bertserve.service.tasks.embed import SPEC, EmbedInput, EmbedParameters


class _FeatureExtraction(ExportTask):
    task_spec = SPEC
    head = "Model"
    outputs = (OutputSpec(name="last_hidden_state", kind="per_token"),)
    activation = "none"
    embeds = True

    def text_input(self, text: str, tokenizer_spec: TokenizerSpec) -> EmbedInput:
        return EmbedInput(text, EmbedParameters())

    def validation_inputs(self, texts: SplitTexts, tokenizer_spec: TokenizerSpec) -> list[Any]:
        return []

    def example(self, tokenizer_spec: TokenizerSpec) -> dict[str, Any]:
        return {"inputs": "The bridge was built in Porto in 1886.", "parameters": {"dimensions": 2, "normalize": True}}

    def tokenizer_call(self, input_: EmbedInput, tokenizer_spec: TokenizerSpec) -> TokenizerCall:
        return (input_.prompt + input_.text,), {}

    def agreement_measure(self, config: ModelConfig) -> Measure:
        return "cosine"

    def data_parameters(self, line_parameters: Sequence[JsonObject], golds: Sequence[Any]) -> list[JsonObject]:
        # vectors are compared as numbers, and texts are cut as by the checkpoint's tokenizer, whatever a line requests
        return [parameters | {"encoding_format": "float", "truncation_direction": None} for parameters in line_parameters]


EXPORT_TASK = _FeatureExtraction()
