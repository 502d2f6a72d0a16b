"""The CPU of the machine: its name, its instruction sets, and the cores that the process can use."""

import os
import platform
from pathlib import Path

import pytest

from bertserve.service.engine import hardware

INTEL = (
    "processor\t: 0\nmodel name\t: Some(R) CPU\nflags\t\t: fpu sse2 fma avx2 avx512f avx512_vnni\n\nprocessor\t: 1\nmodel name\t: Other\n"
)
ARM = "processor\t: 0\nFeatures\t: fp asimd asimddp i8mm\n"


@pytest.mark.parametrize(
    ("text", "name", "instructions"),
    [
        (INTEL, "Some(R) CPU", ("avx2", "fma", "avx512f", "avx512_vnni")),
        (ARM, platform.machine(), ("asimd", "asimddp", "i8mm")),
        ("", platform.machine(), ()),
    ],
)
def test_the_cpu_is_reported_with_its_instruction_sets(tmp_path: Path, text: str, name: str, instructions: tuple[str, ...]) -> None:
    """The name is the first CPU's, or of its architecture; only instruction sets for matrix products are listed."""
    path = tmp_path / "cpuinfo"
    path.write_text(text)

    assert hardware.cpu_instructions(path) == instructions
    assert hardware.cpu_name(path) == name


CGROUPS = [
    pytest.param({"cpu.max": "max 100000\n"}, 8, id="v2 without a quota"),
    pytest.param({"cpu.max": "200000 100000\n"}, 2, id="v2 of two cores"),
    pytest.param({"cpu.max": "50000 100000\n"}, 1, id="v2 of half a core"),
    pytest.param({"cpu.max": "6400000 100000\n"}, 8, id="v2 of more than there are"),
    pytest.param({"cpu/cpu.cfs_quota_us": "400000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 4, id="v1 of four cores"),
    pytest.param({"cpu.max": "nonsense"}, 8, id="not readable"),
    pytest.param({}, 8, id="no cgroup"),
]


@pytest.mark.parametrize(("files", "cores"), CGROUPS)
def test_usable_cores_respect_the_cgroup_quota(files: dict[str, str], cores: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With eight cores by affinity, the quota is rounded down to whole cores, but at least one."""
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    assert hardware.usable_cores(tmp_path) == cores
