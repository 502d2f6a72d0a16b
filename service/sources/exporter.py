"""bert-export as a process of its own: serving imports nothing of it, nor torch. The process ends with this one's signals."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from types import FrameType

from bertserve.service.errors import StartError

GRAPH_MISSING = 4  # bert-export's exit code if the bundle lacks a graph that failed
_STDERR = 2  # stdout is the service's own
_SIGNALS = (signal.SIGINT, signal.SIGTERM)
MODULE = "bertserve.export.cli"


def command() -> list[str]:
    """Returns the command that runs bert-export in this environment, before its arguments.

    Raises:
        StartError: It is not installed.
    """
    package = MODULE.rpartition(".")[0]
    missing = [name for name in (package, "torch", "transformers", "onnx") if find_spec(name) is None]
    if missing:
        raise StartError(
            f"a checkpoint must be exported before it is served, and {', '.join(missing)} not installed; install bertserve with the extra "
            "`export`, as `pip install 'bertserve[cpu,export]'`, or give a bundle that bert-export made elsewhere."
        )
    return [sys.executable, "-P", "-m", MODULE]  # -P: a folder `torch` beside the user's data is not the package


def run(argv: Sequence[str], *, lock: int) -> int:
    """Runs bert-export, its progress and errors on stderr; returns its exit code.

    SIGINT and SIGTERM are passed on, and end this process after it: half of an export is removed by the export itself.

    Args:
        argv: The command with its arguments.
        lock: Descriptor of a lock that is held until the process has ended, also where this one is killed.

    Raises:
        SystemExit: A signal stopped both.
    """
    received: list[int] = []
    process: subprocess.Popen[bytes] | None = None

    def pass_on(number: int, _: FrameType | None) -> None:
        received.append(number)
        if process is not None:
            process.send_signal(number)

    before = [(number, signal.signal(number, pass_on)) for number in _SIGNALS]
    try:
        # a process group of its own: Ctrl-C then reaches it once, from here
        process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=_STDERR, pass_fds=(lock,), process_group=0)  # noqa: S603 - no shell
        for number in received:
            process.send_signal(number)
        code = process.wait()
    finally:
        for number, handler in before:
            signal.signal(number, handler)
    if received:
        raise SystemExit(128 + received[0])
    return code if code >= 0 else 128 - code
