"""The handwritten parts of the documentation agree with the code."""

import json
import re
from pathlib import Path

import pytest

import facts
from bertserve.bench import measurement, workloads
from bertserve.service.body.reading import parse_json, validate_as
from bertserve.service.body.task_body import Limits
from bertserve.service.bundle.manifest import Manifest  # its import defines all records
from bertserve.service.bundle.record import Record
from bertserve.service.errors import BertServeError, CallerError
from bertserve.service.tasks.catalog import TASKS

ROOT = Path(__file__).parent.parent
REFERENCE = ROOT / "docs" / "reference"
RECORDS = sorted(Record.__subclasses__(), key=lambda record: record.__name__)


def section(page: str, heading: str) -> str:
    """Returns the text below a heading of a page, up to the next heading."""
    text = (REFERENCE / page).read_text(encoding="utf-8")
    match = re.search(rf"^#+ {re.escape(heading)}\n(.*?)(?=^#|\Z)", text, re.MULTILINE | re.DOTALL)
    assert match is not None, f"{page} has no section `{heading}`"
    return match[1]


def items(record: type[Record]) -> dict[str, str]:
    """Returns the meaning of each field of a record, as manifest.md lists it."""
    return dict(re.findall(r"^- `(\w+)`: (.*?)(?=^- |\Z)", section("manifest.md", record.__name__), re.MULTILINE | re.DOTALL))


def test_every_limit_of_a_request_is_listed_with_the_file_that_enforces_it() -> None:
    table = section("../explanation/architecture.md", "Limits")
    files = [path for folder in ("body", "models", "tasks", "text") for path in (ROOT / "service" / folder).glob("*.py")]
    constant = re.compile(r"^(?:\w+, )?(MAX_\w+) =", re.MULTILINE)
    limits = [(name, path) for path in files for name in constant.findall(path.read_text(encoding="utf-8"))]

    assert {"MAX_CHOICES", "MAX_WINDOWS"} <= {name for name, _ in limits}
    assert [(name, path) for name, path in limits if f"`{name}`" not in table or path.name not in table] == []


def test_every_error_is_described() -> None:
    rows = re.findall(r"^\| (\d{3}) \| `(\w+)` \|", section("http-api.md", "Errors"), re.MULTILINE)

    types = {(error.status, error.error_type) for error in (*facts.errors(), BertServeError)}
    assert sorted((int(status), error_type) for status, error_type in rows) == sorted(types)


def test_every_endpoint_is_described() -> None:
    """Each path has a heading, or is mentioned as `METHOD PATH`, in http-api.md or tasks.md."""
    text = "".join((REFERENCE / page).read_text(encoding="utf-8") for page in ("http-api.md", "tasks.md"))
    of_a_task = re.compile(rf"/({'|'.join(spec.path for spec in facts.tasks())})(?=/)")
    endpoints = {
        f"{method.upper()} {of_a_task.sub('/{task}', path)}"
        for path, operations in facts.openapi()["paths"].items()
        for method in operations
    }

    assert endpoints
    assert [endpoint for endpoint in endpoints if f"## {endpoint}\n" not in text and f"`{endpoint}`" not in text] == []


def test_the_error_in_the_tutorial_is_that_of_its_request() -> None:
    page = (REFERENCE.parent / "tutorial/first-bundle.md").read_text(encoding="utf-8")
    [(body, response)] = re.findall(r"/classify -d '(.+)'\n```\n\n```\n(\{\"error\": .+)", page)

    with pytest.raises(CallerError) as error:
        validate_as(TASKS["text-classification"].body, parse_json(body.encode()), Limits(max_inputs=1, max_chars=100))
    assert {"error": error.value.message, "error_type": error.value.error_type}.items() <= json.loads(response).items()


@pytest.mark.parametrize("path", ["/v1/embeddings", "/v1/rerank", "/predict", "/embed_all"])
def test_every_field_of_another_wire_format_is_named(path: str) -> None:
    document = facts.openapi()
    schema = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    fields = document["components"]["schemas"][schema["$ref"].rpartition("/")[2]]["properties"]

    assert set(fields) - {"model", "parameters"} - set(re.findall(r"`(\w+)`", section("http-api.md", f"POST {path}"))) == set()


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: record.__name__)
def test_every_manifest_field_is_specified(record: type[Record]) -> None:
    assert sorted(items(record)) == sorted(record.model_fields)


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: record.__name__)
def test_optional_manifest_fields_are_marked(record: type[Record]) -> None:
    optional = {name for name, field in record.model_fields.items() if not field.is_required()}

    assert {name for name, meaning in items(record).items() if "*Optional*" in meaning} == optional


def test_every_manifest_record_has_a_section() -> None:
    headings = re.findall(r"^### (\w+)$", (REFERENCE / "manifest.md").read_text(encoding="utf-8"), re.MULTILINE)

    assert Manifest in RECORDS
    assert sorted(headings) == [record.__name__ for record in RECORDS]


def test_every_slo_metric_is_described() -> None:
    """Each metric of `--slo` is in the table column of its bound: a maximum or a minimum."""
    most, least = (
        set(re.findall(r"`(\w+)`", cell))
        for cell in section("../how-to/load-test.md", "Metrics for --slo").splitlines()[3].strip("|").split("|")
    )

    assert most == {name for name, at_most in measurement.METRICS.items() if at_most}
    assert least == {name for name, at_most in measurement.METRICS.items() if not at_most}


def test_every_workload_is_described() -> None:
    names = re.findall(r"^\| `([^`|]+)`", section("../how-to/load-test.md", "Workloads"), re.MULTILINE)
    rows = [name for name in names if not name.startswith("/")]

    assert sorted(rows) == sorted(workloads.NAMES)
