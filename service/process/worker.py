"""Worker: the server of a process that is one of several. Stops when its supervisor says so or is gone."""

from __future__ import annotations

import socket
import time
from collections.abc import MutableSequence
from types import FrameType
from typing import Any

import uvicorn

from bertserve.service.process.server import Server

HEARTBEAT_S = 0.2


class Worker(Server):
    """A server that takes its share of the connections of a socket."""

    def __init__(
        self,
        config: uvicorn.Config,
        *,
        shutdown_pipe: int,
        counts: MutableSequence[int],
        heartbeats: MutableSequence[int],
        index: int,
        **server: Any,
    ) -> None:
        """Wraps uvicorn.

        Args:
            config: uvicorn's.
            shutdown_pipe: Descriptor that is readable once the supervisor wants an end, or is dead.
            counts: Connections of all workers, from `listener.shared_counts`.
            heartbeats: Of all workers, in shared memory: the `time.monotonic_ns()` at which the event loop last turned.
            index: Of this worker.
            **server: What else a `Server` takes.
        """
        super().__init__(config, **server)
        self._shutdown_pipe = shutdown_pipe
        self._counts, self._index = counts, index
        self._heartbeats = heartbeats

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Stops, however often it is told: a terminal, or systemd, signals the workers too.

        To end at once is the supervisor's to decide.
        """
        self.should_exit = True

    async def on_tick(self, counter: int) -> bool:
        """Returns whether to stop: when told to, or with a dead lane, for the supervisor has another worker then."""
        return await super().on_tick(counter) or not self._scheduler.ready

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Drains and closes; a worker that ends by itself leaves all connections that come to the others at once."""
        if not self.should_exit:
            self._listener.leave()
            self._drain_s = 0  # no load balancer has to notice anything
        await super().shutdown(sockets)

    def _listen(self, listener: socket.socket) -> None:
        super()._listen(listener)
        self._loop.add_reader(self._shutdown_pipe, self._on_shutdown)
        self._beat()

    def _beat(self) -> None:
        """Says that the event loop turns, for as long as it does: also during the drain."""
        self._heartbeats[self._index] = time.monotonic_ns()
        self._loop.call_later(HEARTBEAT_S, self._beat)

    def _on_shutdown(self) -> None:
        self._loop.remove_reader(self._shutdown_pipe)
        self.should_exit = True
