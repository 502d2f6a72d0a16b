"""Several workers on one port: divided limits, one metrics page, replacement, shutdown, and failed starts."""

import json
import os
import re
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from bertserve.service.build import build
from bertserve.service.settings import Settings
from support import metric, slow, tiny, wait_until
from support.app_client import call_once, error_of
from support.replica import BERT_SERVE, ServeProcess, running

pytestmark = pytest.mark.serial

TWO = ("--workers", "2", "--threads", "2")


@contextmanager
def clients_of(server: Any, count: int, *, workers: int = 1) -> Iterator[list[httpx.Client]]:
    """Yields clients with a connection each: at least `count` of them, and enough for connections to `workers` workers."""
    clients: list[httpx.Client] = []
    workers_seen: set[int] = set()
    with ExitStack() as stack:
        while len(clients) < count or len(workers_seen) < workers:
            clients.append(stack.enter_context(httpx.Client(base_url=server.url, timeout=30, trust_env=False)))
            workers_seen.add(worker_of(clients[-1])["index"])
        yield clients


def worker_of(client: httpx.Client) -> dict[str, int]:
    """Returns the `worker` entry of `/info`, from the worker that the client is connected to."""
    return client.get("/info").json()["worker"]


def workers_of(server: Any, count: int = 2) -> dict[int, int]:
    """Returns the process id of each of `count` workers by index."""
    with clients_of(server, 8, workers=count) as clients:
        return {worker["index"]: worker["pid"] for worker in map(worker_of, clients)}


def count_answers(client: httpx.Client) -> float:
    """Returns how many requests the metrics page counts as answered with 200."""
    return metric(client.get("/metrics").text, "requests_total", status="200")


def test_info_has_the_totals_and_the_share_of_the_worker(models: Path) -> None:
    settings = Settings(models=models, workers=2, threads=3, max_batch_tokens=64, max_queue_tokens=1001)
    page = call_once(build(settings, index=1), "GET", "/info").json()

    assert page["limits"]["threads"] == 3
    assert page["limits"]["max_queue_tokens"] == 1001
    assert page["worker"] == {"index": 1, "workers": 2, "pid": os.getpid(), "max_queue_tokens": 500, "threads": 1}


@pytest.mark.parametrize("threads", [None, 2])
def test_every_worker_has_a_thread(models: Path, threads: int | None) -> None:
    """The rule is the same for a given number of threads and for the default."""
    settings = Settings(models=models, workers=250, threads=threads, max_batch_tokens=64)
    states = [build(settings, index=index) for index in (0, 249)]

    assert [(service.total_threads, service.scheduler.queue.threads) for service in states] == [(250, 1)] * 2


def test_all_workers_answer_and_each_metrics_page_counts_all_requests(models: Path, tmp_path: Path) -> None:
    with running(models, tmp_path / "log", *TWO) as server, clients_of(server, 8, workers=2) as clients:
        for client in clients:
            assert client.post("/classify", json={"inputs": ["good", "bad"]}).status_code == 200
        wait_until(lambda: {count_answers(client) for client in clients} == {float(len(clients))})  # counted after it was sent
        page = clients[0].get("/metrics").text
        assert 'bertserve_model_info{model="tiny"' in page
        assert "pid=" not in page
        assert [line for line in page.splitlines() if line.startswith("bertserve_queue_items")] == ["bertserve_queue_items 0.0"]
        assert {"bertserve_workers 2.0", "bertserve_threads 2.0", "bertserve_ready_workers 2.0"} <= set(page.splitlines())
        assert re.findall(r'^process_resident_memory_bytes\{worker="(\d)"\} \d', page, re.MULTILINE) == ["0", "1"]
    assert server.lines() == []


def test_a_worker_that_dies_is_replaced_and_its_counts_are_kept(models: Path, tmp_path: Path) -> None:
    """Log lines of requests name the worker, whatever its process is."""
    with running(models, tmp_path / "log", *TWO, "--access-log", "--log-format", "json") as server:
        before = workers_of(server)
        with clients_of(server, 8) as clients:
            for client in clients:
                client.post("/classify", json={"inputs": "good"})
            wait_until(lambda: count_answers(clients[0]) == 8.0)  # each answer is counted after it was sent
        os.kill(before[0], signal.SIGKILL)
        wait_until(lambda: f"worker 0 (process {before[0]}) was killed by signal 9" in server.log.read_text())
        with clients_of(server, 1) as [client]:
            assert client.post("/classify", json={"inputs": "good"}).status_code == 200
            wait_until(lambda: count_answers(client) == 9.0)
        wait_until(lambda: "worker 0 restarted as process" in server.log.read_text())
        after = workers_of(server)
        assert set(after) == {0, 1}
        assert after[1] == before[1]
        assert after[0] != before[0]
        with clients_of(server, 4) as clients:
            assert [client.post("/classify", json={"inputs": "good"}).status_code for client in clients] == [200] * 4
            wait_until(lambda: {count_answers(client) for client in clients} == {13.0})
            assert 'bertserve_workers_replaced_total{reason="ended"} 1.0' in clients[0].get("/metrics").text
    lines = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
    indices = {(line["worker"], line["pid"]) for line in lines if line["logger"] == "bertserve.access"}
    assert indices == {*before.items(), *after.items()}


