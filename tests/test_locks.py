"""The files in locks/, which the image installs: every pin has hashes and the tested version, and no requirement is missing."""

import re
import tomllib
from pathlib import Path

import pytest

from support import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PIN = re.compile(r"([A-Za-z0-9._-]+)==([^ ;]+)")
# only in locks, not in test environments: packages that markers exclude on Linux, and packages of torch's wheel except NVIDIA's libraries
UNTESTED = {"onnxruntime-gpu", "colorama", "httpx2-jsfetch"}
UNTESTED |= {"cuda-bindings", "cuda-pathfinder", "cuda-toolkit", "setuptools", "triton"}


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def pins(path: Path) -> dict[str, tuple[str, int]]:
    """Returns the version and the number of hashes of each pin in a file."""
    versions: dict[str, tuple[str, int]] = {}
    for line in path.read_text().replace("\\\n", "").splitlines():
        if not line.startswith("#"):
            pin = PIN.match(line)
            assert pin is not None, line
            versions[normal(pin[1])] = pin[2], len(re.findall(r"--hash=sha256:[0-9a-f]{64}\b", line))
    return versions


def names(requirements: list[str]) -> set[str]:
    return {normal(re.match(r"[A-Za-z0-9._-]+", requirement)[0]) for requirement in requirements}


@pytest.mark.parametrize("lock", ["cpu", "gpu", "cpu,export", "cpu,otel", "gpu,otel", "build"])
def test_every_pin_of_the_image_has_the_tested_version_and_hashes(lock: str) -> None:
    """If this fails after a change of constraints.txt, run `make lock`."""
    constraints = {name: version for name, (version, _) in pins(ROOT / "constraints.txt").items()}
    lock_pins = pins(ROOT / "locks" / f"{lock}.txt")
    assert [name for name, (_, hashes) in lock_pins.items() if hashes == 0] == []
    assert {name for name in lock_pins if name not in constraints and not name.startswith("nvidia-")} <= UNTESTED
    assert {name: constraints[name] for name in lock_pins if name in constraints} == {
        name: version for name, (version, _) in lock_pins.items() if name in constraints
    }


@pytest.mark.parametrize("extras", ["cpu", "gpu", "cpu,export", "cpu,otel", "gpu,otel"])
def test_the_image_installs_every_dependency_of_the_service(extras: str) -> None:
    optional = PROJECT["project"]["optional-dependencies"]
    requirements = PROJECT["project"]["dependencies"] + [requirement for extra in extras.split(",") for requirement in optional[extra]]
    assert names(requirements) <= set(pins(ROOT / "locks" / f"{extras}.txt"))


def test_the_build_lock_has_every_build_requirement() -> None:
    assert PROJECT["dependency-groups"]["build"] == PROJECT["build-system"]["requires"]
    assert names(PROJECT["build-system"]["requires"]) <= set(pins(ROOT / "locks/build.txt"))


def test_the_image_installs_nothing_without_a_hash() -> None:
    steps = re.findall(r"^RUN pip install (.*)$", (ROOT / "Dockerfile").read_text(), re.MULTILINE)
    assert steps
    assert [step for step in steps if "--require-hashes" not in step and not step.endswith("--no-deps /app/wheels/*.whl")] == []
