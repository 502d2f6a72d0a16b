"""The tensors of each task in the Open Inference Protocol: which texts it takes, and which tensors its results make."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bertserve.service.bundle.graph_spec import GraphSpec
from bertserve.service.bundle.manifest import Manifest
from bertserve.service.tasks import answer, choose, classify, embed, fill_mask, ner, rerank, similarity, zero_shot
from bertserve.service.tasks.body import TaskBody
from bertserve.service.wire.keys import check_names

Values = NDArray[Any]  # float32, int64, or texts as objects
IDS, MASK, TYPES = "input_ids", "attention_mask", "token_type_ids"
MASK_INDEX = "mask_index"  # of the raw outputs of fill-mask: row and position of each mask
JSON = "json"


@dataclass(frozen=True, slots=True)
class Field:
    """A tensor as the metadata of a model describe it.

    Attributes:
        name: Its name.
        datatype: Its datatype.
        shape: Its axes, -1 where any length goes.
        optional: Whether a request may leave it out.
    """

    name: str
    datatype: str
    shape: tuple[int, ...]
    optional: bool = False


@dataclass(frozen=True, slots=True)
class Form:
    """How a task looks in tensors.

    Attributes:
        inputs: Its texts; each of as many as the first, unless `single`.
        outputs: The tensors that its results make, beside `json`: all that a model has, or those that a body leaves.
        body: Makes the task's body, as JSON has it, of the texts by name and the parameters.
        tensors: Makes the outputs of the results.
        single: The inputs of exactly one text.
        aliases: Other names of inputs.
    """

    inputs: tuple[Field, ...]
    outputs: Callable[[Manifest, TaskBody | None], tuple[Field, ...]]
    body: Callable[[Mapping[str, list[str]], dict[str, Any]], dict[str, Any]]
    tensors: Callable[[Sequence[Any], TaskBody, Manifest], dict[str, Values]]
    single: frozenset[str] = frozenset()
    aliases: Mapping[str, str] = field(default_factory=dict)


def _texts(name: str, *, optional: bool = False) -> Field:
    return Field(name, "BYTES", (-1, 1), optional)


def _inputs_body(texts: Mapping[str, list[str]], parameters: dict[str, Any]) -> dict[str, Any]:
    return {"inputs": texts["inputs"], "parameters": parameters}


def _no_outputs(manifest: Manifest, body: TaskBody | None) -> tuple[Field, ...]:
    return ()


def _no_tensors(results: Sequence[Any], body: TaskBody, manifest: Manifest) -> dict[str, Values]:
    return {}


def _objects(texts: Sequence[str]) -> Values:
    return np.array(texts, object)


def _floats(values: Sequence[Any], *shape: int) -> NDArray[np.float32]:
    return np.array(values, np.float32).reshape(len(values), *shape)


def _classify_body(texts: Mapping[str, list[str]], parameters: dict[str, Any]) -> dict[str, Any]:
    pairs = texts.get("text_pair")
    inputs = texts["inputs"] if pairs is None else [{"text": a, "text_pair": b} for a, b in zip(texts["inputs"], pairs, strict=True)]
    return {"inputs": inputs, "parameters": parameters}


def _labeled(results: Sequence[Any], labels: Sequence[str]) -> dict[str, Values]:
    """Returns the best label of each result with its score, and the scores of all in the order of `labels`."""
    places: dict[str, list[int]] = {}
    for place, label in enumerate(labels):
        places.setdefault(label, []).append(place)
    scores = np.zeros((len(results), len(labels)), np.float32)
    for row, result in zip(scores, results, strict=True):
        # of labels of one name, which an answer cannot tell apart, the first takes the best score
        left = {label: iter(found) for label, found in places.items()}
        for item in result:
            row[next(left[item["label"]])] = item["score"]
    return {
        "label": _objects([result[0]["label"] for result in results]),
        "score": _floats([result[0]["score"] for result in results]),
        "scores": scores,
    }


def _score_fields(count: int) -> tuple[Field, ...]:
    return (Field("label", "BYTES", (-1,)), Field("score", "FP32", (-1,)), Field("scores", "FP32", (-1, count)))


def _answer_body(texts: Mapping[str, list[str]], parameters: dict[str, Any]) -> dict[str, Any]:
    pairs = zip(texts["question"], texts["context"], strict=True)
    return {"inputs": [{"question": question, "context": context} for question, context in pairs], "parameters": parameters}


def _answer_tensors(results: Sequence[Any], body: TaskBody, manifest: Manifest) -> dict[str, Values]:
    best = [result[0] if isinstance(result, list) else result for result in results]
    return {
        "answer": _objects([item["answer"] for item in best]),
        "score": _floats([item["score"] for item in best]),
        "start": np.array([item["start"] for item in best], np.int64),
        "end": np.array([item["end"] for item in best], np.int64),
    }


def _embed_outputs(manifest: Manifest, body: TaskBody | None) -> tuple[Field, ...]:
    """Returns the vectors, but where a text has one for each token, or they are texts of base64."""
    assert manifest.embedding is not None, "a manifest for embeddings has it"
    parameters = None if body is None else body.parameters
    pooling = (parameters and parameters.pooling) or manifest.embedding.pooling
    if pooling == "none" or (parameters is not None and parameters.encoding_format == "base64"):
        return ()
    return (Field("embedding", "FP32", (-1, -1)),)


def _embed_tensors(results: Sequence[Any], body: TaskBody, manifest: Manifest) -> dict[str, Values]:
    if not _embed_outputs(manifest, body):
        return {}
    assert manifest.embedding is not None, "a manifest for embeddings has it"
    return {"embedding": np.stack(results) if results else np.zeros((0, manifest.embedding.dimensions), np.float32)}


def _choose_body(texts: Mapping[str, list[str]], parameters: dict[str, Any]) -> dict[str, Any]:
    context = {name: texts[name][0] for name in ("question", "context") if name in texts}
    return {"inputs": {**context, "choices": texts["choices"]}, "parameters": parameters}


def _scores_by_index(results: Sequence[Any], body: TaskBody, manifest: Manifest) -> dict[str, Values]:
    return {"score": _floats([item["score"] for item in sorted(results[0], key=lambda item: item["index"])])}


def _rerank_body(texts: Mapping[str, list[str]], parameters: dict[str, Any]) -> dict[str, Any]:
    # they stand beside the texts there, where the body has other keys
    check_names(parameters, list(rerank.RerankOptions.model_fields), "`parameters`")
    return {**parameters, "query": texts["query"][0], "texts": texts["texts"]}


def _similarity_body(texts: Mapping[str, list[str]], parameters: dict[str, Any]) -> dict[str, Any]:
    return {"inputs": {"source_sentence": texts["source_sentence"][0], "sentences": texts["sentences"]}, "parameters": parameters}


FORMS: Mapping[str, Form] = {
    classify.TASK: Form(
        (_texts("inputs"), _texts("text_pair", optional=True)),
        lambda manifest, body: _score_fields(len(manifest.labels)),
        _classify_body,
        lambda results, body, manifest: _labeled(results, manifest.labels),
        aliases={"text": "inputs"},
    ),
    ner.TASK: Form((_texts("inputs"),), _no_outputs, _inputs_body, _no_tensors, aliases={"text": "inputs"}),
    fill_mask.TASK: Form((_texts("inputs"),), _no_outputs, _inputs_body, _no_tensors, aliases={"text": "inputs"}),
    answer.TASK: Form(
        (_texts("question"), _texts("context")),
        lambda manifest, body: (
            Field("answer", "BYTES", (-1,)),
            Field("score", "FP32", (-1,)),
            Field("start", "INT64", (-1,)),
            Field("end", "INT64", (-1,)),
        ),
        _answer_body,
        _answer_tensors,
    ),
    choose.TASK: Form(
        (_texts("question"), _texts("choices"), _texts("context", optional=True)),
        lambda manifest, body: (Field("score", "FP32", (-1,)),),
        _choose_body,
        _scores_by_index,
        single=frozenset({"question", "context"}),
        aliases={"prompt": "question"},
    ),
    embed.TASK: Form((_texts("inputs"),), _embed_outputs, _inputs_body, _embed_tensors, aliases={"text": "inputs"}),
    similarity.TASK: Form(
        (_texts("source_sentence"), _texts("sentences")),
        lambda manifest, body: (Field("score", "FP32", (-1,)),),
        _similarity_body,
        lambda results, body, manifest: {"score": _floats(results[0])},
        single=frozenset({"source_sentence"}),
    ),
    rerank.TASK: Form(
        (_texts("query"), _texts("texts")),
        lambda manifest, body: (Field("score", "FP32", (-1,)),),
        _rerank_body,
        _scores_by_index,
        single=frozenset({"query"}),
    ),
    zero_shot.TASK: Form(
        (_texts("inputs"),),
        lambda manifest, body: _score_fields(-1),
        _inputs_body,
        lambda results, body, manifest: _labeled(results, body.parameters.candidate_labels),
        aliases={"text": "inputs"},
    ),
}


def task_of(task: str, names: Sequence[str], parameters: Mapping[str, Any]) -> str:
    """Returns which task a request asks a model for: the model's, or another that bundles of its task answer and its tensors are of."""
    if task == classify.TASK:
        if "texts" in names or "query" in names:
            return rerank.TASK
        return zero_shot.TASK if "candidate_labels" in parameters else task
    return similarity.TASK if task == embed.TASK and ("sentences" in names or "source_sentence" in names) else task


