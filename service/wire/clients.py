"""Special formats for older clients and clients of other services, which are recognized by their User-Agent."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Annotated, Any

from pydantic import BaseModel, Field

from bertserve.service.errors import InvalidValueError
from bertserve.service.tasks import classify, embed, fill_mask, question_answering, token_classification, zero_shot
from bertserve.service.tasks.body import TaskBody
from bertserve.service.tasks.question_answering import AnswerBody

# Start of the User-Agent of @huggingface/inference, the client for JavaScript; browsers replace it with their own.
_JS_CLIENT = "@huggingface/inference/"
# For these tasks, it reads the answer to one input only. It drops other answers, or reports an error.
_JS_CLIENT_READS_ONE = frozenset({classify.TASK, token_classification.TASK, question_answering.TASK, fill_mask.TASK, zero_shot.TASK})
# These clients can send `encoding_format` but read only numbers: huggingface_hub 2.4 always as floats, @huggingface/inference 4.13 by type.
_NO_BASE64 = re.compile(rf"hf_hub/\d+\.\d+|{re.escape(_JS_CLIENT)}")
_HUGGINGFACE_HUB = re.compile(r"hf_hub/(\d{1,6})\.(\d{1,6})")  # Python refuses to parse numbers with thousands of digits
# The first huggingface_hub that reads zero-shot results as a list of objects; earlier versions read an object of lists.
_LISTS_SINCE = (1, 2)

Answer = Callable[[list[Any]], Any]


class ZeroShotLists(BaseModel):
    """A zero-shot result in the format that huggingface_hub before 1.2 reads."""

    sequence: Annotated[str, Field(examples=["A new phone."])]
    labels: Annotated[list[str], Field(examples=[["technology", "politics"]])]
    scores: Annotated[list[float], Field(examples=[[0.98, 0.02]])]


# Task -> additional types of its answer, for OpenAPI.
LEGACY_ANSWERS: dict[str, Any] = {zero_shot.TASK: ZeroShotLists | list[ZeroShotLists]}


def upgrade_legacy_body(kind: type[TaskBody], value: dict[str, Any]) -> dict[str, Any]:
    """Moves a question and its context into `inputs`; huggingface_hub 0.25 sends them at the top level."""
    if kind is not AnswerBody or "inputs" in value or not {"question", "context"} <= value.keys():
        return value
    question = {name: value[name] for name in ("question", "context")}
    return {"inputs": question} | {name: content for name, content in value.items() if name not in question}


def answer_for(user_agent: bytes, task: str, body: TaskBody) -> Answer:
    """Returns the function that converts a task's results to the format that the client reads.

    Raises:
        InvalidValueError: The client cannot read the answer to this body.
    """
    client = user_agent.decode("latin-1")  # decoded first, because the search is five times as fast in a str
    if "hf_hub/" not in client and _JS_CLIENT not in client:
        return body.answer
    if task == embed.TASK:
        _check_base64(client, body)
    if client.startswith(_JS_CLIENT):
        return _js_client_wraps_lists(task, body)
    hub = _HUGGINGFACE_HUB.search(client)
    if task == zero_shot.TASK and hub is not None and (int(hub[1]), int(hub[2])) < _LISTS_SINCE:
        return lambda results: body.answer(_zero_shot_lists(body, results))
    return body.answer


def _check_base64(client: str, body: TaskBody) -> None:
    assert isinstance(body, embed.EmbedBody), "the task has this body"
    encoding_format = body.encoding_format or (body.parameters and body.parameters.encoding_format)
    match = _NO_BASE64.search(client) if encoding_format == "base64" else None
    if match is not None:
        name = "huggingface_hub" if match[0].startswith("hf_hub") else _JS_CLIENT.removesuffix("/")
        raise InvalidValueError("`encoding_format` is `base64`, which {name} cannot read; remove it, or use another client.", name=name)


def _js_client_wraps_lists(task: str, body: TaskBody) -> Answer:
    """Returns the function for @huggingface/inference, which wraps one input in a list but reads the answer to one."""
    if task not in _JS_CLIENT_READS_ONE:
        return body.answer
    if body.is_list and len(body.items) != 1:
        raise InvalidValueError(
            "@huggingface/inference cannot read answers to several inputs, and `inputs` has {items_count} items; "
            "send one at a time, or use another client, such as fetch.",
            items_count=len(body.items),
        )
    if task == fill_mask.TASK and body.parameters is not None and body.parameters.joint:
        raise InvalidValueError(
            "@huggingface/inference cannot read the answers of `joint`, which have several tokens; use another client, such as fetch."
        )
    return lambda results: _js_answer(task, results if body.always_list else results[0])


def _js_answer(task: str, result: Any) -> Any:
    if task == token_classification.TASK:  # without an entity group it treats each token as an entity
        return [{"entity_group": item["entity"]} | item if "entity" in item else item for item in result]
    if task == fill_mask.TASK and isinstance(result[0], list):  # it reads one list: the tokens of the first mask, then of the next one
        return [filled for mask in result for filled in mask]
    return result


def _zero_shot_lists(body: TaskBody, results: list[Any]) -> list[dict[str, Any]]:
    return [
        {"sequence": text, "labels": [item["label"] for item in scored], "scores": [item["score"] for item in scored]}
        for text, scored in zip(body.items, results, strict=True)
    ]
