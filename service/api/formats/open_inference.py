"""The Open Inference Protocol, version 2: BYTES tensors of texts in; labels, scores, vectors or JSON out.

A body or a response is JSON, followed by the binary tensors that the JSON describes.
"""

import itertools
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field
from pydantic.fields import FieldInfo

from bertserve.service import __version__
from bertserve.service.api.call import JSON_HEADERS, Call, Headers
from bertserve.service.api.request import JSON_LENGTH_HEADER, RequestContext
from bertserve.service.api.routing import GuardedRoute, InferenceRoute
from bertserve.service.api.service_routes import info_route, probe_route, readiness
from bertserve.service.app_state import AppState
from bertserve.service.body.json_text import to_json
from bertserve.service.body.reading import check_names, describe_value, read_protocol, validate_as
from bertserve.service.body.task_body import MAX_ITEMS, ClosedModel, TaskBody, types_within
from bertserve.service.bundle.manifest import Manifest
from bertserve.service.errors import CallerValue, InvalidValueError, MalformedRequestError
from bertserve.service.models.request_progress import Prediction
from bertserve.service.tasks import classify, embed, multiple_choice, rerank, similarity, zero_shot
from bertserve.service.tasks.catalog import TASKS
from bertserve.service.tasks.task_spec import UNNAMED_TEXT

BINARY_TYPE = "application/octet-stream"  # JSON, followed by binary tensors
_BINARY_CONTENT = {BINARY_TYPE: {"schema": {"type": "string", "format": "binary", "description": "JSON, followed by binary tensors."}}}
JSON_OUTPUT = "json"  # name of the output with the JSON response of the task's endpoint
_LENGTH_BYTES = 4  # little-endian, before each element of a binary BYTES tensor
_SERVER = {"name": "bertserve", "version": __version__, "extensions": ["binary_tensor_data"]}
_EXAMPLE: dict[str, Any] = {"inputs": [{"name": "inputs", "shape": [2], "datatype": "BYTES", "data": ["A warm, funny film.", "Dull."]}]}
_RESPONSE_EXAMPLE: dict[str, Any] = {
    "model_name": "sentiment",
    "model_version": "1f2e3d4c",
    "outputs": [{"name": "label", "datatype": "BYTES", "shape": [2], "data": ["positive", "negative"]}],
}
_TEXTS = ("label", JSON_OUTPUT)  # outputs of texts; the others are float32
_LABELS = ("label", "score", "scores")
# task -> its outputs in addition to JSON
_OUTPUTS: Mapping[str, tuple[str, ...]] = {
    classify.TASK: _LABELS,
    zero_shot.TASK: _LABELS,
    embed.TASK: ("embedding",),
    **dict.fromkeys((multiple_choice.TASK, similarity.TASK, rerank.TASK), ("score",)),
}


class InferInputParameters(ClosedModel):
    """Parameters of an input tensor."""

    binary_data_size: Annotated[int | None, Field(ge=0, description="Bytes of this tensor after the JSON, instead of `data`.")] = None


class InferInput(ClosedModel):
    """An input tensor of a request."""

    name: Annotated[str, Field(max_length=256)]
    shape: Annotated[list[Annotated[int, Field(ge=0, le=MAX_ITEMS)]], Field(min_length=1, max_length=2, description="[n] or [n, 1].")]
    datatype: Literal["BYTES"]
    parameters: InferInputParameters | None = None
    data: Annotated[list[Any] | None, Field(description="The texts, flat or nested.")] = None


class InferOutputParameters(ClosedModel):
    """Parameters of a requested output."""

    binary_data: Annotated[bool | None, Field(description="Send the values after the JSON, instead of `data`.")] = None


class InferOutput(ClosedModel):
    """A requested output tensor."""

    name: Annotated[str, Field(max_length=256)]
    parameters: InferOutputParameters | None = None


class InferParameters(BaseModel):
    """Parameters of a request: these fields are for the protocol, all others for the task. Some clients send all these fields."""

    model_config = ConfigDict(strict=True, extra="allow")

    binary_data_output: Annotated[bool, Field(description="Whether outputs are binary by default.")] = False
    timeout: Annotated[int, Field(ge=0, description="Microseconds until the request must have started, instead of the header.")] = 0
    priority: Literal[0] = 0
    sequence_id: Literal[0, ""] = 0
    sequence_start: Literal[False] = False
    sequence_end: Literal[False] = False


