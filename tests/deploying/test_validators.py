"""External tools check `deploy/` and the Dockerfile: kubectl, the schemas of Kubernetes and Compose, systemd-analyze, hadolint.

The tools from PyPI are in a separate environment, which `make test-all` creates. The system provides kubectl and systemd-analyze.
"""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from support import ROOT, manifests
from support.manifests import COMPOSE, KUBERNETES, UNIT

PROGRAMS = ROOT / ".venv-tools/bin"
# the oldest version with all fields (matchLabelKeys of topology spread without a feature gate), and the newest version with a schema
VERSIONS = ("1.27", "1.37")
EXPOSURE = 1.5

pytestmark = pytest.mark.full_grid


def installed(name: str) -> Path:
    """Returns a program of the environment, or skips the test."""
    if not (program := PROGRAMS / name).exists():
        pytest.skip(f"{name} is not installed: `make .venv-tools/.installed`")
    return program


def of_the_system(name: str) -> str:
    """Returns a program of the system, or skips the test."""
    if (program := shutil.which(name)) is None:
        pytest.skip(f"this system has no {name}")
    return program


def output_of(*command: str | Path) -> str:
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout + result.stderr


@pytest.fixture(name="rendered", params=["as it is", "with all components"])
def rendered_manifests(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Returns one file of all manifests. The autoscaling component stays disabled, because KEDA also sets the number of pods."""
    folder = shutil.copytree(KUBERNETES, tmp_path / "kubernetes")
    top = folder / "kustomization.yaml"
    if request.param == "with all components":
        text = top.read_text()
        assert set(re.findall(r"^  # - components/(\S+)", text, re.MULTILINE)) == {path.name for path in folder.glob("components/*")}
        text = re.sub(r"^  # - components/autoscaling.*\n", "", text, flags=re.MULTILINE)
        top.write_text(re.sub(r"^  # - components/", "  - components/", text, flags=re.MULTILINE))
    file = tmp_path / "rendered.yaml"
    file.write_text(output_of(of_the_system("kubectl"), "kustomize", str(folder)))
    return file


@pytest.mark.parametrize("version", VERSIONS)
def test_manifests_match_the_schemas_of_kubernetes(rendered: Path, version: str) -> None:
    """No manifest has an unknown field or a wrong type. Only the resources of operators have no schema."""
    text = output_of(installed("kubernetes-validate"), "--strict", "-k", version, rendered)
    resources = manifests.documents(rendered)
    custom = {resource["kind"] for resource in resources if resource["apiVersion"].partition("/")[0].endswith((".com", ".sh"))}

    assert text.count(" passed for resource ") == len(resources) - len(custom)
    assert set(re.findall(r"Couldn't find schema for kind (\w+)", text)) == custom


def test_rendered_images_have_a_registry_and_a_tag(rendered: Path) -> None:
    """The kubelet would look for a bare image name on Docker Hub."""
    images = re.findall(r"\bimage: (\S+)", rendered.read_text())
    assert images
    assert [image for image in images if not re.fullmatch(r"registry\.example\.com/[\w-]+:[\w.]+", image)] == []


def test_the_compose_file_matches_its_schema() -> None:
    output_of(installed("check-jsonschema"), "--builtin-schema", "vendor.compose-spec", COMPOSE)


def test_hadolint_finds_nothing() -> None:
    assert output_of(installed("hadolint"), "--failure-threshold", "style", ROOT / "Dockerfile") == ""


@pytest.fixture(name="unit")
def unit_with_a_program(tmp_path: Path) -> Path:
    """Returns the unit with the path of an existing program, because systemd checks the path."""
    unit = tmp_path / UNIT.name.replace("@", "@8001")
    unit.write_text(UNIT.read_text().replace("/opt/bertserve/bin/bert-serve", str(Path(sys.executable).with_name("bert-serve"))))
    return unit


def test_systemd_accepts_the_unit(unit: Path) -> None:
    assert output_of(of_the_system("systemd-analyze"), "verify", "--man=no", unit) == ""


def test_the_unit_has_a_low_exposure_level(unit: Path) -> None:
    """`systemd-analyze security` gives a level from 0 to 10."""
    text = output_of(of_the_system("systemd-analyze"), "security", "--offline=true", "--no-pager", unit)
    [exposure] = re.findall(r"Overall exposure level for \S+: ([\d.]+)", text)

    assert float(exposure) <= EXPOSURE
