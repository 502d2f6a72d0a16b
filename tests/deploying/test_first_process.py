"""The service as the first process of a container, which ignores each signal without a handler."""

import errno
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

UNSHARE = shutil.which("unshare")


def may_unshare() -> bool:
    """Returns whether this user can create a PID namespace."""
    return UNSHARE is not None and subprocess.run([UNSHARE, "--pid", "--fork", "true"], capture_output=True, check=False).returncode == 0


@pytest.mark.skipif(not may_unshare(), reason="needs unshare, and the right to make a namespace of processes")
def test_sigterm_ends_the_service_during_its_start(tmp_path: Path) -> None:
    """The service exits with the code of the signal, here while it reads its settings from a pipe without data."""
    pipe = tmp_path / "settings.toml"
    os.mkfifo(pipe)
    command = [str(Path(sys.executable).with_name("bert-serve")), "serve", "--config", str(pipe)]
    outside = subprocess.Popen([str(UNSHARE), "--pid", "--fork", "--kill-child", *command], stderr=subprocess.DEVNULL)
    try:
        writer = _opened(pipe)
        children = Path(f"/proc/{outside.pid}/task/{outside.pid}/children").read_text().split()
        os.kill(int(children[0]), signal.SIGTERM)
        assert outside.wait(20) == 128 + signal.SIGTERM
        os.close(writer)
    finally:
        outside.kill()


def _opened(pipe: Path) -> int:
    """Waits until a process reads a pipe, and returns the write end."""
    for _ in range(2000):
        try:
            return os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)
        except OSError as error:
            assert error.errno == errno.ENXIO
            time.sleep(0.01)
    raise AssertionError("nobody read the settings")
