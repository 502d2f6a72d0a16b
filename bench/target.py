"""Endpoints under load: address, request bodies, complete HTTP requests, and the information of the service about itself.

The bodies and their numbers of texts are derived from the service's tasks. A task is recognized by the last part of the path, so it also
works behind a proxy's prefix, and for other servers with the same wire format.
"""

import http.client
import json
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any
from urllib.parse import SplitResult, urlsplit

from prometheus_client.parser import text_string_to_metric_families

from bertserve.bench import workloads
from bertserve.service.body.reading import validate_as
from bertserve.service.body.task_body import TRUSTED_LIMITS
from bertserve.service.errors import CallerError, StartError
from bertserve.service.tasks import attention, fill_mask, multiple_choice, question_answering, rerank, similarity, zero_shot
from bertserve.service.tasks.catalog import TASKS, requested_task

Model = Mapping[str, Any]  # a model in the answer of the service's path `/info`
OK, TOO_MANY_REQUESTS = 200, 429
_REQUIRED_KEYS = {"name", "version", "provider", "precision"}  # an answer without these keys is from another server
_RUN_METRICS = {"bertserve_batch_rows_count", "bertserve_batch_rows_sum", "bertserve_tokens_total"}
# Task -> the workload with suitable inputs. The others read short texts.
_TASK_WORKLOADS = {fill_mask.TASK: "mask", question_answering.TASK: "qa"}
_CHOICES = ["It was late.", "The bridge was closed.", "Nobody had seen it before.", "They sold it for ten times the price."]


def _inputs_body(inputs: Sequence[Any]) -> dict[str, Any]:
    """Returns the body of most tasks; a single input is sent without a list."""
    return {"inputs": inputs[0] if len(inputs) == 1 else list(inputs)}


# Task -> the body for one or more texts. The bodies of other tasks have only inputs.
_TEXT_BODIES: Mapping[str, Callable[[Sequence[Any]], dict[str, Any]]] = {
    # with all layers, answers of several texts would be too long
    attention.TASK: lambda texts: _inputs_body(texts) | {"parameters": {"output_attentions": True, "layers": [-1]}},
    multiple_choice.TASK: lambda texts: _inputs_body([{"prompt": text, "choices": _CHOICES} for text in texts]),
    rerank.TASK: lambda texts: {"query": "Who built the bridge over the river?", "texts": list(texts)},
    similarity.TASK: lambda texts: {
        "inputs": {"source_sentence": "The bridge was opened in the summer of 1886.", "sentences": list(texts)}
    },
    zero_shot.TASK: lambda texts: (
        _inputs_body(texts) | {"parameters": {"candidate_labels": ["culture", "travel", "technology", "history"]}}
    ),
}


@dataclass(frozen=True, slots=True)
class Body:
    """One request body: the JSON that is sent, and the number of texts that the model reads, as `count_texts` counts them."""

    content: bytes
    texts: int


class Target:
    """An endpoint under load, its request bodies, which are sent in turn, and the same bodies as complete HTTP requests.

    `model` is the endpoint's information about its model, None from another server.
    """

    def __init__(self, address: SplitResult, bodies: Sequence[Body], headers: Mapping[str, str], model: Model | None = None) -> None:
        header_names = {name.lower() for name in headers}
        defaults = {"Host": address.netloc, "Content-Type": "application/json"}
        lines = {name: value for name, value in defaults.items() if name.lower() not in header_names} | dict(headers)
        head = f"POST {request_target(address)} HTTP/1.1\r\n" + "".join(f"{name}: {value}\r\n" for name, value in lines.items())
        self.address, self.bodies, self.headers, self.model = address, bodies, headers, model
        self.requests = [f"{head}Content-Length: {len(body.content)}\r\n\r\n".encode("latin-1") + body.content for body in bodies]


