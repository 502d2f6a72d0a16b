"""Attacks on HTTP/1.1 and TLS: clients misuse connections, request heads, framing and timing."""

from __future__ import annotations

import gzip
import json
import socket
import ssl
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress

import raw_http
from attack import Attack, Run, Target
from bertserve.service.settings import Settings
from hostile_values import MAX_BODY, MAX_CHARS, prose

GET_LIVE = b"GET /health/live HTTP/1.1\r\nhost: t\r\n\r\n"
DOCUMENT = b"GET /docs/static/swagger-ui-bundle.js HTTP/1.1\r\nhost: t\r\n\r\n"
METRICS = b"GET /metrics HTTP/1.1\r\nhost: t\r\n\r\n"
HEAD_BYTES: int = Settings.model_fields["max_header_bytes"].default
SHORT = b'{"inputs":"A warm, funny film."}'
PAIRS = json.dumps({"inputs": [{"text": "a", "text_pair": "b"}] * 220}).encode() + b"\n"
MANY_SENTENCES = json.dumps({"inputs": {"source_sentence": "a", "sentences": [""] * 500}}).encode() + b"\n"
LARGE_ANSWER = json.dumps({"inputs": "[MASK] " * 64, "parameters": {"top_k": 300}}).encode()  # 10 MB
BYTE_EVERY_S = 0.2
MANY = 64  # connections of one attacker if each of them uses resources of the service
FLOOD = 1 << 20
RESET = struct.pack("ii", 1, 0)


def forever(*requests: bytes) -> Iterator[bytes]:
    while True:
        yield from requests


def blind(target: Target, data: bytes) -> None:
    """Sends bytes repeatedly over a connection without reading an answer, until the service closes it or the attack ends."""
    with target.opened() as connections:
        connections.append(target.connect())
        connections[0].settimeout(0.2)
        rest = memoryview(data)
        while not target.over:
            with suppress(TimeoutError):  # the service does not read
                rest = rest[connections[0].send(rest) :] or memoryview(data)


def hold(target: Target, count: int, data: bytes, *, byte: bytes = b"", tls: bool = True) -> None:
    """Opens connections, sends data over each, and keeps them open. It sends `byte` over each from time to time."""
    with target.opened() as connections:
        for _ in range(target.share(count)):
            if target.over:
                return
            connections.append(target.connect() if tls else target.connect_tcp())
            connections[-1].settimeout(0.2)
            with suppress(OSError):  # the service refuses the connection or does not read
                connections[-1].sendall(data)
        while target.pause(BYTE_EVERY_S):
            for connection in connections if byte else ():
                with suppress(OSError):
                    connection.sendall(byte)


def read_slowly(target: Target, count: int, request: bytes) -> None:
    """Requests large answers over several connections, and reads them a few bytes at a time."""
    with target.opened() as connections:
        for _ in range(count):
            connections.append(connect_with_small_buffer(target))
            connections[-1].settimeout(0.2)
            with suppress(TimeoutError):
                connections[-1].sendall(request)
        while target.pause(BYTE_EVERY_S):
            for connection in connections:
                connection.setblocking(False)
                with suppress(OSError):
                    connection.recv(64)


def flood(*parts: bytes, path: str = "/classify", count: int = 80) -> Run:
    """Returns an attack by parallel streams with a content length, which send the same bytes without end and read the answers."""

    def run(target: Target) -> None:
        head = target.head("POST", path, b"content-length: 999999999999", b"content-type: application/x-ndjson")
        with target.opened() as connections:
            for _ in range(target.share(count)):
                connections.append(target.connect())
                connections[-1].sendall(head)
            send_and_read(target, connections, parts)

    return run


def pipeline(data: bytes, count: int = 250) -> Run:
    """Returns an attack over parallel connections, which send the same requests without end and read the answers."""

    def run(target: Target) -> None:
        with target.opened() as connections:
            for _ in range(target.share(count)):
                if target.over:
                    return
                connections.append(target.connect())
            send_and_read(target, connections, [data])

    return run


