"""Parts of answers: the headers of a model's answer, and the answers of routes that run no models."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from starlette.responses import Response

from bertserve.service.api.call import Call, Content
from bertserve.service.errors import NotFoundError, UnavailableError
from bertserve.service.models.model import Model
from bertserve.service.models.work import Prediction
from bertserve.service.tasks.batch import MAX_SPANS, ReadSpan
from bertserve.service.tasks.body import TaskBody
from bertserve.service.tasks.json_text import to_json


def json_answer(value: Any) -> Response:
    """Returns a value as a response of JSON."""
    return Response(to_json(value), media_type="application/json")


def check_ready(ready: bool) -> None:
    """Checks the result of a probe.

    Raises:
        UnavailableError: `ready` is false.
    """
    if not ready:
        raise UnavailableError("not ready: shutting down, an inference thread died, or all inference threads hang.")


def probed(find: Callable[[], Model]) -> Model:
    """Returns the model that a probe asks for.

    Raises:
        NotFoundError: The model is not loaded. Probes need no key, so the message names no models.
    """
    try:
        return find()
    except NotFoundError:
        raise NotFoundError("no such model is loaded; GET /models lists the models.") from None


def answer_headers(call: Call, content: Content, prediction: Prediction) -> list[tuple[bytes, bytes]]:
    """Returns the headers of an answer."""
    warnings = list(_warnings(prediction, call.body)) if prediction.warnings else []
    headers = [
        (b"content-length", b"%d" % len(content.body)),
        (b"content-type", content.media_type.encode()),
        (b"x-model", call.model.name.encode()),
        (
            b"server-timing",
            b"tokenize;dur=%.3f, queue;dur=%.3f, inference;dur=%.3f, decode;dur=%.3f"
            % (prediction.tokenize_s * 1000, prediction.queue_s * 1000, prediction.inference_s * 1000, prediction.decode_s * 1000),
        ),
    ]
    if prediction.truncated:
        headers.append((b"x-truncated", b"%d" % len(prediction.truncated)))
        count = f"{len(prediction.truncated)} of {len(prediction.results)} {call.body.subject} " if call.body.is_list else ""
        warnings.append(
            f"truncation; {count}cut to the model's {call.model.bundle.manifest.tokenizer.max_length} tokens: "
            f"{_named(prediction.truncated, call.body)}"
        )
    if prediction.read:
        headers.append((b"x-windows", _escaped(_windows(prediction.read))))
    headers.extend((name.encode(), _escaped(value)) for name, value in content.headers.items())
    # one header per warning, because the official client expects that
    headers.extend((b"x-hf-warning", _escaped(warning)) for warning in warnings)
    return headers


def _warnings(prediction: Prediction, body: TaskBody) -> Iterator[str]:
    """Yields each warning once, with its inputs unless it applies to all."""
    about: dict[str, list[int]] = {}
    for index, warning in prediction.warnings:
        about.setdefault(warning, []).append(index)
    for warning, indices in about.items():
        yield warning if len(indices) == len(prediction.results) else f"{warning}: {_named(indices, body)}"


def _named(indices: Sequence[int], body: TaskBody) -> str:
    """Returns inputs by the names that the caller knows: `inputs` for a single one, `inputs[i]` for items of a list."""
    if not body.is_list:
        return body.subject
    return ", ".join(f"{body.subject}[{index}]" for index in indices[:10]) + (", ..." if len(indices) > 10 else "")


def _windows(read_spans: Sequence[ReadSpan]) -> str:
    """Returns the spans that the model read of an input, such as `0-1843, 1310-2950`; each has its text's name if there are two texts."""
    spans = [f"{span.field}{'=' if span.field else ''}{span.start}-{span.end}" for span in read_spans[:MAX_SPANS]]
    return ", ".join([*spans, "..."] if len(read_spans) > MAX_SPANS else spans)


def _escaped(value: str) -> bytes:
    """Returns a header's value in printable ASCII. Other characters are escaped, because tokens in a vocabulary may have newlines."""
    return value.encode() if value.isascii() and value.isprintable() else value.encode("unicode_escape")