class InferBody(ClosedModel):
    """Body of a request of the Open Inference Protocol, or the JSON before its binary tensors."""

    model_config = ConfigDict(json_schema_extra={"examples": [_EXAMPLE]})

    id: Annotated[str | None, Field(description="Returned with the answer.")] = None
    inputs: Annotated[list[InferInput], Field(fail_fast=True, min_length=1, max_length=16)]
    outputs: Annotated[list[InferOutput] | None, Field(fail_fast=True, max_length=16, description="By default all.")] = None
    parameters: InferParameters | None = None


def read_infer(raw: bytes, request: RequestContext) -> Call:
    """Reads a body for the model in the path."""
    model = request.named_model
    infer, binary_data = _parse_body(raw, request)
    options = infer.parameters or InferParameters()
    max_timeout_ms = request.state.settings.max_timeout_ms
    if options.timeout > 1000 * max_timeout_ms:
        raise InvalidValueError("`parameters.timeout` is over {limit} ms; make it smaller.", limit=max_timeout_ms)
    parameters = options.model_extra or {}
    names = dict.fromkeys(tensor.name for tensor in infer.inputs)
    task = request.state.registry.task_of_body(model, {**names, "inputs": names, "parameters": parameters})
    texts = _read_texts(infer.inputs, binary_data, task)
    body = validate_as(TASKS[task].body, _task_body(task, texts, parameters), request.state.limits)
    outputs = _output_names(task, model.bundle.manifest, body)
    requested = {output.name: output.parameters for output in infer.outputs or ()} or dict.fromkeys(outputs)
    if len(requested) < len(infer.outputs or ()):
        raise InvalidValueError("`outputs` has a duplicate name; send each once.")
    check_names(requested, outputs, f"the answer of {task} with these parameters")

    def to_body(prediction: Prediction) -> tuple[bytes, Headers]:
        values = _output_values(task, outputs, prediction.results, body, model.bundle.manifest)
        if JSON_OUTPUT in requested:
            values[JSON_OUTPUT] = [to_json(result).decode() for result in prediction.results]
        head = {"model_name": model.name, "model_version": model.bundle.version} | ({} if infer.id is None else {"id": infer.id})
        tensors = []
        for name, own_options in requested.items():
            is_binary = options.binary_data_output if own_options is None or own_options.binary_data is None else own_options.binary_data
            tensors.append(_tensor(name, values[name], is_binary))
        json = to_json({**head, "outputs": [tensor for tensor, _ in tensors]})
        if not (binary := b"".join(data for _, data in tensors)):
            return json, JSON_HEADERS
        return json + binary, ((b"content-type", BINARY_TYPE.encode()), (JSON_LENGTH_HEADER, b"%d" % len(json)))

    return Call(task, model, body, to_body, options.timeout / 1_000_000)


def routes() -> list[GuardedRoute]:
    """Returns the route that runs a model, and the routes of metadata and probes."""
    response_type = Annotated[dict[str, Any], Field(examples=[_RESPONSE_EXAMPLE])]
    summary, tags = "Run a model on tensors of texts", ["open inference"]
    return [
        InferenceRoute("/v2/models/{name}/infer", read_infer, summary, (InferBody,), response_type, other_content=_BINARY_CONTENT),
        probe_route("/v2/health/ready", readiness, "Readiness: requests are answered", tags=tags),
        probe_route("/v2/health/live", lambda _: {"live": True}, "Liveness: the process runs", tags=tags),
        probe_route("/v2/models/{name}/ready", readiness, "Readiness of a model", tags=tags),
        info_route("/v2", lambda _: _SERVER, "Name and version of the service", tags=tags),
        info_route("/v2/", lambda _: _SERVER, "", include_in_schema=False),
        info_route("/v2/models/{name}", model_metadata, "Inputs and outputs of a model", tags=tags),
    ]


def model_metadata(state: AppState, name: str) -> dict[str, Any]:
    """Returns the inputs and outputs of a model for its own task.

    Raises:
        HttpError: The model is not loaded.
    """
    model = state.registry.get(name)
    manifest = model.bundle.manifest
    shapes = {"scores": [-1, len(manifest.labels)], "embedding": [-1, -1]}
    return {
        "name": model.name,
        "versions": [model.bundle.version],
        "platform": "onnx_onnxv1",
        "inputs": [{"name": name, "datatype": "BYTES", "shape": [-1, 1]} for name in _inputs(model.task)],
        "outputs": [
            {"name": name, "datatype": "BYTES" if name in _TEXTS else "FP32", "shape": shapes.get(name, [-1])}
            for name in _output_names(model.task, manifest)
        ],
    }


