"""The formats of Hugging Face's Text Embeddings Inference that differ from the service's own: `/predict` and `/embed_all`.

Its `/embed`, `/rerank` and `/similarity` are paths of the service itself.
"""

from collections.abc import Iterator
from functools import partial
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, field_validator
from pydantic_core import PydanticCustomError

from bertserve.service.api.formats.hugging_face import read_for_task
from bertserve.service.api.formats.ignored_fields import is_null_or_ignored
from bertserve.service.api.routing import InferenceRoute
from bertserve.service.body.task_body import LIST_LIMIT, AnyCase, TaskBody, TextOrTexts, Truncate, TruncationDirection, body_config, one_of
from bertserve.service.bundle.manifest import ModelConfig
from bertserve.service.tasks import classify, embed
from bertserve.service.tasks.classify import ClassifyParameters, LabelScore
from bertserve.service.tasks.embed import EmbedParameters, PromptName
from bertserve.service.tasks.step import TextInput

_Item = Annotated[str | Annotated[list[str], LIST_LIMIT], one_of("a text or a list of one or two texts")]


class SequencesBody(TaskBody):
    """Body of a text classification request; a list of two texts is a pair."""

    model_config = body_config(inputs=[["A warm, funny film."], ["A man eats.", "Somebody eats."]])

    inputs: Annotated[
        str | Annotated[list[_Item], LIST_LIMIT],
        one_of("a text, a pair of texts, or a list of lists of one or two texts"),
        Field(description="A text, a pair `[text, text]`, or a batch `[[text], [text, text]]`."),
    ]
    raw_scores: Annotated[bool, Field(description="Return logits instead of scores.")] = False
    truncate: Truncate = None
    truncation_direction: Annotated[
        AnyCase[Literal["right"]] | None, Field(description="Truncate at the end, even if the model's tokenizer truncates at the start.")
    ] = None

    @field_validator("inputs")
    @classmethod
    def _one_or_two_texts(cls, inputs: Any) -> Any:
        if isinstance(inputs, str):
            return inputs
        texts = sum(isinstance(item, str) for item in inputs)
        if texts > 2 or 0 < texts < len(inputs) or any(len(item) not in (1, 2) for item in inputs if isinstance(item, list)):
            raise PydanticCustomError(
                "sequence",
                'must be a text, a pair ["a", "b"], or a list of lists for several of them, [["a"], ["b"]]; /classify '
                "takes a list of texts",
            )
        return inputs

    @property
    def is_list(self) -> bool:
        """Whether it is a batch."""
        return isinstance(self.inputs, list) and not any(isinstance(item, str) for item in self.inputs)

    @property
    def items(self) -> list[Any]:
        """The texts and pairs, each as a list."""
        if isinstance(self.inputs, str):
            return [[self.inputs]]
        return self.inputs if self.is_list else [self.inputs]

    def texts_by_input(self) -> Iterator[list[str]]:
        """Yields each text or pair."""
        yield from self.items

    def task_inputs(self, config: ModelConfig) -> list[Any]:
        """Returns one input per text or pair."""
        parameters = ClassifyParameters(function_to_apply="none" if self.raw_scores else None, truncation=self.truncate is not False)
        side = self.truncation_direction
        return [TextInput(item[0], parameters, item[1] if len(item) > 1 else None, side) for item in self.items]


class EmbedAllBody(TaskBody):
    """Body of a request for a vector per token."""

    model_config = body_config(inputs="A warm, funny film.")
    always_list: ClassVar[bool] = True

    inputs: TextOrTexts
    prompt_name: PromptName = None
    truncate: Truncate = None
    truncation_direction: TruncationDirection = None

    def task_inputs(self, config: ModelConfig) -> list[Any]:
        """Returns one input per text."""
        options = {name: getattr(self, name) for name in ("prompt_name", "truncate", "truncation_direction")}
        return embed.embed_inputs(self.items, EmbedParameters(pooling="none", normalize=False, **options), config)


def routes() -> list[InferenceRoute]:
    """Returns the two routes."""
    read_predict = partial(read_for_task, classify.TASK, SequencesBody, ignores=is_null_or_ignored)
    read_embed_all = partial(read_for_task, embed.TASK, EmbedAllBody, ignores=is_null_or_ignored)
    predict = "Classify texts or pairs of texts, in the format of Text Embeddings Inference"
    embed_all = "Embed each token of texts, in the format of Text Embeddings Inference"
    scores = list[LabelScore] | list[list[LabelScore]]
    return [
        InferenceRoute("/predict", read_predict, predict, (SequencesBody,), scores, task=classify.TASK),
        InferenceRoute("/embed_all", read_embed_all, embed_all, (EmbedAllBody,), list[list[list[float]]], task=embed.TASK),
    ]
