"""Documents stay true: settings, endpoints, metrics, errors and flags are all documented, and README's commands run."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import urllib.request
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from conftest import Served
from service.check import difference
from service.http import errors
from service.http.app import create_fastapi
from service.metrics import Metrics
from service.serving.build import build
from service.settings import Settings

ROOT = Path(__file__).parent.parent
Serve = Callable[..., AbstractContextManager[Served]]


def document(name: str) -> str:
    """Returns a document's text."""
    return (ROOT / name).read_text(encoding="utf-8")


def test_containers_and_make_serve_set_the_same_memory_settings() -> None:
    """They are settings that this machine's C library knows, and the ones that docs/tuning.md explains."""
    made = re.findall(r"glibc\.malloc\.\S+", document("Makefile"))
    assert made == re.findall(r"glibc\.malloc\.\S+", document("Dockerfile"))
    assert f"GLIBC_TUNABLES={made[0]}" in document("docs/tuning.md")
    if not (loader := Path("/lib64/ld-linux-x86-64.so.2")).exists():
        pytest.skip("not a machine with glibc for x86-64")
    known = subprocess.run([loader, "--list-tunables"], capture_output=True, text=True, check=True).stdout
    assert {setting.partition("=")[0] for setting in made[0].split(":")} <= {line.partition(":")[0] for line in known.splitlines()}


def test_every_setting_is_documented_with_its_default() -> None:
    """docs/tuning.md has a row for each flag, and its default where that is a plain value."""
    text = document("docs/tuning.md")
    for name, field in Settings.model_fields.items():
        flag = f"`--{name.replace('_', '-')}`"
        assert flag in text
        if isinstance(field.default, int) and not isinstance(field.default, bool) and name != "port":
            row = next(line for line in text.splitlines() if line.startswith(f"| {flag}"))
            assert f"| {field.default} |" in row


def test_no_setting_is_documented_that_does_not_exist() -> None:
    """Flags of bert-serve that a document names are real."""
    known = {f"--{name.replace('_', '-')}" for name in Settings.model_fields}
    rows = re.findall(r"^\| `(--[a-z-]+)`", document("docs/tuning.md"), re.MULTILINE)

    assert set() == set(rows) - known


def test_every_endpoint_is_documented(models: Path) -> None:
    """docs/api.md names each path of the OpenAPI schema."""
    schema = create_fastapi(build(Settings(models=models))).openapi()
    text = document("docs/api.md")

    assert [] == [path for path in schema["paths"] if path not in text]


def test_every_metric_is_documented() -> None:
    """docs/operations.md names each metric."""
    text = document("docs/operations.md")
    names = {family.name.removeprefix("bertserve_") for family in text_string_to_metric_families(Metrics().page().decode())}

    assert set() == {name for name in names if f"`{name}`" not in text and f"`{name}_total`" not in text}


def test_every_error_is_documented() -> None:
    """docs/api.md has a row for each status and error type."""
    text = document("docs/api.md")

    assert [] == [row for row in {*errors.TABLE.values(), errors.INTERNAL} if f"| {row[0]} | `{row[1]}` |" not in text]


@pytest.mark.parametrize("command", [(), ("verify",)])
def test_every_export_flag_is_documented(command: tuple[str, ...]) -> None:
    """docs/export.md names each flag of bert-export, and of bert-export verify."""
    command_line = [Path(sys.executable).with_name("bert-export"), *command, "--help"]
    usage = subprocess.run(command_line, capture_output=True, text=True, check=True).stdout
    flags = set(re.findall(r"--[a-z0-9-]+", usage)) - {"--help"}

    assert set() == {flag for flag in flags if f"`{flag}`" not in document("docs/export.md")}


def test_readme_requests_give_the_answers_that_it_shows(serve: Serve) -> None:
    """Each curl line of README, sent to the embedded models, gives the JSON below it (scores within int8's tolerance)."""
    shown = re.findall(r"```bash\ncurl -s localhost:8000(\S+) -d '(.+?)'\n```\n\n```json\n(.+?)\n```", document("README.md"), re.DOTALL)
    assert shown

    with serve(ROOT / "models") as served:
        for path, body, answer in shown:
            with urllib.request.urlopen(served.url + path, body.encode(), timeout=20) as response:
                assert difference(json.loads(answer), json.load(response), 0.05) is None


def test_readme_names_make_targets_and_files_that_exist() -> None:
    """Commands and paths of README, CONTRIBUTING and docs are real."""
    makefile = document("Makefile")
    for name in ("README.md", "CONTRIBUTING.md", "docs/export.md", "docs/benchmarking.md"):
        text = document(name)
        for target in re.findall(r"\bmake ([a-z]+)\b(?! it)", text):
            assert re.search(rf"^{target}:", makefile, re.MULTILINE), f"{name}: make {target}"
        for path in re.findall(r"`((?:service|export|bench|models|docs|tests)/[\w./]+)`|\]\(([\w./-]+)\)", text):
            file = next(filter(None, path))
            assert (ROOT / file).exists() or (ROOT / name).parent.joinpath(file).exists(), f"{name}: {file}"


@pytest.mark.parametrize(
    "name", ["README.md", "docs/export.md", "docs/operations.md", "docs/benchmarking.md", "models/README.md", "Dockerfile"]
)
def test_no_document_names_this_machine(name: str) -> None:
    """Paths of a developer's machine have no place here."""
    assert not re.search(r"/(work|root|tmp)/", document(name))


def test_check_passes_on_the_embedded_models() -> None:
    """`bert-serve check`, as documented, accepts what is embedded."""
    command = [Path(sys.executable).with_name("bert-serve"), "check", "--models", str(ROOT / "models")]
    result = subprocess.run(command, capture_output=True, text=True, check=False)

    assert 0 == result.returncode
    assert ["fill-mask", "ner", "qa", "sentiment"] == [line.split(":")[0] for line in result.stdout.splitlines() if line.endswith(": ok")]


def test_the_image_gets_what_it_copies() -> None:
    """The build context leaves out everything but what `.dockerignore` names: all that the Dockerfile copies must be there."""
    kept = {line.removeprefix("!") for line in document(".dockerignore").splitlines() if line.startswith("!")}
    copied = [source for line in document("Dockerfile").splitlines() if line.startswith("COPY ") for source in line.split()[1:-1]]

    assert {"service", "export", "bench", "models", "pyproject.toml"} <= set(copied)
    assert set(copied) <= kept