def send_and_read(target: Target, connections: Sequence[socket.socket], parts: Sequence[bytes]) -> None:
    """Sends parts over each connection in turn and reads what arrives, until the attack ends. What does not fit into a buffer is not sent."""
    rests = [memoryview(b"".join(parts))] * len(connections)
    for connection in connections:
        connection.setblocking(False)
    while not target.over:
        for i, connection in enumerate(connections):
            with suppress(BlockingIOError, ssl.SSLWantWriteError, ssl.SSLWantReadError):
                rests[i] = rests[i][connection.send(rests[i]) :] or memoryview(b"".join(parts))
            with suppress(BlockingIOError, ssl.SSLWantWriteError, ssl.SSLWantReadError):
                connection.recv(65536)


def never_read(target: Target, count: int, request: bytes, *, behind: bytes = b"") -> None:
    """Sends a request and then the bytes `behind` over each of several connections, and never reads the answers."""
    with target.opened() as connections:
        for _ in range(target.share(count)):
            if target.over:
                return
            connections.append(connect_with_small_buffer(target))
            connections[-1].settimeout(0.2)
            with suppress(OSError):
                connections[-1].sendall(request)
        unsent = [memoryview(behind)] * len(connections)
        while target.pause(BYTE_EVERY_S):
            for i, connection in enumerate(connections):
                connection.setblocking(False)
                with suppress(OSError):
                    unsent[i] = unsent[i][connection.send(unsent[i][:60_000]) :]


def connect_with_small_buffer(target: Target) -> socket.socket:
    """Returns a new connection with a small receive buffer. With TLS, the buffer has the usual size."""
    if target.tls:
        return target.connect()
    connection = socket.socket()
    try:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(("127.0.0.1", target.port))
    except OSError:
        connection.close()
        raise
    return connection


def in_chunks(*parts: bytes) -> Run:
    """Returns an attack by chunked requests with this body. Its bytes include the chunk framing."""

    def run(target: Target) -> None:
        head = target.head("POST", "/classify", b"transfer-encoding: chunked", b"content-type: application/json")
        target.ask_all([head, *parts] for _ in iter(int, 1))

    return run


def lines(*parts: bytes) -> Run:
    """Returns an attack by a stream of JSON Lines that lasts as long as the attack. The answers are read afterwards."""

    def run(target: Target) -> None:
        head = target.head("POST", "/classify", b"transfer-encoding: chunked", b"content-type: application/x-ndjson")

        def body() -> Iterator[bytes]:
            yield head
            while not target.over:
                yield from parts
            yield b"0\r\n\r\n"

        target.ask_all([body()])

    return run


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def gets(*paths: str) -> Run:
    return lambda target: target.ask_all(forever(*(target.head("GET", path) for path in paths)))


def posts(*headers: bytes, body: bytes = SHORT, path: str = "/classify") -> Run:
    """Returns an attack by POST requests, each with one of the headers in turn."""
    return lambda target: target.ask_all(forever(*(target.post(path, body, header) for header in headers)))


def raw(*data: bytes, half_close: bool = False) -> Run:
    """Returns an attack that sends each byte string over a new connection, and reads the answer until no bytes arrive for 0.2 s.

    Args:
        *data: The byte strings.
        half_close: Close the sending half of the connection after the bytes.
    """

    def run(target: Target) -> None:
        for sent in data:
            with target.opened() as connections, suppress(TimeoutError):
                connections.append(target.connect())
                connections[0].sendall(sent)
                if half_close:
                    connections[0].shutdown(socket.SHUT_WR)
                connections[0].settimeout(0.2)
                while connections[0].recv(65536):
                    pass

    return run


def hang_up(request: Callable[[Target], bytes], *, reset: bool, tls: bool = True, wait_s: float = 0.0) -> Run:
    """Returns an attack by clients that send a request, wait `wait_s` seconds, and disconnect without reading the answer."""

    def run(target: Target) -> None:
        while not target.over:
            with target.opened() as connections:
                connections.append(target.connect() if tls else target.connect_tcp())
                connections[0].sendall(request(target))
                time.sleep(wait_s)
                if reset:
                    connections[0].setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)

    return run


