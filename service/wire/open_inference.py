"""The Open Inference Protocol, version 2: converts tensors of texts or token ids to calls, and results to tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from bertserve.service.errors import InvalidValueError, NotFoundError, Sent, TooLargeError
from bertserve.service.serving.model import Model
from bertserve.service.serving.work import Prediction
from bertserve.service.tasks import raw_outputs
from bertserve.service.tasks.body import Limits, TaskBody
from bertserve.service.tasks.catalog import TASKS
from bertserve.service.tasks.spec import INPUTS, TaskSpec, TensorForm, Values
from bertserve.service.wire.call import Call, Incoming
from bertserve.service.wire.infer_body import HEADER_LENGTH, InferOutput, Output, Tensor, read_infer_body, shown_count, write_infer_answer
from bertserve.service.wire.json_text import to_json
from bertserve.service.wire.reading import show, validate_as
from bertserve.service.wire.tensor_forms import (
    IDS,
    JSON,
    MASK,
    MASK_INDEX,
    RAW_INPUTS,
    TYPES,
    fills_masks,
    form_of,
    names_of,
    task_of,
)
from bertserve.service.wire.tensor_forms import raw_outputs as raw_output_fields
from bertserve.service.wire.unknown_fields import check_names

# Maximum number of score texts in an answer, which Python creates on the event loop.
MAX_CLASSES = 2**16
_MICROSECONDS = 1_000_000
_MOST_MICROSECONDS = 2**53
# Parameters that Triton's clients always send, with the values that have no effect.
_STATELESS: Mapping[str, tuple[Any, ...]] = {
    "sequence_id": (0, ""),
    "sequence_start": (False,),
    "sequence_end": (False,),
    "priority": (0,),
}


@dataclass(frozen=True, slots=True)
class _Asked:
    """A request with tensors.

    Attributes:
        model: The model that answers.
        tensors: The inputs by name.
        parameters: The parameters of the task.
        timeout_s: Seconds until it must have started, or None.
        outputs: The requested outputs by name; empty for all.
        binary: Whether outputs are binary by default.
        id: An id that the answer returns, or None.
    """

    model: Model
    tensors: Mapping[str, Tensor]
    parameters: Mapping[str, Any]
    timeout_s: float | None
    outputs: Mapping[str, InferOutput]
    binary: bool
    id: str | None

    def write(self, values: Mapping[str, Values]) -> Any:
        """Returns the answer with the requested outputs in the order of the request."""
        head = {"model_name": self.model.name, "model_version": self.model.bundle.version} | ({} if self.id is None else {"id": self.id})
        written = {}
        for name in self.outputs or values:
            parameters = None if name not in self.outputs else self.outputs[name].parameters
            binary = self.binary if parameters is None or parameters.binary_data is None else parameters.binary_data
            written[name] = Output(values[name], binary)
        return write_infer_answer(head, written)

    def best(self, name: str) -> int:
        """Returns how many classes an output must have instead of its numbers; 0 for the numbers."""
        parameters = None if name not in self.outputs else self.outputs[name].parameters
        return 0 if parameters is None else parameters.classification or 0


def read_infer(incoming: Incoming) -> Call:
    """Reads a request: of token ids if it has `input_ids`, otherwise of texts.

    Raises:
        MalformedRequestError: The body is not JSON, or the length of a binary tensor does not fit.
        InvalidValueError: A tensor, a parameter or an output is wrong.
        TooLargeError: It has more texts or rows than are allowed.
        NotFoundError: The model has another version.
    """
    model = incoming.model
    assert model is not None, "the path names a model"
    length = incoming.headers.get(HEADER_LENGTH.encode())
    body, tensors = read_infer_body(incoming.raw, None if length is None else length.decode("latin-1"))
    check_version(model.name, model.bundle.version, incoming.version)
    parameters = dict(body.parameters or {})
    timeout_s, binary = _read_protocol(parameters)
    outputs = {output.name: output for output in body.outputs or ()}
    if len(outputs) < len(body.outputs or ()):
        raise InvalidValueError("`outputs` has a duplicate name; send each once.")
    query = _Asked(model, tensors, parameters, timeout_s, outputs, binary, body.id)
    return _read_ids(query, incoming.limits) if IDS in tensors else _read_texts(query, incoming)


def check_version(name: str, version: str, path_version: str | None) -> None:
    """Checks the version in a path.

    Raises:
        NotFoundError: The version is not loaded; the message has the loaded one.
    """
    if path_version not in (None, version):
        raise NotFoundError(
            "`{name}` has no version `{requested}`; the loaded version is `{version}`; remove `/versions/...` from the path to use it.",
            name=name,
            requested=Sent(path_version),
            version=version,
        )


def _read_protocol(parameters: dict[str, Any]) -> tuple[float | None, bool]:
    """Removes the protocol's own parameters; returns the timeout in seconds and whether outputs are binary."""
    for name, allowed in _STATELESS.items():
        value = parameters.pop(name, allowed[0])
        if value not in allowed:
            raise InvalidValueError(
                "`parameters.{name}` is {value}; models have no state and no priorities, so remove it.",
                name=name,
                value=show(value),
            )
    binary = parameters.pop("binary_data_output", False)
    if not isinstance(binary, bool):
        raise InvalidValueError("`parameters.binary_data_output` is {binary}; it must be true or false.", binary=show(binary))
    timeout = parameters.pop("timeout", 0)
    if isinstance(timeout, bool) or not isinstance(timeout, int) or not 0 <= timeout <= _MOST_MICROSECONDS:
        raise InvalidValueError(
            "`parameters.timeout` is {timeout}; it must be a whole number of microseconds, 0 for none.", timeout=show(timeout)
        )
    return timeout / _MICROSECONDS or None, binary


