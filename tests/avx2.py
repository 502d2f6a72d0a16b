"""Runs a command as on a CPU without AVX-512: `python tests/avx2.py COMMAND...` (make avx2).

Kernels depend on the CPU, and int8 kernels round differently. The script puts a patched copy of onnxruntime first on the import path.
In the copy, each `xgetbv` instruction becomes a constant: the operating system does not save AVX-512 registers. It runs at full speed.
On the same inputs, its results were bit-identical to the results of an emulated Haswell CPU.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

# the instructions that compilers emit: `xor ecx, ecx; xgetbv`, or `xgetbv; mov eax, eax; shl rdx, 32`
ASK = re.compile(rb"(?<=\x31\xc9)\x0f\x01\xd0|\x0f\x01\xd0(?=\x89\xc0\x48\xc1\xe2\x20)")
ANSWER = b"\xb0\x07\x90"  # `mov al, 7; nop`: x87, SSE and AVX state is saved, AVX-512 state is not


def main(command: list[str]) -> int:
    """Runs the command; returns its exit code."""
    spec = find_spec("onnxruntime")
    if not command or spec is None or spec.origin is None:
        print("usage: python tests/avx2.py COMMAND..., in an environment with onnxruntime for x86-64", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory(prefix="onnxruntime-avx2-") as folder:
        copy = shutil.copytree(Path(spec.origin).parent, Path(folder) / "onnxruntime")
        checks = 0
        for library in copy.glob("capi/onnxruntime_pybind11_state*.so"):
            code, count = ASK.subn(ANSWER, library.read_bytes())
            library.write_bytes(code)
            checks += count
        if not checks:
            print("avx2: this onnxruntime does not ask for AVX-512 in a way that is known here", file=sys.stderr)
            return 2
        return subprocess.run(command, env=os.environ | {"PYTHONPATH": folder}, check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