def wrong_keys(target: Target) -> None:
    """Sends requests with an unknown key, and with values that are not keys."""
    keys = [b"Bearer wrong", b"Bearer " + b"a" * (HEAD_BYTES - 1024), b"Basic " + b"=" * 1000, b"\xff" * 1000]
    heads = [b"POST /classify HTTP/1.1\r\nhost: t\r\nauthorization: %s\r\ncontent-length: 0\r\n\r\n" % key for key in keys]
    target.ask_all(forever(*heads))


def handshakes(target: Target) -> None:
    """Opens and closes connections, each with a TLS handshake if the service uses TLS."""
    while not target.over:
        target.connect().close()


def large_body(target: Target) -> bytes:
    """Returns a request with a body of the maximum size, without the last byte."""
    return target.post("/classify", b" " * (MAX_BODY - 1)).replace(b"length: %d" % (MAX_BODY - 1), b"length: %d" % MAX_BODY)


def long_line(target: Target) -> bytes:
    """Returns a stream with a valid line and a line of the maximum length, without the last byte of the second line."""
    head = target.head("POST", "/classify", b"transfer-encoding: chunked", b"content-type: application/x-ndjson")
    return head + chunk(SHORT + b"\n") + b"%x\r\n" % MAX_BODY + b" " * (MAX_BODY - 1)


def _large_answer_request(target: Target) -> bytes:
    return target.post("/fill-mask", LARGE_ANSWER)


def _stream_request(target: Target) -> bytes:
    head = target.head("POST", "/embed", b"transfer-encoding: chunked", b"content-type: application/x-ndjson")
    return head + chunk(b'{"inputs":"A warm, funny film."}\n' * 2000)


def _large_line_request(target: Target) -> bytes:
    body = json.dumps({"inputs": "[MASK] " + "a " * 30_000, "parameters": {"top_k": 180}}).encode() + b"\n"  # an answer of 11 MB
    return target.head("POST", "/fill-mask", b"content-length: %d" % len(body), b"content-type: application/x-ndjson") + body


def _large_answers_request(target: Target) -> bytes:
    head = target.head("POST", "/fill-mask", b"transfer-encoding: chunked", b"content-type: application/x-ndjson")
    return head + chunk(LARGE_ANSWER + b"\n") * 40


LONG_PATHS = tuple("/" + name for name in ("clasify", "modls/x/y/z/a/b/c/d", "v2/modles/x/infr", "x" * 30_000, "x/" * 10_000, "%0a" * 9000))
WRONG_PATHS = b"".join(b"GET /v2/models/aaaaaaaa/versions/bbbbbbbb/conf%04d HTTP/1.1\r\nhost: t\r\n\r\n" % number for number in range(1000))
CONTROL_PATHS = ("/classify%0A", "/health/live%0a", "/%00", "/models/a%0d%0aset-cookie:%20b/info", "/models/%0a/unload", "/..%2f..", "//t/")
SCRAPES = ("/metrics", "/openapi.json", "/models", "/v2/models/stats", "/info", "/docs", "/v2/models/sentiment/config")

