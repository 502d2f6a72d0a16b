"""The speed table, the name of the CPU, and the comparison of rows in batches with the same rows run alone."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from bertserve.export.validation import comparison, report
from bertserve.export.validation.comparison import measure_row_errors
from bertserve.service.engine import hardware
from bertserve.service.engine.onnx_engine import Row
from bertserve.service.text.tokenizer import Encoding

INTEL = "processor\t: 0\nmodel name\t: Some(R) CPU @ 2.00GHz\nflags\t\t: fpu sse2 fma avx2 avx512f avx512_vnni\n\nprocessor\t: 1\nmodel name\t: Other\n"
ARM = "processor\t: 0\nFeatures\t: fp asimd asimddp i8mm\n"


class Fake:
    """An engine that records the lengths of its runs; its outputs can depend on the size of the batch."""

    def __init__(self, leak: float = 0.0) -> None:
        self.lengths: list[int] = []
        self.leak = leak

    def run(self, encodings: Sequence[Encoding]) -> list[Row]:
        self.lengths += map(len, encodings)
        return [{"logits": np.full(2, len(e) + self.leak * len(encodings), dtype=np.float32)} for e in encodings]


def encoding(length: int) -> Encoding:
    return Encoding(np.ones(length, dtype=np.int64), np.zeros(length, dtype=np.int64))


@pytest.mark.parametrize(
    ("text", "name", "instructions"),
    [(INTEL, "Some(R) CPU @ 2.00GHz", ("avx2", "fma", "avx512f", "avx512_vnni")), (ARM, None, ("asimd", "asimddp", "i8mm"))],
)
def test_the_cpu_is_reported_with_its_instruction_sets(tmp_path: Path, text: str, name: str | None, instructions: tuple[str, ...]) -> None:
    """The name is the first CPU's; only instruction sets for matrix products are listed."""
    path = tmp_path / "cpuinfo"
    path.write_text(text)
    found = hardware.cpu_name(path)

    assert instructions == hardware.cpu_instructions(path)
    assert name in (None, found)
    assert found


@pytest.mark.parametrize(("longest", "lengths"), [(512, [16, 64, 128, 512]), (40, [16, 40]), (8, [8])])
def test_lengths_up_to_the_models_maximum_are_timed(longest: int, lengths: list[int]) -> None:
    """The maximum itself is always timed; each length runs several times after a warm-up run."""
    engine = Fake()
    found = report.measure_latency(engine, max_length=longest, pad_id=1)

    assert lengths == [timing.length for timing in found.timings]
    assert dict.fromkeys(lengths, report.RUNS[1] + 1) == {length: engine.lengths.count(length) for length in lengths}


@pytest.mark.parametrize(("leak", "worst"), [(0.0, 0.0), (0.5, 0.5 * (comparison.BATCH_ROWS - 1))])
def test_rows_in_batches_are_compared_with_the_same_rows_run_alone(leak: float, worst: float) -> None:
    """The result has the largest difference, and whether it is only rounding. The last row is alone in its batch, so it is not different."""
    encodings, engine = [encoding(length) for length in (3, 5, 4, 9, 2)], Fake(leak)

    assert (worst, leak == 0) == measure_row_errors(engine, "int8", encodings, [engine.run([one])[0] for one in encodings])
