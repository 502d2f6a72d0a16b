"""Cancels work whose client hung up: FastAPI does not, so the request's own channel has to be watched."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

from starlette.types import Receive

from bertserve.service.errors import ClientGoneError

T = TypeVar("T")

# Most requests are answered sooner; a watch for each would cost more than it saves.
WATCH_AFTER_S = 0.1


async def unless_disconnected(work: Awaitable[T], receive: Receive) -> T:
    """Awaits work and cancels it when the client disconnects.

    Args:
        work: What to await.
        receive: The request's ASGI channel, its body read to the end.

    Raises:
        ClientGoneError: The client disconnected first.
    """
    loop = asyncio.get_running_loop()
    task = asyncio.current_task()
    assert task is not None, "called outside a task. This is a bug."
    watchers: list[asyncio.Task[None]] = []
    gone = False

    async def watch() -> None:
        nonlocal gone
        while (await receive())["type"] != "http.disconnect":
            continue
        gone = True
        task.cancel()

    timer = loop.call_later(WATCH_AFTER_S, lambda: watchers.append(loop.create_task(watch())))
    try:
        return await work
    except asyncio.CancelledError:
        if not gone:
            raise
        task.uncancel()
        raise ClientGoneError("the client closed the connection before it was answered.") from None
    finally:
        timer.cancel()
        for watcher in watchers:
            watcher.cancel()
