"""Several workers on one port: what is divided, one metrics page, restarts, the end, and starts that fail."""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

import slow
import tiny
from application import play
from bertserve.service.errors import SettingsError, StartError
from bertserve.service.process import serve
from bertserve.service.process.connections import ConnectionLimits, Connections
from bertserve.service.process.preparation import prepare
from bertserve.service.process.serve import PREFIX
from bertserve.service.process.server import ABSENT, BalancedListener, Worker, configure, shared_counts
from bertserve.service.process.supervisor import Supervisor, _Worker
from bertserve.service.scheduling.request_queue import RequestQueue
from bertserve.service.scheduling.scheduler import Scheduler
from bertserve.service.serving.build import build
from bertserve.service.serving.workers import WorkerContext
from bertserve.service.settings import Settings, parse
from conftest import metric, wait_until

pytestmark = pytest.mark.serial

Serve = Callable[..., Any]
TWO = ("--workers", "2", "--threads", "2")
LIMITS = ConnectionLimits(max_connections=8, header_timeout_s=1, max_header_bytes=1024, body_timeout_s=1, min_body_rate=1)


@contextmanager
def clients_of(served: Any, count: int, *, workers: int = 1) -> Iterator[list[httpx.Client]]:
    """Opens clients with a connection each: `count` of them, and more until so many workers have one."""
    clients: list[httpx.Client] = []
    reached: set[int] = set()
    with ExitStack() as stack:
        while len(clients) < count or len(reached) < workers:
            clients.append(stack.enter_context(httpx.Client(base_url=served.url, timeout=30, trust_env=False)))
            reached.add(worker_of(clients[-1])["index"])
        yield clients


def worker_of(client: httpx.Client) -> dict[str, int]:
    """Returns what the worker that a client is connected to says of itself."""
    worker: dict[str, int] = client.get("/info").json()["worker"]
    return worker


def workers_of(served: Any, count: int = 2) -> dict[int, int]:
    """Returns the process id of each of `count` workers by index."""
    with clients_of(served, 8, workers=count) as clients:
        return {worker["index"]: worker["pid"] for worker in map(worker_of, clients)}


def answered(client: httpx.Client) -> float:
    """Returns how many requests the metrics page counts as answered with 200."""
    return metric(client.get("/metrics").text, "requests_total", status="200")


@pytest.mark.parametrize(("total", "workers", "shares"), [(8, 2, [4, 4]), (3, 2, [2, 1]), (7, 4, [2, 2, 2, 1]), (5, 1, [5])])
def test_a_total_is_divided_among_the_workers(total: int, workers: int, shares: list[int]) -> None:
    assert shares == [WorkerContext(index, workers).share(total) for index in range(workers)]


def test_info_has_totals_and_the_workers_share(models: Path) -> None:
    """`/info` says what is allowed in total, and which worker with which share answers."""

    async def info(client: httpx.AsyncClient) -> Any:
        return (await client.get("/info")).json()

    settings = Settings(models=models, workers=2, threads=3, max_batch_tokens=64, max_queue_tokens=1001)
    said = play(build(settings, WorkerContext(1, 2)), info)

    assert (3, 1001) == (said["limits"]["threads"], said["limits"]["max_queue_tokens"])
    assert {"index": 1, "workers": 2, "pid": os.getpid(), "max_queue_tokens": 500, "threads": 1} == said["worker"]


def test_every_worker_has_a_thread_by_default(models: Path) -> None:
    made = [build(Settings(models=models, workers=250, max_batch_tokens=64), WorkerContext(index, 250)) for index in (0, 249)]

    assert [1, 1] == [min(service.worker.threads, 1) for service in made]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--workers", "4", "--threads", "2"), ("--workers is 4", "--threads, which is 2")),
        (
            ("--workers", "2", "--max-queue-tokens", "10000"),
            ("--max-queue-tokens is 10000", "2 workers", "--max-batch-tokens, which is 8192"),
        ),
        (("--workers", "0"), ("--workers (or BERT_SERVE_WORKERS) is `0`",)),
    ],
)
def test_what_cannot_be_divided_is_refused(flags: tuple[str, ...], words: tuple[str, ...]) -> None:
    """Limits that leave a worker with nothing to work with are an error that names both."""
    with pytest.raises(SettingsError) as refused:
        parse(Settings, flags)
    assert [] == [word for word in words if word not in refused.value.message]


