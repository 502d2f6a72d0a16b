"""The parts of the reference that are written by hand say all that the code has, and nothing else."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import facts
from bertserve.bench import workloads
from bertserve.bench.report import slo
from bertserve.service import errors
from bertserve.service.bundle.graph_spec import Record
from bertserve.service.bundle.manifest import Manifest  # and with it all records
from bertserve.service.process import server, supervisor

REFERENCE = Path(__file__).parent.parent / "docs" / "reference"
RECORDS = sorted(Record.__subclasses__(), key=lambda record: record.__name__)


def section(page: str, heading: str) -> str:
    """Returns the text below a heading of a page, to the next heading."""
    text = (REFERENCE / page).read_text(encoding="utf-8")
    found = re.search(rf"^#+ {re.escape(heading)}\n(.*?)(?=^#|\Z)", text, re.MULTILINE | re.DOTALL)
    assert found is not None, f"{page} has no section `{heading}`"
    return found[1]


def first_cells(text: str) -> list[str]:
    """Returns the code in the first cell of each row of a text's tables."""
    return re.findall(r"^\| `([^`|]+)`", text, re.MULTILINE)


def test_every_error_is_described() -> None:
    rows = re.findall(r"^\| (\d{3}) \| `(\w+)` \|", section("http-api.md", "Errors"), re.MULTILINE)

    assert sorted({*errors.ERROR_STATUSES.values(), errors.INTERNAL}) == sorted((int(status), kind) for status, kind in rows)


def test_every_endpoint_is_described() -> None:
    """Each path that takes a body has a heading of its own, a row in a table, or stands in the page of its protocol."""
    text = (REFERENCE / "http-api.md").read_text(encoding="utf-8") + (REFERENCE / "open-inference.md").read_text(encoding="utf-8")
    posted = [path for path, operations in facts.openapi()["paths"].items() if "post" in operations]

    assert posted
    assert [] == [path for path in posted if f"### POST {path}\n" not in text and f"`POST {path}`" not in text]


def test_the_heartbeat_of_workers_is_that_of_the_code() -> None:
    text = " ".join((REFERENCE.parent / "explanation/architecture.md").read_text(encoding="utf-8").split())

    assert f"writes a heartbeat to shared memory every {server.HEARTBEAT_S:g} s." in text
    assert f"kills a worker that is silent for {supervisor.HUNG_S:g} s," in text


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: record.__name__)
def test_every_manifest_field_is_specified(record: type[Record]) -> None:
    assert sorted(record.model_fields) == sorted(first_cells(section("manifest.md", record.__name__)))


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: record.__name__)
def test_manifest_fields_that_may_be_missing_are_marked(record: type[Record]) -> None:
    optional = {name for name, field in record.model_fields.items() if not field.is_required()}
    rows = section("manifest.md", record.__name__).splitlines()
    marked = {name for row in rows if "*Optional*" in row for name in first_cells(row)}

    assert optional == marked


def test_every_record_belongs_to_the_manifest() -> None:
    headings = re.findall(r"^### (\w+)$", (REFERENCE / "manifest.md").read_text(encoding="utf-8"), re.MULTILINE)

    assert Manifest in RECORDS
    assert [record.__name__ for record in RECORDS] == sorted(headings)


def test_every_metric_of_a_target_is_named() -> None:
    """The figures that `--slo` takes stand under the bound that they have."""
    most, least = (
        set(re.findall(r"`(\w+)`", cell)) for cell in section("bench-flags.md", "Metrics for --slo").splitlines()[3].strip("|").split("|")
    )

    assert {name for name, at_most in slo.METRICS.items() if at_most} == most
    assert {name for name, at_most in slo.METRICS.items() if not at_most} == least


def test_every_mix_is_described() -> None:
    rows = [name for name in first_cells(section("bench-flags.md", "Workloads")) if not name.startswith("/")]

    assert sorted(workloads.NAMES) == sorted(rows)
