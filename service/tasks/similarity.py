"""Sentence similarity: the embedding of one sentence compared with the embeddings of others, by cosine or by the model's own function."""

from collections.abc import Callable
from dataclasses import replace
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field

from bertserve.service.body.task_body import LIST_LIMIT, AnyCase, ClosedModel, TaskBody, Truncate, TruncationDirection, body_config
from bertserve.service.bundle.manifest import ModelConfig
from bertserve.service.errors import InvalidValueError
from bertserve.service.tasks import embed
from bertserve.service.tasks.cost import NUMBER_BYTES, Cost
from bertserve.service.tasks.decoding import Floats
from bertserve.service.tasks.step import Step, TaskGenerator, TaskModel, TaskResult
from bertserve.service.tasks.task_spec import Derivation, TaskSpec

TASK = "sentence-similarity"


def compare(input_: embed.EmbedInput, model: TaskModel) -> TaskGenerator:
    """Returns the similarity of the text and each compared text, by the model's function; cosines are from -1 to 1.

    The rows are like the rows of `embed`: one per text, the compared ones last.

    Raises:
        InvalidValueError: A text is too long and must not be truncated.
    """
    encoded = [embed.encode(input_, text, model.tokenizer) for text in (input_.text, *input_.compared_texts)]
    rows = yield Step(
        [encoding for encoding, _ in encoded],
        Cost(NUMBER_BYTES * len(encoded)),
        lambda _, row: embed.pool(input_, row, model.config),
        small_outputs=input_.own_pooling,
        truncated=any(truncated for _, truncated in encoded),
    )
    vectors = np.stack([row["vector"] for row in rows])
    similarity = _SIMILARITIES[embed.embedding_settings(model.config).similarity]
    return TaskResult(similarity(vectors[0], vectors[1:]).tolist())


# each returns the similarities of a vector, float32 [values], and others, float32 [others, values], as sentence-transformers does
_SIMILARITIES: dict[str, Callable[[Floats, Floats], Floats]] = {
    "cosine": lambda source, others: np.clip(embed.normalized(others) @ embed.normalized(source), -1, 1),
    "dot": lambda source, others: others @ source,
    "euclidean": lambda source, others: -np.sqrt(np.square(others - source).sum(axis=1)),
    "manhattan": lambda source, others: -np.abs(others - source).sum(axis=1),
}


class SimilarityParameters(ClosedModel):
    """Parameters of sentence similarity."""

    prompt_name: embed.PromptName = None
    truncate: Truncate = None
    truncation_direction: TruncationDirection = None
    pooling: Annotated[
        AnyCase[Literal["cls", "mean", "max"]] | None, Field(description="Pooling of token vectors; by default the model's own.")
    ] = None


class Sentences(ClosedModel):
    """The sentences of a request: a source and the sentences to compare with it."""

    source_sentence: str
    sentences: Annotated[list[str], LIST_LIMIT]


class SimilarityBody(TaskBody):
    """Body of a sentence similarity request."""

    model_config = body_config(inputs={"source_sentence": "A warm film.", "sentences": ["A funny film.", "The bridge was built in 1886."]})

    inputs: Annotated[Sentences, Field(description="A sentence and the sentences to compare it with.")]
    parameters: SimilarityParameters | None = None

    @property
    def count(self) -> int:
        """Number of sentences to compare."""
        return len(self.inputs.sentences)

    def task_inputs(self, config: ModelConfig) -> list[Any]:
        """Returns the only input, with the bundle's defaults for unset parameters.

        Raises:
            InvalidValueError: The model lacks a prompt of this name, or its own pooling returns a vector for each token.
        """
        parameters = embed.EmbedParameters(**({} if self.parameters is None else self.parameters.model_dump(exclude_none=True)))
        [input_] = embed.embed_inputs([self.inputs.source_sentence], parameters, config)
        if input_.parameters.pooling == "none":
            raise InvalidValueError("this model returns a vector for each token; set `pooling` to `cls`, `mean` or `max` in `parameters`.")
        return [replace(input_, compared_texts=self.inputs.sentences)]


SPEC = TaskSpec(
    name=TASK,
    path="similarity",
    title="Compare a sentence with others",
    body=SimilarityBody,
    response_type=list[Annotated[float, Field(examples=[0.83])]],
    function=compare,
    derivation=Derivation(base=embed.TASK, discriminator=("inputs", "source_sentence")),
)