def test_a_system_that_cannot_fork_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where processes cannot be forked, as on Windows, more than one worker is wrong usage."""
    monkeypatch.delattr(os, "fork")
    with pytest.raises(SettingsError, match="--workers is 2,"):
        prepare(Settings(workers=2))


def test_the_listener_leaves_connections_to_whoever_has_fewest() -> None:
    """Of a burst of connections each of two workers takes half, also when one is always asked first."""

    async def run() -> list[int]:
        counts = shared_counts(2)
        taken: list[list[socket.socket]] = [[], []]
        with socket.create_server(("127.0.0.1", 0)) as listener:
            sockets = [listener.dup() for _ in range(2)]
            listeners = [BalancedListener(each, counts, index) for index, each in enumerate(sockets)]

            def admit(index: int, connection: socket.socket) -> None:
                taken[index].append(connection)
                listeners[index].count(len(taken[index]))

            listeners[0].start(lambda connection: admit(0, connection))
            listeners[1].start(lambda connection: admit(1, connection))
            clients = [socket.create_connection(listener.getsockname()) for _ in range(8)]
            while sum(map(len, taken)) < 8:
                await asyncio.sleep(0.001)
            for each in listeners:
                each.close()
            assert [ABSENT, ABSENT] == list(counts)
            for connection in [*clients, *taken[0], *taken[1], *sockets]:
                connection.close()
        return [len(each) for each in taken]

    assert [4, 4] == asyncio.run(asyncio.wait_for(run(), 10))


def test_the_listener_takes_what_nobody_comes_for() -> None:
    """A worker that has more than another, which does not come, takes the connection in the end."""

    async def run() -> int:
        counts = shared_counts(2)
        counts[1] = 0
        taken: asyncio.Queue[socket.socket] = asyncio.Queue()
        with socket.create_server(("127.0.0.1", 0)) as listener:
            balanced = BalancedListener(listener, counts, 0)
            balanced.start(taken.put_nowait)
            balanced.count(5)
            with socket.create_connection(listener.getsockname()), await taken.get():
                balanced.close()
                balanced.count(4)
        return counts[0]

    assert ABSENT == asyncio.run(asyncio.wait_for(run(), 10))


def test_a_listener_that_leaves_takes_nothing_more() -> None:
    """What waits at the socket when a worker gives up is for another, which is served as if the first had not been there."""

    async def run() -> list[int]:
        counts = shared_counts(2)
        taken: list[asyncio.Queue[socket.socket]] = [asyncio.Queue(), asyncio.Queue()]
        with socket.create_server(("127.0.0.1", 0)) as listener:
            leaving, staying = [BalancedListener(listener.dup(), counts, index) for index in range(2)]
            leaving.start(taken[0].put_nowait)
            with socket.create_connection(listener.getsockname()):
                leaving.leave()
                leaving.close()
                staying.start(taken[1].put_nowait)
                (await taken[1].get()).close()
                staying.close()
        return [taken[0].qsize(), taken[1].qsize()]

    assert [0, 0] == asyncio.run(asyncio.wait_for(run(), 10))


def test_a_worker_with_a_dead_thread_makes_room_for_another() -> None:
    """A worker stays alive while its inference threads do, and ends with them."""

    async def run() -> list[bool]:
        scheduler = Scheduler(RequestQueue(max_batch_tokens=64, max_queue_tokens=64), threads=1)
        worker = Worker(
            configure(FastAPI(), keep_alive_s=1),
            scheduler=scheduler,
            connections=Connections(LIMITS),
            shutdown_timeout_s=0,
            on_listen=print,
            pipe=multiprocessing.Pipe()[0],
            on_message=print,
            heartbeats=[0],
            counts=shared_counts(1),
            index=0,
        )
        scheduler.start()
        before = await worker.on_tick(1)
        await scheduler.stop(0)
        return [before, await worker.on_tick(1)]

    assert [False, True] == asyncio.run(run())


def test_all_workers_answer_and_any_page_counts_all_requests(models: Path, serve: Serve) -> None:
    with serve(models, *TWO) as served, clients_of(served, 8, workers=2) as clients:
        for client in clients:
            assert 200 == client.post("/classify", json={"inputs": ["good", "bad"]}).status_code
        wait_until(lambda: {float(len(clients))} == {answered(client) for client in clients})  # each is counted once it was sent
        page = clients[0].get("/metrics").text
        assert 'bertserve_model_info{model="tiny"' in page
        assert "pid=" not in page
        assert ["bertserve_queue_items 0.0"] == [line for line in page.splitlines() if line.startswith("bertserve_queue_items")]
        assert {"bertserve_workers 2.0", "bertserve_threads 2.0", "bertserve_ready_workers 2.0"} <= set(page.splitlines())
        assert ["0", "1"] == re.findall(r'^process_resident_memory_bytes\{worker="(\d)"\} \d', page, re.MULTILINE)
    assert [] == served.lines()


def test_a_worker_that_dies_is_replaced_and_what_it_counted_stays(models: Path, serve: Serve) -> None:
    """After one was killed both places are taken again, the dead one's requests are still counted, and requests are answered."""
    with serve(models, *TWO) as served:
        before = workers_of(served)
        with clients_of(served, 8) as clients:
            for client in clients:
                client.post("/classify", json={"inputs": "good"})
            wait_until(lambda: answered(clients[0]) == 8.0)  # each is counted once it was sent
        os.kill(before[0], signal.SIGKILL)
        wait_until(lambda: f"worker 0, process {before[0]}, ended with code -9" in served.log.read_text())
        with clients_of(served, 1) as [client]:
            assert 200 == client.post("/classify", json={"inputs": "good"}).status_code
            wait_until(lambda: 9.0 == answered(client))
        wait_until(lambda: "worker 0 restarted as process" in served.log.read_text())
        after = workers_of(served)
        assert {0, 1} == set(after)
        assert before[1] == after[1]
        assert before[0] != after[0]
        with clients_of(served, 4) as clients:
            assert [200] * 4 == [client.post("/classify", json={"inputs": "good"}).status_code for client in clients]
            wait_until(lambda: {13.0} == {answered(client) for client in clients})
            assert 'bertserve_workers_replaced_total{reason="ended"} 1.0' in clients[0].get("/metrics").text


