"""The handwritten parts of the documentation agree with the code."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import facts
from bertserve.bench import measurement, objectives, workloads
from bertserve.export import calibration
from bertserve.export.graph import onnx_files
from bertserve.service import errors
from bertserve.service.bundle import validation_policy
from bertserve.service.bundle.graph_spec import Record
from bertserve.service.bundle.manifest import Manifest  # its import defines all records
from bertserve.service.http import errors as http_errors
from bertserve.service.http import responses, streaming
from bertserve.service.process import connections, logs, parsing, preparation, server, supervisor
from bertserve.service.scheduling import request_queue, scheduled_request, watchdog
from bertserve.service.serving import build, model
from bertserve.service.tasks import cost, joint_masks, occlusion
from bertserve.service.text import tokenizer, windows
from bertserve.service.tracing import trace
from bertserve.service.wire import json_text

REFERENCE = Path(__file__).parent.parent / "docs" / "reference"
RECORDS = sorted(Record.__subclasses__(), key=lambda record: record.__name__)


def section(page: str, heading: str) -> str:
    """Returns the text below a heading of a page, up to the next heading."""
    text = (REFERENCE / page).read_text(encoding="utf-8")
    found = re.search(rf"^#+ {re.escape(heading)}\n(.*?)(?=^#|\Z)", text, re.MULTILINE | re.DOTALL)
    assert found is not None, f"{page} has no section `{heading}`"
    return found[1]


def first_cells(text: str) -> list[str]:
    """Returns the code in the first cell of each table row."""
    return re.findall(r"^\| `([^`|]+)`", text, re.MULTILINE)


def test_every_error_is_described() -> None:
    rows = re.findall(r"^\| (\d{3}) \| `(\w+)` \|", section("http-api.md", "Errors"), re.MULTILINE)

    assert sorted({*errors.ERROR_STATUSES.values(), errors.INTERNAL}) == sorted((int(status), kind) for status, kind in rows)


def test_every_endpoint_is_described() -> None:
    """Each POST path has a heading, or is mentioned as `POST PATH`, in http-api.md or open-inference.md."""
    text = (REFERENCE / "http-api.md").read_text(encoding="utf-8") + (REFERENCE / "open-inference.md").read_text(encoding="utf-8")
    posted = [path for path, operations in facts.openapi()["paths"].items() if "post" in operations]

    assert posted
    assert [] == [path for path in posted if f"### POST {path}\n" not in text and f"`POST {path}`" not in text]


@pytest.mark.parametrize(
    ("page", "sentence"),
    [
        ("explanation/architecture.md", f"writes a heartbeat to shared memory every {server.HEARTBEAT_S:g} s."),
        ("explanation/architecture.md", f"kills a worker that is silent for {supervisor.HUNG_S:g} s,"),
        ("explanation/int8.md", f"A file of more than {calibration.MAX_TEXTS:,} texts"),
        ("explanation/scheduling.md", f"can have 1/{request_queue.SMALL_PARTS} of the queue, all together 1/{request_queue.SPARE_PARTS}."),
        ("explanation/scheduling.md", f"(more than {request_queue.LONG_S * 1000:g} ms of work before its last item)"),
        (
            "explanation/scheduling.md",
            f"up to {tokenizer.SHORT_CHARS} characters, where each text after the first counts {cost.TEXT_CHARS} more",
        ),
        ("explanation/scheduling.md", f"for about {model.SLICE_S * 1000:g} ms."),
        (
            "explanation/scheduling.md",
            f"takes about {model.SECONDS_PER_CHAR * 1e6:g} µs, but up to {model.SLOWEST_SECONDS_PER_CHAR * 1e6:g} µs",
        ),
        ("explanation/scheduling.md", f"of more than {model.LONG_CHARS:,} characters,"),
        ("explanation/scheduling.md", f"| lists and objects of a body | {json_text.MAX_CONTAINERS:,} |"),
        ("explanation/scheduling.md", f"| keys of a body | {json_text.MAX_KEYS:,} |"),
        ("explanation/scheduling.md", f"| values of a body | {json_text.MAX_VALUES:,} |"),
        ("explanation/scheduling.md", f"| digits of numbers in a body | {json_text.MAX_DIGITS:,} |"),
        ("explanation/scheduling.md", f"for each choice or label | {cost.MAX_CHARS:,} |"),
        ("explanation/scheduling.md", f"with `targets`, {joint_masks.MAX_PATTERNS * cost.TEXT_CHARS:,} characters per text |"),
        ("explanation/scheduling.md", f"until the request is answered | {cost.MAX_MEMORY:,} ({4 * cost.MAX_MEMORY >> 20} MiB);"),
        ("explanation/scheduling.md", f"each about a microsecond | {cost.MAX_STEPS:,} |"),
        ("explanation/scheduling.md", f"| bytes of the answer as JSON | {cost.MAX_ANSWER_BYTES:,} |"),
        ("explanation/scheduling.md", f"{cost.STEPS_PER_TOKEN} steps of decoding count as one token in the queue."),
        ("explanation/scheduling.md", f"An answer of more than {responses.LONG_BYTES >> 10} KiB"),
        ("explanation/scheduling.md", f"A thread with a lower priority tokenizes more than {tokenizer.LOW_PRIORITY_CHARS:,} characters"),
        ("explanation/scheduling.md", f"| {windows.MAX_WINDOWS:,} windows per text |"),
        ("explanation/scheduling.md", f"{model.MAX_LOGITS:,} logits over the vocabulary, or {model.MAX_WEIGHTS:,} attention weights."),
        ("explanation/scheduling.md", f"The pace is {scheduled_request.PACE:g}."),
        ("explanation/scheduling.md", f"If one is more than {request_queue.LATE_S:g} s late,"),
        ("explanation/scheduling.md", "At least 1/32 of the run is saved." if request_queue.LEAST_GAIN == 1 / 32 else ""),
        ("how-to/explain.md", f"The limit is {occlusion.MAX_WORDS} words."),
        ("how-to/int8.md", f"one text per line: at least {calibration.MIN_TEXTS},"),
        ("how-to/int8.md", f"The built-in calibration texts are {len(calibration.read_texts(calibration.BUILT_IN))} English texts."),
        (
            "how-to/load-test.md",
            f"over {measurement.MAX_CPU_SHARE * 100:g} % of a core or was more than {measurement.MAX_LATENESS_MS:g} ms late at p99.",
        ),
        ("how-to/monitoring.md", f"has spans for the first {trace.MAX_STAGES - 1} runs and the last one."),
        ("how-to/monitoring.md", f"each of its first {streaming.MAX_TRACED_LINES} lines."),
        ("how-to/operations.md", f"takes {watchdog.HUNG_RATIO:g} times its predicted time, and at least {watchdog.HUNG_FLOOR_S:g} s."),
        ("how-to/operations.md", f"count as hung after {watchdog.HUNG_FLOOR_S * watchdog.UNPREDICTED_FLOORS:g} s."),
        ("how-to/operations.md", f"get 500 {watchdog.OVERDUE_S:g} s after their deadlines."),
        ("how-to/operations.md", f"been idle for {connections.LINGER_S:g} s are closed"),
        ("how-to/operations.md", f"The service keeps {connections.PROBE_RESERVE} more connections for probes"),
        ("how-to/operations.md", f"whose event loop stops for {supervisor.HUNG_S:g} s is replaced."),
        ("how-to/serve-a-checkpoint.md", f"with more than {onnx_files.MAX_BYTES >> 20:,} MiB of weights"),
        ("reference/http-api.md", f"at most {parsing.MAX_HEADERS} headers; more is 431."),
        (
            "reference/http-api.md",
            f"at most {joint_masks.MAX_JOINT_MASKS} masks, counting one for each token of a target, and {joint_masks.MAX_PATTERNS}",
        ),
        ("reference/logs.md", f"of 4xx {http_errors.MAX_CALLER_ERRORS} lines;"),
        ("reference/logs.md", f"lines beyond {logs.MAX_WAITING:,} are dropped,"),
        ("reference/manifest.md", f"with more than {onnx_files.MAX_BYTES >> 20:,} MiB of weights"),
        ("reference/settings.md", f"as many as there are threads, at most {build.MAX_LOADING}."),
        ("reference/settings.md", f"at most {preparation.MOST_RAISED:,} and reserves {preparation.RESERVE}."),
        ("tutorial/first-bundle.md", f"At {validation_policy.ENOUGH_AGREEMENT * 100:g} % or more the service uses int8 by default."),
    ],
)
def test_constants_on_a_page_have_the_values_of_the_code(page: str, sentence: str) -> None:
    assert sentence in " ".join((REFERENCE.parent / page).read_text(encoding="utf-8").split())


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: record.__name__)
def test_every_manifest_field_is_specified(record: type[Record]) -> None:
    assert sorted(record.model_fields) == sorted(first_cells(section("manifest.md", record.__name__)))


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: record.__name__)
def test_optional_manifest_fields_are_marked(record: type[Record]) -> None:
    optional = {name for name, field in record.model_fields.items() if not field.is_required()}
    rows = section("manifest.md", record.__name__).splitlines()
    marked = {name for row in rows if "*Optional*" in row for name in first_cells(row)}

    assert optional == marked


def test_every_manifest_record_has_a_section() -> None:
    headings = re.findall(r"^### (\w+)$", (REFERENCE / "manifest.md").read_text(encoding="utf-8"), re.MULTILINE)

    assert Manifest in RECORDS
    assert [record.__name__ for record in RECORDS] == sorted(headings)


def test_every_slo_metric_is_described() -> None:
    """Each metric of `--slo` is in the table column of its bound: a maximum or a minimum."""
    most, least = (
        set(re.findall(r"`(\w+)`", cell)) for cell in section("bench-flags.md", "Metrics for --slo").splitlines()[3].strip("|").split("|")
    )

    assert {name for name, at_most in objectives.METRICS.items() if at_most} == most
    assert {name for name, at_most in objectives.METRICS.items() if not at_most} == least


def test_every_workload_is_described() -> None:
    rows = [name for name in first_cells(section("bench-flags.md", "Workloads")) if not name.startswith("/")]

    assert sorted(workloads.NAMES) == sorted(rows)
