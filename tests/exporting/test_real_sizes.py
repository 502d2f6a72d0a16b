"""Models of real sizes with random weights, and real checkpoints (`make parity CHECKPOINTS=DIR`).

An export takes minutes and gigabytes of memory; int8 takes much longer than fp32.

The sizes are BERT base and large, ALBERT (its layers share weights), and one as large as XLM-RoBERTa large, whose graph needs two files.

`BERTSERVE_SIZES=base,large,albert,huge python -m pytest -m checkpoints tests/exporting/test_real_sizes.py -s` exports all sizes; `-k fp32`
selects one precision, and `BERTSERVE_TEXTS=16` calibrates int8 on 16 texts instead of all.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from bertserve.export import calibration
from bertserve.export.validation.parity import MAX_ABS_ERROR
from bertserve.service.bundle import files
from bundles import exported
from families import FAMILIES

VARIABLE = "BERTSERVE_SIZES"
TEXTS = "BERTSERVE_TEXTS"
BASE: dict[str, Any] = {
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "intermediate_size": 3072,
    "max_position_embeddings": 512,
}
LARGE = {**BASE, "hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096}
SIZES: dict[str, tuple[str, dict[str, Any]]] = {
    "base": ("BERT", {**BASE, "vocab_size": 30522}),
    "large": ("BERT", {**LARGE, "vocab_size": 30522}),
    "albert": ("ALBERT", {**BASE, "vocab_size": 30000, "embedding_size": 128}),
    # fewer layers and more vocabulary rows than the real model: as many bytes, but a shorter export
    "huge": ("XLM-RoBERTa", {**LARGE, "vocab_size": 500002, "max_position_embeddings": 514, "num_hidden_layers": 4}),
}
# the peak of a separate process, from VmHWM: the peak of resource.getrusage starts at the parent's
EXPORT = """
import sys
from bertserve.export import cli
code = cli.main(sys.argv[1:])
print(int(next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM"))) / 1024)
sys.exit(code)
"""
RESIDENT = """
import sys
from pathlib import Path
from bertserve.service.backend.onnx_engine import OnnxEngine
from bertserve.service.bundle.files import load_bundle
def resident():
    return int(next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmRSS")))
bundle = load_bundle(Path(sys.argv[1]))
graph, spec = bundle.graph("cpu"), bundle.manifest.tokenizer
before = resident()
engine = OnnxEngine(bundle.path / graph.file, graph, pad_id=spec.pad_id, padding_side=spec.padding_side)
engine.time_runs([(1, 32)], repeats=1)
print((resident() - before) / 1024)
"""

CHECKPOINTS = "BERTSERVE_CHECKPOINTS"

pytestmark = [pytest.mark.torch, pytest.mark.checkpoints]


@pytest.mark.skipif(CHECKPOINTS not in os.environ, reason=f"needs real checkpoints: set {CHECKPOINTS} to a folder of checkpoint folders")
@pytest.mark.parametrize("name", ["sentiment", "ner", "qa", "fill-mask", "nli", "rerank"])
def test_a_real_checkpoint_answers_like_pytorch(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """For every sample, the fp32 logits are within the bound and the labels are PyTorch's. The validation report is printed."""
    validation = exported(Path(os.environ[CHECKPOINTS]) / name, tmp_path).manifest.graphs[0].evidence
    with capsys.disabled():
        print(f"\n{name}: {validation.model_dump_json()}")

    assert validation.agreement is not None
    assert pytest.approx(1, abs=1e-3) == validation.agreement.value
    assert validation.worst_abs_error <= MAX_ABS_ERROR["fp32"]


@pytest.mark.skipif(VARIABLE not in os.environ, reason=f"takes minutes: set {VARIABLE} to some of {', '.join(SIZES)}")
@pytest.mark.parametrize("size", [size for size in SIZES if size in os.environ.get(VARIABLE, "").split(",")])
@pytest.mark.parametrize("precision", ["fp32", "int8"])
def test_a_model_of_real_size_is_exported(size: str, precision: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name, fields = SIZES[size]
    source = FAMILIES[name].save(tmp_path / "checkpoint", "text-classification", **fields)
    texts = tmp_path / "texts.txt"
    texts.write_text("\n".join(calibration.read_texts(calibration.BUILT_IN)[: int(os.environ.get(TEXTS, "1000"))]), encoding="utf-8")
    flags = ["--output", tmp_path / "models", "--precision", precision, "--max-int8-error", 1, "--calibration", texts]
    start = time.perf_counter()
    peak = _python(EXPORT, source, *flags)
    seconds = time.perf_counter() - start
    path = tmp_path / "models" / source.name
    graph = files.load_bundle(path).graph("cpu", precision)
    resident = _python(RESIDENT, path)
    in_bytes = {file.file: file.size_bytes or 0 for file in graph.files}
    with capsys.disabled():
        print(
            f"\n{size} {precision}: checkpoint {(source / 'model.safetensors').stat().st_size / 2**20:.0f} MiB, graph "
            f"{sum(in_bytes.values()) / 2**20:.0f} MiB in {len(in_bytes)} files, resident {resident:.0f} MiB, exported in {seconds:.0f} s with "
            f"{peak:.0f} MiB at most; {graph.form}; {graph.evidence.model_dump_json()}"
        )

    assert (sum(in_bytes.values()) > 2**31) == (len(in_bytes) > 1)
    if precision == "fp32":
        assert graph.evidence.worst_abs_error <= MAX_ABS_ERROR[precision]
        assert 1 == graph.evidence.label_agreement


def _python(code: str, *arguments: Any) -> float:
    """Runs Python code in a separate process, and returns the number in the last line that it prints."""
    ran = subprocess.run([sys.executable, "-c", code, *map(str, arguments)], check=False, capture_output=True, text=True)
    assert 0 == ran.returncode, ran.stderr
    return float(ran.stdout.splitlines()[-1])
