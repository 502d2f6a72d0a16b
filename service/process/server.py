"""The process around the application: uvicorn with an orderly end, and start-up lines."""

from __future__ import annotations

import asyncio
import gc
import signal
import socket
from collections.abc import Callable

import uvicorn
from starlette.types import ASGIApp

from service.errors import StartError
from service.process.protocol import HttpProtocol
from service.scheduling.scheduler import Scheduler

# After our own drain only bytes already produced remain to be sent.
FLUSH_S = 5


class Server(uvicorn.Server):
    """uvicorn, but what was admitted is answered, or refused by us, before connections are closed."""

    def __init__(self, config: uvicorn.Config, *, scheduler: Scheduler, grace_s: float, on_listen: Callable[[str], None]) -> None:
        """Wraps uvicorn.

        Args:
            config: uvicorn's.
            scheduler: What to drain.
            grace_s: Seconds for the drain.
            on_listen: Called with the address once connections are taken.
        """
        super().__init__(config)
        self._scheduler = scheduler
        self._grace_s = grace_s
        self._on_listen = on_listen

    def run(self, sockets: list[socket.socket] | None = None) -> None:
        """Serves until SIGINT or SIGTERM, and returns after an orderly end."""
        for number in (signal.SIGINT, signal.SIGTERM):
            # uvicorn raises the signal again once it is done, for whoever handled it before: here nobody has to
            signal.signal(number, lambda *_: None)
        super().run(sockets)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listens on the sockets and says so."""
        await self.listen(sockets or [])
        if self.started:
            assert sockets
            host, port = sockets[0].getsockname()[:2]
            self._on_listen(f"http://{f'[{host}]' if ':' in host else host}:{port}")
            gc.collect()
            gc.freeze()  # what was loaded stays; later collections need not walk it

    async def listen(self, sockets: list[socket.socket]) -> None:
        """Starts the application, and takes connections from the sockets."""
        await super().startup(sockets)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Drains, then closes listeners and connections.

        uvicorn would close the listeners first and answer cancelled handlers in plain text; this way probes see
        `/health/ready` turn red, and late requests get our 503, while the drain goes on.
        """
        await self.drain()
        await super().shutdown(sockets)

    async def drain(self) -> None:
        """Answers what was admitted, and refuses what comes meanwhile."""
        await self._scheduler.stop(self._grace_s)
        await asyncio.sleep(0)  # let the handlers that were just answered write their responses


def configure(app: ASGIApp, *, keep_alive_s: int) -> uvicorn.Config:
    """Returns what uvicorn needs to know to serve an application."""
    return uvicorn.Config(
        app,
        loop="uvloop",
        http=HttpProtocol,
        ws="none",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,  # nothing here depends on who the client is
        timeout_keep_alive=keep_alive_s,
        timeout_graceful_shutdown=FLUSH_S,
    )


def bind(host: str, port: int) -> socket.socket:
    """Returns a socket bound to an address; it does not listen yet.

    Raises:
        StartError: The address cannot be had.
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
