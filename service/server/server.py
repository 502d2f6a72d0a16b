"""The server process: uvicorn with its own connections and shutdown, as a single process or as one of several workers."""

from __future__ import annotations

import asyncio
import errno
import gc
import logging
import mmap
import os
import signal
import socket
import ssl
import sys
import time
from collections.abc import Callable, MutableSequence, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from types import FrameType
from typing import Any, cast

import uvicorn
from starlette.types import ASGIApp

from bertserve.service.errors import StartError, plural
from bertserve.service.scheduling.scheduler import Scheduler
from bertserve.service.server import systemd
from bertserve.service.server.connections import Connections, Room
from bertserve.service.server.parsing import rendered
from bertserve.service.server.protocol import HttpProtocol
from bertserve.service.server.reads import connect

listener_logger = logging.getLogger("bertserve.listener")

ABSENT = sys.maxsize  # the count of a worker that accepts no connections
BACKLOG = 2048
YIELD_S = 0.001  # pause in which other workers can accept; a worker without work needs a tenth of it
PAUSE_S = 1.0  # pause when there is no descriptor or memory for another connection
# Bytes of answers that the system takes before it has sent them, per connection. Without this limit it takes up to 4 MB: for clients that do not
# read their answers, the service would work ahead, and the memory would not be in any limit. Half of it makes answers of 11 MB a little slower.
MAX_UNSENT_BYTES = 2**17
_EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


def shared_counts(count: int, value: int = ABSENT) -> MutableSequence[int]:
    """Returns numbers in memory that is shared with processes that are forked later, such as the connections of each worker."""
    counts = memoryview(mmap.mmap(-1, 8 * count)).cast("q")
    for index in range(count):
        counts[index] = value
    return cast("MutableSequence[int]", counts)


