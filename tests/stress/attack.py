"""Defines Attack, a way to harm a service from outside, and Target, the service from an attacker's point of view."""

from __future__ import annotations

import os
import socket
import ssl
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from http.client import HTTPException, HTTPResponse
from typing import Literal

NICE = 10  # of attacking threads, because the attackers of a real service have their own processors
READ_BYTES = 1 << 16
REFUSED = (OSError, HTTPException, ValueError)  # the connection was refused, closed or too slow, or the answer is invalid


@dataclass(frozen=True)
class Target:
    """A service under attack.

    Attributes:
        port: Its port on loopback.
        tls: Whether the service uses TLS.
        key: The attacker's API key; empty for none.
        admin_key: A key that can load and unload models.
        max_connections: The service's limit of connections.
        until: End of the attack, as `time.monotonic`; no request starts later.
        patience_s: Seconds to wait for answers after the end of the attack.
        parallel: Number of attackers at the same time.
        index: Number of this attacker, from 0.
        answers: Status -> number of answers to complete requests; all attackers share it.
    """

    port: int
    tls: bool
    key: str
    admin_key: str
    max_connections: int
    until: float
    patience_s: float
    parallel: int = 1
    index: int = 0
    answers: Counter[int] = field(default_factory=Counter)

    @property
    def over(self) -> bool:
        return time.monotonic() >= self.until

    @property
    def left_s(self) -> float:
        return max(self.until + self.patience_s - time.monotonic(), 0.01)

    def share(self, count: int) -> int:
        return -(-count // self.parallel)

    def as_admin(self) -> Target:
        return replace(self, key=self.admin_key)

    def pause(self, seconds: float) -> bool:
        """Waits, at most until the end of the attack. Returns whether time is left."""
        time.sleep(max(min(seconds, self.until - time.monotonic()), 0))
        return not self.over

    def connect(self) -> socket.socket:
        """Returns a new connection. If the service uses TLS, the handshake is complete."""
        connection = self.connect_tcp()
        if not self.tls:
            return connection
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
        try:
            return context.wrap_socket(connection)
        except OSError:
            connection.close()
            raise

    def connect_tcp(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=self.left_s)

    def head(self, method: str, path: str, *headers: bytes) -> bytes:
        """Returns the head of a request with the attacker's key, including the empty line."""
        key = [f"authorization: Bearer {self.key}".encode()] if self.key else []
        return b"\r\n".join([f"{method} {path} HTTP/1.1".encode(), b"host: t", *key, *headers]) + b"\r\n\r\n"

    def post(self, path: str, body: bytes, *headers: bytes) -> bytes:
        return self.head("POST", path, b"content-length: %d" % len(body), *headers) + body

    @contextmanager
    def opened(self) -> Iterator[list[socket.socket]]:
        """Yields a list of connections, and closes all of them at the end."""
        connections: list[socket.socket] = []
        try:
            yield connections
        finally:
            for connection in connections:
                connection.close()

    def ask_all(self, requests: Iterable[bytes | Iterable[bytes]]) -> None:
        """Sends requests one after the other over one connection, and reads the answers. Reconnects if the connection is lost.

        Args:
            requests: The requests, each as bytes or as parts that are sent one by one.
        """
        with self.opened() as connections:  # at most one
            for request in requests:
                if self.over:
                    return
                try:
                    if not connections:
                        connections.append(self.connect())
                    connections[0].settimeout(self.left_s)
                    for part in [request] if isinstance(request, bytes) else request:
                        connections[0].sendall(part)
                    status, stays_open = read_answer(connections[0], self)
                    self.answers[status] += 1
                except REFUSED:
                    stays_open = False
                    time.sleep(0.01)
                if not stays_open:
                    for lost in connections:
                        lost.close()
                    connections.clear()


def read_answer(connection: socket.socket, target: Target) -> tuple[int, bool]:
    """Reads and discards an answer. Returns its status, and whether the connection stays open.

    Raises:
        TimeoutError: The answer did not end in time; the answer of a stream can last as long as the client reads it.
    """
    answer = HTTPResponse(connection)
    try:
        answer.begin()
        while answer.read(READ_BYTES):
            if time.monotonic() > target.until + target.patience_s:
                raise TimeoutError("the answer did not end in time")
        return answer.status, not answer.will_close
    finally:
        answer.close()


Run = Callable[[Target], None]


@dataclass(frozen=True)
class Attack:
    """A way to harm the service.

    Attributes:
        name: Its name in the table.
        kind: The attack uses a `field` of a request body, an expensive `body`, or a feature of the `protocol`.
        run: Attacks until `Target.over`; called again if the connection is refused.
        covers: Names of the attacked fields.
        connections: Minimum number of connections that one attacker opens.
        callers: Number of requests of one attacker that run at the same time. The same number of ordinary clients is the normal load.
    """

    name: str
    kind: Literal["field", "body", "protocol"]
    run: Run
    covers: frozenset[str] = frozenset()
    connections: int = 1
    callers: int = 1


def start(attack: Attack, targets: Iterable[Target]) -> list[threading.Thread]:
    """Starts an attacker for each target, in a thread with low priority, and returns the threads."""
    threads = [threading.Thread(target=_attack, args=(attack, target), daemon=True) for target in targets]
    for thread in threads:
        thread.start()
    return threads


def _attack(attack: Attack, target: Target) -> None:
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)
    while not target.over:
        try:
            attack.run(target)
        except REFUSED:
            time.sleep(0.01)