def test_the_log_has_the_exit_code_of_a_worker(models: Path, tmp_path: Path) -> None:
    """Here each worker ends as if its inference threads had failed. A bundle that is broken since the start does not affect its successor."""
    patch = "from bertserve.service.server import serve; work = serve.serve_models; serve.serve_models = lambda *a, **b: work(*a, **b) or 1"
    with running(models, tmp_path / "log", *TWO, program=f"{patch}; {BERT_SERVE}") as server:
        pid = workers_of(server)[0]
        (tiny.bundle(models, "later") / "tokenizer.json").write_text("{}")
        os.kill(pid, signal.SIGTERM)
        wait_until(lambda: f"worker 0 (process {pid}) ended with exit code 1" in server.log.read_text())
        wait_until(lambda: "worker 0 restarted as process" in server.log.read_text())


IMPATIENT = f"from bertserve.service.server import workers; workers.HUNG_S = 5; {BERT_SERVE}"


@pytest.mark.full_grid
def test_a_worker_that_hangs_is_replaced(models: Path, tmp_path: Path) -> None:
    with running(models, tmp_path / "log", *TWO, program=IMPATIENT) as server:
        before = workers_of(server)
        os.kill(before[0], signal.SIGSTOP)  # a stopped process cannot even handle SIGTERM
        wait_until(lambda: "worker 0 restarted as process" in server.log.read_text())
        after = workers_of(server)
        assert after[0] != before[0]
        assert after[1] == before[1]
        assert f"worker 0 (process {before[0]}) hangs: its event loop has not run for 5 s" in server.log.read_text()
        with clients_of(server, 4) as clients:
            assert 'bertserve_workers_replaced_total{reason="hung"} 1.0' in clients[0].get("/metrics").text
            assert [client.post("/classify", json={"inputs": "good"}).status_code for client in clients] == [200] * 4


@pytest.mark.full_grid
def test_a_worker_whose_threads_hang_is_replaced(tmp_path: Path) -> None:
    """A graph really hangs: the watchdog fails its request, then the worker ends. The other worker answers meanwhile."""
    models = slow.hanging_bundle(tmp_path / "models").parent
    with running(models, tmp_path / "log", *TWO) as server, clients_of(server, 4, workers=2) as clients, ThreadPoolExecutor(1) as pool:
        before = workers_of(server)
        hanging_client = clients[0]
        working_client = next(client for client in clients if worker_of(client) != worker_of(hanging_client))
        pending, answers = pool.submit(hanging_client.post, "/classify", json={"inputs": "dull"}), []
        while "restarted as process" not in server.log.read_text():
            answers.append(working_client.post("/classify", json={"inputs": "good"}).status_code)
            time.sleep(0.05)
        assert set(answers) == {200}
        error_of(pending.result(), 500, "engine")
        assert len(set(workers_of(server).values()) - set(before.values())) == 1
        assert "hung_runs_total 1.0" in working_client.get("/metrics").text
    assert "ended with exit code 1" in server.log.read_text()
    assert "dull" not in server.log.read_text()


@pytest.mark.full_grid
def test_a_process_whose_threads_hang_ends(tmp_path: Path) -> None:
    """A supervisor can then start another one."""
    with running(slow.hanging_bundle(tmp_path / "models").parent, tmp_path / "log", "--threads", "1") as server:
        error_of(httpx.post(f"{server.url}/classify", json={"inputs": "dull"}, timeout=60, trust_env=False), 500, "engine")
        assert server.process.wait(30) == 1


