"""bertserve under Ray Serve: its settings and autoscaling policy, and replicas behind HAProxy on a Ray cluster of this machine.

Clients see the same as from one process, even while replicas start, stop and die.
"""

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
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import httpx
import pytest
import yaml

from bertserve.service.errors import SettingsError
from support import ROOT, metric, slow, tiny, variables, wait_until
from support.balanced import load
from support.http_messages import post
from support.replica import free_ports, is_ready, running


@pytest.fixture(name="replica", scope="module")
def module() -> ModuleType:
    """Returns `bertserve.service.ray_serve`. Only this fixture imports it, because Ray takes half a second and emits warnings."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return import_module("bertserve.service.ray_serve")


@pytest.mark.parametrize(
    ("arguments", "replacement"),
    [
        ({"port": 1}, "http_options"),
        ({"workers": 1}, "num_replicas"),
        ({"tls_cert": "a", "tls_key": "a"}, "proxy"),
        ({"shutdown_timeout_s": 1.0}, "graceful_shutdown_timeout_s"),
        ({"admin_key_file": "a"}, "configuration"),
        ({"forwarded_allow_ips": ["127.0.0.1"]}, "proxy"),
    ],
)
def test_a_setting_that_ray_controls_is_refused(replica: ModuleType, arguments: dict[str, Any], replacement: str) -> None:
    with pytest.raises(SettingsError, match=rf"`{next(iter(arguments))}`.*{replacement}"):
        replica.read_settings({**arguments, "models": "."})


def test_environment_variables_are_read_as_by_the_command(replica: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BERT_SERVE_PORT", "tcp://10.0.0.1:8000")
    monkeypatch.setenv("BERT_SERVE_MAX_INPUTS", "7")
    assert replica.read_settings({"models": "."}).max_inputs == 7
    monkeypatch.setenv("BERT_SERVE_MAX_INPUT", "7")
    with pytest.raises(SettingsError, match="BERT_SERVE_MAX_INPUTS"):
        replica.read_settings({"models": "."})


def test_the_variables_of_the_image_are_ignored(replica: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Variables from the Dockerfile do not fail a deployment. The argument `host` does, and so does BERT_SERVE_WORKERS."""
    for line in re.findall(r"^ENV (.+)$", (ROOT / "Dockerfile").read_text(encoding="utf-8"), re.MULTILINE):
        for name, value in (variable.split("=", 1) for variable in line.split()):
            monkeypatch.setenv(name, value)
    assert os.environ["BERT_SERVE_HOST"] == "0.0.0.0"
    settings = replica.read_settings({"models": "."})
    assert (settings.model_fields_set & set(replica.RAY_REPLACEMENTS), settings.cache_dir) == (set(), Path("/cache"))
    with pytest.raises(SettingsError, match="`host`"):
        replica.read_settings({"models": ".", "host": "0.0.0.0"})
    monkeypatch.setenv("BERT_SERVE_WORKERS", "2")
    with pytest.raises(SettingsError, match="`workers`"):
        replica.read_settings({"models": "."})


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
    assert replica.autoscaling_policy(SimpleNamespace(aggregated_metrics=metrics)) == (enough, {})


