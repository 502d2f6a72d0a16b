"""The wheel installs only the package `bertserve`, and its commands work without this repository."""

import os
import subprocess
import sys
import sysconfig
import venv
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from bertserve.service.api import playground
from support import ROOT

Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(name="wheel", scope="module")
def built_wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Builds the wheel of this repository and returns its path."""
    folder = tmp_path_factory.mktemp("wheel")
    build = "-m pip wheel --quiet --no-deps --no-build-isolation --no-index --wheel-dir"
    subprocess.run([sys.executable, *build.split(), folder, ROOT], check=True)
    [wheel] = folder.glob("*.whl")
    return wheel


@pytest.fixture(name="run", scope="module")
def run_in_environment(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Returns `run(command, ...)`. It runs in an environment with the wheel and its dependencies, without this repository."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder / "venv")
    python = folder / "venv/bin/python"
    site = Path(sysconfig.get_path("purelib", vars={"base": str(folder / "venv")}))
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib"))  # .pth files there are not read, so no editable install
    install = ["-m", "pip", "--python", python, "install", "--quiet", "--no-deps", "--no-index", "--disable-pip-version-check", wheel]
    subprocess.run([sys.executable, *install], check=True)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}

    def run(command: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        words = [python.with_name(command), *arguments]
        return subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, check=False)

    return run


@pytest.mark.full_grid
def test_the_wheel_has_one_package(wheel: Path) -> None:
    """The wheel contains `bertserve` and its data files, but no measurements, no scripts for them, and no models."""
    names = zipfile.ZipFile(wheel).namelist()

    assert {name.split("/")[0] for name in names} == {"bertserve", "bertserve-0.1.0.dist-info"}
    data = {f"bertserve/service/api/playground/{name}" for name in (playground.PAGE, *playground.FILES)}
    data |= {"bertserve/export/int8_texts.txt", "bertserve/bench/report.html", "bertserve/bench/sentences.json"}
    assert {n for n in names if n.startswith("bertserve/") and not n.endswith(".py")} == data
    assert not any(name.startswith("bertserve/bench/scripts/") for name in names)
    assert "bertserve/bench/cli.py" in names


@pytest.mark.full_grid
@pytest.mark.parametrize("command", ["bert-serve", "bert-export", "bert-bench"])
def test_commands_start(command: str, run: Run) -> None:
    assert run(command, "--help").returncode == 0
    assert run(command, "--version").stdout == f"{command} 0.1.0\n"


@pytest.mark.full_grid
def test_a_bundle_is_exported_checked_and_verified(run: Run, tmp_path: Path) -> None:
    """`--model` finds the exporter under its installed name."""
    from support.checkpoints import bert

    bert(tmp_path, "reviews")
    flags = ["--model", str(tmp_path / "reviews"), "--cache-dir", str(tmp_path / "cache"), "--precision", "fp32"]
    check_result = run("bert-serve", "check", *flags)

    assert check_result.stdout == "reviews: text-classification, cpu/fp32: ok\n", check_result.stderr
    [bundle] = tmp_path.glob("cache/*/reviews")
    assert run("bert-export", "verify", str(bundle)).returncode == 0


@pytest.mark.full_grid
def test_every_module_can_be_imported(run: Run) -> None:
    code = (
        "import bertserve, importlib, pkgutil, sys\n"
        "names = [m.name for m in pkgutil.walk_packages(bertserve.__path__, 'bertserve.')]\n"
        "[importlib.import_module(name) for name in names]\n"
        "print(bool(names), [m for m in sys.modules if m.split('.')[0] in ('service', 'export', 'bench')])"
    )
    import_result = run("python", "-c", code)

    assert import_result.stdout == "True []\n", import_result.stderr