@pytest.mark.full_grid
def test_a_worker_that_drains_is_not_killed(tmp_path: Path) -> None:
    """It answers its open requests, although this takes longer than the limit for a worker that hangs; then another one starts."""
    slow.bundle(tmp_path / "slow")
    with (
        running(tmp_path / "slow", tmp_path / "log", *TWO, "--timeout-ms", "120000", program=IMPATIENT) as server,
        clients_of(server, 2, workers=2) as clients,
        ThreadPoolExecutor(len(clients)) as pool,
    ):
        pid = worker_of(clients[0])["pid"]
        open_requests = [pool.submit(client.post, "/classify", json={"inputs": ["good"] * 120}) for client in clients]
        wait_until(lambda: waiting(server) > 120 * (len(clients) - 1))  # the last one is accepted too
        os.kill(pid, signal.SIGTERM)
        assert {future.result().status_code for future in open_requests} == {200}
        wait_until(lambda: "restarted as process" in server.log.read_text())
    assert "hangs" not in server.log.read_text()


def test_the_others_serve_while_a_worker_cannot_be_replaced(models: Path, tmp_path: Path) -> None:
    """The start is repeated until the models can be loaded again. The service ends only if no worker is left."""
    tokenizer = (models / "tiny/tokenizer.json").read_bytes()
    program = f"from bertserve.service.server import workers; workers.RETRY_S = 0.5; {BERT_SERVE}"
    with running(models, tmp_path / "log", *TWO, program=program) as server:
        before = workers_of(server)
        (models / "tiny/tokenizer.json").unlink()
        os.kill(before[0], signal.SIGKILL)
        wait_until(lambda: server.log.read_text().count("cannot start: ") >= 2)
        assert workers_of(server, 1) == {1: before[1]}
        with clients_of(server, 1) as [client]:
            assert client.post("/classify", json={"inputs": "good"}).status_code == 200
            assert {"bertserve_workers 2.0", "bertserve_ready_workers 1.0"} <= set(client.get("/metrics").text.splitlines())
        (models / "tiny/tokenizer.json").write_bytes(tokenizer)
        wait_until(lambda: "worker 0 restarted as process" in server.log.read_text())
        after = workers_of(server)
        assert set(after) == {0, 1}
        assert after[1] == before[1]
        (models / "tiny/tokenizer.json").unlink()
        for worker in after.values():
            os.kill(worker, signal.SIGKILL)
        assert server.process.wait(30) == 1
        assert "tokenizer.json" in server.log.read_text().splitlines()[-1]


def test_a_signal_stops_the_service_while_a_worker_cannot_be_replaced(models: Path, tmp_path: Path) -> None:
    program = f"from bertserve.service.server import workers; workers.RETRY_S = 600; {BERT_SERVE}"
    with running(models, tmp_path / "log", *TWO, program=program) as server:
        (models / "tiny/tokenizer.json").unlink()
        os.kill(workers_of(server)[0], signal.SIGKILL)
        wait_until(lambda: "cannot start: " in server.log.read_text())
        assert server.stop() == 0


@pytest.mark.full_grid
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_drains_all_workers(tmp_path: Path, number: int) -> None:
    """Both workers answer the requests that they have accepted, even if they get the signal too. The exit code is 0."""
    slow.bundle(tmp_path / "slow")
    with (
        running(tmp_path / "slow", tmp_path / "log", *TWO) as server,
        clients_of(server, 4, workers=2) as clients,
        ThreadPoolExecutor(len(clients)) as pool,
    ):
        workers = workers_of(server)
        answers = [pool.submit(client.post, "/classify", json={"inputs": ["good"] * 60}) for client in clients]
        wait_until(lambda: waiting(server) > 60 * (len(clients) - 1))  # the last one is accepted too
        server.process.send_signal(number)
        for pid in workers.values():
            os.kill(pid, number)  # like a terminal or systemd, which sends it to the whole group
        assert {(future.result().status_code, len(future.result().json())) for future in answers} == {(200, 60)}
        assert server.process.wait(10) == 0
    assert server.lines() == []


def waiting(server: ServeProcess) -> float:
    return metric(httpx.get(f"{server.url}/metrics", trust_env=False).text, "queue_items")


def test_no_worker_outlives_its_parent_process(models: Path, tmp_path: Path) -> None:
    """Neither does the folder of their metrics."""
    with running(models, tmp_path / "log", *TWO) as server:
        maps = Path(f"/proc/{workers_of(server)[0]}/maps").read_text()
        [folder] = {Path(folder) for folder in re.findall(r"(/\S+/bert-serve-\w+)/", maps)}
        assert folder.is_dir()
        server.process.kill()
        ThreadPoolExecutor(1).submit(server.process.stdout.read).result(15)  # ends when the last process has closed its stdout
        with pytest.raises(httpx.TransportError):
            httpx.get(server.url, trust_env=False)
    assert not folder.exists()
