"""bertserve under Ray Serve: its settings and autoscaling policy, and replicas behind HAProxy on a Ray cluster of this machine.

Clients see the same as from one process, even while replicas start, stop and die.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection
from importlib import import_module
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import httpx
import pytest
import yaml
from pydantic import ValidationError

import slow
import tiny
from balanced import load
from bertserve.service.errors import SettingsError
from conftest import ROOT, metric, running, variables
from replica import free_ports, is_ready


@pytest.fixture(name="replica", scope="module")
def module() -> ModuleType:
    """Returns `bertserve.service.ray_serve`. Only this fixture imports it, because Ray takes half a second and emits warnings."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return import_module("bertserve.service.ray_serve")


@pytest.mark.parametrize("name", ["port", "workers", "tls_cert", "shutdown_timeout_s", "admin_key_file", "forwarded_allow_ips"])
def test_a_setting_that_ray_controls_is_refused(replica: ModuleType, name: str) -> None:
    value: Any = {"port": 1, "workers": 1, "shutdown_timeout_s": 1.0, "forwarded_allow_ips": ["127.0.0.1"]}.get(name, "a")
    with pytest.raises(ValidationError) as caught:
        replica.ReplicaSettings.model_validate({name: value, "models": "."})
    if name not in ("tls_cert", "config"):  # their errors say what is missing
        assert f"`{name}` has no effect" in str(caught.value) and replica.LEFT_TO_RAY[name] in str(caught.value)


def test_every_setting_left_to_ray_exists(replica: ModuleType) -> None:
    """An unknown name in the list would have no effect."""
    assert set(replica.LEFT_TO_RAY) <= set(replica.ReplicaSettings.model_fields)


