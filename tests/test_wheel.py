"""The wheel: it installs `bertserve` and no other package, and its commands work without this repository."""

from __future__ import annotations

import ast
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from hatch_build import COMMANDS, PACKAGES, commands, rewritten
from service.http import playground

ROOT = Path(__file__).parent.parent
Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.mark.parametrize(
    ("source", "installed"),
    [
        ("from service.cli import main\n", "from bertserve.service.cli import main\n"),
        ("from service import (\n    errors,\n)\n", "from bertserve.service import (\n    errors,\n)\n"),
        ("def f():\n    from export import flags\n", "def f():\n    from bertserve.export import flags\n"),
        ("import service\n", "from bertserve import service\n"),
        ("import bench as b\n", "from bertserve import bench as b\n"),
        ('"""\nfrom service import x\n"""\n', '"""\nfrom service import x\n"""\n'),
        ("from services import x\nfrom .service import y\nservice = 1\n", "from services import x\nfrom .service import y\nservice = 1\n"),
    ],
)
def test_imports_are_rewritten(source: str, installed: str) -> None:
    """Those of our packages, wherever they stand, and nothing that only looks like one."""
    assert installed == rewritten(source)


@pytest.mark.parametrize("source", ["import service.cli\n", "import os, service\n"])
def test_an_import_that_cannot_be_rewritten_stops_the_build(source: str) -> None:
    """It would bind another name."""
    with pytest.raises(ValueError, match="line 1, `import "):
        rewritten(source)


