"""The house's rules: who may import whom, which library has which home, and what the serving install holds."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FILES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for package in ("service", "export", "bench")
    for path in sorted((ROOT / package).rglob("*.py"))
}

# The arrows of docs/architecture.md: module -> modules of ours that it may import. `bundle` and the manifest's records, `errors` and the
# package's own version are open to all.
ALLOWED = {
    "service": set(),
    "service.errors": set(),
    "service.record": set(),
    "service.shape_plan": set(),
    "service.graph": set(),
    "service.manifest": set(),
    "service.bundle": set(),
    "service.evidence": set(),
    "service.settings": set(),
    "service.seat": set(),
    "service.door": set(),
    "service.supervisor": set(),
    "service.cost": set(),
    "service.job": set(),
    "service.demand": set(),
    "service.backlog": {"service.job"},
    "service.mailbox": set(),
    "service.metrics": set(),
    "service.tokenization": set(),
    "service.machine": set(),
    "service.providers": {"service.machine"},
    "service.engine": {"service.machine", "service.providers", "service.tokenization"},
    "service.engines": {"service.cost", "service.engine"},
    "service.scheduler": {"service.backlog", "service.demand", "service.job", "service.mailbox"},
    "service.tasks": set(),
    "service.tasks.scores": set(),
    "service.tasks.encoded": {"service.tokenization"},
    "service.tasks.classify": {"service.tasks.encoded", "service.tasks.scores", "service.tokenization"},
    "service.tasks.offsets": set(),
    "service.tasks.schemes": set(),
    "service.tasks.ner": {
        "service.tasks.encoded",
        "service.tasks.offsets",
        "service.tasks.schemes",
        "service.tasks.scores",
        "service.tokenization",
    },
    "service.tasks.answer": {"service.tasks.encoded", "service.tasks.offsets", "service.tasks.scores", "service.tokenization"},
    "service.tasks.fill_mask": {"service.tasks.encoded", "service.tasks.scores", "service.tokenization"},
    "service.tasks.embed": {"service.tasks.encoded", "service.tasks.scores", "service.tokenization"},
    "service.tasks.similarity": {"service.tasks.embed", "service.tasks.encoded", "service.tasks.scores", "service.tokenization"},
    "service.tasks.rerank": {"service.tasks.encoded", "service.tasks.scores", "service.tokenization"},
    "service.tasks.zero_shot": {"service.tasks.classify", "service.tasks.encoded", "service.tasks.scores", "service.tokenization"},
    "service.tasks.uses": {"service.tasks"},
    "service.model": {
        "service.cost",
        "service.engine",
        "service.engines",
        "service.metrics",
        "service.scheduler",
        "service.tasks",
        "service.tokenization",
    },
    "service.registry": {
        "service.cost",
        "service.engine",
        "service.evidence",
        "service.engines",
        "service.metrics",
        "service.model",
        "service.scheduler",
        "service.tasks.uses",
        "service.tokenization",
    },
    "service.api": set(),
    "service.api.errors": set(),
    "service.api.disconnect": set(),
    "service.api.edge": {"service.api", "service.metrics"},
    "service.api.schemas": {"service.tasks"},
    "service.api.heads": {"service.api.schemas", "service.tasks"},
    "service.api.bodies": {"service.api", "service.tasks"},
    "service.api.reading": {"service.api"},
    "service.api.rendering": set(),
    "service.api.routes": {"service.api", "service.metrics", "service.model"},
    "service.api.inference": {
        "service.api",
        "service.metrics",
        "service.model",
        "service.registry",
        "service.scheduler",
        "service.tasks",
    },
    "service.api.app": {
        "service.api",
        "service.backlog",
        "service.engine",
        "service.machine",
        "service.evidence",
        "service.engines",
        "service.metrics",
        "service.registry",
        "service.scheduler",
        "service.seat",
        "service.settings",
    },
    "service.protocol": set(),
    "service.server": {"service.protocol", "service.scheduler"},
    "service.worker": {"service.door", "service.scheduler", "service.server"},
    "service.cli": {
        "service.api",
        "service.door",
        "service.metrics",
        "service.seat",
        "service.server",
        "service.settings",
        "service.supervisor",
        "service.worker",
    },
    "export": set(),
    "export.errors": set(),
    "export.flags": set(),
    "export.signals": set(),
    "export.leftovers": {"export.errors"},
    "export.steady": {"export.errors"},
    "export.steps": {"export.errors"},
    "export.embedding": {"export.errors", "export.steps"},
    "export.quirks": set(),
    "export.adapter": {"export.errors"},
    "export.files": {"export.adapter", "export.errors", "export.steps"},
    "export.head": {"export.adapter", "export.embedding", "export.errors", "export.files"},
    "export.fast_tokenizer": {"export.errors", "export.files"},
    "export.weights": {"export.embedding", "export.errors", "export.files", "export.leftovers"},
    "export.checkpoint": {
        "export.embedding",
        "export.errors",
        "export.fast_tokenizer",
        "export.files",
        "export.flops",
        "export.head",
        "export.quirks",
        "export.steady",
        "export.weights",
    },
    "export.storage": set(),
    "export.trace": {"export.checkpoint", "export.embedding", "export.errors", "export.quirks", "export.storage"},
    "export.optimize": {"export.checkpoint", "export.storage"},
    "export.graph": {"export.storage"},
    "export.lower": {"export.errors", "export.graph"},
    "export.narrow": {"export.graph"},
    "export.pack": {"export.graph"},
    "export.outliers": {"export.graph"},
    "export.balance": {"export.graph"},
    "export.rounding": set(),
    "export.targets": set(),
    "export.shapes": set(),
    "export.tensorrt": {"export.errors", "export.storage"},
    "export.cuda": {"export.checkpoint", "export.storage"},
    "export.flops": set(),
    "export.half": {"export.calibration", "export.storage"},
    "export.made": set(),
    "export.progress": set(),
    "export.workspace": {"export.signals"},
    "export.cpu": {
        "export.calibration",
        "export.checkpoint",
        "export.lower",
        "export.made",
        "export.narrow",
        "export.optimize",
        "export.pack",
        "export.progress",
        "export.quantize",
        "export.storage",
        "export.trace",
        "service.tokenization",
    },
    "export.accelerate": {
        "export.calibration",
        "export.checkpoint",
        "export.cuda",
        "export.half",
        "export.made",
        "export.shapes",
        "export.tensorrt",
        "service.tokenization",
    },
    "export.calibration": {"export.checkpoint", "export.errors", "service.tokenization"},
    "export.products": {"export.graph"},
    "export.fitting": {"export.calibration", "export.graph", "export.products", "export.rounding"},
    "export.integers": {"export.fitting", "export.graph", "export.products", "export.rounding"},
    "export.quantize": {
        "export.balance",
        "export.calibration",
        "export.errors",
        "export.fitting",
        "export.graph",
        "export.integers",
        "export.outliers",
        "export.products",
    },
    "export.samples": {"service.tasks"},
    "export.scoring": set(),
    "export.choices": {"export.scoring", "service.tasks"},
    "export.rows": {"service.engine", "service.tokenization"},
    "export.speed": {"service.machine", "service.engine", "service.tokenization"},
    "export.answers": {"service.engine", "service.model", "service.tasks", "service.tokenization"},
    "export.parity": {
        "export.checkpoint",
        "export.embedding",
        "export.choices",
        "export.errors",
        "export.rows",
        "export.scoring",
        "service.engine",
        "service.model",
        "service.tasks",
        "service.tokenization",
    },
    "export.evidence": {
        "export.checkpoint",
        "export.errors",
        "export.made",
        "export.parity",
        "export.rows",
        "export.speed",
        "export.storage",
        "service.engine",
        "service.tokenization",
    },
    "export.example": {"export.answers", "export.checkpoint", "service.api", "service.engine", "service.tokenization"},
    "export.card": set(),
    "export.package": {"export.card", "export.errors", "export.signals"},
    "export.pipeline": {"export", "service.engine", "service.tokenization"},
    "export.dataset": {"export.errors", "export.scoring", "service.api", "service.tasks"},
    "export.agreement": {"export.choices", "export.dataset", "export.errors", "export.scoring", "service.tasks"},
    "export.subjects": {"export.answers", "service.engine", "service.tokenization"},
    "export.verify": {"export", "service.api", "service.cli", "service.engine", "service.model", "service.tokenization"},
    "export.renew": {
        "export.card",
        "export.checkpoint",
        "export.errors",
        "export.evidence",
        "export.made",
        "export.parity",
        "export.samples",
        "service.tokenization",
    },
    "export.verify_cli": {"export.errors", "export.flags", "export.renew", "export.verify"},
    "export.cli": {"export.errors", "export.flags", "export.pipeline", "export.signals", "export.targets", "export.verify_cli"},
    "bench": set(),
    "bench.errors": set(),
    "bench.sentences": set(),
    "bench.arrivals": set(),
    "bench.queueing": set(),
    "bench.alarm": set(),
    "bench.connection": set(),
    "bench.progress": set(),
    "bench.mixes": {"bench.sentences"},
    "bench.endpoints": {"bench.errors", "bench.sentences"},
    "bench.bodies": {"bench.endpoints", "bench.errors", "bench.mixes"},
    "bench.slo": {"bench.errors"},
    "bench.target": {"bench.bodies", "bench.errors"},
    "bench.stream": {"bench.alarm", "bench.connection", "bench.errors", "bench.target"},
    "bench.client": {"bench.progress", "bench.stream", "bench.target"},
    "bench.inspection": {"bench.errors", "bench.target"},
    "bench.measurement": {"bench.client", "bench.inspection", "bench.stream"},
    # bodies become encodings exactly as in the service, or the limit would be another's
    "bench.limits": {"bench.bodies", "bench.errors", "service.api.bodies", "service.api.reading", "service.model", "service.tokenization"},
    "bench.report": {"bench.errors", "bench.limits", "bench.measurement", "bench.slo"},
    "bench.plots": {"bench.errors"},
    "bench.page": {"bench.plots"},
    "bench.summary": {"bench.limits", "bench.measurement", "bench.report", "bench.slo"},
    "bench.session": {
        "bench.arrivals",
        "bench.bodies",
        "bench.client",
        "bench.errors",
        "bench.inspection",
        "bench.limits",
        "bench.measurement",
        "bench.mixes",
        "bench.progress",
        "bench.report",
        "bench.target",
    },
    "bench.experiments": {"bench.errors", "bench.measurement", "bench.queueing", "bench.report", "bench.session", "bench.slo"},
    "bench.commands": {"bench"},
    "bench.flags": {"bench.mixes", "bench.slo"},
    "bench.cli": {"bench"},
}
MANIFEST = {"service.record", "service.shape_plan", "service.graph", "service.manifest"}
OPEN_TO_ALL = {"service", "service.bundle", "service.errors", *MANIFEST}
HOMES = {
    "fastapi": {"service.api", "service.server"},
    "starlette": {"service.api"},
    "uvicorn": {"service.protocol", "service.server", "service.worker"},
    "pydantic": {"service.bundle", *MANIFEST, "service.settings", "service.api"},
    "pydantic_settings": {"service.settings"},
    "tokenizers": {"service.tokenization"},
    "onnxruntime": {"service.engine", "export", "bench.limits"},
    "prometheus_client": {"service.metrics"},
    "uvloop": {"bench.client"},
    "matplotlib": {"bench.plots"},
    "asyncio": {
        "service.api",
        "service.model",
        "service.scheduler",
        "service.mailbox",
        "service.protocol",
        "service.server",
        "service.worker",
        "service.door",
        "service.cli",
        "bench.alarm",
        "bench.connection",
        "bench.stream",
        "bench.client",
    },
    "multiprocessing": {"service.supervisor"},
    "threading": {"service.scheduler", "service.mailbox", "bench", "export.signals"},
    "torch": {"export"},
    "transformers": {"export"},
    "huggingface_hub": {"export"},
    "onnx": {"export"},
}


def imports(path: Path) -> set[str]:
    """Returns the modules that a file imports; `from a import b` is `a.b` where that is a module of ours."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            modules = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {module if module in FILES else node.module for module in modules}
    return found


