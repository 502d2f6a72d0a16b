"""A Ray cluster on this machine, on loopback only: runs `ray start` per node, and deploys applications like `serve deploy`."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

from bertserve.bench.errors import BenchError
from replica import free_ports, is_ready

ENVIRONMENT = Path(__file__).resolve().parents[2] / "deploy/ray/ray.env"
PATIENCE_S = 90.0
_OK = 200
_FAILED = 500
_TRIES = 3


def environment() -> dict[str, str]:
    """Returns the variables of deploy/ray/ray.env."""
    lines = [line for line in ENVIRONMENT.read_text(encoding="utf-8").splitlines() if line and not line.startswith("#")]
    return dict(line.split("=", 1) for line in lines)


def until(check: Callable[[], bool], what: str) -> None:
    """Waits until a condition is true.

    Raises:
        BenchError: The condition is not true within 90 seconds.
    """
    end = time.monotonic() + PATIENCE_S
    while not check():
        if time.monotonic() > end:
            raise BenchError(f"timed out while waiting until {what}.")
        time.sleep(0.1)


class RayCluster:
    """A head node and other nodes, each in its own process session.

    Attributes:
        folder: Folder with the files of the nodes.
        url: Address of HAProxy, once an application runs.
        replica_port: First port of the replicas.
        nodes: The processes that started the nodes.
    """

    def __init__(self, *, cpus: int = 2) -> None:
        """Starts the head node.

        Args:
            cpus: Number of CPUs that the node reports.
        """
        self.folder = Path(tempfile.mkdtemp(prefix="ray", dir="/tmp"))
        self.http, self._gcs, self._dashboard, self._client, stats, metrics, self.replica_port = free_ports(7)
        self.url = f"http://127.0.0.1:{self.http}"
        haproxy = self.folder / "haproxy"
        self._environment = {
            **{name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"},
            **environment(),
            "PYTHONPATH": str(Path(__file__).resolve().parents[2]),
            "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": str(haproxy / "haproxy.cfg"),
            "RAY_SERVE_HAPROXY_SOCKET_PATH": str(haproxy / "admin.sock"),
            "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": str(haproxy),
            "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": str(haproxy / "server-state"),
            "RAY_SERVE_HAPROXY_STATS_PORT": str(stats),
            "RAY_SERVE_HAPROXY_METRICS_PORT": str(metrics),
            "RAY_SERVE_DIRECT_INGRESS_MIN_HTTP_PORT": str(self.replica_port),
            "RAY_SERVE_DIRECT_INGRESS_MAX_HTTP_PORT": str(self.replica_port + 100),
            "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "2",  # the default of 30 seconds is for external load balancers
            "RAY_AUTH_MODE": "disabled",  # a token would be written to the home folder
        }
        self.nodes: list[subprocess.Popen[bytes]] = []
        try:
            self._start(
                "--head",
                f"--port={self._gcs}",
                f"--dashboard-port={self._dashboard}",
                f"--ray-client-server-port={self._client}",
                f"--temp-dir={self.folder / 'ray'}",
                f"--num-cpus={cpus}",
            )
        except BaseException:
            self.close()
            raise

    def add_node(self, *, cpus: int = 2) -> subprocess.Popen[bytes]:
        """Starts another node, which joins the head, and returns the process that started it."""
        return self._start(f"--address=127.0.0.1:{self._gcs}", f"--num-cpus={cpus}")

    def put(self, config: dict[str, Any]) -> None:
        """Sends a configuration like `serve deploy`. Retries, because Ray can fail while its HAProxy restarts.

        Raises:
            BenchError: Ray does not accept the configuration.
        """
        for _ in range(_TRIES):
            status, said = self._ask("PUT", json.dumps(config))
            if status < _FAILED:
                break
        if status != _OK:
            raise BenchError(f"Ray Serve does not accept the configuration: {said[-1000:]}")

    def status(self) -> Any:
        """Returns the entry of the application `bertserve` in `serve status`."""
        applications = json.loads(self._ask("GET")[1])["applications"]
        return applications.get("bertserve", {"status": "NOT_STARTED"})

    def wait(self, route_prefix: str = "/") -> None:
        """Waits until the application runs and answers requests.

        Raises:
            BenchError: It does not answer in time.
        """
        until(lambda: self.status()["status"] == "RUNNING", "the application runs")
        until(lambda: is_ready(self.url, f"{route_prefix.rstrip('/')}/health/ready"), "it answers")

    def pids(self) -> list[int]:
        """Returns the processes that handle requests: replicas and HAProxy. Ray's other processes can start and end at any time."""
        leaders = {node.pid for node in self.nodes}
        return [pid for pid in _processes() if _session(pid) in leaders and _command(pid).startswith(("ray::ServeReplica", "haproxy"))]

    def kill(self, node: subprocess.Popen[bytes]) -> None:
        """Kills all processes of a node."""
        for pid in _processes():
            if _session(pid) == node.pid:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def close(self) -> None:
        """Kills all processes that were started, with their children, because Ray's own shutdown takes about 15 seconds."""
        for node in self.nodes:
            self.kill(node)
            node.wait()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _start(self, *flags: str) -> subprocess.Popen[bytes]:
        program = Path(sys.executable).with_name("ray")
        command = [str(program), "start", "--block", *flags, "--node-ip-address=127.0.0.1", "--disable-usage-stats"]
        path = self.folder / f"node-{len(self.nodes)}"
        with path.open("wb") as log:
            node = subprocess.Popen(command, stdout=log, stderr=log, env=self._environment, start_new_session=True)
        self.nodes.append(node)
        until(lambda: b"Ray runtime started" in path.read_bytes(), "a node runs")
        return node

    def _ask(self, method: str, body: str | None = None) -> tuple[int, str]:
        connection = HTTPConnection("127.0.0.1", self._dashboard, timeout=PATIENCE_S)
        with contextlib.closing(connection):
            connection.request(method, "/api/serve/applications/", body, {"content-type": "application/json"})
            response = connection.getresponse()
            return response.status, response.read().decode()


def _processes() -> list[int]:
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]


def _command(pid: int) -> str:
    """Returns the program name and arguments of a process. Ray's processes replace both with a description."""
    try:
        first, _, rest = Path(f"/proc/{pid}/cmdline").read_text(encoding="utf-8").partition("\0")
    except (FileNotFoundError, ProcessLookupError):
        return ""
    return f"{Path(first).name if first.startswith('/') else first} {rest}"


def _session(pid: int) -> int | None:
    """Returns the session of a process; Ray's processes stay in the session of the command that started them."""
    try:
        return os.getsid(pid)
    except ProcessLookupError:
        return None