def raw_inputs() -> tuple[Field, ...]:
    """Returns what those send who tokenize themselves."""
    return (Field(IDS, "INT64", (-1, -1)), Field(MASK, "INT64", (-1, -1), optional=True), Field(TYPES, "INT64", (-1, -1), optional=True))


def raw_outputs(manifest: Manifest, graph: GraphSpec) -> tuple[Field, ...]:
    """Returns what they get: the outputs of the graph, and where the masks were that it filled."""
    axes = {"per_text": 2, "per_mask": 2, "per_token": 2 if manifest.task == answer.TASK else 3}
    fields = tuple(Field(output.name, "FP32", (-1,) * axes[output.kind]) for output in graph.outputs if output.kind in axes)
    return (*fields, Field(MASK_INDEX, "INT64", (-1, 2))) if fills_masks(graph) else fields


def fills_masks(graph: GraphSpec) -> bool:
    """Returns whether a graph gives out something for each mask."""
    return any(output.kind == "per_mask" for output in graph.outputs)


def described(fields: Sequence[Field]) -> list[dict[str, Any]]:
    """Returns fields as metadata have them."""
    return [{"name": field.name, "datatype": field.datatype, "shape": list(field.shape)} for field in fields]


def metadata(name: str, version: str, manifest: Manifest, graph: GraphSpec) -> dict[str, Any]:
    """Returns the metadata of a model: its texts and their results, and under `tensors` the other form, of token ids and raw outputs.

    They are apart because perf_analyzer asks for all outputs that are listed, and a request has those of one form.
    """
    form = FORMS[manifest.task]
    return {
        "name": name,
        "versions": [version],
        "platform": "onnx_onnxv1",
        "inputs": described(form.inputs),
        "outputs": described((*form.outputs(manifest, None), Field(JSON, "BYTES", (-1,)))),
        "tensors": {"inputs": described(raw_inputs()), "outputs": described(raw_outputs(manifest, graph))},
    }


_CONFIG_TYPES = {"BYTES": "TYPE_STRING"}


def config(name: str, manifest: Manifest, *, max_rows: int) -> dict[str, Any]:
    """Returns the configuration of a model as Triton's clients read it, of texts: the first axis is the batch's."""
    form = FORMS[manifest.task]

    def tensor(field: Field) -> dict[str, Any]:
        kind = _CONFIG_TYPES.get(field.datatype, f"TYPE_{field.datatype}")
        return {"name": field.name, "data_type": kind, "dims": list(field.shape[1:]), "optional": field.optional}

    return {
        "name": name,
        "platform": "onnx_onnxv1",
        "backend": "onnxruntime",
        "max_batch_size": max_rows,
        "input": [tensor(field) for field in form.inputs],
        "output": [
            {key: value for key, value in tensor(field).items() if key != "optional"}
            for field in (*form.outputs(manifest, None), Field(JSON, "BYTES", (-1,)))
        ],
        "dynamic_batching": {},
    }
