"""locks/, what the image installs: every pin has its hashes, is the one that the tests ran with, and nothing is missing."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PIN = re.compile(r"([A-Za-z0-9._-]+)==([^ ;]+)")
# in an image alone, never where tests run: what builds the package, libraries of NVIDIA, and what markers leave out on Linux
UNTESTED = {"hatchling", "trove-classifiers", "tomlkit", "onnxruntime-gpu", "colorama", "httpx2-jsfetch"}


def normal(name: str) -> str:
    """Returns a package's name as indexes compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def pins(path: Path) -> dict[str, tuple[str, int]]:
    """Returns version and number of hashes of each pin of a file."""
    found: dict[str, tuple[str, int]] = {}
    for line in path.read_text().replace("\\\n", "").splitlines():
        if not line.startswith("#"):
            pin = PIN.match(line)
            assert pin is not None, line
            found[normal(pin[1])] = pin[2], len(re.findall(r"--hash=sha256:[0-9a-f]{64}\b", line))
    return found


def asked(requirements: list[str]) -> set[str]:
    """Returns the names of requirements."""
    return {normal(re.match(r"[A-Za-z0-9._-]+", requirement)[0]) for requirement in requirements}  # type: ignore[index]


@pytest.mark.parametrize("lock", ["cpu", "gpu", "build"])
def test_every_pin_of_the_image_is_the_tested_one_and_has_hashes(lock: str) -> None:
    """Run `make lock` after a change of constraints.txt."""
    tested = {name: version for name, (version, _) in pins(ROOT / "constraints.txt").items()}
    locked = pins(ROOT / "locks" / f"{lock}.txt")
    assert [] == [name for name, (_, hashes) in locked.items() if hashes == 0]
    beside = {name for name in locked if name not in tested and not name.startswith("nvidia-")}
    assert beside <= UNTESTED
    assert {name: version for name, (version, _) in locked.items() if name in tested} == {
        name: tested[name] for name in locked if name in tested
    }


@pytest.mark.parametrize("extra", ["cpu", "gpu"])
def test_the_image_gets_all_that_the_service_needs(extra: str) -> None:
    """The lock has every dependency of the base and of the extra."""
    wanted = PROJECT["project"]["dependencies"] + PROJECT["project"]["optional-dependencies"][extra]
    assert asked(wanted) - set(pins(ROOT / "locks" / f"{extra}.txt")) == set()


def test_the_image_is_built_with_what_the_package_asks_for() -> None:
    """The group that is locked is the build system's requirements."""
    assert PROJECT["build-system"]["requires"] == PROJECT["dependency-groups"]["build"]
    assert asked(PROJECT["build-system"]["requires"]) <= set(pins(ROOT / "locks/build.txt"))


def test_the_image_installs_nothing_without_a_hash() -> None:
    """Each `pip install` of the Dockerfile has --require-hashes, or installs our own wheel without its dependencies."""
    steps = re.findall(r"^RUN pip install (.*)$", (ROOT / "Dockerfile").read_text(), re.MULTILINE)
    assert 3 == len(steps)
    assert [] == [step for step in steps if "--require-hashes" not in step and not step.endswith("--no-deps /app/wheels/*.whl")]
