"""A HAProxy with the configuration of `deploy/haproxy`, at other addresses."""

from __future__ import annotations

import re
import shutil
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException
from pathlib import Path

from bertserve.bench.errors import BenchError
from bertserve.bench.overhead.replica import free_ports

CONFIGURATION = Path(__file__).resolve().parents[2] / "deploy/haproxy/haproxy.cfg"
_START_S = 10
_READY = 200


@dataclass(frozen=True, slots=True)
class HAProxy:
    """A HAProxy that runs.

    Attributes:
        url: Where it takes requests.
        stats_url: Where it says how it is.
        process: Its process.
        log: What it writes: failures and replicas that come and go.
    """

    url: str
    stats_url: str
    process: subprocess.Popen[bytes]
    log: Path


def installed() -> bool:
    """Returns whether this system has a HAProxy."""
    return shutil.which("haproxy") is not None


def configuration(port: int, stats_port: int, replica_ports: Sequence[int]) -> str:
    """Returns the configuration with other ports, and with as many replicas as there are ports for them."""
    text = CONFIGURATION.read_text(encoding="utf-8")
    text = text.replace("bind 127.0.0.1:8000", f"bind 127.0.0.1:{port}").replace("bind 127.0.0.1:8404", f"bind 127.0.0.1:{stats_port}")
    lines = "".join(f"    server replica{i} 127.0.0.1:{each}\n" for i, each in enumerate(replica_ports, 1))
    return re.sub(r"(^ +server replica\d+ \S+\n)+", lines, text, flags=re.MULTILINE)


@contextmanager
def haproxy(replica_ports: Sequence[int], folder: Path) -> Iterator[HAProxy]:
    """Runs a HAProxy before replicas that listen, with its files in a folder, until the block ends.

    Raises:
        BenchError: There is none on this system, or it did not start.
    """
    if not installed():
        raise BenchError("this system has no haproxy; install the package of that name.")
    port, stats_port = free_ports(2)
    file, log = folder / f"haproxy-{port}.cfg", folder / f"haproxy-{port}.log"
    file.write_text(configuration(port, stats_port, replica_ports), encoding="utf-8")
    with log.open("w") as errors:
        process = subprocess.Popen(["haproxy", "-db", "-f", str(file)], stdout=subprocess.DEVNULL, stderr=errors)  # noqa: S603, S607
    try:
        _wait_until_ready(port, process, log)
        yield HAProxy(f"http://127.0.0.1:{port}", f"http://127.0.0.1:{stats_port}", process, log)
    finally:
        process.kill()  # a stop would wait for connections
        process.wait()


def _wait_until_ready(port: int, process: subprocess.Popen[bytes], log: Path) -> None:
    end = time.monotonic() + _START_S
    while process.poll() is None and time.monotonic() < end:
        connection = HTTPConnection("127.0.0.1", port, timeout=1)
        try:
            connection.request("GET", "/health/ready")
            if connection.getresponse().status == _READY:
                return
        except (OSError, HTTPException):
            pass
        finally:
            connection.close()
        time.sleep(0.02)
    raise BenchError(f"haproxy did not start: {log.read_text()}")
