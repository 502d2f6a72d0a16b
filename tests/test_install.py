"""The contents and the imports of the serving install."""

import subprocess
import sys

import pytest

from support import ROOT

FILES = [path for package in ("service", "export", "bench") for path in sorted((ROOT / package).rglob("*.py"))]


def test_no_message_installs_bertserve_from_an_index() -> None:
    """The index has no package of this name, so anyone can publish one. `install_command` names a folder or a wheel instead."""
    assert [str(path) for path in FILES if "bertserve[" in path.read_text(encoding="utf-8")] == []


def test_the_serving_install_has_no_torch_and_runs_the_included_models() -> None:
    python = ROOT / ".venv/bin/python"
    assert python.exists(), "run `make unit`, which installs .venv first"
    code = "import importlib.util as u; print([m for m in ('torch', 'transformers', 'onnx') if u.find_spec(m)])"

    assert subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"
    export = subprocess.run([python.with_name("bert-export"), "x", "--output", "y"], capture_output=True, text=True, check=False)
    assert export.returncode == 3
    assert "pip install '" in export.stderr
    assert "[export,cpu]'" in export.stderr
    check = subprocess.run([python.with_name("bert-serve"), "check"], cwd=ROOT, capture_output=True, text=True, check=True)
    models = ["embed", "fill-mask", "ner", "nli", "qa", "rerank", "sentiment"]
    assert [line.split(":")[0] for line in check.stdout.splitlines() if line.endswith(": ok")] == models


@pytest.mark.parametrize(
    ("modules", "unwanted"),
    [
        # even if they are installed; the service imports the tracing SDK only for traces
        ("api.application, cli, server.serve", ("torch", "transformers", "bertserve.export", "opentelemetry.sdk")),
        # the parent of workers: threads of these libraries do not survive its forks
        ("cli, server.serve, server.workers", ("onnxruntime", "numpy")),
    ],
)
def test_modules_import_no_unwanted_libraries(modules: str, unwanted: tuple[str, ...]) -> None:
    imports = ", ".join(f"bertserve.service.{name}" for name in modules.split(", "))
    code = f"import sys, {imports}; print([name for name in {unwanted} if name in sys.modules])"

    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip() == "[]"
