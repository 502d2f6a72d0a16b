"""The server process: uvicorn with an orderly shutdown."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import socket
import ssl
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from types import FrameType

import uvicorn
from starlette.types import ASGIApp

from bertserve.service.errors import StartError, plural
from bertserve.service.scheduling.scheduler import Scheduler
from bertserve.service.server import systemd
from bertserve.service.server.limits import limited

logger = logging.getLogger("bertserve.server")

FLUSH_S = 5  # for clients to read their answers, after the scheduler has stopped
TICK_S = 0.5


class Server(uvicorn.Server):
    """uvicorn with an orderly shutdown: each admitted request gets its answer or an error of this service before its connection closes."""

    def __init__(
        self,
        config: uvicorn.Config,
        *,
        scheduler: Scheduler,
        shutdown_timeout_s: float,
        pre_stop_delay_s: float = 0,
        on_listen: Callable[[str], None] = lambda address: None,
        on_hangup: Callable[[], None] = lambda: None,
    ) -> None:
        """Wraps uvicorn.

        Args:
            config: uvicorn's configuration, from `configure`.
            scheduler: The scheduler, which is stopped before the server ends.
            shutdown_timeout_s: Seconds in which admitted requests can finish.
            pre_stop_delay_s: Seconds to report not-ready before shutdown starts; requests are still served.
            on_listen: Called with the address when the server accepts connections.
            on_hangup: Called in the event loop on each SIGHUP.
        """
        super().__init__(config)
        self._scheduler = scheduler
        self._shutdown_timeout_s = shutdown_timeout_s
        self._pre_stop_delay_s = pre_stop_delay_s
        self._on_listen = on_listen
        self._on_hangup = on_hangup
        self._watchdog = systemd.SystemdWatchdog()

    def run(self, sockets: list[socket.socket] | None = None) -> None:
        """Serves until SIGINT or SIGTERM, and returns after an orderly shutdown."""
        for number in (signal.SIGINT, signal.SIGTERM):
            # uvicorn has its own handlers only while its loop runs: an earlier signal stops the server after its start, and a later one has
            # nothing to stop
            signal.signal(number, self.handle_exit)
        signal.signal(signal.SIGHUP, lambda *_: None)
        super().run(sockets)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Stops the server. A second SIGINT ends the process at once, for an impatient user; SIGTERM may come twice by accident."""
        if self.should_exit and sig == signal.SIGINT:
            os._exit(0)  # without waiting for log lines
        self.should_exit = True

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listens on the first socket and reports the address."""
        assert sockets
        gc.collect()
        gc.freeze()  # the loaded objects stay, so later collections need not visit them
        await super().startup(sockets)
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, self._on_hangup)
        host, port = sockets[0].getsockname()[:2]
        scheme = "http" if self.config.ssl is None else "https"
        self._on_listen(f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}")

    async def on_tick(self, counter: int) -> bool:
        """Returns whether to stop. If all inference threads hang, systemd gets no more reports, and restarts the service after a while."""
        if self._scheduler.ready:
            self._watchdog.beat()
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Reports not ready, drains, then closes the listener and the connections.

        uvicorn alone would close the listener first, and cancel handlers. Here, probes see `/health/ready` fail, late requests get status 503
        with an error of this service, and a connection closes only after an answer.
        """
        began = time.monotonic()
        systemd.notify("STOPPING=1")
        logger.info(
            "shutdown started: not ready for %.0f s, then up to %.0f s for %s in progress",
            self._pre_stop_delay_s,
            self._shutdown_timeout_s,
            plural(len(self.server_state.tasks), "request"),
        )
        ticks = asyncio.create_task(self._tick())
        self._scheduler.withdraw()
        await asyncio.sleep(self._pre_stop_delay_s)
        self.config.encoded_headers.append((b"connection", b"close"))  # in the answers to all requests from now on
        await super().on_tick(0)
        for _ in range(3):  # turns of the loop in which requests that were read before are admitted
            await asyncio.sleep(0)
        aborted = await self._scheduler.stop(self._shutdown_timeout_s)
        late = asyncio.gather(*map(self._connect, _waiting(sockets or ())), return_exceptions=True)
        await super().shutdown(sockets)
        await late
        ticks.cancel()
        if aborted:
            logger.warning("at the shutdown timeout, %s aborted", plural(aborted, "request"))
        logger.info("shutdown finished after %.1f s", time.monotonic() - began)

    async def _connect(self, connection: socket.socket) -> None:
        """Serves a connection that uvicorn has not accepted."""
        protocol = partial(self.config.http_protocol_class, self.config, self.server_state, self.lifespan.state)  # type: ignore[call-arg]
        await asyncio.get_running_loop().connect_accepted_socket(protocol, connection, ssl=self.config.ssl)

    async def _tick(self) -> None:
        """Continues to tick while the server drains, so that neither a process manager nor systemd takes it for hung."""
        while True:
            await asyncio.sleep(TICK_S)
            await self.on_tick(0)


def _waiting(listeners: Iterable[socket.socket]) -> Iterator[socket.socket]:
    """Accepts the connections that wait in the queues of listeners: the system would reset them when a listener closes."""
    for listener in listeners:
        with suppress(BlockingIOError):
            while True:
                yield listener.accept()[0]


def configure(
    app: ASGIApp,
    *,
    keep_alive_s: int,
    max_header_bytes: int,
    header_timeout_s: float,
    tls: ssl.SSLContext | None = None,
    proxies: Sequence[str] = (),
) -> uvicorn.Config:
    """Returns uvicorn's configuration, with TLS if there is a context; `proxies` may set the client's address."""
    return uvicorn.Config(
        app,
        loop="uvloop",
        http=limited(max_header_bytes, header_timeout_s),
        ws="none",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=bool(proxies),
        forwarded_allow_ips=list(proxies),
        timeout_keep_alive=keep_alive_s,
        timeout_graceful_shutdown=FLUSH_S,
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
        listener.bind(address)
    except OSError as error:
        if listener is not None:
            listener.close()
        raise StartError(f"cannot listen on {host}:{port} ({error.strerror}); choose another --host or --port.") from error
    return listener