def test_every_import_of_ours_is_rewritten() -> None:
    """No file of ours has one that a wheel could not have, and none is left."""
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*.py"):
            nodes = list(ast.walk(ast.parse(rewritten(path.read_text()))))
            modules = [node.module or "" for node in nodes if isinstance(node, ast.ImportFrom) and node.level == 0]
            modules += [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
            assert [] == [module for module in modules if module.split(".")[0] in PACKAGES], path


def test_a_command_that_is_left_out_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    """In an image that serves, where the exporter and the load tester are not."""
    module: dict[str, Callable[[], int]] = {}
    exec(commands(["service"]), module)  # type: ignore[arg-type]

    assert [3, 3] == [module["bert_export"](), module["bert_bench"]()]
    assert "bert-export: this installation serves and has no `export`; install all of bertserve." in capsys.readouterr().err
    assert set(COMMANDS) <= set(module)


@pytest.fixture(name="wheel", scope="module")
def built_wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of this repository."""
    folder = tmp_path_factory.mktemp("wheel")
    build = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--no-deps",
        "--no-build-isolation",
        "--no-index",
        "--wheel-dir",
        folder,
        ROOT,
    ]
    subprocess.run(build, check=True)
    [wheel] = folder.glob("*.whl")
    return wheel


@pytest.fixture(name="run", scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Returns `run(command, ...)`, which runs a command of an environment with the wheel and its dependencies, and no path here."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder / "venv")
    python = folder / "venv/bin/python"
    site = Path(sysconfig.get_path("purelib", vars={"base": str(folder / "venv")}))
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib"))  # .pth files in there are not read: no editable install
    install = ["-m", "pip", "--python", python, "install", "--quiet", "--no-deps", "--no-index", "--disable-pip-version-check", wheel]
    subprocess.run([sys.executable, *install], check=True)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}

    def run(command: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [python.with_name(command), *arguments], cwd=folder, env=environment, capture_output=True, text=True, check=False
        )

    return run


@pytest.mark.full_grid
def test_the_wheel_has_one_package(wheel: Path) -> None:
    """`bertserve`, with what it needs beside Python, and nothing of measurements or models."""
    names = zipfile.ZipFile(wheel).namelist()

    assert {"bertserve", "bertserve-0.1.0.dist-info"} == {name.split("/")[0] for name in names}
    page = {f"bertserve/service/http/playground/{name}" for name in (playground.PAGE, *playground.FILES)}
    assert {"bertserve/export/calibration.txt"} | page == {n for n in names if n.startswith("bertserve/") and not n.endswith(".py")}


@pytest.mark.full_grid
def test_no_other_name_is_taken(run: Run) -> None:
    """`service`, `export` and `bench` are other people's."""
    code = (
        "import importlib.util as u; print([n for n in ('bertserve', 'bertserve.service', 'service', 'export', 'bench') if u.find_spec(n)])"
    )

    assert "['bertserve', 'bertserve.service']\n" == run("python", "-c", code).stdout


@pytest.mark.full_grid
@pytest.mark.parametrize("command", ["bert-serve", "bert-export", "bert-bench"])
def test_commands_start(command: str, run: Run) -> None:
    """Each says what it does, and its version."""
    assert 0 == run(command, "--help").returncode
    assert f"{command} 0.1.0\n" == run(command, "--version").stdout


@pytest.mark.full_grid
def test_the_embedded_models_answer(run: Run) -> None:
    """As they do from the repository, and are listed."""
    checked = run("bert-serve", "check", "--models", str(ROOT / "models"))

    assert 6 == checked.stdout.count(": ok\n"), checked.stderr
    assert 6 == len(json.loads(run("bert-serve", "models", "--json", "--models", str(ROOT / "models")).stdout))


@pytest.mark.full_grid
def test_without_models_one_line_says_where_to_get_some(run: Run) -> None:
    """The wheel has none: they would be a hundred times its size."""
    started = run("bert-serve", "serve", "--port", "0")

    assert 1 == started.returncode
    assert 1 == started.stderr.count("\n")
    assert "--models" in started.stderr
    assert "--model" in started.stderr


@pytest.mark.full_grid
def test_a_bundle_is_exported_verified_and_served(run: Run, tmp_path: Path) -> None:
    """`--model` finds the exporter under the name that it is installed by."""
    sys.path.insert(0, str(ROOT / "tests/exporting"))
    from checkpoints import bert

    bert(tmp_path, "reviews")
    flags = ["--model", str(tmp_path / "reviews"), "--cache-dir", str(tmp_path / "cache"), "--precision", "fp32"]
    checked = run("bert-serve", "check", *flags)

    assert "reviews: text-classification, cpu/fp32: ok\n" == checked.stdout, checked.stderr
    [bundle] = tmp_path.glob("cache/*/reviews")
    assert 0 == run("bert-export", "verify", str(bundle)).returncode


@pytest.mark.full_grid
def test_every_module_can_be_imported(run: Run) -> None:
    """Under its installed name, those that need torch too."""
    code = (
        "import bertserve, importlib, pkgutil, sys\n"
        "names = [m.name for m in pkgutil.walk_packages(bertserve.__path__, 'bertserve.')]\n"
        "[importlib.import_module(name) for name in names]\n"
        "print(len(names) > 200, [m for m in sys.modules if m.split('.')[0] in ('service', 'export', 'bench')])"
    )
    imported = run("python", "-c", code)

    assert "True []\n" == imported.stdout, imported.stderr


@pytest.mark.full_grid
def test_an_editable_install_runs_from_the_repository(tmp_path: Path) -> None:
    """Its wheel has where the commands start, and the path of the repository."""
    code = f"import hatchling.build as b; print(b.build_editable({str(tmp_path)!r}))"
    name = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()[-1]
    archive = zipfile.ZipFile(tmp_path / name)

    assert ["_bertserve.pth", "bertserve/__init__.py", "bertserve/commands.py"] == sorted(
        n for n in archive.namelist() if "dist-info" not in n
    )
    assert "from service.cli import main" in archive.read("bertserve/commands.py").decode()
    assert str(ROOT) == archive.read("_bertserve.pth").decode()


@pytest.mark.full_grid
def test_an_image_gets_the_service_alone(tmp_path: Path) -> None:
    """BERTSERVE_PARTS says so; a variable of a build, not of the commands."""
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir", tmp_path]
    source = tmp_path / "source"
    source.mkdir()
    shutil.copytree(ROOT / "service", source / "service")
    for name in ("pyproject.toml", "hatch_build.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    subprocess.run([*build, source], env=os.environ | {"BERTSERVE_PARTS": "service"}, check=True)
    [wheel] = tmp_path.glob("*.whl")

    packages = {name.split("/")[1] for name in zipfile.ZipFile(wheel).namelist() if name.startswith("bertserve/")}
    assert {"service", "commands.py", "__init__.py"} == packages