def test_environment_variables_are_read_as_by_the_command(replica: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BERT_SERVE_PORT", "tcp://10.0.0.1:8000")
    monkeypatch.setenv("BERT_SERVE_MAX_INPUTS", "7")
    assert 7 == replica.ReplicaSettings.model_validate({"models": "."}).max_inputs
    monkeypatch.setenv("BERT_SERVE_MAX_INPUT", "7")
    with pytest.raises(SettingsError, match="did you mean BERT_SERVE_MAX_INPUTS"):
        replica.ReplicaSettings.model_validate({"models": "."})


def test_the_variables_of_the_image_are_ignored(replica: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Variables from the Dockerfile do not fail a deployment. The argument `host` does, and so does BERT_SERVE_WORKERS."""
    for line in re.findall(r"^ENV (.+)$", (ROOT / "Dockerfile").read_text(encoding="utf-8"), re.MULTILINE):
        for name, value in (variable.split("=", 1) for variable in line.split()):
            monkeypatch.setenv(name, value)
    assert "0.0.0.0" == os.environ["BERT_SERVE_HOST"]
    settings = replica.ReplicaSettings.model_validate({"models": "."})
    assert (set(), Path("/cache")) == (settings.model_fields_set & set(replica.LEFT_TO_RAY), settings.cache_dir)
    with pytest.raises(ValidationError, match="`host` has no effect"):
        replica.ReplicaSettings.model_validate({"models": ".", "host": "0.0.0.0"})
    monkeypatch.setenv("BERT_SERVE_WORKERS", "2")
    with pytest.raises(ValidationError, match="`workers` has no effect"):
        replica.ReplicaSettings.model_validate({"models": "."})


def test_a_replica_uses_each_setting_that_it_accepts(replica: ModuleType, models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A setting without an effect belongs in `LEFT_TO_RAY`. A deleted replica closes its tracer."""
    context = SimpleNamespace(get_assigned_resources=lambda: {"CPU": 1.0})
    monkeypatch.setattr(replica.ray, "get_runtime_context", lambda: context)
    monkeypatch.setattr(replica, "configure_logging", lambda _: None)
    used: set[str] = set()

    class Watched(replica.ReplicaSettings):  # type: ignore[misc, name-defined]
        def __getattribute__(self, name: str) -> Any:
            used.add(name)
            return super().__getattribute__(name)

    settings = Watched.model_validate({"models": models, "otlp_endpoint": "http://127.0.0.1:9"})
    used.clear()
    made = replica.Replica.func_or_class.__mro__[1](settings)  # our class, which Ray's class inherits from
    made.__serve_build_asgi_app__()
    # `config` is read with the settings, and `cache_dir` is only for the models in `model`
    assert {"config", "cache_dir"} == set(replica.ReplicaSettings.model_fields) - used - set(replica.LEFT_TO_RAY)
    closed: list[str] = []
    monkeypatch.setattr(type(made._state.tracer), "close", lambda _: closed.append("closed"))
    made.__del__()
    assert ["closed"] == closed


@pytest.mark.parametrize(
    ("queue_s", "busy", "enough"),
    [
        ([], [], 1),
        ([0, 0, 0], [0, 0, 0], 1),
        ([0, 0], [0.5, 0.5], 2),  # a total of 1.0 is more than the limit of 0.8 per replica
        ([0, 0, 0], [0.2, 0.3, 0.2], 1),
        ([0.4, 0.4], [1, 1], 3),  # a short queue, but no reserve
        ([2, 3], [1, 1], 5),  # 5 s of queued work, 1 s per replica
    ],
)
def test_enough_replicas_have_short_queues_and_a_reserve(replica: ModuleType, queue_s: list[float], busy: list[float], enough: int) -> None:
    metrics = {"queue_s": dict(enumerate(queue_s)), "busy": dict(enumerate(busy))} if queue_s else None
    assert (enough, {}) == replica.enough_replicas(SimpleNamespace(aggregated_metrics=metrics))


CLIENTS = 8
PATIENCE_S = 90.0
_OK = 200
_FAILED = 500
_TRIES = 3


def until(check: Callable[[], bool], what: str) -> None:
    """Waits until a condition is true.

    Raises:
        AssertionError: The condition is not true within 90 seconds.
    """
    end = time.monotonic() + PATIENCE_S
    while not check():
        if time.monotonic() > end:
            raise AssertionError(f"timed out while waiting until {what}.")
        time.sleep(0.1)


class Cluster:
    """A Ray cluster of this machine, on loopback only, that serves a folder of models. Each node has its own process session.

    Attributes:
        models: The folder of models.
        folder: Folder with the files of the nodes.
        url: Address of HAProxy, once an application runs.
        replica_port: First port of the replicas.
        nodes: The processes that started the nodes.
    """

    def __init__(self, models: Path) -> None:
        """Starts the head node."""
        self.models = models
        self.folder = Path(tempfile.mkdtemp(prefix="ray", dir="/tmp"))
        self.http, self._gcs, self._dashboard, self._client, stats, metrics, self.replica_port = free_ports(7)
        self.url = f"http://127.0.0.1:{self.http}"
        haproxy = self.folder / "haproxy"
        self._environment = {
            **{name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"},
            **variables(ROOT / "deploy/ray/ray.env"),
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
                "--num-cpus=2",
            )
        except BaseException:
            self.close()
            raise

    def put(self, config: dict[str, Any]) -> None:
        """Sends a configuration like `serve deploy`. Retries, because Ray can fail while its HAProxy restarts.

        Raises:
            AssertionError: Ray does not accept the configuration.
        """
        for _ in range(_TRIES):
            status, said = self._ask("PUT", json.dumps(config))
            if status < _FAILED:
                break
        if status != _OK:
            raise AssertionError(f"Ray Serve does not accept the configuration: {said[-1000:]}")

    def status(self) -> Any:
        """Returns the entry of the application `bertserve` in `serve status`."""
        applications = json.loads(self._ask("GET")[1])["applications"]
        return applications.get("bertserve", {"status": "NOT_STARTED"})

    def wait(self, route_prefix: str = "/") -> None:
        """Waits until the application runs and answers requests.

        Raises:
            AssertionError: It does not answer in time.
        """
        until(lambda: self.status()["status"] == "RUNNING", "the application runs")
        until(lambda: is_ready(self.url, f"{route_prefix.rstrip('/')}/health/ready"), "it answers")

    def deploy(
        self,
        *,
        wait: bool = True,
        route_prefix: str = "/",
        args: dict[str, Any] | None = None,
        scaling: dict[str, Any] | None = None,
        **deployment: Any,
    ) -> None:
        """Deploys or updates the application of deploy/ray/serve.yaml, with fixed replicas or, with `scaling`, changed autoscaling."""
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
        deployed |= {"graceful_shutdown_wait_loop_s": 0.2} | deployment  # instead of 2 s, which each stopping replica waits at least
        self.put(config)
        if wait:
            self.wait(route_prefix)

    def replicas(self) -> int:
        states = [replica["state"] for replica in self.status()["deployments"]["bertserve"]["replicas"]]
        return states.count("RUNNING")

    def worker_pids(self) -> list[int]:
        """Returns the process ids of the replicas that answer forty requests."""
        found: list[int] = []
        for _ in range(40):
            with httpx.Client(trust_env=False) as client:
                pid = client.get(f"{self.url}/info").json()["worker"]["pid"]
            if pid not in found:
                found.append(pid)
        return found

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


def _session(pid: int) -> int | None:
    """Returns the session of a process; Ray's processes stay in the session of the command that started them."""
    try:
        return os.getsid(pid)
    except ProcessLookupError:
        return None


SHOWN = ("content-type", "x-model", "x-truncated", "x-windows", "x-hf-warning", "retry-after")
LONG = "good film " * 200
REQUESTS: dict[str, tuple[str, str, bytes, dict[str, str]]] = {
    "a text": ("POST", "/classify", b'{"inputs": "good film"}', {}),
    "a list": ("POST", "/classify", b'{"inputs": ["good", "bad"], "parameters": {"top_k": 1}}', {}),
    "a model's path": ("POST", "/models/tiny", b'{"inputs": "good"}', {}),
    "a text that is cut": ("POST", "/classify", json.dumps({"inputs": LONG, "parameters": {"truncation": True}}).encode(), {}),
    "a wrong key": ("POST", "/classify", b'{"input": "good"}', {}),
    "no JSON": ("POST", "/classify", b"{", {}),
    "no path": ("GET", "/nowhere", b"", {}),
    "a wrong method": ("GET", "/classify", b"", {}),
    "a large body": ("POST", "/classify", b'{"inputs": "' + b"a" * 2_000_000 + b'"}', {}),
    "a wrong deadline": ("POST", "/classify", b'{"inputs": "good"}', {"x-request-timeout-ms": "soon"}),
    "readiness": ("GET", "/health/ready", b"", {}),
    "a query": ("POST", "/classify?a=1", b'{"inputs": "good"}', {}),
}


def full(test: Callable[..., None]) -> Callable[..., None]:
    return pytest.mark.full_grid(pytest.mark.serial(test))


@pytest.fixture(name="cluster", scope="module")
def ray_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Yields a Ray cluster with two replicas of a tiny model."""
    models = tmp_path_factory.mktemp("ray") / "models"
    tiny.bundle(models)
    cluster = Cluster(models)
    try:
        cluster.deploy(args={"max_body_bytes": 1_000_000})
        yield cluster
    finally:
        cluster.close()


def shown(answer: httpx.Response) -> Any:
    """Returns the status, the relevant headers and the body of a response, without the request id."""
    body = answer.json()
    if isinstance(body, dict):
        body.pop("request_id", None)
    return answer.status_code, {name: answer.headers.get(name) for name in SHOWN}, body


def test_replicas_answer_like_one_process(cluster: Cluster, tmp_path: Path) -> None:
    """Responses are equal to those of one process. Each has one request id, which is the caller's if the caller sent one."""
    with running(cluster.models, tmp_path / "log", "--max-body-bytes", "1000000") as served, httpx.Client(trust_env=False) as client:
        for name, (method, path, body, headers) in REQUESTS.items():
            one, many = (client.request(method, f"{url}{path}", content=body, headers=headers) for url in (served.url, cluster.url))
            assert shown(one) == shown(many), name
            assert 1 == len(many.headers.get_list("x-request-id")), name
            if many.status_code >= 400:
                assert many.headers["x-request-id"] == many.json()["request_id"], name
        named = client.post(f"{cluster.url}/classify", content=b'{"inputs": "good"}', headers={"x-request-id": "mine-1"})
        assert ["mine-1"] == named.headers.get_list("x-request-id")
    assert 2 == len(cluster.worker_pids())


@full
def test_a_rolling_update_fails_no_request(cluster: Cluster) -> None:
    before = cluster.worker_pids()
    with load(cluster.url, CLIENTS) as seen:
        cluster.deploy(args={"max_inputs": 100})
        until(lambda: not set(before) & set(cluster.worker_pids()), "both are replaced")
    assert {} == seen.failed


@full
def test_a_route_prefix_serves_the_same_paths(cluster: Cluster) -> None:
    """Paths that run models are handled before FastAPI, which only documents them."""
    cluster.deploy(route_prefix="/bert", num_replicas=2)
    with httpx.Client(base_url=f"{cluster.url}/bert", trust_env=False) as client:
        assert 200 == client.post("/classify", json={"inputs": "good"}).status_code
        assert 200 == client.post("/models/tiny", json={"inputs": "good"}).status_code
        assert 404 == client.get("/nowhere").status_code
        assert 200 == client.get("/docs").status_code


@full
def test_the_number_of_replicas_follows_the_load(cluster: Cluster) -> None:
    """The policy of deploy/ray/serve.yaml starts a second replica under load and stops it later. All requests succeed."""
    quick = {"upscale_delay_s": 1, "downscale_delay_s": 2, "look_back_period_s": 2, "metrics_interval_s": 0.5}
    cluster.deploy(args=_slow(cluster), scaling={"min_replicas": 1, "max_replicas": 2, **quick})
    until(lambda: _model(cluster) == "slow" and cluster.replicas() == 1, "one is there")
    with load(cluster.url, CLIENTS) as seen:
        until(lambda: cluster.replicas() == 2, "there is a second one")
    until(lambda: cluster.replicas() == 1, "one is enough")
    assert {} == seen.failed


@full
def test_a_full_queue_answers_429_and_a_disconnect_empties_it(cluster: Cluster) -> None:
    """The responses have `retry-after`. The queued work of a disconnected caller is dropped."""
    cluster.deploy(num_replicas=1, args=_slow(cluster))
    until(lambda: _model(cluster) == "slow", "it is there")
    body = json.dumps({"inputs": ["good"] * 90}).encode()
    with socket.create_connection(("127.0.0.1", cluster.http)) as leaving, ThreadPoolExecutor(8) as pool:
        leaving.sendall(b"POST /classify HTTP/1.1\r\nhost: a\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
        until(lambda: _queued(cluster) > 0, "it is queued")
        answers = list(pool.map(lambda _: httpx.post(f"{cluster.url}/classify", content=body, timeout=60, trust_env=False), range(8)))
    refused = [answer for answer in answers if answer.status_code == 429]
    assert refused
    assert all(int(answer.headers["retry-after"]) >= 1 for answer in refused)
    until(lambda: _queued(cluster) == 0, "nothing is left")


def _slow(cluster: Cluster) -> dict[str, Any]:
    """Returns settings for a replica with long runs and a short queue."""
    models = cluster.models.with_name("slow")
    if not models.exists():
        slow.bundle(models)
    return {"models": str(models), "max_queue_tokens": 600, "max_batch_tokens": 600}


def _model(cluster: Cluster) -> str:
    answer = httpx.post(f"{cluster.url}/classify", json={"inputs": "good"}, trust_env=False)
    return answer.headers.get("x-model", "")


def _queued(cluster: Cluster) -> float:
    return metric(httpx.get(f"{cluster.url}/metrics", trust_env=False).text, "queue_tokens")
