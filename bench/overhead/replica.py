"""Replicas: `bert-serve` processes on ports of loopback, each of which can be ended and started again at its address."""

from __future__ import annotations

import contextlib
import os
import random
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from bertserve.bench.errors import BenchError

# below what Linux hands out by itself (net.ipv4.ip_local_port_range, from 32768), above where Ray's workers listen (to 19999), with room
# for a hundred behind the last one
PORTS = range(20_000, 32_000)
_STOP_S = 60


class Replica:
    """A `bert-serve` at a port that stays the same, however often the process is started.

    Attributes:
        port: Its port on loopback.
        log: What its processes wrote to stderr, one after another.
        process: The process that was started last.
    """

    def __init__(
        self,
        models: Path,
        port: int,
        log: Path,
        flags: Sequence[str] = (),
        *,
        program: Sequence[str] = (),
        tree: Path | None = None,
    ) -> None:
        """Knows how to start.

        Args:
            models: Folder of bundles.
            port: A free port.
            log: Gets what the process writes to stderr, of one start after another.
            flags: More flags of `bert-serve serve`.
            program: What runs in place of the installed `bert-serve`.
            tree: A checkout whose code it runs; None for the installed one.
        """
        self.port = port
        program = program or (str(Path(sys.executable).with_name("bert-serve")),)
        self._command = [*program, "serve", "--models", str(models), "--port", str(port), *flags]
        self._env = None if tree is None else {**os.environ, "PYTHONPATH": str(tree)}
        self.log = log
        self.process: subprocess.Popen[str]

    @property
    def url(self) -> str:
        """Where it answers."""
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Starts a process and returns once it listens.

        Raises:
            BenchError: It ended before.
        """
        self.spawn()
        self.wait_until_it_listens()

    def spawn(self) -> None:
        """Starts a process."""
        with self.log.open("a") as log:
            self.process = subprocess.Popen(self._command, stdout=subprocess.PIPE, stderr=log, text=True, env=self._env)  # noqa: S603

    def wait_until_it_listens(self) -> None:
        """Waits until the process takes connections.

        Raises:
            BenchError: It ended before.
        """
        assert self.process.stdout is not None
        if not any(" listens on " in line for line in self.process.stdout):
            self.wait()
            raise BenchError(f"bert-serve did not start: {self.log.read_text()}")

    def stop(self) -> int:
        """Asks the process to end, waits until it has, and returns its exit code."""
        self.process.terminate()
        return self.wait()

    def wait(self) -> int:
        """Waits until the process has ended, and returns its exit code."""
        code = self.process.wait(_STOP_S)
        assert self.process.stdout is not None
        self.process.stdout.close()
        return code

    def kill(self) -> None:
        """Ends it at once, also where it hangs."""
        if self.process.poll() is None:
            self.process.kill()
        self.wait()


@contextmanager
def replicas(models: Path, count: int, folder: Path, flags: Sequence[str] = ()) -> Iterator[list[Replica]]:
    """Runs replicas of the same models on free ports, with their logs in a folder, until the block ends. They start side by side.

    Raises:
        BenchError: One of them did not start.
    """
    made = [Replica(models, port, folder / f"replica-{port}.log", flags) for port in free_ports(count)]
    with ExitStack() as stack:
        for each in made:
            each.spawn()
            stack.callback(each.kill)
        for each in made:
            each.wait_until_it_listens()
        yield made


def free_ports(count: int) -> list[int]:
    """Returns ports of loopback that nobody listens on, all different.

    They lie below those that the system hands out by itself: what Ray, or a client, opens between this call and the moment
    that a server binds its port takes none of them.
    """
    with ExitStack() as stack:
        found: list[int] = []
        for port in random.sample(PORTS, len(PORTS)):
            if len(found) == count:
                break
            with contextlib.suppress(OSError):
                stack.enter_context(socket.create_server(("127.0.0.1", port)))
                found.append(port)
        return found
