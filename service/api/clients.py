"""What @huggingface/inference, the client for JavaScript, needs in Node.

It wraps a single input in a list, but reads the answer to a single input: it drops answers to more, or reports a wrong type.
In a browser, its User-Agent is the browser's, so there it must be given single inputs.
"""

from __future__ import annotations

from typing import Any

from bertserve.service.errors import InvalidValueError
from bertserve.service.tasks import classify, fill_mask, question_answering, token_classification, zero_shot
from bertserve.service.tasks.body import TaskBody

JS_USER_AGENT = b"@huggingface/inference/"
_READS_ONE = frozenset({classify.TASK, token_classification.TASK, question_answering.TASK, fill_mask.TASK, zero_shot.TASK})


def reads_one(task: str, body: TaskBody) -> bool:
    """Returns whether the client reads the answer to one input, and needs `js_answer`.

    Raises:
        InvalidValueError: There is not exactly one input.
    """
    if task in _READS_ONE and body.is_list and len(body.items) != 1:
        raise InvalidValueError("@huggingface/inference reads only the answer to one input; send one at a time, or use fetch.")
    return task in _READS_ONE


def js_answer(task: str, body: TaskBody, results: list[Any]) -> Any:
    """Returns the answer to one input as the client reads it."""
    result = results if body.always_list else results[0]
    if task == token_classification.TASK:  # without an entity group it treats each token as an entity
        return [{"entity_group": item["entity"]} | item if "entity" in item else item for item in result]
    if task == fill_mask.TASK and isinstance(result[0], list):  # it reads one list: the tokens of the first mask, then of the next one
        return [token for mask in result for token in mask]
    return result