def within(module: str, homes: set[str]) -> bool:
    """Returns whether a module is one of these or below one of them."""
    return any(module == home or module.startswith(f"{home}.") for home in homes)


def test_every_module_has_its_arrows() -> None:
    """A new room is drawn before it is built."""
    assert set(ALLOWED) == set(FILES)


@pytest.mark.parametrize("module", FILES)
def test_imports_follow_the_architecture(module: str) -> None:
    """A module imports only what docs/architecture.md lets it."""
    ours = {name for name in imports(FILES[module]) if name.split(".")[0] in ("service", "export", "bench")}

    assert set() == {name for name in ours if name not in OPEN_TO_ALL and not within(name, ALLOWED[module])}


@pytest.mark.parametrize("module", FILES)
def test_libraries_stay_in_their_homes(module: str) -> None:
    """Each library is imported where it lives and nowhere else."""
    outside = {name.split(".")[0] for name in imports(FILES[module])} & set(HOMES)

    assert set() == {library for library in outside if not within(module, HOMES[library])}


def test_no_file_is_a_drawer() -> None:
    """No `utils`, `helpers`, `common`, `base` or `manager`."""
    assert [] == [name for name in FILES if re.search(r"util|helper|common|base$|manager", name)]


def test_the_serving_install_has_no_torch() -> None:
    """What `make serve` installs can serve, cannot export, and holds neither torch nor transformers."""
    python = ROOT / ".venv/bin/python"
    assert python.exists(), "run `make unit`, which installs .venv first"
    code = "import importlib.util as u; print([m for m in ('torch', 'transformers', 'onnx') if u.find_spec(m)])"

    assert "[]" == subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
    export = subprocess.run([python.with_name("bert-export"), "x", "--output", "y"], capture_output=True, text=True, check=False)
    assert 3 == export.returncode
    assert "pip install 'bertserve[export,cpu]'" in export.stderr
    assert 0 == subprocess.run([python.with_name("bert-serve"), "check"], cwd=ROOT, capture_output=True, check=False).returncode


def test_importing_the_service_imports_no_torch() -> None:
    """Also where torch is installed, serving does not load it."""
    code = "import sys, service.api.app, service.cli; print([m for m in ('torch', 'transformers', 'export') if m in sys.modules])"

    assert "[]" == subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
