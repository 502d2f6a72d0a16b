"""Attacks through HAProxy and nginx on one replica: SECURITY.md says what happens then.

During each attack, a probe asks the replica itself, its memory is measured, and an ordinary caller sends requests through the proxy.
`pytest -s` prints a table of all attacks. `make test` runs the attacks of EVERY_RUN for a part of a second, each through one proxy.
"""

import functools
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from support import ROOT, metric, raw_http, tiny, wait_until
from support.attacks import ATTACKS, LARGE_ANSWER
from support.http_messages import get
from support.replica import PROXIES, Proxy, ServeProcess, is_ready, replicas

pytestmark = [pytest.mark.serial, pytest.mark.skipif(not all(map(shutil.which, PROXIES)), reason="haproxy or nginx is not installed")]

MAX_STALL_S = 0.25
MAX_GROWTH_MIB = 64
MAX_KEPT_MIB = 16
SECONDS = float(os.environ.get("STRESS_SECONDS", "0.4"))
RATE = 1000  # requests of an address per second, as in deploy/
TRIES = 3  # a machine that stands still causes a stall once, an attack causes it each time
EVERY_RUN = {
    "slow heads",
    "slow bodies",
    "lines without their last byte",
    "slow readers of a large answer",
    "silent connections",
    "pipelined requests",
    "chunks of one byte",
    "chunk extensions",
    "chunks over the limit",
    "6,000 headers",
    "a header of a megabyte",
    "a stream of blank lines",
    "a stream of wrong lines",
}
GOOD = {"inputs": "good"}
# A request for a path that the proxies do not forward. It is as long as that of the corpus.
HIDDEN = get(b"x-request-id: hiden", start=b"GET /metrics HTTP/1.1")


@dataclass
class Outcome:
    """The effect of one attack.

    Attributes:
        stall_s: Longest time until the replica answered a probe, without the longest delay of a thread of this process.
        growth_mib: Peak of the replica's anonymous memory, minus its memory before the attack.
        callers: Status, or kind of failure, of each request of the ordinary caller.
    """

    stall_s: float = 0.0
    growth_mib: float = 0.0
    callers: Counter[int | str] = field(default_factory=Counter)

    @property
    def holds(self) -> bool:
        return self.stall_s <= MAX_STALL_S and self.growth_mib <= MAX_GROWTH_MIB and set(self.callers) == {200}


class Measured:
    def __init__(self, one: ServeProcess, proxies: dict[str, Proxy]) -> None:
        self._replica, self.proxies = one, proxies
        self._warm_up()

    def _warm_up(self) -> None:
        """Sends ordinary requests with large answers, and notes the memory afterwards."""
        for _ in range(4):
            httpx.post(f"{self._replica.url}/fill-mask", content=LARGE_ANSWER, timeout=60, trust_env=False).raise_for_status()
        self._memory_mib = self._replica.memory_mib()

    def rest(self) -> None:
        """Restarts a replica that still works on the last attack, or has not returned its memory: both would count for the next attack."""
        if self._replica.memory_mib() > self._memory_mib + MAX_KEPT_MIB or self._requests() != self._requests():
            self._replica.kill()
            self._replica.start()
            self._warm_up()
            wait_until(lambda: all(is_ready(proxy.url) for proxy in self.proxies.values()))

    def _requests(self) -> float:
        """Returns how many requests and lines of streams the replica has answered, after a moment."""
        time.sleep(0.05)
        return metric(httpx.get(f"{self._replica.url}/metrics", timeout=60, trust_env=False).text, "requests_total")

    def attacked(self, name: str, proxy: Proxy) -> Outcome:
        """Returns the effect of an attack through a proxy."""
        self.rest()
        command = [sys.executable, "-m", "support.attacks", name, str(urlsplit(proxy.url).port), str(SECONDS)]
        outcome, over, before = Outcome(), threading.Event(), self._replica.memory_mib()
        with ThreadPoolExecutor(3) as pool:
            probing = pool.submit(self._replica.longest_probe_s, over, 0.01)
            calling = pool.submit(_call, proxy.url, over, outcome)
            delayed = pool.submit(_delay_s, over)
            with subprocess.Popen(command, cwd=ROOT / "tests") as attacker:
                while attacker.poll() is None:
                    outcome.growth_mib = max(outcome.growth_mib, self._replica.memory_mib() - before)
                    time.sleep(0.01)
            over.set()
            calling.result()
            outcome.stall_s = max(0.0, probing.result() - delayed.result())
        assert attacker.returncode == 0
        return outcome

    def log(self) -> str:
        return self._replica.log.read_text()