@pytest.mark.full_grid
def test_a_worker_that_hangs_is_replaced(models: Path, serve: Serve) -> None:
    """A worker whose event loop stands still is killed, and another takes its place; the other one is left alone."""
    with serve(models, *TWO) as served:
        before = workers_of(served)
        start = time.monotonic()
        os.kill(before[0], signal.SIGSTOP)  # it cannot even be told to stop
        wait_until(lambda: "is killed" in served.log.read_text())
        killed_s = time.monotonic() - start
        wait_until(lambda: "worker 0 restarted as process" in served.log.read_text())
        print(f"killed after {killed_s:.1f} s, replaced after {time.monotonic() - start:.1f} s")
        after = workers_of(served)
        assert {0, 1} == set(after)
        assert (before[1], True) == (after[1], before[0] != after[0])
        assert f"worker 0, process {before[0]}, has hung for" in served.log.read_text()
        with clients_of(served, 4) as clients:
            assert 'bertserve_workers_replaced_total{reason="hung"} 1.0' in clients[0].get("/metrics").text
            assert [200] * 4 == [client.post("/classify", json={"inputs": "good"}).status_code for client in clients]


@pytest.mark.full_grid
def test_a_machine_that_stood_still_costs_no_worker(models: Path, serve: Serve) -> None:
    """A worker that is paused together with the supervisor, for example by a container's runtime, does not count as hung later."""
    with serve(models, *TWO) as served:
        before = workers_of(served)
        everyone = [served.process.pid, *before.values()]
        for pid in everyone:
            os.kill(pid, signal.SIGSTOP)
        time.sleep(6)
        for pid in everyone:
            os.kill(pid, signal.SIGCONT)
            time.sleep(0.2)
        time.sleep(1)
        assert before == workers_of(served)
    assert [] == served.lines()


