"""Import rules that import-linter does not check: which modules can import which library, and what the serving install contains."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FILES = {
    ".".join(("bertserve", *path.relative_to(ROOT).with_suffix("").parts)).removesuffix(".__init__"): path
    for package in ("service", "export", "bench")
    for path in sorted((ROOT / package).rglob("*.py"))
}

# Library or own package -> modules that can import it. `make lint` checks the other imports between our modules with import-linter.
HOMES = {
    "bertserve.export": {"bertserve.export", "bertserve.bench.inference_time"},
    "bertserve.bench": {"bertserve.bench"},
    "fastapi": {"bertserve.service.http"},
    "starlette": {
        "bertserve.service.http",
        "bertserve.service.process.work",
        "bertserve.service.process.server",
        "bertserve.service.process.connections",
        "bertserve.service.process.parsing",
        "bertserve.service.ray_serve",
    },
    "uvicorn": {"bertserve.service.process"},
    "pydantic": {
        "bertserve.service.bundle",
        "bertserve.service.cli",
        "bertserve.service.http",
        "bertserve.service.ray_serve",
        "bertserve.service.scoring.columns",
        "bertserve.service.serving.registry",
        "bertserve.service.settings",
        "bertserve.service.tasks",
        "bertserve.service.wire",
    },
    "pydantic_settings": {"bertserve.service.cli", "bertserve.service.settings"},
    "pydantic_core": {"bertserve.service.tasks", "bertserve.service.wire"},
    "orjson": {"bertserve.service.scoring.rows", "bertserve.service.wire"},
    "tokenizers": {"bertserve.service.text", "bertserve.export.checkpoint.tokenizer", "bertserve.export.checkpoint.vocabulary_files"},
    "onnxruntime": {"bertserve.service.backend", "bertserve.export", "bertserve.bench.engine", "bertserve.bench.inference_time"},
    "prometheus_client": {"bertserve.service.metrics"},
    "uvloop": {"bertserve.bench.generator", "bertserve.service.process.reads"},
    "httptools": {"bertserve.bench.connection", "bertserve.service.process.parsing"},
    "opentelemetry": {"bertserve.service.tracing.tracer"},
    "matplotlib": {"bertserve.bench.page"},
    "asyncio": {
        "bertserve.service.http",
        "bertserve.service.serving.held_bytes",
        "bertserve.service.serving.model",
        "bertserve.service.serving.reloader",
        "bertserve.service.serving.utilization",
        "bertserve.service.scheduling",
        "bertserve.service.process",
        "bertserve.service.cli",
        "bertserve.bench.connection",
        "bertserve.bench.generator",
    },
    "multiprocessing": {"bertserve.service.process"},
    "threading": {
        "bertserve.service.scheduling",
        "bertserve.service.backend.engines",
        "bertserve.service.backend.freed_memory",
        "bertserve.service.text.tokenizer",
        "bertserve.service.process.logs",
        "bertserve.service.tracing.tracer",
        "bertserve.service.process.serve",
        "bertserve.bench",
        "bertserve.export.workspace",
        "bertserve.export.graph.rewrite",
    },
    "torch": {"bertserve.export", "bertserve.bench.inference_time"},
    "transformers": {"bertserve.export", "bertserve.bench.inference_time"},
    "huggingface_hub": {"bertserve.export"},
    "onnx": {"bertserve.export"},
    "onnx_ir": {"bertserve.export"},
    "threadpoolctl": {"bertserve.export.int8.quantize"},
    "tqdm": {"bertserve.export.progress", "bertserve.service.scoring.score"},
    "pyarrow": {"bertserve.service.scoring.parquet", "bertserve.service.scoring.ray_data"},
    "ray": {"bertserve.service.ray_serve", "bertserve.service.scoring.ray_data"},
    "peft": {"bertserve.export.checkpoint.lora"},
}


def imports(path: Path) -> set[str]:
    """Returns the modules that a file imports. `from a import b` imports `a.b` if that is one of our modules, otherwise `a`."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            modules = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {module if module in FILES else node.module for module in modules}
    return found


def within(module: str, homes: set[str]) -> bool:
    """Returns whether a module is one of `homes`, or below one of them."""
    return any(module == home or module.startswith(f"{home}.") for home in homes)


@pytest.mark.parametrize("module", FILES)
def test_a_library_is_imported_only_in_its_permitted_modules(module: str) -> None:
    names = imports(FILES[module])
    imported = {library for library in HOMES if any(within(name, {library}) for name in names)}

    assert set() == {library for library in imported if not within(module, HOMES[library])}


def test_no_message_installs_bertserve_from_an_index() -> None:
    """The index has no package of this name, so anyone can publish one. `install_command` names a folder or a wheel instead."""
    assert [] == [str(path) for path in FILES.values() if "bertserve[" in path.read_text(encoding="utf-8")]


def test_no_module_has_a_catch_all_name() -> None:
    assert [] == [name for name in FILES if re.search(r"util(?!ization)|helper|common|base$|manager", name)]


def test_names_of_test_files_are_unique() -> None:
    """Pytest imports test files by name, and `make grid` collects all of them. tests/clients runs separately."""
    names = sorted(path.name for path in (ROOT / "tests").glob("**/test_*.py") if "clients" not in path.parts)

    assert sorted(set(names)) == names


def test_the_serving_install_has_no_torch() -> None:
    python = ROOT / ".venv/bin/python"
    assert python.exists(), "run `make unit`, which installs .venv first"
    code = "import importlib.util as u; print([m for m in ('torch', 'transformers', 'onnx') if u.find_spec(m)])"

    assert "[]" == subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
    export = subprocess.run([python.with_name("bert-export"), "x", "--output", "y"], capture_output=True, text=True, check=False)
    assert 3 == export.returncode
    assert "pip install '" in export.stderr and "[export,cpu]'" in export.stderr
    assert 0 == subprocess.run([python.with_name("bert-serve"), "check"], cwd=ROOT, capture_output=True, check=False).returncode


def test_importing_the_service_imports_neither_torch_nor_the_tracing_sdk() -> None:
    """This is true even if they are installed. The service imports the tracing SDK only for traces."""
    unwanted = ("torch", "transformers", "bertserve.export", "opentelemetry.sdk")
    code = f"import sys, bertserve.service.http.app, bertserve.service.cli, bertserve.service.process.work; print([m for m in {unwanted} if m in sys.modules])"

    assert "[]" == subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