def _check_rows(count: int, limits: Limits, name: str) -> None:
    if count > limits.max_inputs:
        raise TooLargeError(
            "`{name}` has {count} rows and {max_inputs} are allowed; split the request; the operator can raise --max-inputs.",
            name=Sent(name),
            count=Sent(shown_count(count)),
            max_inputs=limits.max_inputs,
        )


# Texts.


def _read_texts(query: _Asked, incoming: Incoming) -> Call:
    """Returns the call of a request with texts."""
    model, manifest = query.model, query.model.bundle.manifest
    task = task_of(model.task, list(query.tensors), query.parameters)
    incoming.models.for_task(task, model.name)
    form = form_of(task)
    texts = _texts(form, query.tensors, incoming.limits, f"`{model.name}`, a model for {task},")
    body = validate_as(TASKS[task].body, _body(TASKS[task], form, texts, query.parameters), incoming.limits)
    names = [*(field.name for field in form.outputs(manifest, body)), JSON]
    check_names(query.outputs, names, f"the answer of {task} with these parameters")
    _check_best(query, task, "scores" if "scores" in names else None)
    labels = [] if form.labels is None else form.labels(body, manifest)
    _check_classes(len(body.items) * min(query.best("scores"), len(labels)))
    top_k, body = _without_top_k(body) if labels else (None, body)

    def answer(answered: Prediction) -> Any:
        values = form.tensors(answered.results, body, manifest)
        if count := query.best("scores"):
            values["scores"] = _best(values["scores"], count, labels)
        if JSON in (query.outputs or names):
            values[JSON] = np.array([to_json(result[:top_k] if top_k else result).decode() for result in answered.results], object)
        return query.write(values)

    return Call(task, model, body, answer, query.timeout_s)