def test_a_worker_that_cannot_be_replaced_leaves_the_others_serving(models: Path, serve: Serve) -> None:
    """While no model can be loaded its place is tried again and again, and taken once one can; the service ends only with its last worker."""
    tokenizer = (models / "tiny/tokenizer.json").read_bytes()
    with serve(models, *TWO) as served:
        before = workers_of(served)
        (models / "tiny/tokenizer.json").unlink()
        os.kill(before[0], signal.SIGKILL)
        wait_until(lambda: "worker 0 failed to start 3 times in a row" in served.log.read_text())
        assert {1: before[1]} == workers_of(served, 1)
        with clients_of(served, 1) as [client]:
            assert 200 == client.post("/classify", json={"inputs": "good"}).status_code
            assert {"bertserve_workers 2.0", "bertserve_ready_workers 1.0"} <= set(client.get("/metrics").text.splitlines())
        (models / "tiny/tokenizer.json").write_bytes(tokenizer)
        wait_until(lambda: "worker 0 restarted as process" in served.log.read_text())
        after = workers_of(served)
        assert ({0, 1}, before[1]) == (set(after), after[1])
        (models / "tiny/tokenizer.json").unlink()
        for worker in after.values():
            os.kill(worker, signal.SIGKILL)
        assert 1 == served.process.wait(30)
        assert "tokenizer.json" in served.log.read_text().splitlines()[-1]


def test_a_start_that_fails_is_tried_again_later_and_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first attempts follow at once, further ones after 1, 2, 4 s and so on up to a minute; when all places have failed it is the end."""
    now, started, stopped = [100.0], list[int](), list[str]()
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    supervisor = Supervisor(lambda *_: None, workers=2, shutdown_timeout_s=1, heartbeats=[0, 0], on_ready=print, on_end=print)
    monkeypatch.setattr(supervisor, "_start", started.append)
    monkeypatch.setattr(supervisor, "_stop", lambda: stopped.append("stopped"))
    supervisor._announced = True
    waits = []
    for _ in range(10):
        supervisor._retry(1, StartError("broken"))
        waits.append(supervisor._due[1] - now[0])
        supervisor._start_due()
        now[0] += waits[-1]
        supervisor._start_due()
    assert [0, 0, 1, 2, 4, 8, 16, 32, 60, 60] == waits
    assert ([1] * 10, []) == (started, stopped)
    for _ in range(3):
        supervisor._retry(0, StartError("broken"))
    assert ["stopped"] == stopped


def test_messages_wait_for_a_worker_that_does_not_read() -> None:
    """They come in their order, and SIGHUP only once, however often it is sent meanwhile."""
    supervisor = Supervisor(lambda *_: None, workers=1, shutdown_timeout_s=1, heartbeats=[0], on_ready=print, on_end=print)
    pipe, unread = multiprocessing.Pipe()
    process: Any = SimpleNamespace(pid=1)  # without `kill`
    worker = _Worker(0, process, pipe, 0.0, ready=True)
    supervisor._workers = [worker]
    messages = [str(number) * 1000 for number in range(500)]
    with pipe, unread:
        for message in messages:
            supervisor.send(0, message)
        for _ in range(100):
            supervisor.send(0, signal.SIGHUP)
        supervisor.send(0, None)
        read = []
        while worker.unsent or unread.poll():
            read.append(unread.recv())
            supervisor._flush(worker)
    assert [*messages, signal.SIGHUP, None] == read


def test_no_message_comes_to_the_successor_of_a_worker() -> None:
    supervisor = Supervisor(lambda *_: None, workers=1, shutdown_timeout_s=1, heartbeats=[0], on_ready=print, on_end=print)
    process: Any = SimpleNamespace(pid=1, exitcode=0, join=lambda: None)
    (pipe, unread), (next_pipe, next_unread) = multiprocessing.Pipe(), multiprocessing.Pipe()
    worker, successor = _Worker(0, process, pipe, 0.0, ready=True), _Worker(0, process, next_pipe, 0.0, ready=True)
    supervisor._workers = [worker]
    with pipe, unread, next_pipe, next_unread:
        while not worker.unsent:
            supervisor.send(0, "a" * 1000)
        supervisor._reap(worker)
        supervisor.send(0, "lost")
        supervisor._workers = [successor]
        supervisor.send(0, "b")
        assert ("b", False) == (next_unread.recv(), next_unread.poll())


LATE = """
import os, signal, time
from bertserve.service.process import supervisor
from bertserve.service.process.server import shared_counts

supervisor.HUNG_S = 60.0
heartbeats, read = shared_counts(1), shared_counts(1, 0)

