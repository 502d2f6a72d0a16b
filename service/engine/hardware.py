"""The hardware of this machine: the name of its CPU, its GPU and the driver. It is independent of graphs and providers."""

import ctypes
import os
import platform
from pathlib import Path

from bertserve.service.errors import StartError

# Instruction sets for matrix products, as in /proc/cpuinfo; AVX-512 and VNNI decide the speed of int8.
INSTRUCTIONS = (
    *("avx2", "fma", "avx_vnni", "avx512f", "avx512bw", "avx512_vnni", "avx512_bf16", "amx_int8", "amx_bf16"),
    *("asimd", "asimddp", "i8mm", "bf16", "sve"),
)


def cpu_name(info: Path = Path("/proc/cpuinfo")) -> str:
    """Returns the CPU model as reported by the system, or else its architecture."""
    names = (value for key, value in _cpu_info(info) if key == "model name")
    return next(names, "") or platform.processor() or platform.machine()


def cpu_instructions(info: Path = Path("/proc/cpuinfo")) -> tuple[str, ...]:
    """Returns the CPU's instruction sets among `INSTRUCTIONS`; empty if the system does not report them."""
    flags = {flag for key, value in _cpu_info(info) if key.lower() in ("flags", "features") for flag in value.split()}
    return tuple(flag for flag in INSTRUCTIONS if flag in flags)


def _cpu_info(info: Path) -> list[tuple[str, str]]:
    """Returns the names and values in /proc/cpuinfo; empty if it cannot be read."""
    try:
        lines = info.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
    return [(key.strip(), value.strip()) for key, _, value in (line.partition(":") for line in lines)]


def find_gpu(index: int = 0) -> tuple[str, str]:
    """Returns the name of a GPU of the NVIDIA driver by its index, and its compute capability as `major.minor`.

    Raises:
        StartError: There is no driver, or it offers no such GPU to this process.
    """
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise StartError(
            f"there is no NVIDIA driver ({error}); install it on the host, and start a container with the GPUs (`--gpus all`)."
        ) from error
    count, device, name = ctypes.c_int(), ctypes.c_int(), ctypes.create_string_buffer(256)
    code = driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count))
    if code or not count.value:
        raise StartError(
            f"the NVIDIA driver has no GPU for this process ({count.value} devices, code {code}); check `nvidia-smi`, "
            "CUDA_VISIBLE_DEVICES and the GPUs of the container."
        )
    if index >= count.value:
        raise StartError(
            f"--device-id is {index}, and the GPUs of this process are 0 to {count.value - 1}; check `nvidia-smi` and CUDA_VISIBLE_DEVICES."
        )
    driver.cuDeviceGet(ctypes.byref(device), index)
    driver.cuDeviceGetName(name, len(name), device)
    capability = []
    for attribute in (75, 76):  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR and _MINOR
        value = ctypes.c_int()
        driver.cuDeviceGetAttribute(ctypes.byref(value), attribute, device)
        capability.append(str(value.value))
    return name.value.decode(errors="replace"), ".".join(capability)


def usable_cores(cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Returns the number of cores that this process can use, by CPU affinity and the cgroup's CPU quota."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota, period = _cgroup_quota(cgroup)
    return max(1, min(cores, int(quota / period) if quota > 0 else cores))


def _cgroup_quota(root: Path) -> tuple[int, int]:
    """Returns quota and period of cgroup v2 or v1 in microseconds; the quota is -1 if there is none."""
    try:
        quota, period = (root / "cpu.max").read_text().split()
        return (-1 if quota == "max" else int(quota)), int(period)
    except (OSError, ValueError):
        pass
    try:
        return int((root / "cpu/cpu.cfs_quota_us").read_text()), int((root / "cpu/cpu.cfs_period_us").read_text())
    except (OSError, ValueError):
        return -1, 1
