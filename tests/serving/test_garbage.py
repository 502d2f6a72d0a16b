"""Requests and connections free their memory when they end: the service collects all garbage too rarely to wait for it."""

from __future__ import annotations

import itertools
import os
import re
import signal
import socket
import ssl
import struct
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
import trustme

import raw_http
from conftest import UNTHROTTLED, Served, running, wait_until

# With SIGUSR1, it writes how many connections, requests and tracebacks are in memory, in use or not. gc.get_objects leaves out the objects of the
# start.
PROGRAM = f"""
import collections, gc, signal, ssl, sys, types
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle
from uvloop.loop import SSLProtocol
from bertserve.service.process.protocol import HttpProtocol
gc.disable()
kinds = HttpProtocol, RequestResponseCycle, SSLProtocol, ssl.SSLObject, types.TracebackType
def tell(*_):
    alive = collections.Counter(type(each).__name__ for each in gc.get_objects() if type(each) in kinds)
    print("alive:", dict(alive), file=sys.stderr, flush=True)
signal.signal(signal.SIGUSR1, tell)
{UNTHROTTLED.replace("; ", chr(10))}
"""
RESET = struct.pack("ii", 1, 0)
STREAM = (b"POST /classify HTTP/1.1", b"host: t", b"content-type: application/x-ndjson")
SENT = {
    "nothing": b"",
    "half a head": b"GET /health",
    "half a body": raw_http.post(length=99),
    "a request": raw_http.post(),
    "a last request": raw_http.get(b"connection: close"),
    "a request of HTTP/1.0": raw_http.get(start=b"GET /health HTTP/1.0"),
    "many requests": raw_http.post() * 20,
    "a slow request": raw_http.post(body=b'{"inputs": [%s]}' % b", ".join([b'"%s"' % (b"good " * 99)] * 99)),
    "half a stream": b"\r\n".join([*STREAM, b"content-length: 999", b"", b'{"inputs": "good"}\n' * 9]),
    "a stream with wrong lines": b"\r\n".join(
        [*STREAM, b"content-length: 60", b"", b'{"inputs": 1}\n{\n{"inputs": "good"}\n' + b"\n" * 60]
    ),
    "a wrong path": raw_http.get(start=b"GET /nowhere HTTP/1.1"),
    "an error before its body": raw_http.post(path=b"/nowhere", length=99),
    "a wrong value": raw_http.post(body=b'{"inputs": 1}'),
    "no JSON": raw_http.post(body=b"{" * 9),
    "a large body that is not JSON": raw_http.post(body=b"{" * 70_000),
    "a large body": raw_http.post(body=raw_http.BODY + b" " * 70_000),
    "many lists": raw_http.post(body=b"[%s[]]" % (b"[]," * 70_000)),
    "a long text": raw_http.post(body=b'{"inputs": "%s"}' % (b"good " * 100_000)),
    "an unknown model": raw_http.post(path=b"/models/unknown"),
    "a wrong header": raw_http.post(b"x-request-timeout-ms: soon"),
    "a deadline": raw_http.post(b"x-request-timeout-ms: 1", body=b'{"inputs": [%s]}' % b", ".join([b'"%s"' % (b"good " * 99)] * 99)),
    "many headers": raw_http.get(*[b"a: b"] * 300),
    "long headers": raw_http.get(*[b"a: " + b"b" * 9999] * 9),
    "long trailers": raw_http.chunked(b"11\r\n" + raw_http.BODY + b"\r\n0\r\n" + b"a: b\r\n" * 9999 + b"\r\n"),
    **{name: sent for name, (sent, _) in raw_http.CORPUS.items()},
}


def send(served: Served, tls: ssl.SSLContext | None, sent: bytes, read: bool, reset: bool) -> None:
    """Sends bytes over a new connection and closes or resets it, after or before the first byte of an answer. Errors do not matter."""
    with suppress(OSError), ExitStack() as stack:
        connection = stack.enter_context(socket.create_connection(served.address, timeout=0.1))
        if tls is not None:
            connection = stack.enter_context(tls.wrap_socket(connection, server_hostname="127.0.0.1"))
        connection.sendall(sent)
        if read:
            connection.recv(1)
        if reset:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)


@pytest.mark.parametrize("secure", [False, True], ids=["plain", "tls"])
def test_a_closed_connection_leaves_no_garbage(models: Path, tmp_path: Path, secure: bool) -> None:
    """A connection with TLS that left a reference cycle would take 40 KB, and a refused body would stay as a whole."""
    flags, contexts = [], [None]
    if secure:
        authority, tls = trustme.CA(), ssl.create_default_context()
        issued = authority.issue_cert("127.0.0.1")
        authority.configure_trust(tls)
        issued.private_key_and_cert_chain_pem.write_to_path(str(tmp_path / "pem"))
        flags, contexts = ["--tls-cert", str(tmp_path / "pem"), "--tls-key", str(tmp_path / "pem")], [tls, None]  # None: no handshake

    def counts() -> list[str]:
        return re.findall("alive: (.*)\n", log.read_text())

    def alive() -> str:
        known = len(counts())
        os.kill(served.process.pid, signal.SIGUSR1)
        wait_until(lambda: len(counts()) > known)
        return counts()[-1]

    log = tmp_path / "log"
    limits = ("--header-timeout-s", "1", "--body-timeout-s", "1", "--max-body-bytes", "600000")
    with running(models, log, *flags, *limits, program=PROGRAM) as served, ThreadPoolExecutor(8) as pool:
        cases = itertools.product(contexts, SENT.values(), (False, True), (False, True))
        for done in [pool.submit(send, served, *case) for case in cases]:
            done.result()
        with suppress(AssertionError):
            wait_until(lambda: alive() == "{}", 20)
        assert alive() == "{}"


def test_all_objects_are_collected_only_at_intervals(models: Path, tmp_path: Path) -> None:
    """This finds what an unknown error leaves. Python alone would collect all objects while the queue is full."""
    program = f"""
import gc, sys
from bertserve.service.process import server
server.COLLECT_TICKS = 2
gc.callbacks.append(lambda phase, details: print(phase, details["generation"], gc.get_threshold()[2], file=sys.stderr, flush=True))
{UNTHROTTLED.replace("; ", chr(10))}
"""
    with running(models, tmp_path / "log", program=program):
        wait_until(lambda: (tmp_path / "log").read_text().count(f"stop 2 {2**31 - 1}\n") > 2)