def parse_url(url: str) -> SplitResult:
    """Returns the parts of `http://HOST[:PORT]/PATH`, or the same with https, with the port; raises StartError for other texts."""
    with suppress(ValueError):  # the port is not a number, or a bracket is not closed
        parts = urlsplit(url)
        # a password would appear in the report, and a fragment is never sent
        host = parts.hostname or ""
        is_whole = parts.scheme in ("http", "https") and host and parts.username is None and "#" not in url
        if is_whole and url.isascii() and not any(c.isspace() for c in url):
            port = parts.port or (443 if parts.scheme == "https" else 80)
            return parts._replace(netloc=f"[{host}]:{port}" if ":" in host else f"{host}:{port}", path=parts.path or "/")
    raise StartError(f"`{url.rpartition('@')[2]}` is not an address, or has a password; give one such as http://127.0.0.1:8000/classify.")


def request_target(address: SplitResult) -> str:
    """Returns the path of an address with its query, for a request line."""
    return f"{address.path}?{address.query}" if address.query else address.path


def build_bodies(source: str, *, path: str = "/", texts: int = 1, seed: int = 0, mask: str = workloads.MASK) -> list[Body]:
    """Returns the bodies of a workload or of a file.

    Args:
        source: Name of a workload, or path of a JSON Lines file with a text on each line, or a whole body, which is sent unchanged.
        path: Path of the endpoint for the bodies.
        texts: Number of texts per request. Objects of a file are whole requests, so it must be 1 for them.
        seed: Seed of a built-in workload.
        mask: The model's spelling of the mask; the content of a file is sent unchanged.

    Raises:
        StartError: The workload or file does not exist, a line of the file is not a body, or the endpoint does not support the workload.
    """
    if source in workloads.NAMES:
        inputs = workloads.workload_inputs(source, seed=seed, mask=mask)
    else:
        inputs = _read_lines(Path(source))
        if isinstance(inputs[0], dict):
            if texts != 1:
                raise StartError(f"--texts {texts} groups texts, but `{source}` has whole request bodies; remove the flag.")
            return [Body(json.dumps(value).encode(), count_texts(value)) for value in inputs]
    last = path.rstrip("/").rpartition("/")[2]
    build = next((_TEXT_BODIES[name] for name in _TEXT_BODIES if TASKS[name].path == last), _inputs_body)
    if build is not _inputs_body and not isinstance(inputs[0], str):
        raise StartError(f"/{last} takes texts, not questions with passages; give another workload, or a file of texts or whole bodies.")
    # all inputs occur equally often, unless this takes more than 512 bodies
    count = min(math.lcm(len(inputs), texts) // texts, max(len(inputs) // texts, 512))
    values = [build([inputs[(i * texts + k) % len(inputs)] for k in range(texts)]) for i in range(count)]
    return [Body(json.dumps(value).encode(), count_texts(value)) for value in values]


def _read_lines(path: Path) -> list[Any]:
    """Returns the values of a JSON Lines file, which must be all objects or all strings; raises StartError otherwise."""
    try:
        text = path.read_text(encoding="utf-8")
        lines = [json.loads(line) for line in text.split("\n") if line.strip()]  # a text can contain other line ends, such as U+2028
    except (OSError, ValueError) as error:
        raise StartError(f"`{path}` is neither a workload ({', '.join(workloads.NAMES)}) nor a file of JSON lines: {error}.") from error
    if not any(lines and all(isinstance(line, kind) for line in lines) for kind in (str, dict)):
        raise StartError(f"`{path}` must have a JSON string on each line, or a JSON object on each line.")
    return lines


def count_texts(value: Mapping[str, Any]) -> int:
    """Returns the number of texts that the model reads for a body: texts to rank, sentences to compare, or pairs of text and label.

    If the body fits no task, the items of `inputs` are counted.
    """
    names = {requested_task(spec.name, value) for spec in TASKS.values() if spec.derivation is None}
    # derived tasks with specific keys come before tasks that accept any inputs
    for name in sorted(names, key=lambda name: TASKS[name].derivation is None):
        with suppress(CallerError):
            # the count of similarity is without the source sentence
            return validate_as(TASKS[name].body, value, TRUSTED_LIMITS).count + (name == similarity.TASK)
    inputs = value.get("inputs")
    return len(inputs) if isinstance(inputs, list) else 1


def fetch(address: SplitResult, method: str, path: str, headers: Mapping[str, str], body: bytes | None = None) -> tuple[int, Any]:
    """Sends one request; returns the status and the JSON value of the response, or its text if it is not JSON.

    Raises:
        StartError: The address cannot be reached, or does not use HTTP.
    """
    kind = http.client.HTTPSConnection if address.scheme == "https" else http.client.HTTPConnection
    connection = kind(address.netloc, timeout=30)
    try:
        connection.request(method, path, body, {"Content-Type": "application/json", **headers})
        response = connection.getresponse()
        content = response.read()
        with suppress(ValueError):
            return response.status, json.loads(content)
        return response.status, content.decode(errors="replace")
    except (OSError, http.client.HTTPException) as error:
        url = address.geturl()
        raise StartError(f"{url} cannot be reached ({error!r}); start the service, or give its address with --target.") from error
    finally:
        connection.close()


def fetch_info(address: SplitResult, path: str, headers: Mapping[str, str]) -> dict[str, Any] | None:
    """Returns the JSON object at a path, or None if there is none; raises StartError like `fetch`."""
    status, value = fetch(address, "GET", path, headers)
    return value if status == OK and isinstance(value, dict) else None


def read_run_totals(target: Target) -> Counter[str]:
    """Returns the totals of a target's model in the service's `/metrics` by name, tokens by kind; empty if it shows none."""
    totals = Counter[str]()
    if target.model is not None:
        with suppress(StartError, ValueError):  # a load that ended the service has a report too
            _, text = fetch(target.address, "GET", "/metrics", target.headers)
            for sample in chain.from_iterable(family.samples for family in text_string_to_metric_families(str(text))):
                if sample.name in _RUN_METRICS and sample.labels["model"] == target.model["name"]:
                    totals[sample.labels.get("kind", sample.name)] += int(sample.value)
    return totals


def probe_target(text: str, headers: Mapping[str, str], *, texts: int, seed: int) -> Target:
    """Returns a target that has answered one request. A server that is only busy or broken at the moment can be loaded too.

    Args:
        text: `URL` or `URL=WORKLOAD`; without a workload, the default workload of the model's task is used.
        headers: Headers of every request.
        texts: Number of texts per request.
        seed: Seed of a built-in workload.

    Raises:
        StartError: The address, the workload or the file is wrong, or the endpoint refused the first body.
    """
    url, equals, workload = text.rpartition("=") if "?" in text else text.partition("=")
    if not equals or ("?" in url and workload not in workloads.NAMES and not Path(workload).exists()):
        url, workload = text, ""
    address = parse_url(url)
    model = fetch_info(address, address.path.rstrip("/") + "/info", headers) or {}
    workload = workload or _TASK_WORKLOADS.get(str(model.get("task")), "short")
    mask = str(model.get("mask_token") or workloads.MASK)
    bodies = build_bodies(workload, path=address.path, texts=texts, seed=seed, mask=mask)
    status, value = fetch(address, "POST", request_target(address), headers, bodies[0].content)
    if not 200 <= status < 300 and status != TOO_MANY_REQUESTS and status < 500:
        raise StartError(
            f"{url} answered {status} to a first request: {value.get('error') if isinstance(value, dict) else str(value)[:100]}"
        )
    shown = {key: value for key, value in model.items() if key not in ("validation", "metrics")}  # these are long
    return Target(address, bodies, headers, shown | {"workload": workload} if model.keys() >= _REQUIRED_KEYS else None)