def work(index, pipe):
    pipe.send(index)
    time.sleep(1)
    while pipe.recv() is not None:
        read[0] += 1

def on_ready(_):
    for number in range(1000):
        supervisor.send(0, number)
    os.kill(os.getpid(), signal.SIGTERM)

supervisor = supervisor.Supervisor(
    work, workers=1, shutdown_timeout_s=60, heartbeats=heartbeats, on_ready=on_ready, on_end=lambda *_: None
)
supervisor.run()
print(read[0])
"""


def test_a_worker_that_reads_late_gets_all_messages_before_it_stops() -> None:
    """The supervisor sends what waits on its own, also while it stops; a worker with a heartbeat is not killed."""
    done = subprocess.run([sys.executable, "-c", LATE], capture_output=True, text=True, timeout=60, check=False)
    assert (0, "1000\n") == (done.returncode, done.stdout)


@pytest.mark.full_grid
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_drains_all_workers(tmp_path: Path, serve: Serve, number: int) -> None:
    """What was accepted by either worker is answered after the signal, even if the workers get it too, and the exit code is 0."""
    slow.bundle(tmp_path / "slow")
    with serve(tmp_path / "slow", *TWO) as served, clients_of(served, 4, workers=2) as clients, ThreadPoolExecutor(len(clients)) as pool:
        workers = workers_of(served)
        accepted = [pool.submit(client.post, "/classify", json={"inputs": ["good"] * 15}) for client in clients]
        with clients_of(served, 1) as [client]:
            wait_until(lambda: waiting(client) > 30)
        served.process.send_signal(number)
        for pid in workers.values():
            os.kill(pid, number)  # as a terminal, or systemd, sends it to the whole group
        assert {(200, 15)} == {(future.result().status_code, len(future.result().json())) for future in accepted}
        assert 0 == served.process.wait(10)
    assert [] == served.lines()


def waiting(client: httpx.Client) -> float:
    return metric(client.get("/metrics").text, "queue_items")


def test_no_worker_outlives_its_supervisor(models: Path, serve: Serve) -> None:
    with serve(models, *TWO) as served:
        served.process.kill()
        reader = threading.Thread(target=served.process.stdout.read)  # ends when the last of them has closed it
        reader.start()
        reader.join(15)
        assert not reader.is_alive()
        with pytest.raises(httpx.TransportError):
            httpx.get(served.url, trust_env=False)


def test_replaced_workers_take_no_more_memory(models: Path, serve: Serve) -> None:
    with serve(models, *TWO) as served:
        folder = folder_of(served)
        with clients_of(served, 4) as clients:
            for client in clients:
                client.post("/classify", json={"inputs": "good"})
        before, files, size = counted(served), sorted(folder.glob("*.db")), room(folder)
        for index in (0, 1):
            worker = workers_of(served)[index]
            os.kill(worker, signal.SIGKILL)
            wait_until(lambda index=index: f"worker {index} restarted as process" in served.log.read_text())  # type: ignore[misc]
        after = counted(served)
        assert (files, size) == (sorted(folder.glob("*.db")), room(folder))
        assert [] == [name for name, value in before.items() if after[name] < value]
        assert 4.0 == after['bertserve_request_seconds_count{model="tiny",task="text-classification"}']


def folder_of(served: Any) -> Path:
    """Returns the folder that the workers of a service share, which its supervisor keeps open."""
    descriptors = Path(f"/proc/{served.process.pid}/fd").iterdir()
    return next(path for descriptor in descriptors if (path := Path(os.readlink(descriptor))).name.startswith(PREFIX))


def room(folder: Path) -> int:
    return sum(path.stat().st_blocks * 512 for path in folder.glob("*.db"))


def counted(served: Any) -> dict[str, float]:
    """Returns the counters and histograms of the metrics page, without those of processes."""
    with clients_of(served, 1) as [client]:
        lines = client.get("/metrics").text.splitlines()
    found = dict(line.rsplit(" ", 1) for line in lines if re.match(r"bertserve_\w+_(total|count|sum|bucket)[ {]", line))
    return {name: float(value) for name, value in found.items()}


def test_a_killed_service_leaves_its_folder_for_the_next_start_to_remove(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder of a service that runs stays, and so do a new one that is still empty and what is none of ours."""
    monkeypatch.setattr(serve, "MEMORY", str(tmp_path))
    abandoned, empty, other = (tmp_path / name for name in (f"{PREFIX}abandoned", f"{PREFIX}empty", "other"))
    for folder in (abandoned, empty, other):
        folder.mkdir()
    (abandoned / "counter_0.db").write_bytes(b"a")
    (tmp_path / f"{PREFIX}link").symlink_to(other)
    with serve.shared_folder() as first:
        (first / "counter_0.db").write_bytes(b"a")
        with serve.shared_folder() as second:
            assert {first.name, second.name, empty.name, other.name, f"{PREFIX}link"} == set(os.listdir(tmp_path))
    assert {empty.name, other.name, f"{PREFIX}link"} == set(os.listdir(tmp_path))


