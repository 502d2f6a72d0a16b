"""Builds requests of HTTP/1.1 as bytes, valid and invalid ones, and reads all responses on a connection."""

import select
import socket
from contextlib import suppress
from dataclasses import dataclass

BODY = b'{"inputs":"good"}'
END = b"\r\n\r\n"
CHUNKED = b"transfer-encoding: chunked"
LINES = b"content-type: application/x-ndjson"
LAST_CHUNK = b"0\r\n\r\n"
H2C = (b"connection: upgrade, http2-settings", b"upgrade: h2c", b"http2-settings: AAMAAABkAAQAAP__")
QUIET_S = 0.05


def head(*headers: bytes, path: bytes = b"/classify", start: bytes | None = None) -> bytes:
    """Returns the head of a POST to a path, or of a request with another first line."""
    return b"\r\n".join([start or b"POST %s HTTP/1.1" % path, b"host: t", *headers]) + END


def get(*headers: bytes, start: bytes = b"GET /health HTTP/1.1") -> bytes:
    return head(*headers, start=start)


def post(*headers: bytes, body: bytes = BODY, length: int | None = None, path: bytes = b"/classify") -> bytes:
    """Returns a POST of a body. Its last header is `content-length`, with the true length or `length`."""
    return head(*headers, b"content-length: %d" % (len(body) if length is None else length), path=path) + body


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


@dataclass(frozen=True)
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes


def exchange(address: tuple[str, int], *messages: bytes, count: int = 0) -> list[Answer]:
    """Returns all responses on a connection.

    Args:
        address: Host and port of the service.
        messages: Bytes to send, each after the response to the message before it.
        count: Responses to wait for. After them, reading stops when `QUIET_S` pass without data, or when the service closes the connection.

    Raises:
        TimeoutError: The service hangs.
    """
    stream = bytearray()
    count = max(count, len(messages) - 1)
    with socket.create_connection(address, timeout=10) as connection, suppress(ConnectionError):
        for index, message in enumerate(messages):
            with suppress(ConnectionError):  # the service refused the request before all bytes were sent
                connection.sendall(message)
            expected = count if message is messages[-1] else index + 1
            while stream.count(b"\r\nx-request-id: ") < expected or select.select([connection], [], [], QUIET_S)[0]:
                if not (data := connection.recv(65536)):
                    return parse_answers(bytes(stream))
                stream += data
    return parse_answers(bytes(stream))


def parse_answers(stream: bytes) -> list[Answer]:
    """Parses responses, without interim ones; asserts that each is complete and well-formed, with no bytes between them."""
    results = []
    while stream:
        head, end, stream = stream.partition(END)
        assert end, head
        line, *lines = head.decode("ascii").split("\r\n")
        version, status, _ = line.split(" ", 2)
        assert version == "HTTP/1.1", line
        if status == "100":
            assert lines == []
            continue
        headers = dict(field.split(": ", 1) for field in lines)
        assert len(headers) == len(lines), lines
        length = 0 if headers["x-request-id"].startswith("head") else int(headers["content-length"])
        assert length <= len(stream), head
        results.append(Answer(int(status), headers, stream[:length]))
        stream = stream[length:]
    return results
