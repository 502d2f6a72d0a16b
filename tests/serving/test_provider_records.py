"""An execution provider is one record: no other code names a provider, and flags, manifests and sessions need only the record."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import tiny

ROOT = Path(__file__).parents[2]


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
        from bertserve.service.engine import sessions
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