# name -> (attack, minimum number of connections of one attacker)
PROTOCOL: dict[str, tuple[Run, int]] = {
    "pipelined probes": (lambda target: blind(target, GET_LIVE * 5000), 1),
    "pipelined requests": (lambda target: blind(target, target.post("/classify", SHORT) * 5000), 1),
    "pipelined refusals": (lambda target: blind(target, target.post("/nowhere", b"") * 5000), 1),
    "pipelined scrapes": (lambda target: blind(target, target.head("GET", "/metrics") * 5000), 1),
    "pipelined probes of many connections": (pipeline(GET_LIVE * 200), 250),
    "pipelined wrong paths of many connections": (pipeline(WRONG_PATHS), 250),
    "trailers of a megabyte": (in_chunks(chunk(SHORT) + b"0\r\n", b"x: y\r\n" * (FLOOD // 6) + b"\r\n"), 1),
    "trailers without end": (in_chunks(chunk(SHORT) + b"0\r\n", *[b"x: y\r\n" * (FLOOD // 6)] * 200), 1),
    "chunks of a byte": (in_chunks(b"1\r\n \r\n" * FLOOD, chunk(SHORT) + b"0\r\n\r\n"), 1),
    "chunk extensions": (in_chunks((b"1;" + b"a=b;" * 2000 + b"\r\n \r\n") * 1000, chunk(SHORT) + b"0\r\n\r\n"), 1),
    "one long chunk extension": (in_chunks(b"1;" + b"a=b;" * (FLOOD // 4) + b"\r\n \r\n", chunk(SHORT) + b"0\r\n\r\n"), 1),
    "a chunk size of many zeros": (in_chunks(b"0" * FLOOD + b"1\r\n \r\n", chunk(SHORT) + b"0\r\n\r\n"), 1),
    "chunks over the limit": (in_chunks(*[chunk(b" " * FLOOD)] * 64, b"0\r\n\r\n"), 1),
    "slow heads": (lambda target: hold(target, MANY, b"POST /classify HTTP/1.1\r\nhost: t\r\nx: ", byte=b"y"), MANY),
    "slow bodies": (lambda target: hold(target, MANY, target.head("POST", "/classify", b"content-length: 1000000"), byte=b" "), MANY),
    "bodies without their last byte": (lambda target: hold(target, MANY, large_body(target)), MANY),
    "lines without their last byte": (lambda target: hold(target, MANY, long_line(target)), MANY),
    "slow readers of a large answer": (lambda target: read_slowly(target, 8, _large_answer_request(target)), 8),
    "slow readers of a stream": (lambda target: read_slowly(target, 8, _stream_request(target)), 8),
    "a slow reader of a stream of large answers": (lambda target: read_slowly(target, 1, _large_answers_request(target)), 1),
    "streams of a large answer that is not read": (lambda target: never_read(target, 40, _large_line_request(target)), 40),
    "silent connections": (lambda target: hold(target, target.max_connections + 16, b""), MANY),
    "silent connections without TLS": (lambda target: hold(target, target.max_connections + 16, b"", tls=False), MANY),
    "half of a TLS hello": (lambda target: hold(target, MANY, bytes.fromhex("16030100c8010000c40303"), byte=b"\0", tls=False), MANY),
    "handshakes": (handshakes, 1),
    "half-closed connections": (raw(raw_http.post(), raw_http.CLEAN, b"POST /classify HTTP/1.1\r\ncontent-length: 9\r\n\r\n", half_close=True), 1),
    "resets": (hang_up(lambda _: b"", reset=True, tls=False), 1),
    "requests that are reset": (hang_up(lambda target: target.post("/classify", SHORT), reset=True), 1),
    "long requests that are reset": (hang_up(lambda target: target.post("/classify", json.dumps({"inputs": prose(MAX_CHARS), "parameters": {"window": "max"}}).encode()), reset=True, wait_s=0.1), 1),
    "many headers": (raw(raw_http.get(*[b"a: b"] * (HEAD_BYTES // 6 - 20)), raw_http.get(*[b"a:"] * (HEAD_BYTES // 4 - 40))), 1),
    "a head without end": (lambda target: blind(target, b"GET / HTTP/1.1\r\n" + b"x: y\r\n" * (FLOOD // 6)), 1),
    "bytes behind the last answer": (lambda target: blind(target, raw_http.get(b"connection: close") + bytes(FLOOD)), 1),
    "one long header": (raw(raw_http.get(b"x: " + b"y" * (HEAD_BYTES - 100)), raw_http.get(b"x: " + b"y" * FLOOD)), 1),
    "headers of numbers": (posts(*(name + b"1" * 30_000 for name in (b"user-agent: @huggingface/inference/", b"x-request-timeout-ms: ", b"inference-header-content-length: ", b"x-request-id: ", b"traceparent: 00-"))), 1),
    "odd media types": (posts(b"content-type: " + b"a/b;" * 7000, b"accept: " + b"*/*;q=0.1," * 2900, b"content-type: application/x-ndjson"), 1),
    "bodies that are waited for": (lambda target: hold(target, MANY, target.head("POST", "/classify", b"expect: 100-continue", b"content-length: 9")), MANY),
    "upgrades": (raw(*(raw_http.post(*headers) + raw_http.CLEAN for headers in raw_http.UPGRADES.values())), 1),
    "HTTP/1.0": (lambda target: target.ask_all(forever(target.post("/classify", SHORT, b"connection: keep-alive").replace(b"HTTP/1.1", b"HTTP/1.0"))), 1),
    "whole addresses": (gets("http://t/health/live", "http://" + "a" * 20_000 + "/info", "/info?" + "a=b&" * 7000), 1),
    "wrong paths": (gets(*LONG_PATHS), 1),
    "control characters in paths": (gets(*CONTROL_PATHS), 1),
    "contradicting lengths": (raw(*(sent for name, (sent, _) in raw_http.CORPUS.items() if "length" in name or "chunk" in name)), 1),
    "no HTTP": (raw(bytes(FLOOD), bytes(range(256)) * 4096, b"\r\n" * FLOOD, b"\r\n" * FLOOD + GET_LIVE), 1),
    "compressed bodies": (posts(b"content-encoding: gzip", b"content-encoding: br, gzip", body=gzip.compress(b"[" * 8 * FLOOD)), 1),
    "a stream of tiny lines": (lines(chunk(b"1\n" * (FLOOD // 2))), 1),
    "a stream of empty lines": (lines(chunk(b"\n" * FLOOD)), 1),
    "a stream of short texts": (lines(chunk(b'{"inputs":"good"}\n' * 4000)), 1),
    "a stream of lists of pairs": (lines(chunk(PAIRS * 32)), 1),
    "a stream of one line": (lines(chunk(b"[]," * (FLOOD // 3))), 1),
    "a stream of lines of containers": (lines(*[chunk(b"[],[]," * (FLOOD // 6))] * 6, chunk(b"[]\n")), 1),
    "a stream in chunks of a byte": (lines(b"1\r\n1\r\n1\r\n\n\r\n" * 50_000), 1),
    "streams of blank lines": (flood(b"\n " * (FLOOD // 4)), 80),
    "endless bodies behind an error of many connections": (flood(bytes(FLOOD), path="/nowhere", count=250), 250),
    "streams of short wrong lines": (flood(b"ab\n" * (FLOOD // 4)), 80),
    "streams of many texts": (flood(MANY_SENTENCES * 100, path="/similarity"), 80),
    "documents that are not read": (lambda target: never_read(target, target.max_connections + 16, DOCUMENT), MANY),
    "metrics that are not read": (lambda target: never_read(target, target.max_connections + 16, METRICS), MANY),
    "documents that are not read, with bytes behind them": (lambda target: never_read(target, target.max_connections // 2, DOCUMENT, behind=bytes(316_000)), MANY),
    "scrapes": (gets(*SCRAPES), 1),
    "wrong keys": (wrong_keys, 1),
    "bodies for every path": (lambda target: target.ask_all(forever(*(target.post(path, b"[" * 65_536) for path in ("/health", "/v2/repository/index", "/docs", "/nowhere", "/models/nobody/load", "/metrics")))), 1),
}  # fmt: skip


# attack that does not wait for each answer -> number of requests of one attacker that run at the same time
CALLERS = {
    "slow readers of a large answer": 8,
    "slow readers of a stream": 8,
    "requests that are reset": 8,
    "long requests that are reset": 8,
    "a stream of short texts": 8,  # 32 lines of a stream run at the same time
    "a stream of lists of pairs": 8,
    "streams of many texts": 8,
    "streams of a large answer that is not read": 8,
}


def protocol_attacks() -> list[Attack]:
    return [
        Attack(name, "protocol", run, connections=connections, callers=CALLERS.get(name, 1))
        for name, (run, connections) in PROTOCOL.items()
    ]