class BalancedListener:
    """Accepts connections for one worker."""

    def __init__(self, listener: socket.socket, counts: MutableSequence[int], index: int) -> None:
        """Creates a listener; `start` starts it.

        Args:
            listener: A bound socket, possibly shared with other workers.
            counts: From `shared_counts`.
            index: Index of this worker.
        """
        self._listener = listener
        self._counts = counts
        self._index = index
        self._timer: asyncio.TimerHandle | None = None
        self._closed = False

    def start(self, on_connection: Callable[[socket.socket], None]) -> None:
        """Listens, and passes each accepted connection to `on_connection`."""
        self._on_connection = on_connection
        self._loop = asyncio.get_running_loop()
        self._listener.setblocking(False)
        self._listener.listen(BACKLOG)
        self.count(0)
        self._watch()

    def close(self) -> None:
        """Accepts the waiting connections, which the last close of the socket would reset, and then no more."""
        if self._closed:
            return
        self._unwatch()
        for _ in range(BACKLOG):
            if not self._accept():
                break
        self.leave()

    def leave(self) -> None:
        """Accepts no more connections; waiting and new ones go to the other processes that have the socket."""
        self._unwatch()
        self._listener.close()
        self.count(ABSENT)
        self._closed = True

    def count(self, connections: int) -> None:
        """Publishes the number of this worker's connections to the other workers."""
        if not self._closed:
            self._counts[self._index] = connections

    def _watch(self) -> None:
        self._loop.add_reader(self._listener, self._on_readable)

    def _unwatch(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._loop.remove_reader(self._listener)

    def _on_readable(self) -> None:
        if self._counts[self._index] > min(self._counts):
            self._pause(YIELD_S)
        else:
            self._accept()

    def _pause(self, seconds: float) -> None:
        """Stops watching the socket for a while: a socket that stays readable would wake the loop continuously."""
        self._loop.remove_reader(self._listener)
        self._timer = self._loop.call_later(seconds, self._resume)

    def _resume(self) -> None:
        self._watch()
        self._accept()

    def _accept(self) -> bool:
        """Accepts one connection, so that the worker with the fewest connections accepts the next one. Returns False if none waits."""
        try:
            connection, _ = self._listener.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return False
        except OSError as error:
            if error.errno not in _EXHAUSTED:
                raise
            listener_logger.error("cannot accept connections (%s); trying again in %.0f s", error.strerror, PAUSE_S)
            self._pause(PAUSE_S)
            return False
        connection.setblocking(False)
        self._on_connection(connection)
        return True


logger = logging.getLogger("bertserve.server")

# After the scheduler has stopped, the server only sends finished answers and refuses late requests.
FLUSH_S = 5
HEARTBEAT_S = 0.2
# Ticks of 0.1 s until a collection of all objects, which stops the process for 0.1 s while the queue is full. Python alone would often collect
# then. Connections and requests leave no cycles, so only an unknown error would leave something to collect.
COLLECT_TICKS = 6000
NEVER = 2**31 - 1  # collections of the middle generation until Python itself collects all objects


class Server(uvicorn.Server):
    """uvicorn with an orderly shutdown: each admitted request gets its answer or an error of this service before its connection closes."""

    def __init__(
        self,
        config: uvicorn.Config,
        *,
        scheduler: Scheduler,
        connections: Connections,
        shutdown_timeout_s: float,
        pre_stop_delay_s: float = 0,
        on_listen: Callable[[str], None],
        on_hangup: Callable[[], None] = lambda: None,
    ) -> None:
        """Wraps uvicorn.

        Args:
            config: uvicorn's configuration.
            scheduler: The scheduler, which is stopped before the server ends.
            connections: An empty set with the limits of connections.
            shutdown_timeout_s: Seconds in which admitted requests can finish.
            pre_stop_delay_s: Seconds to report not-ready before shutdown starts; requests are still served.
            on_listen: Called with the address when the server accepts connections.
            on_hangup: Called in the event loop on each SIGHUP.
        """
        super().__init__(config)
        self._scheduler = scheduler
        self._open = self.server_state.connections = connections
        self._shutdown_timeout_s = shutdown_timeout_s
        self._pre_stop_delay_s = pre_stop_delay_s
        self._on_listen = on_listen
        self._on_hangup = on_hangup
        self._counts, self._index = shared_counts(1), 0
        self._watchdog = systemd.SystemdWatchdog()

    def run(self, sockets: list[socket.socket] | None = None) -> None:
        """Serves until SIGINT or SIGTERM, and returns after an orderly shutdown."""
        for number in (signal.SIGINT, signal.SIGTERM):
            # uvicorn has its own handlers only while its loop runs: an earlier signal stops the server after its start, and a later one has
            # nothing to stop
            signal.signal(number, self._stop_early)
        signal.signal(signal.SIGHUP, lambda *_: None)
        super().run(sockets)

    def _stop_early(self, *_: Any) -> None:
        self.should_exit = True

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Stops the server. A second SIGINT ends the process at once, for an impatient user; SIGTERM may come twice by accident."""
        if self.should_exit and sig == signal.SIGINT:
            os._exit(0)  # without waiting for log lines
        self.should_exit = True

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listens on the first socket and reports the address."""
        await super().startup([])
        if self.started:
            assert sockets
            gc.collect()
            gc.freeze()  # the loaded objects stay, so later collections need not visit them; requests and messages must not wait for it
            gc.set_threshold(*gc.get_threshold()[:2], NEVER)
            self._listen(sockets[0])
            host, port = sockets[0].getsockname()[:2]
            scheme = "http" if self.config.ssl is None else "https"
            self._on_listen(f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}")

    async def on_tick(self, counter: int) -> bool:
        """Returns whether to stop. If all inference threads hang, systemd gets no more reports, and restarts the service after a while."""
        if self._scheduler.ready:
            self._watchdog.beat()
        if counter % COLLECT_TICKS == COLLECT_TICKS - 1:
            gc.collect()
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Reports not ready, drains, then closes listener and connections.

        uvicorn alone would close the listeners first and cancel handlers. Here, probes see `/health/ready` fail, late requests get
        status 503 with an error of this service, and a connection closes only after an answer.
        """
        began = time.monotonic()
        systemd.notify("STOPPING=1")
        running = len(self.server_state.tasks)
        logger.info(
            "shutdown started: not ready for %.0f s, then up to %.0f s for %s in progress",
            self._pre_stop_delay_s,
            self._shutdown_timeout_s,
            plural(running, "request"),
        )
        log_filter = _Unsaid()
        errors_log = logging.getLogger("bertserve.errors")
        errors_log.addFilter(log_filter)
        self._open.stopping = True
        self._scheduler.withdraw()
        await asyncio.sleep(self._pre_stop_delay_s)
        self._open.last_answers()
        for _ in range(3):  # turns of the loop in which requests that were read before the signal are admitted
            await asyncio.sleep(0)
        aborted_count = await self._scheduler.stop(self._shutdown_timeout_s)
        self._listener.close()
        await self._open.end(FLUSH_S)
        self._open.stop()
        if self.server_state.tasks:  # their clients have left, or have an answer
            await asyncio.wait(self.server_state.tasks, timeout=1)
        errors_log.removeFilter(log_filter)
        if (refusals := self._open.refusals) or aborted_count:
            logger.warning(
                "during shutdown, %s refused with 503; at the shutdown timeout, %s aborted",
                plural(refusals, "request"),
                plural(aborted_count, "request"),
            )
        await self.lifespan.shutdown()
        logger.info("shutdown finished after %.1f s", time.monotonic() - began)

    def _listen(self, listener: socket.socket) -> None:
        self._loop = asyncio.get_running_loop()
        self._loop.add_signal_handler(signal.SIGHUP, self._hang_up)
        self._listener = BalancedListener(listener, self._counts, self._index)
        self._open.changed = self._count
        self._listener.start(self._accept)
        self._open.start()

    def _hang_up(self) -> None:
        """Handles SIGHUP."""
        self._on_hangup()

    def _accept(self, connection: socket.socket) -> None:
        """Creates a protocol for a connection, as uvicorn does for its own sockets."""
        room = self._open.room()
        if room is Room.NONE:
            with connection, suppress(OSError):  # the client may have left
                if self.config.ssl is None:
                    connection.send(rendered())  # it fits into any buffer, so there is no wait
            return
        protocol = HttpProtocol(self.config, self.server_state, self.lifespan.state, self._loop)
        protocol.surplus = room is Room.PROBE
        protocol.handshake = self._loop.create_task(connect(protocol, connection, self.config.ssl, self._open.limits))
        protocol.handshake.add_done_callback(lambda handshake: self._connected(handshake, protocol, connection))
        self._open.add(protocol)

    def _connected(self, handshake: asyncio.Task[Any], protocol: HttpProtocol, connection: socket.socket) -> None:
        protocol.handshake = None  # its exception refers to the protocol: such a cycle would wait for the garbage collector
        if handshake.cancelled() or handshake.exception() is not None:  # the client left, or was evicted, during the handshake
            self._open.discard(protocol)
            protocol.parser = None  # type: ignore[assignment]  # it refers to the protocol too
            connection.close()

    def _count(self) -> None:
        self._listener.count(len(self._open))


class Worker(Server):
    """A server that accepts its share of the connections of a socket."""

    def __init__(
        self,
        config: uvicorn.Config,
        *,
        pipe: Connection,
        on_message: Callable[[Any], None],
        counts: MutableSequence[int],
        heartbeats: MutableSequence[int],
        index: int,
        **server: Any,
    ) -> None:
        """Wraps uvicorn.

        Args:
            config: uvicorn's configuration.
            pipe: Pipe to the supervisor; it closes when the supervisor ends.
            on_message: Called with each message of the supervisor, except None, which stops the worker, and SIGHUP.
            counts: Numbers of connections of all workers, from `shared_counts`.
            heartbeats: For all workers, the `time.monotonic_ns()` of the last turn of the event loop, in shared memory.
            index: Index of this worker.
            **server: Further arguments of `Server`.
        """
        super().__init__(config, **server)
        self._pipe, self._on_message = pipe, on_message
        self._counts, self._index = counts, index
        self._heartbeats = heartbeats

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Stops the server; repeated signals change nothing, because a terminal or systemd signals the workers too.

        Only the supervisor can end a worker at once.
        """
        self.should_exit = True

    async def on_tick(self, counter: int) -> bool:
        """Returns whether to stop: on request, or if an inference thread has died, because the supervisor then starts another worker."""
        return await super().on_tick(counter) or not self._scheduler.ready

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Drains and closes; a worker that ends by itself immediately leaves new connections to the other workers."""
        if not self.should_exit:
            self._listener.leave()
            self._pre_stop_delay_s = 0  # no load balancer has to react
        await super().shutdown(sockets)

    def _listen(self, listener: socket.socket) -> None:
        super()._listen(listener)
        self._loop.add_reader(self._pipe.fileno(), self._read)
        self._beat()

    def _hang_up(self) -> None:
        """Passes SIGHUP to the supervisor, which forwards it to all workers, including this one."""
        with suppress(OSError):  # the supervisor was killed
            self._pipe.send(signal.SIGHUP)

    def _beat(self) -> None:
        """Publishes heartbeats while the event loop turns, also during the drain."""
        self._heartbeats[self._index] = time.monotonic_ns()
        self._loop.call_later(HEARTBEAT_S, self._beat)

    def _read(self) -> None:
        try:
            message = self._pipe.recv()
        except (EOFError, OSError):
            self._loop.remove_reader(self._pipe.fileno())
            message = None
        if message is None:
            self.should_exit = True
        elif message is signal.SIGHUP:
            self._on_hangup()
        else:
            self._on_message(message)


class _Unsaid(logging.Filter):
    """Keeps refusals out of the log during shutdown; the log gets their number at the end."""

    def filter(self, record: logging.LogRecord) -> bool:
        return getattr(record, "error_type", None) != "unavailable"


def configure(app: ASGIApp, *, keep_alive_s: int, tls: ssl.SSLContext | None = None, proxies: Sequence[str] = ()) -> uvicorn.Config:
    """Returns uvicorn's configuration, with TLS if there is a context; `proxies` may set the client's address."""
    return uvicorn.Config(
        app,
        loop="uvloop",
        http=HttpProtocol,
        ws="none",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=bool(proxies),
        forwarded_allow_ips=list(proxies),
        timeout_keep_alive=keep_alive_s,
        ssl_context_factory=None if tls is None else lambda *_: tls,
    )


def bind(host: str, port: int) -> socket.socket:
    """Returns a socket bound to an address; it does not listen yet.

    Raises:
        StartError: The address cannot be used.
    """
    listener = None
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        with suppress(OSError):  # a sandbox may not have this option
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, MAX_UNSENT_BYTES)
        listener.bind(address)
    except OSError as error:
        if listener is not None:
            listener.close()
        raise StartError(f"cannot listen on {host}:{port} ({error.strerror}); choose another --host or --port.") from error
    return listener
