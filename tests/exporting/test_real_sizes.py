"""Models in their real sizes with random weights: BERT base and large, and ALBERT, whose layers share weights. Minutes, and gigabytes.

`BERTSERVE_SIZES=base,large,albert python -m pytest -m checkpoints tests/exporting/test_real_sizes.py -s`
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from export.parity import MAX_ABS_ERROR
from export.pipeline import ExportSpec, export
from families import FAMILIES

VARIABLE = "BERTSERVE_SIZES"
BASE: dict[str, Any] = {
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "intermediate_size": 3072,
    "max_position_embeddings": 512,
}
SIZES: dict[str, tuple[str, dict[str, Any]]] = {
    "base": ("BERT", {**BASE, "vocab_size": 30522}),
    "large": (
        "BERT",
        {**BASE, "vocab_size": 30522, "hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096},
    ),
    "albert": ("ALBERT", {**BASE, "vocab_size": 30000, "embedding_size": 128}),
}
RESIDENT = """
import sys
from pathlib import Path
from service.bundle import load
from service.engine import OnnxEngine
from service.tokenization import Tokenizer
def resident():
    return int(next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmRSS")))
bundle = load(Path(sys.argv[1]))
graph, spec = bundle.graph("cpu"), bundle.manifest.tokenizer
before = resident()
engine = OnnxEngine(bundle.path / graph.file, graph, pad_id=spec.pad_id, padding_side=spec.padding_side)
engine.time_runs([(1, 32)], repeats=1)
print((resident() - before) / 1024)
"""

pytestmark = [
    pytest.mark.torch,
    pytest.mark.checkpoints,
    pytest.mark.skipif(VARIABLE not in os.environ, reason=f"takes minutes: set {VARIABLE} to some of {', '.join(SIZES)}"),
]


@pytest.mark.parametrize("size", [size for size in SIZES if size in os.environ.get(VARIABLE, "").split(",")])
@pytest.mark.parametrize("precision", ["fp32", "int8"])
def test_a_real_size_is_exported(size: str, precision: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The bundle is within the bound in fp32; size, error, seconds and memory are printed."""
    name, fields = SIZES[size]
    source = FAMILIES[name].save(tmp_path / "checkpoint", "text-classification", **fields)
    start = time.perf_counter()
    path, manifest = export(ExportSpec(str(source), tmp_path / "models", precisions=(precision,), max_int8_error=1.0), lambda line: None)
    seconds = time.perf_counter() - start
    graph = manifest.graphs[0]
    resident = subprocess.run([sys.executable, "-c", RESIDENT, str(path)], capture_output=True, text=True, check=True).stdout.strip()
    with capsys.disabled():
        print(
            f"\n{size} {precision}: checkpoint {(source / 'model.safetensors').stat().st_size / 2**20:.0f} MiB, graph "
            f"{(path / graph.file).stat().st_size / 2**20:.0f} MiB, resident {float(resident):.0f} MiB, exported in {seconds:.0f} s; "
            f"{graph.form}; {graph.evidence.model_dump_json()}"
        )

    assert graph.evidence.worst_abs_error <= MAX_ABS_ERROR[precision]
    if precision == "fp32":
        assert 1 == graph.evidence.label_agreement
