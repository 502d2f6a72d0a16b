"""bertserve under Ray Serve behind HAProxy: clients see the same as from one process, even while replicas start, stop and die."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

import slow
import tiny
from cluster import ROOT, Cluster, Load
from conftest import metric, running
from ray_cluster import until
from replica import free_ports

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
def test_prometheus_scrapes_every_replica(cluster: Cluster, tmp_path: Path) -> None:
    program = shutil.which("prometheus")
    if program is None:
        pytest.skip("prometheus is not installed (Debian: apt-get install prometheus)")
    until(lambda: len(cluster.worker_pids()) == 2, "two answer")
    config = yaml.safe_load((ROOT / "deploy/ray/prometheus.yml").read_text(encoding="utf-8"))
    config["global"]["scrape_interval"] = "1s"
    (targets,) = config["scrape_configs"][0]["static_configs"]
    assert [f"127.0.0.1:{30000 + i}" for i in range(4)] == targets["targets"]
    targets["targets"] = [
        f"127.0.0.1:{cluster.replica_port + i}" for i in range(30)
    ]  # the ports of earlier replicas are not reused immediately
    (tmp_path / "prometheus.yml").write_text(yaml.safe_dump(config))
    (port,) = free_ports(1)
    flags = [f"--config.file={tmp_path}/prometheus.yml", f"--storage.tsdb.path={tmp_path}/data", f"--web.listen-address=127.0.0.1:{port}"]
    with (tmp_path / "log").open("wb") as log, subprocess.Popen([program, *flags], stderr=log) as prometheus:
        try:
            until(lambda: _ready(port) == 2, "both are scraped")
        finally:
            prometheus.terminate()


@full
def test_a_chunked_body_that_is_too_large_is_refused(cluster: Cluster) -> None:
    with httpx.Client(trust_env=False) as client:
        answer = client.post(f"{cluster.url}/classify", content=(b" " * 65536 for _ in range(40)))
    assert (413, "too_large") == (answer.status_code, answer.json()["error_type"])


@full
def test_a_setting_that_ray_controls_fails_the_deployment(cluster: Cluster) -> None:
    cluster.deploy(wait=False, args={"workers": 2})
    until(lambda: "num_replicas" in str(cluster.status()["message"]), "it is said")
    assert 200 == httpx.post(f"{cluster.url}/classify", json={"inputs": "good"}, trust_env=False).status_code


@full
def test_a_rolling_update_fails_no_request(cluster: Cluster) -> None:
    before = cluster.worker_pids()
    with Load(cluster.url) as load:
        cluster.deploy(args={"max_inputs": 100})
        until(lambda: not set(before) & set(cluster.worker_pids()), "both are replaced")
    assert 0 == load.failed, (load.statuses, load.broken)


@full
def test_scaling_up_and_down_fails_no_request(cluster: Cluster) -> None:
    cluster.add_node(cpus=2)
    cluster.deploy(num_replicas=1)
    with Load(cluster.url) as load:
        cluster.deploy(num_replicas=3)
        until(lambda: len(cluster.worker_pids()) == 3, "three answer")
        cluster.deploy(num_replicas=1)
        until(lambda: cluster.replicas() == 1, "one is left")
        time.sleep(1)
    assert 0 == load.failed, (load.statuses, load.broken)


@full
def test_a_killed_replica_is_replaced(cluster: Cluster) -> None:
    """Its running requests and a few more fail. The other replica answers until there are two again."""
    cluster.deploy(num_replicas=2)
    until(lambda: len(cluster.worker_pids()) == 2, "two answer")
    victim = cluster.worker_pids()[0]
    with Load(cluster.url) as load:
        os.kill(victim, signal.SIGKILL)
        until(lambda: len(set(cluster.worker_pids()) - {victim}) == 2, "another one answers")
        answered = load.statuses[200]
        until(lambda: load.statuses[200] > answered + 100, "the load goes on")
    print(f"kill -9 of a replica: {load.failed} of {sum(load.statuses.values())} failed: {load.statuses} {load.broken}")
    assert load.failed < 200, (load.statuses, load.broken)


@full
def test_the_service_survives_a_killed_raylet(cluster: Cluster) -> None:
    node = cluster.nodes[1] if len(cluster.nodes) > 1 else cluster.add_node(cpus=2)
    cluster.deploy(num_replicas=4)
    until(lambda: len(cluster.worker_pids()) == 4, "four answer")
    with Load(cluster.url) as load:
        cluster.kill(node)
        until(lambda: cluster.replicas() >= 2, "the others run")
        answered = load.statuses[200]
        until(lambda: load.statuses[200] > answered + 100, "the load goes on")
    print(f"kill -9 of a raylet with its replicas: {load.failed} of {sum(load.statuses.values())} failed: {load.statuses} {load.broken}")
    assert load.failed < 200, (load.statuses, load.broken)


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
    with Load(cluster.url) as load:
        until(lambda: cluster.replicas() == 2, "there is a second one")
    with Load(cluster.url, callers=1, pause_s=0.5) as little:
        until(lambda: cluster.replicas() == 1, "one is enough")
    assert (0, 0) == (load.failed, little.failed), (load, little)


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


def _ready(port: int) -> int:
    """Returns the number of ready replicas in Prometheus, or 0 while Prometheus starts."""
    query = {"query": "count by (instance) (bertserve_ready_workers == 1)"}
    try:
        answer = httpx.get(f"http://127.0.0.1:{port}/api/v1/query", params=query, trust_env=False)
    except httpx.TransportError:
        return 0
    return len(answer.json()["data"]["result"]) if answer.status_code == 200 else 0


def _model(cluster: Cluster) -> str:
    answer = httpx.post(f"{cluster.url}/classify", json={"inputs": "good"}, trust_env=False)
    return answer.headers.get("x-model", "")


def _queued(cluster: Cluster) -> float:
    return metric(httpx.get(f"{cluster.url}/metrics", trust_env=False).text, "queue_tokens")
