"""Real checkpoints in float32 against PyTorch: `make parity CHECKPOINTS=DIR`."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from bertserve.export.validation.parity import MAX_ABS_ERROR
from bundles import exported

VARIABLE = "BERTSERVE_CHECKPOINTS"
NAMES = ("sentiment", "ner", "qa", "fill-mask", "nli")

pytestmark = [
    pytest.mark.torch,
    pytest.mark.checkpoints,
    pytest.mark.skipif(VARIABLE not in os.environ, reason=f"needs real checkpoints: set {VARIABLE} to a folder of checkpoint folders"),
]


@pytest.mark.parametrize("name", NAMES)
def test_a_real_checkpoint_answers_as_in_pytorch(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The fp32 bundle's logits are within the bound and its labels are PyTorch's on every sample; the validation report is printed."""
    source = Path(os.environ[VARIABLE]) / name
    validation = exported(source, tmp_path).manifest.graphs[0].evidence
    with capsys.disabled():
        print(f"\n{name}: {validation.model_dump_json()}")

    assert validation.agreement is not None
    assert pytest.approx(1, abs=1e-3) == validation.agreement.value
    assert validation.worst_abs_error <= MAX_ABS_ERROR["fp32"]
