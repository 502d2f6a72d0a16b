"""Measures from outside what an attack does to a service. `Outcome` describes the metrics; `prober.py` watches the service."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import trustme

import tiny
from attack import Attack, Target, start
from conftest import BERT_SERVE, ROOT, Served, running
from hostile_values import prose
from loads import LONG, percentile, seconds
from prober import Measurement, Options, memory, process_tree

# The limits for an attack. The growth of memory has a limit per attacking connection, and a limit in total.
MAX_STALL_MS = 250.0
MAX_GROWTH_PER_CONNECTION_MIB = 64.0
MAX_GROWTH_MIB = 256.0
MAX_WORKERS_KILLED = 0
# Only `make stress` checks the p99 of other callers, because the p99 of half a second is noise. The normal p99 is measured next to the same
# number of clients that send ordinary requests one after the other, because those clients also use the shared cores.
MAX_P99_RATIO = 3.0

ATTACK_S, PATIENCE_S = (seconds(2.0), 8.0) if LONG else (0.25, 1.0)
LONG_ATTACK_S = 10.0
SETTLE_S, RETURN_S = (60.0, 5.0) if LONG else (5.0, 0.0)
# Time from the ordinary requests to the measurement of the memory at the start. The service returns freed memory up to 1.2 s after its work;
# if the measurement included it, the service could keep more without a restart.
REST_S = 2.0 if LONG else 0.2
MAX_CONNECTIONS = 256
# the service is idle if fewer threads than this, on average, run or wait for a core; the prober's requests use a fifth of a thread
IDLE_THREADS = 0.5
IDLE_SAMPLES, IDLE_EVERY_S = 10, 0.01
RETURNED_MIB = 32.0
MIB = 1 << 20
KEYS = {"attacker": "attacker-key", "caller": "caller-key", "admin": "admin-key"}
# Ordinary requests with the largest batches, two at the same time. Growth is the memory of an attack above the peak of these requests.
# Between requests the memory varies by 50 MiB: it depends on when glibc last returned freed memory.
CALLERS = 2
ROUNDS = 3  # of the largest ordinary batches; in one round, both callers may reach the same worker, or never run at the same time
WARM_UP: tuple[tuple[str, Any], ...] = (
    ("/classify", {"inputs": [prose(2500)] * 16}),
    ("/ner", {"inputs": [prose(2500)] * 16}),
    ("/answer", {"inputs": {"question": "How long?", "context": prose(20_000)}}),
    ("/fill-mask", {"inputs": ["a [MASK] " + prose(2400)] * 16}),
    ("/embed", {"inputs": [prose(1200)] * 32}),
    ("/zero-shot", {"inputs": [prose(2400)] * 4, "parameters": {"candidate_labels": ["film", "book"]}}),
)


def _ask_as_others_do(target: Target) -> None:
    body = json.dumps({"inputs": [prose(120), prose(500), prose(1000)]}).encode()
    target.ask_all(target.post("/classify", body) for _ in itertools.count())


def _send_largest_batches(target: Target) -> None:
    target.ask_all(target.post(path, json.dumps(body).encode()) for path, body in WARM_UP)


ORDINARY = Attack("ordinary requests", "protocol", _ask_as_others_do)


@dataclass(frozen=True)
class Configuration:
    """A configuration of the service.

    Attributes:
        name: Its name in the table.
        workers: Number of worker processes.
        keys: Whether callers need an API key.
        max_concurrent_per_key: Limit of a key's open requests per worker; None for no limit.
        tls: Whether the service uses TLS.
    """

    name: str
    workers: int = 1
    keys: bool = False
    max_concurrent_per_key: int | None = None
    tls: bool = False

    def flags(self, folder: Path) -> list[str]:
        """Returns the flags of `bert-serve serve`, and writes the files that the flags name to the folder."""
        flags = [
            "--allow-implicit-default",
            "--max-connections",
            str(MAX_CONNECTIONS),
            "--admin-key-file",
            str(_written(folder / "admin", "admin")),
        ]
        if self.workers > 1:
            flags += ["--workers", str(self.workers), "--threads", str(self.workers)]
        if self.keys:
            flags += ["--api-key-file", str(_written(folder / "keys", "attacker", "caller"))]
        if self.max_concurrent_per_key is not None:
            flags += ["--max-concurrent-per-key", str(self.max_concurrent_per_key)]
        if self.tls:
            authority = trustme.CA()
            issued = authority.issue_cert("localhost", "127.0.0.1")
            authority.cert_pem.write_to_path(str(folder / "authority.pem"))
            issued.cert_chain_pems[0].write_to_path(str(folder / "cert.pem"))
            issued.private_key_pem.write_to_path(str(folder / "key.pem"))
            flags += ["--tls-cert", str(folder / "cert.pem"), "--tls-key", str(folder / "key.pem")]
        return flags


def _written(file: Path, *keys: str) -> Path:
    file.write_text("\n".join(KEYS[key] for key in keys))
    return file


@dataclass(frozen=True)
class Outcome:
    """The effect of one attack.

    Attributes:
        attack: Name of the attack.
        configuration: Name of the service's configuration.
        attackers: Number of attackers at the same time.
        connections: Minimum number of connections that all attackers opened.
        stall_ms: Longest time until `/health/live` answered, minus the delay of the machine itself.
        growth_mib: Peak memory of the service's processes, minus the larger of their memory before and their peak with ordinary requests.
        return_s: Seconds after the attack until the growth was below `RETURNED_MIB`; None if it was not within `RETURN_S`.
        busy_s: Seconds after the attack until the service was idle; None if it was not within `SETTLE_S`.
        killed: Number of worker processes that ended.
        hung: Number of runs that hung; each of them blocks its inference thread.
        ready: Whether the service was ready afterwards.
        attacker: Status -> number of answers to the attackers.
        statuses: Status -> number of answers to the other caller; -1 means no answer.
        p99_ratio: The other caller's p99, divided by its p99 next to as many ordinary clients; infinite if over 1 % of its requests failed.
    """

    attack: str
    configuration: str
    attackers: int
    connections: int
    stall_ms: float
    growth_mib: float
    return_s: float | None
    busy_s: float | None
    killed: int
    hung: int
    ready: bool
    attacker: dict[int, int]
    statuses: dict[int, int]
    p99_ratio: float

    @property
    def breaches(self) -> list[str]:
        """Descriptions of the exceeded limits."""
        growth = min(MAX_GROWTH_MIB, MAX_GROWTH_PER_CONNECTION_MIB * self.connections)
        unanswered = {status: count for status, count in self.statuses.items() if status not in (200, 429)}
        broken = {
            f"stall {self.stall_ms:.0f} ms > {MAX_STALL_MS:.0f}": self.stall_ms > MAX_STALL_MS,
            f"growth {self.growth_mib:.0f} MiB > {growth:.0f}": self.growth_mib > growth,
            f"{self.killed} workers killed": self.killed > MAX_WORKERS_KILLED,
            f"{self.hung} inference threads lost": LONG and self.hung > 0,  # on a busy machine, a slow run can look hung
            "not ready afterwards": not self.ready,
            f"other callers got {unanswered}": bool(unanswered) or 200 not in self.statuses,
            f"other callers' p99 {self.p99_ratio:.1f}x > {MAX_P99_RATIO:.0f}x": LONG and self.p99_ratio > MAX_P99_RATIO,
        }
        return [words for words, is_broken in broken.items() if is_broken]

    def line(self) -> str:
        answers, attacker = (" ".join(f"{s}:{n}" for s, n in sorted(each.items())) for each in (self.statuses, self.attacker))
        back = f">{RETURN_S:.0f}" if self.return_s is None else f"{self.return_s:.1f}"
        return (
            f"{self.attack[:44]:44} {self.configuration:7} x{self.attackers:<2} {self.stall_ms:7.0f} {self.growth_mib:7.0f} {back:>6} "
            f"{self.killed:4} {self.hung:4}  {answers:16} {self.p99_ratio:6.1f}  {attacker[:24]:24}  {'; '.join(self.breaches) or 'ok'}"
        )


HEADER = f"{'attack':44} {'mode':7} {'':3} {'stall':>7} {'growth':>7} {'return':>6} {'lost':>4} {'hung':>4}  {'others':16} {'p99':>6}  {'attacker':24}  verdict"
UNITS = (
    f"{'':44} {'':7} {'':3} {'ms':>7} {'MiB':>7} {'s':>6} {'wkrs':>4} {'runs':>4}  {'status:count':16} {'ratio':>6}  {'status:count':24}"
)


class AttackedService:
    """A service with the embedded models, tiny models for the other endpoints, and a prober. It starts on demand."""

    def __init__(self, configuration: Configuration, folder: Path) -> None:
        """Stores the arguments; `folder` is for the service's files."""
        self._configuration = configuration
        self._folder = folder
        self._running: ExitStack | None = None
        self._served: Served
        self._prober: subprocess.Popen[str]
        self._usual_p99_s: dict[tuple[int, float], float] = {}  # (number of ordinary clients, seconds) -> p99
        self._memory_at_start = self._ordinary_peak = 0
        self.starts = 0

    def measure(self, attack: Attack, attackers: int) -> Outcome:
        """Attacks, waits until the service is idle, and returns the outcome. A service that does not recover is restarted.

        In an attack of two seconds, the p99 is the slowest of about 60 requests. If only it exceeds its limit, a longer attack follows; it
        is compared with ordinary clients that run as long.
        """
        outcome = self._measure(attack, attackers, ATTACK_S)
        if LONG and outcome.p99_ratio > MAX_P99_RATIO and len(outcome.breaches) == 1:
            return self._measure(attack, attackers, LONG_ATTACK_S)
        return outcome

    def _measure(self, attack: Attack, attackers: int, attack_s: float) -> Outcome:
        self._start_if_needed()
        usual_p99_s = self._usual(attackers * attack.callers, attack_s)
        pids, hung, before = self._workers(), self._hung_runs(), self._memory()
        self._tell_prober("begin")
        answers = self._attack(attack, attackers, attack_s)
        ended = time.monotonic()
        busy_s = self._wait_until_idle(ended)
        seen = self._tell_prober("end")
        return_s = self._wait_for_memory(before, ended)
        killed = len(pids - self._workers())
        lost = self._hung_runs() - hung
        outcome = Outcome(
            attack.name,
            self._configuration.name,
            attackers,
            attackers * attack.connections,
            max(seen.stall_s - seen.late_s, 0) * 1000,
            max(seen.rss_peak - max(seen.rss_before, self._ordinary_peak), 0) / MIB,
            return_s,
            busy_s,
            killed,
            lost,
            self._is_ready(),
            answers,
            seen.statuses,
            self._p99_s(seen) / usual_p99_s,
        )
        # Kept memory would hide the growth of the next attack, or count as its growth: Python keeps a whole MiB while one object in it lives, and
        # for example a metric with new labels lives until the end.
        grown = LONG and self._wait_for_memory(self._memory_at_start, ended) is None
        if busy_s is None or killed or lost or grown or not outcome.ready:
            self.stop(broken=True)
        return outcome

    def stop(self, *, broken: bool = False) -> None:
        """Stops the service; kills it if it is broken."""
        if self._running is None:
            return
        for pid in process_tree(self._served.process.pid) if broken else ():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._running.close()
        self._running = None

    def _start_if_needed(self) -> None:
        if self._running is not None:
            return
        self.starts += 1
        folder = self._folder / f"start-{self.starts}"
        folder.mkdir()
        flags = self._configuration.flags(folder)
        with ExitStack() as stack:
            self._served = stack.enter_context(
                running(ROOT / "models", folder / "log", "--models", str(_tiny_models(folder)), *flags, program=BERT_SERVE)
            )
            self._prober = stack.enter_context(self._probing(str(folder / "authority.pem") if self._configuration.tls else ""))
            stack.callback(self._prober.kill)
            self._tell_prober("begin")
            with ThreadPoolExecutor(CALLERS) as pool:
                list(pool.map(_send_largest_batches, [self._target(time.monotonic() + 30)] * CALLERS * ROUNDS))
            self._ordinary_peak = self._tell_prober("end").rss_peak
            time.sleep(REST_S)
            self._memory_at_start = self._memory()
            self._running = stack.pop_all()

    def _usual(self, others: int, attack_s: float) -> float:
        """Returns the p99 of the prober's requests in seconds, next to this number of ordinary clients that run for `attack_s`."""
        key = others, attack_s
        if key not in self._usual_p99_s:
            self._tell_prober("begin")
            self._attack(ORDINARY, others, attack_s)
            self._wait_until_idle(time.monotonic())
            self._usual_p99_s[key] = self._p99_s(self._tell_prober("end"))
        return self._usual_p99_s[key]

    def _probing(self, authority: str) -> subprocess.Popen[str]:
        key = KEYS["caller"] if self._configuration.keys else ""
        options = Options(self._port, self._served.process.pid, self._configuration.workers, key, authority)
        command = [sys.executable, str(Path(__file__).with_name("prober.py")), json.dumps(options.__dict__)]
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def _tell_prober(self, word: str) -> Measurement:
        assert self._prober.stdin is not None
        assert self._prober.stdout is not None
        self._prober.stdin.write(f"{word}\n")
        self._prober.stdin.flush()
        told = Measurement(**json.loads(self._prober.stdout.readline()))
        told.statuses = {int(status): count for status, count in told.statuses.items()}
        return told

    @property
    def _port(self) -> int:
        return int(self._served.url.rpartition(":")[2])

    def _target(self, until: float) -> Target:
        key = KEYS["attacker"] if self._configuration.keys else ""
        return Target(self._port, self._configuration.tls, key, KEYS["admin"], MAX_CONNECTIONS, until, PATIENCE_S)

    def _attack(self, attack: Attack, attackers: int, attack_s: float) -> Counter[int]:
        first = self._target(time.monotonic() + attack_s)
        for thread in start(attack, [replace(first, parallel=attackers, index=index) for index in range(attackers)]):
            thread.join(attack_s + PATIENCE_S + 1)
        return first.answers

    def _workers(self) -> set[int]:
        first = self._served.process
        if first.poll() is not None:
            return set()
        return set(process_tree(first.pid)[1:]) if self._configuration.workers > 1 else {first.pid}

    def _memory(self) -> int:
        return memory(self._served.process.pid)

    def _hung_runs(self) -> int:
        """Returns the number of runs that have hung since the start."""
        return self._served.log.read_text().count(" hangs: ")

    def _is_ready(self) -> bool:
        try:
            return httpx.get(f"{self._served.url}/health/ready", trust_env=False, verify=False, timeout=30).status_code == 200
        except httpx.TransportError:
            return False

    def _wait_until_idle(self, ended: float) -> float | None:
        while True:
            start = time.monotonic()
            runnable = 0
            for _ in range(IDLE_SAMPLES):
                runnable += self._runnable_threads()
                time.sleep(IDLE_EVERY_S)
            if runnable < IDLE_THREADS * IDLE_SAMPLES:
                return start - ended
            if start - ended > SETTLE_S:
                return None

    def _runnable_threads(self) -> int:
        """Returns the number of the service's threads that run or wait for a core."""
        runnable = 0
        for pid in process_tree(self._served.process.pid):
            for status in Path(f"/proc/{pid}/task").glob("*/stat"):
                with suppress(OSError):  # the thread has just ended
                    runnable += status.read_text().rpartition(") ")[2].startswith("R")
        return runnable

    def _wait_for_memory(self, before: int, ended: float) -> float | None:
        while True:
            waited = time.monotonic() - ended
            if self._memory() - before < RETURNED_MIB * MIB:
                return waited
            if waited > RETURN_S:
                return None
            time.sleep(0.1)

    def _p99_s(self, seen: Measurement) -> float:
        refused = sum(count for status, count in seen.statuses.items() if status != 200)
        return max(percentile([*seen.latencies_s, *[float("inf")] * refused], 0.99), 1e-3)


def _tiny_models(folder: Path) -> Path:
    """Writes tiny bundles for the endpoints that no embedded model serves. Their names sort after those of the embedded models."""
    models = folder / "models"
    tiny.bundle(models, "tiny-attention", max_length=512, attention_heads=(4, 4))
    tiny.bundle(models, "tiny-choices", max_length=512, task="multiple-choice")
    tiny.bundle(models, "tiny-ranker", max_length=512, labels=("LABEL_0",), activation="none")
    return models


def show_table(outcomes: Iterable[Outcome]) -> None:
    ordered = sorted(outcomes, key=lambda each: not each.breaches)
    print("\n".join(["", HEADER, UNITS, *(outcome.line() for outcome in ordered)]), flush=True)