@pytest.mark.usefixtures("logging_of_pytest")
def test_only_a_replica_that_failed_ends(replica: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler, exits = SimpleNamespace(ready=False, failure=None), list[int]()
    monkeypatch.setattr(replica, "build", lambda *_: SimpleNamespace(scheduler=scheduler, tracer=None))
    monkeypatch.setattr(replica.ray, "get_runtime_context", lambda: SimpleNamespace(get_assigned_resources=dict))
    monkeypatch.setattr(os, "_exit", exits.append)
    (plain_class,) = replica.Replica.func_or_class.__bases__[:1]  # without Ray's wrapper, whose end is a coroutine
    stopping = plain_class(replica.read_settings({"models": "."}))
    stopping.check_health()
    assert exits == []
    scheduler.failure = "the GPU failed"
    stopping.check_health()
    assert exits == [1]


CLIENTS = 8
PATIENCE_S = 90.0


class Cluster:
    """A Ray node of this machine, on loopback only, that serves a folder of models. Its processes are one session."""

    def __init__(self, models: Path) -> None:
        self.models = models
        self.folder = Path(tempfile.mkdtemp(prefix="ray", dir="/tmp"))
        self.http, gcs, self._dashboard, client, stats, metrics, replica = free_ports(7)
        self.url = f"http://127.0.0.1:{self.http}"
        haproxy = self.folder / "haproxy"
        environment = {
            **{name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"},
            **variables(ROOT / "deploy/ray/ray.env"),
            "PYTHONPATH": str(Path(__file__).resolve().parents[2]),
            "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": str(haproxy / "haproxy.cfg"),
            "RAY_SERVE_HAPROXY_SOCKET_PATH": str(haproxy / "admin.sock"),
            "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": str(haproxy),
            "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": str(haproxy / "server-state"),
            "RAY_SERVE_HAPROXY_STATS_PORT": str(stats),
            "RAY_SERVE_HAPROXY_METRICS_PORT": str(metrics),
            "RAY_SERVE_DIRECT_INGRESS_MIN_HTTP_PORT": str(replica),
            "RAY_SERVE_DIRECT_INGRESS_MAX_HTTP_PORT": str(replica + 100),
            "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "2",  # the default of 30 seconds is for external load balancers
            "RAY_AUTH_MODE": "disabled",  # a token would be written to the home folder
        }
        program = Path(sys.executable).with_name("ray")
        ports = [f"--port={gcs}", f"--dashboard-port={self._dashboard}", f"--ray-client-server-port={client}"]
        command = [program, "start", "--block", "--head", *ports, f"--temp-dir={self.folder / 'ray'}", "--num-cpus=2"]
        log = self.folder / "node.log"
        with log.open("wb") as file:
            self.node = subprocess.Popen(
                [*map(str, command), "--node-ip-address=127.0.0.1", "--disable-usage-stats"],
                stdout=file,
                stderr=file,
                env=environment,
                start_new_session=True,
            )
        try:
            wait_until(lambda: b"Ray runtime started" in log.read_bytes(), PATIENCE_S)
        except BaseException:
            self.close()
            raise

    def status(self) -> Any:
        return self._ask("GET").json()["applications"].get("bertserve", {"status": "NOT_STARTED"})

    def deploy(
        self, *, route_prefix: str = "/", args: dict[str, Any] | None = None, scaling: dict[str, Any] | None = None, **deployment: Any
    ) -> None:
        """Deploys or updates the application of deploy/ray/serve.yaml, with fixed replicas or, with `scaling`, changed autoscaling."""
        config = yaml.safe_load((ROOT / "deploy/ray/serve.yaml").read_text(encoding="utf-8"))
        config["http_options"] |= {"port": self.http}
        (application,) = config["applications"]
        application |= {"route_prefix": route_prefix, "args": {"models": str(self.models)} | (args or {})}
        (target,) = application["deployments"]
        if scaling is None:
            del target["autoscaling_config"]
            target["num_replicas"] = 2
        else:
            target["autoscaling_config"] |= scaling
        target |= {"graceful_shutdown_wait_loop_s": 0.2} | deployment  # instead of 2 s, which each stopping replica waits at least
        for _ in range(3):  # Ray can fail while its HAProxy restarts
            answer = self._ask("PUT", json=config)
            if answer.status_code < 500:
                break
        assert answer.status_code == 200, answer.text[-1000:]
        wait_until(lambda: self.status()["status"] == "RUNNING", PATIENCE_S)
        wait_until(lambda: is_ready(self.url, f"{route_prefix.rstrip('/')}/health/ready"), PATIENCE_S)

    def replicas(self) -> int:
        states = [replica["state"] for replica in self.status()["deployments"]["bertserve"]["replicas"]]
        return states.count("RUNNING")

    def worker_pids(self) -> list[int]:
        """Returns the process ids of the replicas that answer forty requests."""
        return list({httpx.get(f"{self.url}/info", trust_env=False).json()["worker"]["pid"] for _ in range(40)})

    def close(self) -> None:
        """Kills all processes of the node's session, because Ray's own shutdown takes about 15 seconds."""
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(ProcessLookupError, ValueError):
                if os.getsid(int(entry.name)) == self.node.pid:
                    os.kill(int(entry.name), signal.SIGKILL)
        self.node.wait()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _ask(self, method: str, **options: Any) -> httpx.Response:
        url = f"http://127.0.0.1:{self._dashboard}/api/serve/applications/"
        return httpx.request(method, url, timeout=PATIENCE_S, trust_env=False, **options)


HEADERS = ("content-type", "x-model", "x-truncated", "x-windows", "x-hf-warning", "retry-after")
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


def response_facts(answer: httpx.Response) -> Any:
    """Returns the status, the relevant headers and the body of a response, without the request id."""
    body = answer.json()
    if isinstance(body, dict):
        body.pop("request_id", None)
    return answer.status_code, {name: answer.headers.get(name) for name in HEADERS}, body


@full
def test_replicas_answer_like_one_process(cluster: Cluster, tmp_path: Path) -> None:
    with running(cluster.models, tmp_path / "log", "--max-body-bytes", "1000000") as process, httpx.Client(trust_env=False) as client:
        for name, (method, path, body, headers) in REQUESTS.items():
            one, many = (client.request(method, f"{url}{path}", content=body, headers=headers) for url in (process.url, cluster.url))
            assert response_facts(many) == response_facts(one), name
            assert len(many.headers.get_list("x-request-id")) == 1, name
            if many.status_code >= 400:
                assert many.json()["request_id"] == many.headers["x-request-id"], name
        answer = client.post(f"{cluster.url}/classify", content=b'{"inputs": "good"}', headers={"x-request-id": "mine-1"})
        assert answer.headers.get_list("x-request-id") == ["mine-1"]
    assert len(cluster.worker_pids()) == 2


@full
def test_a_rolling_update_fails_no_request(cluster: Cluster) -> None:
    before = cluster.worker_pids()
    with load(cluster.url, CLIENTS) as result:
        cluster.deploy(args={"max_inputs": 100})
        wait_until(lambda: not set(before) & set(cluster.worker_pids()), PATIENCE_S)
    assert result.failed == {}


@full
def test_a_route_prefix_serves_the_same_paths(cluster: Cluster) -> None:
    """Paths that run models are handled before FastAPI, which only documents them."""
    cluster.deploy(route_prefix="/bert", num_replicas=2)
    with httpx.Client(base_url=f"{cluster.url}/bert", trust_env=False) as client:
        assert client.post("/classify", json={"inputs": "good"}).status_code == 200
        assert client.post("/models/tiny", json={"inputs": "good"}).status_code == 200
        assert client.get("/nowhere").status_code == 404
        assert client.get("/docs").status_code == 200


@full
def test_the_number_of_replicas_follows_the_load(cluster: Cluster) -> None:
    """The policy of deploy/ray/serve.yaml starts a second replica under load and stops it later. All requests succeed."""
    quick = {"upscale_delay_s": 1, "downscale_delay_s": 2, "look_back_period_s": 2, "metrics_interval_s": 0.5}
    cluster.deploy(args=_slow(cluster), scaling={"min_replicas": 1, "max_replicas": 2, **quick})
    wait_until(lambda: _model(cluster) == "slow" and cluster.replicas() == 1, PATIENCE_S)
    with load(cluster.url, CLIENTS) as result:
        wait_until(lambda: cluster.replicas() == 2, PATIENCE_S)
    wait_until(lambda: cluster.replicas() == 1, PATIENCE_S)
    assert result.failed == {}


@full
def test_a_full_queue_answers_429_and_a_disconnect_empties_it(cluster: Cluster) -> None:
    """The responses have `retry-after`. The queued work of a disconnected caller is dropped."""
    cluster.deploy(num_replicas=1, args=_slow(cluster))
    wait_until(lambda: _model(cluster) == "slow", PATIENCE_S)
    body = json.dumps({"inputs": ["good"] * 90}).encode()
    with socket.create_connection(("127.0.0.1", cluster.http)) as leaving, ThreadPoolExecutor(8) as pool:
        leaving.sendall(post(body=body))
        wait_until(lambda: _queued(cluster) > 0, PATIENCE_S)
        answers = list(pool.map(lambda _: httpx.post(f"{cluster.url}/classify", content=body, timeout=60, trust_env=False), range(8)))
    refusals = [answer for answer in answers if answer.status_code == 429]
    assert refusals
    assert all(int(answer.headers["retry-after"]) >= 1 for answer in refusals)
    wait_until(lambda: _queued(cluster) == 0, PATIENCE_S)


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
