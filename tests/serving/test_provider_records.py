"""An execution provider is one record: no other code names a provider, and flags, manifests and sessions need only the record."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import tiny
from bertserve.service.providers import PROVIDERS

ROOT = Path(__file__).parents[2]
# modules with the records and the graph builders
HOMES = {"service/providers.py", "export/gpu.py"}
NAMES = re.compile(
    r"(?<![a-z])({})(?![a-z])".format("|".join(n for p in PROVIDERS.values() if p.name != "cpu" for n in (p.name, p.ort_name)))
)


def names(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            node.value.value = ""
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value
        yield from (getattr(node, field) for field in ("id", "attr", "arg", "name") if isinstance(getattr(node, field, None), str))


def test_only_records_and_builders_name_a_provider() -> None:
    """Other code has no provider name in a string or an identifier."""
    found = {
        str(path.relative_to(ROOT)): named
        for package in ("service", "export", "bench")
        for path in (ROOT / package).rglob("*.py")
        if (named := sorted({name for name in names(ast.parse(path.read_text(encoding="utf-8"))) if NAMES.search(name)}))
    }

    assert set(found) == HOMES, found


def test_a_new_record_works_in_flags_manifests_and_sessions(tmp_path: Path) -> None:
    program = """
        import json, sys
        from pathlib import Path
        from typing import Literal
        from bertserve.service import providers
        toy = providers.ExecutionProvider("toy", "ToyExecutionProvider", "onnxruntime-toy", "toy", ("fp32",),
            lambda graph, engines: {"file": graph.file}, library="libtoy.so", fallback="cpu")
        providers.PROVIDERS["toy"] = toy
        # what the module computes of its records when it is imported
        providers.Provider = Literal[tuple(providers.PROVIDERS)]
        providers.ProviderChoice = Literal[("auto", *providers.PROVIDERS)]

        from bertserve.export import flags
        from bertserve.export.artifact import choose_precisions
        from bertserve.service.backend import sessions
        from bertserve.service.bundle import files
        from bertserve.service.cli import Serve
        from bertserve.service.settings import parse

        folder = Path(sys.argv[1])
        assert parse(Serve, ["--provider", "toy"]).provider == "toy"
        assert flags.parse_providers("cpu,toy") == ("cpu", "toy")
        assert choose_precisions(("toy",), None) == {"toy": ("fp32",)}
        manifest = json.loads((folder / "manifest.json").read_text())
        manifest["graphs"][0]["provider"] = "toy"
        (folder / "manifest.json").write_text(json.dumps(manifest))
        graph = files.load_bundle(folder).graph("toy")
        assert sessions._provider_options("toy", graph, None) == [("ToyExecutionProvider", {"file": graph.file}), ("CPUExecutionProvider", {})]
        assert "the extra `toy`" in sessions.missing("toy", ["CPUExecutionProvider"])
        parse(Serve, ["--help"])
    """
    folder = tiny.bundle(tmp_path)
    run = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program), str(folder)], capture_output=True, text=True, cwd=ROOT, timeout=60, check=False
    )

    assert run.returncode == 0, run.stderr
    assert "--provider {auto,cpu,cuda,tensorrt,toy}" in " ".join(run.stdout.split())