def _texts(form: TensorForm, tensors: Mapping[str, Tensor], limits: Limits, subject: str) -> dict[str, list[str]]:
    """Returns the texts of a task's inputs by name."""
    names = names_of(form)
    check_names(tensors, [*names, IDS], subject)
    single = {field.name for field in form.inputs if field.single}
    texts_by_name: dict[str, list[str]] = {}
    for input_name, tensor in tensors.items():
        name = names[input_name]
        if name in texts_by_name:
            raise InvalidValueError(
                "`{given}` is another name of `{name}`, and the request has both; remove one of them.", given=Sent(input_name), name=name
            )
        if len(tensor.shape) > 2 or tensor.shape[1:] not in ((), (1,)):
            raise InvalidValueError(
                "`{given}` has the shape {shape}; texts must have [n] or [n, 1].", given=Sent(input_name), shape=Sent(list(tensor.shape))
            )
        _check_rows(tensor.count, limits, input_name)
        if name in single and tensor.count != 1:
            raise InvalidValueError(
                "`{given}` has {count} texts; it must have exactly one.", given=Sent(input_name), count=Sent(tensor.count)
            )
        texts_by_name[name] = tensor.texts()
    missing = next((field.name for field in form.inputs if not field.optional and field.name not in texts_by_name), None)
    if missing is not None:
        raise InvalidValueError(
            "{what} needs the input `{missing}`, BYTES of the shape [n] or [n, 1]; the request has {names}.",
            what=subject,
            missing=missing,
            names=", ".join(texts_by_name) or "none",
        )
    counts = {name: len(texts) for name, texts in texts_by_name.items() if name not in single}
    if len(set(counts.values())) > 1:
        raise InvalidValueError(
            "the inputs have {names}; send the same number of each.",
            names=" and ".join((f"{count} `{name}`" for name, count in counts.items())),
        )
    return texts_by_name