def _delay_s(over: threading.Event) -> float:
    """Returns the longest delay of a thread that sleeps, in seconds. It is part of what the probe measures."""
    longest = 0.0
    while not over.is_set():
        start = time.monotonic()
        time.sleep(0.01)
        longest = max(longest, time.monotonic() - start - 0.01)
    return longest


def _call(url: str, over: threading.Event, outcome: Outcome) -> None:
    with httpx.Client(base_url=url, trust_env=False, timeout=30) as client:
        while not over.is_set():
            name = f"caller-{outcome.callers.total()}"
            try:
                answer = client.post("/classify", json=GOOD, headers={"x-request-id": name})
                outcome.callers["not its own" if answer.headers["x-request-id"] != name else answer.status_code] += 1
            except httpx.HTTPError as error:
                outcome.callers[type(error).__name__] += 1
            time.sleep(0.02)


@pytest.fixture(name="service", scope="module")
def one_replica_behind_proxies(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Measured]:
    """Yields a replica with one thread, behind HAProxy and behind nginx."""
    folder = tmp_path_factory.mktemp("attacked")
    tiny.every_kind(folder / "models", max_length=512)
    flags = ["--threads", "1", "--allow-implicit-default", "--access-log"]
    with ExitStack() as stack:
        [one] = stack.enter_context(replicas(folder / "models", 1, folder, flags))
        proxies = {name: stack.enter_context(start([one.port], folder, RATE)) for name, start in PROXIES.items()}
        yield Measured(one, proxies)
    assert "ERROR" not in one.log.read_text()


@pytest.fixture(name="outcomes", scope="module")
def all_outcomes() -> Iterator[dict[tuple[str, str], Outcome]]:
    """Yields a dictionary for the outcomes of all attacks, and prints it as a table at the end."""
    outcomes: dict[tuple[str, str], Outcome] = {}
    yield outcomes
    print("\n\n| attack | proxy | stall ms | MiB | callers answered |\n|---|---|---|---|---|")
    for (attack, proxy), outcome in outcomes.items():
        answered = f"{outcome.callers[200]} of {outcome.callers.total()}"
        print(f"| {attack} | {proxy} | {outcome.stall_s * 1000:.0f} | {outcome.growth_mib:.0f} | {answered} |")


def cases() -> Iterator[Any]:
    """Yields each attack with each proxy. `make test` runs the attacks of EVERY_RUN through one proxy, in turn."""
    for number, attack in enumerate(ATTACKS):
        for place, proxy in enumerate(PROXIES):
            runs = attack in EVERY_RUN and number % 2 == place
            yield pytest.param(attack, proxy, marks=() if runs else pytest.mark.full_grid)


@pytest.mark.parametrize(("attack", "proxy"), list(cases()))
def test_a_replica_withstands_an_attack(service: Measured, outcomes: dict[tuple[str, str], Outcome], attack: str, proxy: str) -> None:
    for _ in range(TRIES):
        outcome = outcomes[attack, proxy] = service.attacked(attack, service.proxies[proxy])
        if outcome.holds:
            break
    assert outcome.holds, outcome


@pytest.mark.parametrize("proxy", PROXIES)
def test_no_bytes_of_a_request_become_another_request(service: Measured, proxy: str) -> None:
    """The replica gets no hidden request that the proxy did not read, and an ordinary caller gets its own answers."""
    assert len(raw_http.SMUGGLED) == len(HIDDEN)
    url, outcome, over = service.proxies[proxy].url, Outcome(), threading.Event()
    requests = [request.replace(raw_http.SMUGGLED, HIDDEN) for request, _ in raw_http.CORPUS.values()]
    with ThreadPoolExecutor(9) as pool:
        calling = pool.submit(_call, url, over, outcome)
        responses = list(pool.map(functools.partial(_response_to, urlsplit(url).port), requests))
        over.set()
        calling.result()

    assert [response for response in responses if b"bertserve_" in response] == []
    assert "hiden" not in service.log()
    assert set(outcome.callers) == {200}


def _response_to(port: int, request: bytes) -> bytes:
    """Returns everything that is received for some bytes until the connection ends, or until nothing comes for a moment."""
    response = b""
    with socket.create_connection(("127.0.0.1", port), timeout=0.2) as connection, suppress(OSError):
        connection.sendall(request)
        while data := connection.recv(65536):
            response += data
    return response
