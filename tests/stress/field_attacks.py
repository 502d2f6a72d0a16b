"""One attack for each field of a request body: the field's most expensive values, which are listed here, and invalid values.

A field without a line in COSTLIEST has no attack, so that test_catalogue.py fails.
"""

from __future__ import annotations

import json
import random
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

from attack import Attack, Target
from hostile_values import ANY, BATCH_CHARS, MAX_CHARS, MAX_INPUTS, ROOM, any_value, prose, repeated, values_of_schema
from request_fields import Field, all_fields

PROSE = prose(MAX_CHARS)
BATCH = [prose(BATCH_CHARS)] * MAX_INPUTS  # the maximum number of texts, each as long as the size of a body permits
LABELS = [f"{number} {prose(900)}" for number in range(1000)]
INT64 = 2**63 - 1

# `Class.field` -> the field's most expensive values; the class is the one that declares the field.
COSTLIEST: dict[str, tuple[Any, ...]] = {
    # all tasks
    "TaskBody.model": ("sentiment", repeated("sentiment-")),
    "TaskBody.parameters": ({}, {repeated("a"): 1}),
    "TextPair.text": (PROSE,),
    "TextPair.text_pair": (PROSE,),
    # classification
    "ClassifyBody.inputs": (BATCH, [{"text": PROSE, "text_pair": PROSE}] * 9),
    "ClassifyParameters.top_k": (INT64,),
    "ClassifyParameters.function_to_apply": ("sigmoid",),
    "ClassifyParameters.truncation": (False, True),
    "ClassifyParameters.window": ("mean",),
    "ClassifyParameters.stride": (254, 0),
    "ClassifyParameters.explain": (True,),
    "ClassifyParameters.offset_unit": ("utf16", "utf8"),
    "SequencesBody.inputs": ([[text] for text in BATCH],),
    "SequencesBody.raw_scores": (True,),
    "SequencesBody.truncate": (True,),
    "SequencesBody.truncation_direction": ("right",),
    # named entities
    "NerBody.inputs": (BATCH, repeated("London, Paris and Ada Lovelace. ")),
    "NerParameters.aggregation_strategy": ("none", "average"),
    "NerParameters.ignore_labels": ([], LABELS),
    "NerParameters.stride": (254, 0),
    "NerParameters.offset_unit": ("utf16", "utf8"),
    # question answering
    "AnswerBody.inputs": ([{"question": "Where?", "context": prose(BATCH_CHARS)}] * MAX_INPUTS,),
    "Question.question": (PROSE,),
    "Question.context": (PROSE, repeated("e\u0301 ")),
    "AnswerParameters.top_k": (1000,),
    "AnswerParameters.doc_stride": (191, 0),
    "AnswerParameters.max_answer_len": (512,),
    "AnswerParameters.max_seq_len": (512, 8),
    "AnswerParameters.handle_impossible_answer": (True,),
    "AnswerParameters.align_to_words": (False, True),
    "AnswerParameters.duplicates": ("sum",),
    "AnswerParameters.offset_unit": ("utf16", "utf8"),
    "AnswerParameters.explain": (True,),
    # masks
    "FillMaskBody.inputs": ("[MASK] " * 64 + "a", [f"a [MASK] {prose(1500)}"] * MAX_INPUTS, "[MASK] " + repeated("\n", MAX_CHARS - 7)),
    "FillMaskParameters.top_k": (100, 30_522, INT64),
    "FillMaskParameters.targets": (["film"] * 1000, [f"{number:0256}" for number in range(64)]),
    "FillMaskParameters.joint": (True,),
    "FillMaskParameters.beam": (64,),
    # multiple choice
    "ChooseBody.inputs": ([{"question": "What?", "choices": [prose(200)] * 64}] * (MAX_INPUTS // 64),),
    "ChooseParameters.truncation": (True, False),
    "Choices.choices": ([prose(3000)] * 64,),
    "Choices.question": (PROSE,),
    "Choices.prompt": (PROSE,),
    "Choices.context": (PROSE,),
    # embeddings
    "EmbedBody.inputs": (BATCH,),
    "EmbedOptions.normalize": (True,),
    "EmbedOptions.prompt_name": (PROSE,),
    "EmbedOptions.truncate": (True,),
    "EmbedOptions.truncation_direction": ("left",),
    "EmbedOptions.dimensions": (1, INT64),
    "EmbedOptions.encoding_format": ("base64", "float"),
    "EmbedOptions.pooling": ("none", "max"),
    "EmbedOptions.layers": ("last_four", [-1] * 256),
    "EmbedOptions.combine": ("concat",),
    "EmbedAllBody.inputs": (BATCH,),
    "EmbedAllBody.prompt_name": (PROSE,),
    "EmbedAllBody.truncate": (True,),
    "EmbedAllBody.truncation_direction": ("left",),
    "EmbeddingsBody.input": (BATCH, [[1] * 16_384] * 40),
    "EmbeddingsBody.encoding_format": ("float", "base64"),
    "EmbeddingsBody.dimensions": (1, INT64),
    "EmbeddingsBody.user": (PROSE,),
    "SimilarityBody.inputs": ({"source_sentence": PROSE, "sentences": BATCH[1:]},),
    "SimilarityParameters.prompt_name": (PROSE,),
    "SimilarityParameters.truncate": (True,),
    "SimilarityParameters.truncation_direction": ("left",),
    "SimilarityParameters.pooling": ("max",),
    "Sentences.source_sentence": (PROSE,),
    "Sentences.sentences": (BATCH[1:],),
    # ranking
    "QueryBody.query": (PROSE,),
    "RerankBody.texts": (BATCH, ["a"] * MAX_INPUTS),
    "RerankOptions.raw_scores": (True,),
    "RerankOptions.return_text": (True,),
    "RerankOptions.truncate": (True,),
    "RerankOptions.truncation_direction": ("left",),
    "DocumentsBody.documents": (BATCH, [{"text": "a", "more": prose(BATCH_CHARS)}] * MAX_INPUTS),
    "DocumentsBody.top_n": (INT64,),
    "DocumentsBody.return_documents": (True,),
    "Document.text": (PROSE,),
    # zero-shot classification
    "ZeroShotBody.inputs": (BATCH, ["good film"] * MAX_INPUTS),
    "ZeroShotParameters.candidate_labels": (LABELS, [str(number) for number in range(1000)], ",".join(map(str, range(1000)))),
    "ZeroShotParameters.hypothesis_template": (repeated("{}", 1000), prose(998) + "{}"),
    "ZeroShotParameters.multi_label": (True,),
    # attention
    "AttentionBody.inputs": (["good film"] * MAX_INPUTS, [prose(1500)] * 8),
    "AttentionParameters.output_attentions": (True,),
    "AttentionParameters.layers": ([0] * 256, [-1, 0]),
    "AttentionParameters.heads": ([0] * 256, [0, 1]),
    # Open Inference Protocol and KServe
    "InferBody.id": (PROSE,),
    "InferBody.inputs": ([{"name": "inputs", "shape": [512], "datatype": "BYTES", "data": BATCH}],),
    "InferBody.outputs": ([{"name": "scores"}] * 16,),
    "InferBody.parameters": ({"top_k": 1, "binary_data_output": True}, {repeated("a"): 1}),
    "InferParameters.binary_data_output": (True,),
    "InferParameters.timeout": (INT64,),
    "InferInput.name": (repeated("a", 256),),
    "InferInput.shape": ([INT64] * 8, [2**32, 2**32], [0, INT64], [2**31 - 1], [512, 512]),
    "InferInput.datatype": ("INT64", "BYTES", "FP16"),
    "InferInput.parameters": ({"binary_data_size": INT64}, {"binary_data_size": 10**30}),
    "InferInput.data": ([1] * (ROOM // 3), [[[["good"]]]], BATCH),
    "InferOutput.name": (repeated("a", 256),),
    "InferOutput.parameters": ({"binary_data": True},),
    "InferInputParameters.binary_data_size": (INT64, 10**30, 0),
    "InferOutputParameters.binary_data": (True,),
    "PredictBody.instances": (BATCH,),
    "PredictBody.parameters": ({"top_k": INT64}, {repeated("a"): 1}),
}


def requests_of(field: Field, target: Target, *, seed: int) -> Iterator[list[bytes]]:
    """Yields requests without end, each as a list of parts: first the most expensive values, then all others in random order."""
    written = (json.dumps(value).encode() for value in COSTLIEST[field.name])
    wrong = [*values_of_schema(field.schema), *ANY]
    random.Random(seed).shuffle(wrong)
    yield from (_request(field, target, value) for value in written)
    while True:
        yield from (_request(field, target, any_value(value) if isinstance(value, str) else value) for value in wrong)


def _request(field: Field, target: Target, value: bytes) -> list[bytes]:
    body = field.filled(value)
    headers = [b"content-length: %d" % len(body), b"content-type: application/json"]
    if field.path.startswith("/v2/repository/models"):
        target = target.as_admin()
    return [target.head("POST", field.path, *headers), body]


def attack_on(fields: list[Field], name: str) -> Attack:
    """Returns an attack that sends a request for each of the fields in turn."""

    def run(target: Target) -> None:
        seeds = range(target.index * len(fields), (target.index + 1) * len(fields))
        streams = [requests_of(field, target, seed=seed) for field, seed in zip(fields, seeds, strict=True)]
        target.ask_all(next(stream) for _ in iter(int, 1) for stream in streams)

    return Attack(name, "field", run, frozenset(field.name for field in fields))


def field_attacks() -> list[Attack]:
    by_name: dict[str, list[Field]] = defaultdict(list)
    for field in all_fields():
        if field.name in COSTLIEST:
            by_name[field.name].append(field)
    return [attack_on(fields, f"field {name}") for name, fields in by_name.items()]


def path_attacks() -> list[Attack]:
    """Returns one attack per path, on all fields of its body. Short runs use it, because an attack per field takes too long."""
    by_path: dict[str, list[Field]] = defaultdict(list)
    for field in all_fields():
        if field.name in COSTLIEST:
            by_path[field.path].append(field)
    return [attack_on(fields, f"fields of {path}") for path, fields in by_path.items()]