def _body(spec: TaskSpec, form: TensorForm, texts: Mapping[str, list[str]], parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the JSON value of the task's body, from the texts by name and the parameters."""
    single = {field.name for field in form.inputs if field.single}
    inputs: Any
    if single:
        inputs = {name: values[0] if name in single else values for name, values in texts.items()}
    elif list(texts) == [INPUTS.name]:
        inputs = texts[INPUTS.name]
    else:
        keys = [INPUTS.alias if name == INPUTS.name else name for name in texts]
        inputs = [dict(zip(keys, row, strict=True)) for row in zip(*texts.values(), strict=True)]
    if "inputs" in spec.body.names:
        return {"inputs": inputs, "parameters": parameters}
    # the parameters of this task are next to the texts, at the top level of the body
    check_names(parameters, [name for name in spec.body.model_fields if name not in (*texts, *TaskBody.model_fields)], "`parameters`")
    return {**parameters, **inputs}


def _without_top_k(body: TaskBody) -> tuple[int | None, TaskBody]:
    """Returns the number of labels in `json`, and a body that requests all labels, because `scores` contains all of them."""
    top_k = getattr(body.parameters, "top_k", None)
    if top_k is None:
        return None, body
    return top_k, body.model_copy(update={"parameters": body.parameters.model_copy(update={"top_k": None})})


def _check_best(query: _Asked, task: str, able: str | None) -> None:
    unavailable = next((name for name in query.outputs if query.best(name) and name != able), None)
    if unavailable is not None:
        remedy = f"use it for `{able}`" if able else f"remove it, because {task} has no label scores"
        raise InvalidValueError("`{name}` does not support `classification`; {remedy}.", name=Sent(unavailable), remedy=remedy)


def _check_classes(count: int) -> None:
    if count > MAX_CLASSES:
        raise TooLargeError(
            "`classification` asks for {count} classes and {limit} are allowed; make it smaller, or split the request.",
            count=count,
            limit=MAX_CLASSES,
        )


def _best(scores: Values, count: int, labels: Sequence[str]) -> Values:
    """Returns the best `count` scores of each row as texts `score:index:label`, like Triton: objects [rows, count]."""
    order = np.argsort(-scores, axis=-1, kind="stable")[:, :count]
    best = np.empty(order.shape, object)
    for (row, place), index in np.ndenumerate(order):
        best[row, place] = f"{scores[row, index]:f}:{index}:{labels[int(index)]}"
    return best


# Token ids.


@dataclass(frozen=True, slots=True)
class _Rows:
    """Takes the role of the body for a request with token ids."""

    rows: list[Any]
    is_list: bool = True
    subject: str = IDS

    def requests(self, config: Any = None) -> list[Any]:
        """Returns the rows."""
        return self.rows


def _read_ids(query: _Asked, limits: Limits) -> Call:
    """Returns the call of a request with token ids."""
    model, graph, manifest = query.model, query.model.graph, query.model.bundle.manifest
    check_names(query.parameters, [], f"a request with `{IDS}` takes no task parameters and")
    check_names(query.tensors, [field.name for field in RAW_INPUTS], f"a request with `{IDS}`")
    check_names(query.outputs, [field.name for field in raw_output_fields(manifest, graph)], f"the answer to `{IDS}`")
    _check_best(query, f"a request with `{IDS}`", None)
    shape = query.tensors[IDS].shape
    if len(shape) != 2 or 0 in shape:
        raise InvalidValueError(
            "`{ids}` has the shape {shape}; it must be [rows, length], at least one of each.", ids=IDS, shape=Sent(list(shape))
        )
    _check_rows(shape[0], limits, IDS)
    if shape[1] > manifest.tokenizer.max_length:
        raise InvalidValueError(
            "`{ids}` has rows of {shape} tokens and the model takes {max_length}; truncate them.",
            ids=IDS,
            shape=Sent(min(shape[1], 10**12)),
            max_length=manifest.tokenizer.max_length,
        )
    mismatched = next((tensor for tensor in query.tensors.values() if tensor.shape != shape), None)
    if mismatched is not None:
        raise InvalidValueError(
            "`{name}` has the shape {shape} and `{ids}` has {given_shape}; give both the same shape.",
            name=Sent(mismatched.name),
            shape=Sent(list(mismatched.shape)),
            ids=IDS,
            given_shape=Sent(list(shape)),
        )
    ids = query.tensors[IDS].integers("INT64", "INT32")
    mask = query.tensors[MASK].integers("INT64", "INT32", "BOOL") if MASK in query.tensors else np.ones_like(ids)
    type_ids = query.tensors[TYPES].integers("INT64", "INT32") if TYPES in query.tensors else np.zeros_like(ids)
    available = [output for output in graph.outputs if output.kind != "per_map"]  # maps are only available at /attention, which limits them
    outputs = [output for output in available if not query.outputs or output.name in query.outputs]
    try:
        rows = raw_outputs.rows(ids, mask, type_ids, outputs=outputs, manifest=manifest, fills_masks=fills_masks(graph))
    except InvalidValueError as error:
        error.name_input(many=True, subject=IDS)
        raise
    pads_left = manifest.tokenizer.padding_side == "left"

    def answer(answered: Prediction) -> Any:
        return query.write(_raw_values(rows, answered.results, pads_left=pads_left, fills=fills_masks(graph)))

    return Call(model.task, model, _Rows(rows), answer, query.timeout_s, raw_outputs.SPEC)


def _raw_values(
    rows: Sequence[raw_outputs.RawOutputsRequest], results: Sequence[Any], *, pads_left: bool, fills: bool
) -> dict[str, Values]:
    """Returns the outputs of all rows.

    Outputs per text have the shape [rows, values]; outputs per token [rows, length, ...], with zeros for the padding; outputs per mask
    [masks, values], in the order of the rows.
    """
    values: dict[str, Values] = {}
    for output in rows[0].outputs:
        parts = [result[output.name] for result in results]
        if output.kind == "per_text":
            values[output.name] = np.stack(parts)
        elif output.kind == "per_mask":
            values[output.name] = np.concatenate(parts)
        else:
            padded = values[output.name] = np.zeros((len(rows), rows[0].padded, *parts[0].shape[1:]), np.float32)
            for row, part in zip(padded, parts, strict=True):
                row[len(row) - len(part) if pads_left else 0 :][: len(part)] = part
    if fills:
        places = [
            (index, mask + (row.padded - len(row.encoding) if pads_left else 0))
            for index, row in enumerate(rows)
            for mask in row.encoding.masks
        ]
        values[MASK_INDEX] = np.array(places, np.int64).reshape(-1, 2)
    return values
