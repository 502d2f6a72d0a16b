"""Helpers for loads on a real service: durations, the service's metrics before and after a load, and the outcome of every request.

`make test` and `make test-all` run each load for half a second on tiny models, and check what must always be true. `make stress` sets
STRESS_SECONDS, runs each load on the included models for the full duration, and prints the measured values.
"""

import json
import os
import re
import threading
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import httpx

from bertserve.bench.generator import Load, RequestRecord, send_loads
from bertserve.bench.target import Body, Target, parse_url
from support import ROOT, metric, tiny
from support.replica import ServeProcess

LONGEST_S = float(os.environ.get("STRESS_SECONDS", "0.5"))
LONG = "STRESS_SECONDS" in os.environ
# every deadline here is far shorter: if a client waits longer, its request is lost
CLIENT_TIMEOUT_S = 60.0

TASKS_OF = {"sentiment": "text-classification", "ner": "token-classification", "qa": "question-answering", "fill-mask": "fill-mask"}


def seconds(most: float) -> float:
    """Returns the duration of a load in seconds: `most`, limited by STRESS_SECONDS."""
    return min(most, LONGEST_S)


def models_for(folder: Path) -> Path:
    """Returns a folder of models: in `make stress` the included models, otherwise tiny models with the names and tasks of TASKS_OF."""
    if LONG:
        return ROOT / "models"
    for name, task in TASKS_OF.items():
        tiny.bundle(folder / "models", name, task=task, max_length=512)
    return folder / "models"


def target(server: ServeProcess, path: str, bodies: Iterable[Any], **headers: str) -> Target:
    """Returns a target for the load generator: a path and its bodies, sent in turn. Bytes are sent unchanged, other bodies as JSON."""
    load_bodies = [Body(body if isinstance(body, bytes) else json.dumps(body).encode(), 1) for body in bodies]
    return Target(parse_url(server.url + path), load_bodies, headers)


def load(target: Target, connections: int, duration_s: float, *, warmup_s: float = 0.0, arrivals: Sequence[float] | None = None) -> Load:
    """Runs a closed loop, or with arrival times an open loop, which sends requests at these times even if the service is slow."""
    result = Load(target, connections, seconds=duration_s, warmup_s=warmup_s, timeout_s=CLIENT_TIMEOUT_S)
    send_loads([result], threading.Event(), [] if arrivals is None else [arrivals])
    return result


def measured_records(load: Load) -> list[RequestRecord]:
    """Returns the requests that were due within the measured time."""
    start, end = load.measured
    return [record for record in load.records if start <= record.intended < end]


def metrics(server: ServeProcess) -> str:
    """Returns the page of the service's metrics."""
    return httpx.get(f"{server.url}/metrics", trust_env=False, timeout=60).text


def queue_items(server: ServeProcess) -> float:
    return metric(metrics(server), "queue_items")


def by_status(page: str) -> Counter[int]:
    """Returns how many requests the service has answered with each status."""
    statuses = set(re.findall(r'^bertserve_requests_total\{.*status="(\d+)"', page, re.MULTILINE))
    return Counter({int(status): int(metric(page, "requests_total", status=status)) for status in statuses})


def assert_each_ended_once(before: str, after: str, *loads: Load) -> Counter[int | str]:
    """Asserts that each request between two pages of metrics got one answer, which the service counted, and that no request is queued.

    The load generator records each request that it sent. Without an answer, its outcome is a word instead of a status.

    Returns:
        Outcome -> number of requests.
    """
    outcomes = Counter(record.outcome for load in loads for record in load.records)
    statuses = by_status(after) - by_status(before)
    assert outcomes == statuses, (statuses, outcomes)
    assert (metric(after, "queue_items"), metric(after, "queue_tokens")) == (0, 0)
    return outcomes


def show(name: str, value: str) -> None:
    """Prints a measured value if STRESS_SECONDS is set, because short loads give no meaningful values."""
    if LONG:
        print(f"\n  {name}: {value}", end="", flush=True)


def accesses(server: ServeProcess) -> list[dict[str, Any]]:
    """Returns the access log of a service with `--access-log --log-format json`: one line per answered request."""
    lines = map(json.loads, Path(server.log).read_text().splitlines())
    return [line for line in lines if line["logger"] == "bertserve.access"]


def descriptors(server: ServeProcess) -> int:
    return len(os.listdir(f"/proc/{server.process.pid}/fd"))


def threads(server: ServeProcess) -> int:
    return len(os.listdir(f"/proc/{server.process.pid}/task"))
