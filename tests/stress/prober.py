"""Watches a service from outside, in a separate process: measures stalls, the answers to another caller, and memory.

Run it as `python prober.py OPTIONS`, with `Options` as JSON. The line `begin` on stdin starts a measurement, and the line `end` prints the
result as a line of JSON. The prober raises its own priority if it has the permission. It also measures its own wake-up delay, so that
a stall of the machine does not count as a stall of the service.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import ssl
import sys
import threading
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

PROBE_EVERY_S = 0.01
CALL_EVERY_S = 0.02
SAMPLE_EVERY_S = 0.02
TIMEOUT_S = 60.0
MOST_MEMORY = 4 << 30  # a service that uses more is killed, before the kernel kills another process
LAST_ANSWER_S = 10.0
MOST_TRIES = 16  # connections until one leads to the right worker
PRIORITY = -10
UNANSWERED = (OSError, ValueError, KeyError)  # no answer, or an unreadable answer


@dataclass(frozen=True)
class Options:
    """The options of the prober.

    Attributes:
        port: Port of the service on loopback.
        pid: Main process of the service.
        workers: Number of worker processes. Each gets a connection that requests `/health/live`, and one of the caller.
        key: API key of the caller; empty for none.
        authority: PEM file of the service's certificate authority; empty for plain HTTP.
    """

    port: int
    pid: int
    workers: int
    key: str
    authority: str

    @property
    def authorization(self) -> bytes:
        """The line of the header with the key; empty without a key."""
        return f"authorization: Bearer {self.key}\r\n".encode() if self.key else b""


@dataclass
class Measurement:
    """The values that were measured between `begin` and `end`.

    Attributes:
        stall_s: Longest time until `/health/live` answered, including failed attempts.
        late_s: Longest wake-up delay of a thread with the service's priority: the machine's part of a stall.
        failed_probes: Number of probes without an answer.
        latencies_s: Latency in seconds of each of the caller's requests with status 200.
        statuses: Status -> number of answers to the caller; -1 means no answer.
        rss_before: Bytes of anonymous memory of all processes of the service at `begin`.
        rss_peak: Peak of that memory.
    """

    stall_s: float = 0.0
    late_s: float = 0.0
    failed_probes: int = 0
    latencies_s: list[float] = field(default_factory=list)
    statuses: dict[int, int] = field(default_factory=dict)
    rss_before: int = 0
    rss_peak: int = 0


def process_tree(pid: int) -> list[int]:
    """Returns a process and all its descendants."""
    found = [pid]
    for parent in found:
        try:
            for task in Path(f"/proc/{parent}/task").iterdir():
                found += [int(child) for child in (task / "children").read_text().split()]
        except OSError:
            continue  # the process has just ended
    return found


def memory(pid: int) -> int:
    """Returns the anonymous resident bytes of a process and all its descendants."""
    total = 0
    for each in process_tree(pid):
        try:
            resident, shared = Path(f"/proc/{each}/statm").read_text().split()[1:3]
        except (OSError, ValueError):
            continue
        total += (int(resident) - int(shared)) * 4096
    return total


class Connection:
    """A connection that is reopened after it was lost.

    With `worker`, it leads to the worker process with this index. Otherwise a caller and an attacker would share a worker only by chance.
    """

    def __init__(self, options: Options, worker: int | None = None) -> None:
        self._options = options
        self._worker = worker
        self._context = ssl.create_default_context(cafile=options.authority) if options.authority else None
        self._socket: socket.socket | None = None

    def ask(self, request: bytes) -> int:
        """Sends a request and returns the status of its answer, or raises one of UNANSWERED."""
        try:
            if self._socket is None:
                self._socket = self._open()
            self._socket.sendall(request)
            return self._read(self._socket)[0]
        except UNANSWERED:
            self.close()
            raise

    def _open(self) -> socket.socket:
        refused: list[socket.socket] = []  # still open, so that the next connection goes to another worker
        try:
            while True:
                opened = socket.create_connection(("127.0.0.1", self._options.port), timeout=TIMEOUT_S)
                if self._context is not None:
                    opened = self._context.wrap_socket(opened, server_hostname="127.0.0.1")
                if self._worker is None:
                    return opened
                opened.sendall(b"GET /info HTTP/1.1\r\nhost: t\r\n%s\r\n" % self._options.authorization)
                if json.loads(self._read(opened)[1])["worker"]["index"] == self._worker or len(refused) == MOST_TRIES:
                    return opened
                refused.append(opened)
        finally:
            for each in refused:
                each.close()

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
        self._socket = None

    def _read(self, open_socket: socket.socket) -> tuple[int, bytes]:
        received = b""
        while b"\r\n\r\n" not in received:
            received += self._some(open_socket)
        head, _, body = received.partition(b"\r\n\r\n")
        lines = dict(line.lower().split(b": ", 1) for line in head.split(b"\r\n")[1:])
        while len(body) < int(lines[b"content-length"]):
            body += self._some(open_socket)
        if lines.get(b"connection") == b"close":
            self.close()
        return int(head.split(b" ", 2)[1]), body

    def _some(self, open_socket: socket.socket) -> bytes:
        data = open_socket.recv(65536)
        if not data:
            raise ConnectionResetError("closed without an answer")
        return data


class Prober:
    """Measures until its process ends."""

    def __init__(self, options: Options) -> None:
        """Starts all threads."""
        self._options = options
        self._measurement = Measurement()
        self._lock = threading.Lock()
        self._called: dict[int, Measurement] = {}  # worker -> the measurement in which the caller sent the request that is in flight
        self._asked: dict[int, float] = {}  # thread -> send time of its unanswered probe
        for work in (*[self._probe] * options.workers, self._sample, self._watch_own_delay):
            threading.Thread(target=work, daemon=True).start()
        for worker in range(options.workers):
            threading.Thread(target=self._call, args=(worker,), daemon=True).start()

    def begin(self) -> None:
        now = memory(self._options.pid)
        with self._lock:
            self._measurement = Measurement(rss_before=now, rss_peak=now)

    def end(self) -> Measurement:
        """Returns the measurement since `begin`, including unanswered probes. First waits for the answer to the caller."""
        deadline = time.monotonic() + LAST_ANSWER_S
        while (self._is_called() or not self._now().statuses) and time.monotonic() < deadline:
            time.sleep(PROBE_EVERY_S / 2)
        waiting = [time.monotonic() - start for start in list(self._asked.values())]
        measurement = self._now()
        measurement.stall_s = max([measurement.stall_s, *waiting])
        return measurement

    def _is_called(self) -> bool:
        """Returns whether a request that the caller sent in this measurement has no answer yet."""
        return any(called is self._now() for called in list(self._called.values()))

    def _now(self) -> Measurement:
        with self._lock:
            return self._measurement

    def _probe(self) -> None:
        connection, thread = Connection(self._options), threading.get_ident()
        while True:
            measurement = self._now()
            start = self._asked.setdefault(thread, time.monotonic())  # a failed probe is repeated, and its time continues
            try:
                connection.ask(b"GET /health/live HTTP/1.1\r\nhost: t\r\n\r\n")
                del self._asked[thread]
                measurement.stall_s = max(measurement.stall_s, time.monotonic() - start)
            except UNANSWERED:
                measurement.failed_probes += 1
            time.sleep(PROBE_EVERY_S)

    def _call(self, worker: int) -> None:
        connection = Connection(self._options, worker if self._options.workers > 1 else None)
        body = b'{"inputs":"A warm, funny film."}'
        head = b"POST /classify HTTP/1.1\r\nhost: t\r\n%scontent-length: %d\r\n\r\n" % (self._options.authorization, len(body))
        while True:
            start = time.monotonic()
            measurement = self._called[worker] = self._now()
            try:
                status = connection.ask(head + body)
            except UNANSWERED:
                status = -1
            if status == 200:
                measurement.latencies_s.append(time.monotonic() - start)
            with self._lock:
                measurement.statuses[status] = measurement.statuses.get(status, 0) + 1
            del self._called[worker]
            time.sleep(CALL_EVERY_S)

    def _sample(self) -> None:
        while True:
            now = memory(self._options.pid)
            measurement = self._now()
            measurement.rss_peak = max(measurement.rss_peak, now)
            for pid in process_tree(self._options.pid) if now > MOST_MEMORY else ():
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(SAMPLE_EVERY_S)

    def _watch_own_delay(self) -> None:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 0)  # the service's priority; on Linux each thread has its own
        while True:
            measurement = self._now()
            start = time.monotonic()
            time.sleep(PROBE_EVERY_S)
            measurement.late_s = max(measurement.late_s, time.monotonic() - start - PROBE_EVERY_S)


def main() -> None:
    """Executes the lines of stdin."""
    with suppress(PermissionError):  # without a higher priority, `late_s` has the delay
        os.nice(PRIORITY)
    prober = Prober(Options(**json.loads(sys.argv[1])))
    for line in sys.stdin:
        if line.strip() == "begin":
            prober.begin()
            print("{}", flush=True)
        else:
            print(json.dumps(asdict(prober.end())), flush=True)


if __name__ == "__main__":
    main()
