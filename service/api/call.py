"""Call: the request to a model and the headers of its response, independent of its wire format."""

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from bertserve.service.api.request import LARGE_BYTES, RequestContext
from bertserve.service.body.json_text import to_json
from bertserve.service.body.task_body import TaskBody
from bertserve.service.errors import BertServeError, RefusedError
from bertserve.service.models.model import Model
from bertserve.service.models.request_progress import Prediction, truncation_warning
from bertserve.service.text.tokenizer import ReadSpan

if TYPE_CHECKING:
    from bertserve.service.tracing import RequestSpan

Headers = Sequence[tuple[bytes, bytes]]
JSON_HEADERS: Headers = ((b"content-type", b"application/json"),)
MAX_WINDOWS_SHOWN = 64  # windows in the header `x-windows`
MIN_RETRY_S = 0.1  # seconds until a refused call asks again, at least


@dataclass(slots=True)
class Call:
    """A request to a model.

    Attributes:
        to_body: Returns the body of the response, and the headers that describe it; None for the service's own format.
        timeout_s: Seconds until it must have started, if the body sets a deadline; otherwise 0.
    """

    task: str
    model: Model
    body: TaskBody
    to_body: Callable[[Prediction], tuple[bytes, Headers]] | None = None
    timeout_s: float = 0.0

    async def run(
        self, request: RequestContext, timeout_s: float, trace: "RequestSpan | None", *, counts_refusals: bool = True
    ) -> tuple[Prediction, bytes, Headers]:
        """Runs the model, with the arguments and errors of `Model.predict`; the message of an error names the wrong input.

        Returns:
            The prediction, the body of the response, and the headers that describe the body.
        """
        try:
            inputs = self.body.task_inputs(self.model.bundle.manifest)
            prediction = await self.model.predict(
                inputs, timeout_s=self.timeout_s or timeout_s, task=self.task, counts_refusals=counts_refusals, trace=trace
            )
        except BertServeError as error:
            error.prefix_input(is_list=self.body.is_list, input_name=self.body.input_name)
            raise
        if prediction.response_bytes > LARGE_BYTES:
            await request.take_turn()
        if self.to_body is not None:
            return prediction, *self.to_body(prediction)
        return prediction, to_json(self.body.to_response(prediction.results)), JSON_HEADERS

    async def run_when_admitted(self, request: RequestContext, timeout_s: float, trace: "RequestSpan | None") -> bytes:
        """Returns the body of the response. If the model refuses, it asks again for `timeout_s` seconds; only the last refusal counts."""
        end = time.monotonic() + timeout_s
        while (left_s := end - time.monotonic()) > 0:
            try:
                return (await self.run(request, timeout_s, trace, counts_refusals=False))[1]
            except RefusedError as error:  # each attempt can tokenize the inputs again
                await asyncio.sleep(max(MIN_RETRY_S, min(error.retry_after_s, left_s)))
        return (await self.run(request, timeout_s, trace))[1]

    def headers(self, prediction: Prediction) -> list[tuple[bytes, bytes]]:
        """Returns the headers of a response that do not describe its body."""
        warnings = list(_warnings(prediction, self.body)) if prediction.warnings else []
        headers = [
            (b"x-model", self.model.name.encode()),
            (
                b"server-timing",
                b"tokenize;dur=%.3f, queue;dur=%.3f, inference;dur=%.3f, decode;dur=%.3f"
                % (prediction.tokenize_s * 1000, prediction.queue_s * 1000, prediction.inference_s * 1000, prediction.decode_s * 1000),
            ),
        ]
        if prediction.truncated:
            headers.append((b"x-truncated", b"%d" % len(prediction.truncated)))
            count = f"{len(prediction.truncated)} of {len(prediction.results)} {self.body.input_name} " if self.body.is_list else ""
            warning = truncation_warning(self.model.bundle.manifest.tokenizer.max_length, count)
            warnings.append(f"{warning}: {_name_inputs(prediction.truncated, self.body)}")
        if prediction.read_spans:
            headers.append((b"x-windows", _escape(_windows(prediction.read_spans))))
        # one header per warning, because the official client expects that
        headers.extend((b"x-hf-warning", _escape(warning)) for warning in warnings)
        return headers


def _warnings(prediction: Prediction, body: TaskBody) -> Iterator[str]:
    """Yields each warning once, with its inputs unless it applies to all."""
    indices_by_warning: dict[str, list[int]] = {}
    for index, warning in prediction.warnings:
        indices_by_warning.setdefault(warning, []).append(index)
    for warning, indices in indices_by_warning.items():
        yield warning if len(indices) == len(prediction.results) else f"{warning}: {_name_inputs(indices, body)}"


def _name_inputs(indices: Sequence[int], body: TaskBody) -> str:
    """Returns inputs by the names that the caller knows: `inputs` for a single one, `inputs[i]` for items of a list."""
    if not body.is_list:
        return body.input_name
    return ", ".join(f"{body.input_name}[{index}]" for index in indices[:10]) + (", ..." if len(indices) > 10 else "")


def _windows(read_spans: Sequence[ReadSpan]) -> str:
    """Returns the spans of an input that the model read, such as `0-1843, 1310-2950`; with two texts, each begins with its text's name."""
    spans = [f"{field}{'=' if field else ''}{start}-{end}" for field, start, end in read_spans[:MAX_WINDOWS_SHOWN]]
    return ", ".join([*spans, "..."] if len(read_spans) > MAX_WINDOWS_SHOWN else spans)


def _escape(value: str) -> bytes:
    """Returns a header's value in printable ASCII. Other characters are escaped, because tokens can contain newlines."""
    return value.encode() if value.isascii() and value.isprintable() else value.encode("unicode_escape")
