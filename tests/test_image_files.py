"""The image, the systemd unit and `make serve` have the same memory settings, and the image gets its files."""

import re
import subprocess
from pathlib import Path

import pytest

from support import ROOT


def document(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def test_containers_the_unit_and_make_serve_set_the_same_memory_settings() -> None:
    """They are also the settings in docs/how-to/operations.md, and this machine's C library supports them."""
    tunables = re.findall(r"glibc\.malloc\.\S+", document("Makefile"))
    for name in ("Dockerfile", "deploy/systemd/bertserve@.service"):
        assert re.findall(r"glibc\.malloc\.\S+", document(name)) == tunables
    assert f"GLIBC_TUNABLES={tunables[0]}" in document("docs/how-to/operations.md")
    if not (loader := Path("/lib64/ld-linux-x86-64.so.2")).exists():
        pytest.skip("not a machine with glibc for x86-64")
    supported = subprocess.run([loader, "--list-tunables"], capture_output=True, text=True, check=True).stdout
    assert {setting.partition("=")[0] for setting in tunables[0].split(":")} <= {line.partition(":")[0] for line in supported.splitlines()}


def test_the_build_context_has_all_files_that_the_dockerfile_copies() -> None:
    """`.dockerignore` excludes all files except the paths that it lists with `!`."""
    exceptions = {line.removeprefix("!") for line in document(".dockerignore").splitlines() if line.startswith("!")}
    lines = [line for line in document("Dockerfile").splitlines() if line.startswith("COPY ") and "--from=" not in line]
    sources = [source.partition("/")[0] for line in lines for source in line.split()[1:-1]]

    assert {"bertserve", "service", "export", "bench", "models", "pyproject.toml"} <= set(sources)
    assert set(sources) <= exceptions
