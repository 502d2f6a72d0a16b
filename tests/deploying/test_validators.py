"""The tools of others read `deploy/` and the Dockerfile: kubectl, the schemas of Kubernetes and of compose, systemd-analyze, hadolint.

What PyPI has is in an environment of its own (`make test-all` makes it); kubectl and systemd-analyze are the system's.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from manifests import COMPOSE, DEPLOY, KUBERNETES, ROOT, UNIT

PROGRAMS = ROOT / ".venv-tools/bin"
# the oldest one that has all fields, matchLabelKeys of topology spread without a feature gate among them, and the newest one that there is a schema of
VERSIONS = ("1.27", "1.37")
EXPOSURE = 1.5

pytestmark = pytest.mark.full_grid


def installed(name: str) -> Path:
    """Returns a program of the environment, or leaves the test out."""
    if not (program := PROGRAMS / name).exists():
        pytest.skip(f"{name} is not installed: `make .venv-tools/.installed`")
    return program


def of_the_system(name: str) -> str:
    """Returns a program of the system, or leaves the test out."""
    if (program := shutil.which(name)) is None:
        pytest.skip(f"this system has no {name}")
    return program


def said(*command: str | Path) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert 0 == done.returncode, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.fixture(name="rendered", params=["as it is", "with all components"])
def what_kustomize_renders(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """One file of all manifests. Of the two components that say how many pods there are, all of them means the other one."""
    folder = shutil.copytree(KUBERNETES, tmp_path / "kubernetes")
    top = folder / "kustomization.yaml"
    if request.param == "with all components":
        text = top.read_text()
        assert 6 == text.count("  # - components/")
        text = re.sub(r"^  # - components/autoscaling.*\n", "", text, flags=re.MULTILINE)
        top.write_text(re.sub(r"^  # - components/", "  - components/", text, flags=re.MULTILINE))
    file = tmp_path / "rendered.yaml"
    file.write_text(said(of_the_system("kubectl"), "kustomize", str(folder)))
    return file


@pytest.mark.parametrize("version", VERSIONS)
def test_manifests_keep_to_the_schemas_of_kubernetes(rendered: Path, version: str) -> None:
    """What kustomize renders has no unknown field and no wrong type; only what is an operator's has no schema there."""
    text = said(installed("kubernetes-validate"), "--strict", "-k", version, rendered)
    keda = "kind: ScaledObject" in rendered.read_text()

    assert (8 if keda else 6) == text.count(" passed for resource ")
    expected = ["PodMonitor", "ScaledObject"] if keda else []
    assert expected == sorted(re.findall(r"Couldn't find schema for kind (\w+)", text))


def test_what_is_rendered_has_registry_and_tag(rendered: Path) -> None:
    """No image keeps its bare name, which the kubelet would look for on Docker Hub."""
    images = re.findall(r"\bimage: (\S+)", rendered.read_text())
    assert images
    assert [] == [image for image in images if not re.fullmatch(r"registry\.example\.com/[\w-]+:[\w.]+", image)]


def test_the_composition_keeps_to_its_schema() -> None:
    said(installed("check-jsonschema"), "--builtin-schema", "vendor.compose-spec", COMPOSE)


def test_hadolint_finds_nothing() -> None:
    assert "" == said(installed("hadolint"), "--failure-threshold", "style", ROOT / "Dockerfile")


@pytest.fixture(name="unit")
def unit_with_a_program(tmp_path: Path) -> Path:
    """The unit, with a program that there is here: systemd looks for it."""
    unit = tmp_path / UNIT.name
    unit.write_text(UNIT.read_text().replace("/opt/bertserve/bin/bert-serve", str(Path(sys.executable).with_name("bert-serve"))))
    return unit


def test_systemd_reads_the_unit(unit: Path) -> None:
    assert "" == said(of_the_system("systemd-analyze"), "verify", "--man=no", unit)


def test_the_unit_is_exposed_little(unit: Path) -> None:
    """By systemd's own measure, of 0 to 10."""
    text = said(of_the_system("systemd-analyze"), "security", "--offline=true", "--no-pager", unit)
    [exposure] = re.findall(r"Overall exposure level for \S+: ([\d.]+)", text)

    assert float(exposure) <= EXPOSURE


def test_nothing_else_is_in_the_folder() -> None:
    """What stands in `deploy/` is read by a test here or in tests that know its tool."""
    known = {"compose", "grafana", "haproxy", "kserve", "kubernetes", "prometheus", "ray", "systemd"}
    assert {path.name for path in DEPLOY.iterdir()} <= known
