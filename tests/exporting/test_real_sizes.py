"""Real checkpoints (`make parity CHECKPOINTS=DIR`), and a model with random weights whose graph needs two files, as XLM-RoBERTa large."""

import os
from pathlib import Path

import pytest

from bertserve.export.validation.comparison import MAX_ABS_ERROR
from support.bundles import exported
from support.families import FAMILIES

CHECKPOINTS = "BERTSERVE_CHECKPOINTS"

pytestmark = [
    pytest.mark.torch,
    pytest.mark.checkpoints,
    pytest.mark.skipif(CHECKPOINTS not in os.environ, reason=f"set {CHECKPOINTS} to a folder of checkpoint folders"),
]


@pytest.mark.parametrize("name", ["sentiment", "ner", "qa", "fill-mask", "nli", "rerank"])
def test_a_real_checkpoint_answers_like_pytorch(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    validation = exported(Path(os.environ[CHECKPOINTS]) / name, tmp_path).manifest.graphs[0].validation
    with capsys.disabled():
        print(f"\n{name}: {validation.model_dump_json()}")

    assert validation.agreement.value == pytest.approx(1, abs=1e-3)
    assert validation.worst_abs_error <= MAX_ABS_ERROR["fp32"]


def test_weights_of_more_than_two_gibibytes_are_in_a_file_of_their_own(tmp_path: Path) -> None:
    """The export takes minutes and gigabytes of memory. There are fewer layers than in the real model, and more rows in the vocabulary."""
    sizes = {"hidden_size": 1024, "num_hidden_layers": 4, "num_attention_heads": 16, "intermediate_size": 4096}
    fields = {**sizes, "vocab_size": 500002, "max_position_embeddings": 514}
    [graph] = exported(FAMILIES["XLM-RoBERTa"].save(tmp_path / "checkpoint", "text-classification", **fields)).manifest.graphs

    assert len(graph.files) == 2
    assert sum(file.size_bytes or 0 for file in graph.files) > 2**31
    assert graph.validation.worst_abs_error <= MAX_ABS_ERROR["fp32"]
    assert graph.validation.agreement.value == 1