@cache
def _inputs(task: str) -> dict[str, FieldInfo]:
    """Returns the input tensors of a task. A text without a name is called `inputs`, and `prompt` is another name of `question`."""
    return {"inputs" if name == UNNAMED_TEXT else name: field for name, field in TASKS[task].input_fields.items() if name != "prompt"}


@cache
def _single(task: str) -> list[str]:
    """Returns the input tensors of one text, for which another tensor contains a list of texts."""
    lists = [name for name, field in _inputs(task).items() if list in types_within(field.annotation)]
    return [name for name in _inputs(task) if name not in lists] if lists else []


def _output_names(task: str, manifest: Manifest, body: TaskBody | None = None) -> list[str]:
    """Returns the outputs of a task: all of a model, or the ones for a body."""
    parameters = getattr(body, "parameters", None)
    pooling = manifest.embedding and (getattr(parameters, "pooling", None) or manifest.embedding.pooling)
    if pooling == "none" or getattr(parameters, "encoding_format", None) == "base64" or getattr(parameters, "decide", False):
        return [JSON_OUTPUT]  # a list of vectors, a text or a decision per input
    # `top_k` keeps other labels for each text, so `scores` would have no fixed columns
    is_cut = getattr(parameters, "top_k", None) is not None
    return [name for name in (*_OUTPUTS.get(task, ()), JSON_OUTPUT) if name != "scores" or not is_cut]


def _output_values(task: str, names: Sequence[str], results: Sequence[Any], body: TaskBody, manifest: Manifest) -> dict[str, Any]:
    """Returns the outputs except JSON: scores [n, labels], vectors [n, values], others [n]."""
    values: dict[str, Any] = {}
    if "label" in names:
        values = {key: [result[0][key] for result in results] for key in ("label", "score")}
    if "scores" in names:
        labels = body.parameters.candidate_labels if isinstance(body, zero_shot.ZeroShotBody) else manifest.labels
        by_label = [{item["label"]: item["score"] for item in result} for result in results]
        values["scores"] = np.array([[scored[label] for label in labels] for scored in by_label]).reshape(-1, len(labels))
    if "embedding" in names:
        values["embedding"] = np.stack(results) if results else np.zeros((0, 0))
    if "score" in names and "label" not in names:
        (result,) = results
        values["score"] = result if task == similarity.TASK else [item["score"] for item in sorted(result, key=lambda item: item["index"])]
    return values


def _tensor(name: str, values: Any, is_binary: bool) -> tuple[dict[str, Any], bytes]:
    """Returns an output tensor, and its values if they are binary."""
    is_text = name in _TEXTS
    array = np.array(values, object if is_text else np.float32)
    tensor = {"name": name, "datatype": "BYTES" if is_text else "FP32", "shape": list(array.shape)}
    if not is_binary:
        return {**tensor, "data": values if is_text else array.reshape(-1)}, b""
    texts = [text.encode() for text in values] if is_text else []
    data = b"".join(len(text).to_bytes(_LENGTH_BYTES, "little") + text for text in texts) if is_text else array.astype("<f4").tobytes()
    return {**tensor, "parameters": {"binary_data_size": len(data)}}, data