def test_the_log_is_one_for_all_workers(models: Path, serve: Serve) -> None:
    """Lines of all workers come as whole JSON objects, which say whose they are; so do those of the supervisor about the shutdown."""
    with serve(models, *TWO, "--access-log", "--log-format", "json") as served, clients_of(served, 4) as clients:
        for client in clients:
            client.post("/classify", json={"inputs": "good"})
        workers = workers_of(served)
    lines = [json.loads(line) for line in served.log.read_text().splitlines()]

    assert 4 == len([line for line in lines if line.get("model") == "tiny"])
    assert {line["pid"]: line.get("worker") for line in lines} == {served.process.pid: None} | {pid: i for i, pid in workers.items()}
    shutdown = [(line["message"].split()[:2], line.get("worker")) for line in lines if line["message"].startswith("shutdown ")]
    assert sorted(shutdown, key=str) == sorted(
        ((["shutdown", what], index) for what in ("started:", "finished") for index in (None, 0, 1)), key=str
    )


@pytest.mark.full_grid
def test_models_change_in_all_workers_under_load(models: Path, tmp_path: Path, serve: Serve) -> None:
    """Whichever worker is asked: no request fails or is answered by two models, all have the same after it, and a worker that comes later too."""
    tiny.bundle(models, "other")
    (tmp_path / "admin").write_text("trident")
    admin = {"authorization": "Bearer trident"}
    flags = [*TWO, "--allow-implicit-default", "--admin-key-file", str(tmp_path / "admin")]
    with serve(models, *flags) as served, clients_of(served, 8) as clients:
        done = threading.Event()
        seen: set[tuple[float, ...]] = set()

        def ask(client: httpx.Client) -> None:
            while not done.is_set():
                answer = client.post("/models/tiny", json={"inputs": ["good"] * 20})
                assert answer.status_code == 200, answer.text
                [scores] = {tuple(item["score"] for item in result) for result in answer.json()}
                seen.add(scores)

        def change(client: httpx.Client, what: str, name: str) -> httpx.Response:
            return client.post(f"/models/{name}/{what}", headers=admin)

        before = workers_of(served)
        with ThreadPoolExecutor(4) as pool:
            asking = [pool.submit(ask, client) for client in clients[:4]]
            for seed, client in enumerate(clients[4:7], 1):
                wait_until(lambda seed=seed: seed == len(seen))  # type: ignore[misc]
                shutil.rmtree(models / "tiny")
                tiny.bundle(models, "tiny", seed=seed)
                page = change(client, "reload", "tiny")
                assert page.status_code == 200, page.text
                assert {page.json()["version"]} == {one.get("/models/tiny").json()["version"] for one in clients[4:]}
            wait_until(lambda: 4 == len(seen))
            done.set()
            for future in asking:
                future.result()
        assert 4 == len(seen)
        assert {"name": "other", "unloaded": True} == change(clients[4], "unload", "other").json()
        assert [404] * 8 == [client.get("/models/other").status_code for client in clients]
        os.kill(before[0], signal.SIGKILL)
        wait_until(lambda: "worker 0 restarted as process" in served.log.read_text())
        assert before[0] != workers_of(served)[0]
        with clients_of(served, 8) as others:
            assert [["tiny"]] * 8 == [[model["name"] for model in client.get("/models").json()] for client in others]
            assert 200 == change(others[0], "load", "other").status_code
            assert [["other", "tiny"]] * 8 == [[model["name"] for model in client.get("/models").json()] for client in others]
    assert "Traceback" not in served.log.read_text()
