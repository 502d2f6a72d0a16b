"""Worker: the server of a process that is one of several. Stops when its supervisor says so or is gone, and shares the listener."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable, MutableSequence
from types import FrameType
from typing import Any

import uvicorn

from service.process.listener import BalancedListener
from service.process.server import Server
from service.scheduling.scheduler import Scheduler

HEARTBEAT_S = 0.5


class Worker(Server):
    """A server that takes its share of the connections of a socket."""

    def __init__(
        self,
        config: uvicorn.Config,
        *,
        scheduler: Scheduler,
        grace_s: float,
        on_listen: Callable[[str], None],
        shutdown_pipe: int,
        connections: MutableSequence[int],
        heartbeats: MutableSequence[int],
        index: int,
    ) -> None:
        """Wraps uvicorn.

        Args:
            config: uvicorn's.
            scheduler: What to drain.
            grace_s: Seconds for the drain.
            on_listen: Called with the address once connections are taken.
            shutdown_pipe: Descriptor that is readable once the supervisor wants an end, or is dead.
            connections: Counts of all workers, from `listener.shared_counts`.
            heartbeats: Of all workers, in shared memory: the `time.monotonic_ns()` at which the event loop last turned.
            index: Of this worker.
        """
        super().__init__(config, scheduler=scheduler, grace_s=grace_s, on_listen=on_listen)
        self._shutdown_pipe = shutdown_pipe
        self._connections = connections
        self._heartbeats = heartbeats
        self._index = index
        self._arriving: set[asyncio.Task[Any]] = set()
        self.server_state.connections = _Connections(self._count)

    async def listen(self, sockets: list[socket.socket]) -> None:
        """Starts the application, and takes connections from the first socket."""
        await super().listen([])
        if self.started:
            self._loop = asyncio.get_running_loop()
            self._loop.add_reader(self._shutdown_pipe, self._on_shutdown)
            self._listener = BalancedListener(sockets[0], self._connections, self._index)
            self._listener.start(self._accept)
            self._beat()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Stops, however often it is told: a terminal, or systemd, signals the workers too, and to uvicorn a second SIGINT means at once.

        To end at once is the supervisor's to decide.
        """
        self.should_exit = True

    async def on_tick(self, counter: int) -> bool:
        """Returns whether to stop: when told to, or with a dead lane, for the supervisor has another worker then."""
        return await super().on_tick(counter) or not self._scheduler.ready

    async def drain(self) -> None:
        """Answers what was admitted, refuses what comes meanwhile, and takes no more connections."""
        await super().drain()
        self._listener.close()

    def _beat(self) -> None:
        """Says that the event loop turns, for as long as it does: also during the drain."""
        self._heartbeats[self._index] = time.monotonic_ns()
        self._loop.call_later(HEARTBEAT_S, self._beat)

    def _on_shutdown(self) -> None:
        self._loop.remove_reader(self._shutdown_pipe)
        self.should_exit = True

    def _accept(self, connection: socket.socket) -> None:
        """Makes uvicorn's protocol for a connection, as uvicorn does for those of its own sockets."""

        def protocol() -> asyncio.Protocol:
            made: Callable[..., asyncio.Protocol] = self.config.http_protocol_class
            return made(config=self.config, server_state=self.server_state, app_state=self.lifespan.state, _loop=self._loop)

        task = self._loop.create_task(self._loop.connect_accepted_socket(protocol, connection))
        self._arriving.add(task)
        task.add_done_callback(lambda task: self._arrived(task, connection))
        self._count()

    def _arrived(self, task: asyncio.Task[Any], connection: socket.socket) -> None:
        self._arriving.discard(task)
        self._count()
        if task.cancelled() or task.exception() is not None:  # the client left before it was let in
            connection.close()

    def _count(self) -> None:
        self._listener.count(len(self.server_state.connections) + len(self._arriving))


class _Connections(set[Any]):
    """uvicorn's open connections; says when they change."""

    def __init__(self, changed: Callable[[], None]) -> None:
        super().__init__()
        self._changed = changed

    def add(self, connection: Any) -> None:
        super().add(connection)
        self._changed()

    def discard(self, connection: Any) -> None:
        super().discard(connection)
        self._changed()