def _read_texts(inputs: Sequence[InferInput], binary_data: memoryview, task: str) -> dict[str, list[str]]:
    """Returns the texts of each input by name; `binary_data` contains the bytes after the JSON."""
    expected, single = _inputs(task), _single(task)
    texts: dict[str, list[str]] = {}
    for tensor in inputs:
        check_names([tensor.name], [*expected], f"a model for {task}")
        if tensor.name in texts:
            raise InvalidValueError("`inputs` has `{name}` twice; send it once.", name=tensor.name)
        texts[tensor.name], binary_data = _read_tensor(tensor, binary_data)
        if len(texts[tensor.name]) != tensor.shape[0] or tensor.shape[1:] not in ([], [1]):
            raise InvalidValueError(
                "`{name}` has {count} texts and the shape {shape}; the shape must be [{count}] or [{count}, 1].",
                name=tensor.name,
                count=len(texts[tensor.name]),
                shape=CallerValue(list(tensor.shape)),
            )
    if len(binary_data):
        raise MalformedRequestError("the body has {left} bytes after its last tensor; remove them.", left=len(binary_data))
    missing = next((name for name, field in expected.items() if field.is_required() and name not in texts), None)
    if missing is not None:
        raise InvalidValueError("a model for {task} needs the input `{missing}`; add it.", task=task, missing=missing)
    listed = next(name for name in expected if name not in single)
    for name, values in texts.items():
        needed = 1 if name in single else len(texts[listed])
        if len(values) != needed:
            raise InvalidValueError("`{tensor}` has {count} texts; it must have {needed}.", tensor=name, count=len(values), needed=needed)
    return texts


def _read_tensor(tensor: InferInput, binary_data: memoryview) -> tuple[list[str], memoryview]:
    """Returns the texts of a tensor, from `data` or from the start of the binary data, and the rest of the binary data.

    A binary text in UTF-8 follows its length.
    """
    size = None if tensor.parameters is None else tensor.parameters.binary_data_size
    if (size is None) == (tensor.data is None):
        raise InvalidValueError("`{name}` must have exactly one of `data` and `parameters.binary_data_size`.", name=tensor.name)
    if size is None:
        rows = tensor.data or []
        texts = list(itertools.chain.from_iterable(rows)) if all(isinstance(row, list) for row in rows) else rows
        value = next((text for text in texts if not isinstance(text, str)), "")
        if not isinstance(value, str):
            raise InvalidValueError(
                "`{name}` is BYTES, so its `data` must be texts; one value is {value}.", name=tensor.name, value=describe_value(value)
            )
        return texts, binary_data
    texts, start = [], 0
    try:
        while start < size <= len(binary_data) and len(texts) < tensor.shape[0]:
            end = start + _LENGTH_BYTES + int.from_bytes(binary_data[start : start + _LENGTH_BYTES], "little")
            texts.append(str(binary_data[start + _LENGTH_BYTES : end], "utf-8"))
            start = end
    except UnicodeDecodeError:
        raise InvalidValueError("`{name}` has a text that is not UTF-8; encode it as UTF-8.", name=tensor.name) from None
    if start != size:
        raise MalformedRequestError(
            "the {size} bytes of `{name}` are not {count} texts, each after its length in 4 bytes, little-endian; {left} bytes follow the "
            "JSON or the tensor before (header `Inference-Header-Content-Length`).",
            size=CallerValue(size),
            name=tensor.name,
            count=CallerValue(tensor.shape[0]),
            left=len(binary_data),
        )
    return texts, binary_data[size:]


def _task_body(task: str, texts: Mapping[str, list[str]], parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the JSON value of the task's body."""
    single, fields = _single(task), TASKS[task].body.model_fields
    inputs: Any
    if single:
        inputs = {name: values[0] if name in single else values for name, values in texts.items()}
    elif list(texts) == ["inputs"]:
        inputs = texts["inputs"]
    else:
        keys = ["text" if name == "inputs" else name for name in texts]
        inputs = [dict(zip(keys, row, strict=True)) for row in zip(*texts.values(), strict=True)]
    if "inputs" in fields:
        return {"inputs": inputs, "parameters": parameters}
    # the parameters of this task are next to the texts, at the top level of the body
    check_names(parameters, [name for name in fields if name not in (*texts, *TaskBody.model_fields)], "`parameters`")
    return {**parameters, **inputs}


def _parse_body(raw: bytes, request: RequestContext) -> tuple[InferBody, memoryview]:
    """Returns the JSON of a request, and the bytes after it."""
    header = request.headers.get(JSON_LENGTH_HEADER)
    size = len(raw) if header is None else int(header) if header.isdigit() and len(header) < 16 else 0
    if header is not None and not 0 < size <= len(raw):
        raise MalformedRequestError(
            "the header `Inference-Header-Content-Length` is `{header}`; it must be the length of the JSON before the "
            "tensors, from 1 to the {size} bytes of the body.",
            header=CallerValue(header.decode("latin-1")),
            size=len(raw),
        )
    return read_protocol(InferBody, raw[:size], _EXAMPLE), memoryview(raw)[size:]
