"""A small HTTP server for tests of clients, in its own thread. The test passes the function that answers each request."""

import asyncio
import contextlib
import socket
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager

Answer = Callable[[int], Awaitable[bytes | None]]
OK = b"HTTP/1.1 200 OK\r\nserver-timing: tokenize;dur=0.5, inference;dur=2.0\r\ncontent-length: 2\r\n\r\n[]"
BUSY = b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 2\r\n\r\n[]"


class Server:
    """An HTTP server that counts its connections and requests.

    Attributes:
        port: TCP port.
        connections: Connections accepted so far.
        requests: Requests received so far.
        heads: Request lines and headers of these requests, in lower case.
        bodies: Bodies of these requests.
        over: Event that closes the server and all its connections; set it on the server's event loop.
    """

    def __init__(self, answer: Answer) -> None:
        self.port = 0
        self.connections = 0
        self.requests = 0
        self.heads: list[bytes] = []
        self.bodies: list[bytes] = []
        self.over = asyncio.Event()
        self._answer = answer

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answers the requests of a connection; closes it if the test's function returns None."""
        self.connections += 1
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).lower()
                length = int(head.split(b"content-length:")[1].split(b"\r\n")[0]) if b"content-length:" in head else 0
                self.heads.append(head)
                self.bodies.append(await reader.readexactly(length))
                self.requests += 1
                answer = await self._answer(self.requests - 1)
                if answer is None:
                    return
                writer.write(answer)
        except (asyncio.IncompleteReadError, asyncio.CancelledError, ConnectionError):
            pass
        finally:
            writer.close()


@contextmanager
def http_server(answer: Answer) -> Iterator[Server]:
    """Runs a server on a free loopback port until the block ends.

    Args:
        answer: Gets the index of a request and returns the whole response, or None to close the connection.
    """
    server = Server(answer)
    ready = threading.Event()
    loop = asyncio.new_event_loop()

    async def run() -> None:
        async with await asyncio.start_server(server.serve, "127.0.0.1", 0) as listener:
            server.port = listener.sockets[0].getsockname()[1]
            ready.set()
            await server.over.wait()
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()
        await asyncio.sleep(0.01)

    def work() -> None:
        loop.run_until_complete(run())
        loop.close()

    thread = threading.Thread(target=work)
    thread.start()
    assert ready.wait(5)
    try:
        yield server
    finally:
        with contextlib.suppress(RuntimeError):  # the test has already closed the server and its event loop
            loop.call_soon_threadsafe(server.over.set)
        thread.join(5)


def response(body: bytes, status: bytes = b"200 OK") -> bytes:
    return b"HTTP/1.1 %s\r\ncontent-length: %d\r\n\r\n%s" % (status, len(body), body)


def always(response: bytes) -> Answer:
    """Returns a function that answers each request with the same bytes."""

    async def answer(_: int) -> bytes:
        return response

    return answer


ok = always(OK)


async def never(_: int) -> None:
    await asyncio.sleep(60)


def unused_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])
