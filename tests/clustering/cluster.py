"""Ray on this machine, all on loopback: `ray start` for each node, and what `serve deploy` sends for the application."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import yaml

ROOT = Path(__file__).parents[2]
RAY_ENV = ROOT / "deploy/ray/ray.env"
PATIENCE_S = 90.0
BODY = {"inputs": "good film"}


def ray_environment() -> dict[str, str]:
    """Returns the variables of deploy/ray/ray.env."""
    lines = [line for line in RAY_ENV.read_text(encoding="utf-8").splitlines() if line and not line.startswith("#")]
    return dict(line.split("=", 1) for line in lines)


def free_ports(count: int) -> list[int]:
    """Returns ports that nobody listens on."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


def until(check: Callable[[], bool], what: str) -> None:
    """Waits for something to become true.

    Raises:
        AssertionError: It does not within a minute and a half.
    """
    end = time.monotonic() + PATIENCE_S
    while not check():
        assert time.monotonic() < end, f"waited in vain until {what}"
        time.sleep(0.1)


class Cluster:
    """A head and raylets, each a process group of its own."""

    def __init__(self, models: Path) -> None:
        """Starts a head with two CPUs."""
        self.models = models
        self.folder = Path(tempfile.mkdtemp(prefix="ray", dir="/tmp"))  # a socket's path has a hundred characters at most
        self.http, self._gcs, self._dashboard, client, stats, metrics = free_ports(6)
        (self.replica_port,) = free_ports(1)
        haproxy = self.folder / "haproxy"
        self._environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("PYTEST")},
            **ray_environment(),
            "PYTHONPATH": str(ROOT),
            "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": str(haproxy / "haproxy.cfg"),
            "RAY_SERVE_HAPROXY_SOCKET_PATH": str(haproxy / "admin.sock"),
            "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": str(haproxy),
            "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": str(haproxy / "server-state"),
            "RAY_SERVE_HAPROXY_STATS_PORT": str(stats),
            "RAY_SERVE_HAPROXY_METRICS_PORT": str(metrics),
            "RAY_SERVE_DIRECT_INGRESS_MIN_HTTP_PORT": str(self.replica_port),
            "RAY_SERVE_DIRECT_INGRESS_MAX_HTTP_PORT": str(self.replica_port + 100),
            "RAY_ADDRESS": f"127.0.0.1:{self._gcs}",
            "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "2",  # of 30 seconds, in which a balancer of one's own would notice
            "RAY_AUTH_MODE": "disabled",  # a token would be written to the home folder
        }
        self.nodes: list[subprocess.Popen[bytes]] = []
        head = ["--head", f"--port={self._gcs}", f"--dashboard-port={self._dashboard}", f"--ray-client-server-port={client}"]
        self.add_node(*head, f"--temp-dir={self.folder / 'ray'}")

    def add_node(self, *flags: str, cpus: int = 2) -> subprocess.Popen[bytes]:
        """Starts a node, which joins the head where there is one."""
        address = [] if "--head" in flags else [f"--address=127.0.0.1:{self._gcs}"]
        command = [_program("ray"), "start", "--block", *address, *flags, f"--num-cpus={cpus}", "--node-ip-address=127.0.0.1"]
        with (self.folder / f"node-{len(self.nodes)}").open("wb") as log:
            environment = self._environment if address else {k: v for k, v in self._environment.items() if k != "RAY_ADDRESS"}
            node = subprocess.Popen([*command, "--disable-usage-stats"], stdout=log, stderr=log, env=environment, start_new_session=True)
        self.nodes.append(node)
        until(lambda: b"Ray runtime started" in (self.folder / f"node-{self.nodes.index(node)}").read_bytes(), "the node runs")
        return node

    def deploy(
        self,
        *,
        wait: bool = True,
        route_prefix: str = "/",
        args: dict[str, Any] | None = None,
        scaling: dict[str, Any] | None = None,
        **deployment: Any,
    ) -> None:
        """Deploys, or changes, the application of deploy/ray/serve.yaml with fixed replicas, or its autoscaling with changes."""
        config = yaml.safe_load((ROOT / "deploy/ray/serve.yaml").read_text(encoding="utf-8"))
        config["http_options"] |= {"port": self.http}
        (application,) = config["applications"]
        application |= {
            "import_path": application["import_path"].removeprefix("bertserve."),
            "route_prefix": route_prefix,
            "args": {"models": str(self.models)} | (args or {}),
        }
        (deployed,) = application["deployments"]
        if scaling is None:
            del deployed["autoscaling_config"]
            deployed["num_replicas"] = 2
        else:
            scaled = deployed["autoscaling_config"]
            scaled |= scaling
            scaled["policy"]["policy_function"] = scaled["policy"]["policy_function"].removeprefix("bertserve.")
        deployed |= deployment
        answer = httpx.put(self._api, json=config, timeout=PATIENCE_S, trust_env=False)
        assert 200 == answer.status_code, answer.text
        if wait:
            until(lambda: self.status()["status"] == "RUNNING", "the application runs")
            until(lambda: self._answers(route_prefix), "it answers")

    def status(self) -> Any:
        """Returns what `serve status` says of the application."""
        said = httpx.get(self._api, timeout=PATIENCE_S, trust_env=False).json()
        return said["applications"].get("bertserve", {"status": "NOT_STARTED"})

    def replicas(self) -> int:
        """Returns how many replicas run."""
        states = [replica["state"] for replica in self.status()["deployments"]["bertserve"]["replicas"]]
        return states.count("RUNNING")

    def worker_pids(self) -> list[int]:
        """Returns the process ids of the replicas, by asking them who they are until no other one says."""
        found: list[int] = []
        for _ in range(40):
            with httpx.Client(trust_env=False) as client:
                pid = client.get(f"{self.url}/info").json()["worker"]["pid"]
            if pid not in found:
                found.append(pid)
        return found

    @property
    def _api(self) -> str:
        return f"http://127.0.0.1:{self._dashboard}/api/serve/applications/"

    @property
    def url(self) -> str:
        """Where HAProxy listens."""
        return f"http://127.0.0.1:{self.http}"

    def close(self) -> None:
        """Ends all that was started, and all that that started: Ray's own end takes a quarter of a minute."""
        for node in self.nodes:
            self.kill(node, signal.SIGKILL)
            node.wait()
        shutil.rmtree(self.folder, ignore_errors=True)

    @staticmethod
    def kill(node: subprocess.Popen[bytes], number: signal.Signals) -> None:
        """Signals a node and all processes of its session."""
        for pid in _session(node.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def _answers(self, route_prefix: str) -> bool:
        try:
            return httpx.get(f"{self.url}{route_prefix.rstrip('/')}/health/ready", trust_env=False).status_code == 200
        except httpx.TransportError:
            return False


@dataclass
class Load:
    """Callers that each send their next request when the last one was answered.

    Attributes:
        statuses: How many answers had each status.
        broken: What connections ended with instead.
    """

    url: str
    body: Any = field(default_factory=lambda: BODY)
    callers: int = 8
    statuses: dict[int, int] = field(default_factory=dict)
    broken: list[str] = field(default_factory=list)
    _stop: bool = False

    def __enter__(self) -> Load:
        self._pool = ThreadPoolExecutor(self.callers)
        self._futures = [self._pool.submit(self._call) for _ in range(self.callers)]
        until(lambda: self.statuses.get(200, 0) > self.callers, "the load runs")
        return self

    def __exit__(self, *_: object) -> None:
        self._stop = True
        for future in self._futures:
            future.result()
        self._pool.shutdown()

    @property
    def failed(self) -> int:
        """How many requests had no answer, or another one than 200."""
        return len(self.broken) + sum(count for status, count in self.statuses.items() if status != 200)

    def _call(self) -> None:
        data = json.dumps(self.body).encode()
        with httpx.Client(timeout=30, trust_env=False) as client:
            while not self._stop:
                try:
                    status = client.post(f"{self.url}/classify", content=data).status_code
                except httpx.TransportError as error:
                    self.broken.append(type(error).__name__)
                    continue
                self.statuses[status] = self.statuses.get(status, 0) + 1


def _program(name: str) -> str:
    return str(Path(sys.executable).with_name(name))


def _session(leader: int) -> list[int]:
    """Returns the processes of a session, of which Ray's are many."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if os.getsid(int(entry.name)) == leader:
                    found.append(int(entry.name))
            except ProcessLookupError:
                pass
    return found
