"""on_thread: runs a function that may block for long, such as a read of a pipe or the load of a model."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")


async def on_thread(work: Callable[[], T], *, name: str) -> T:
    """Returns the result of a function that runs on a thread of its own; the end of the process does not wait for this thread.

    If the coroutine is cancelled, the function runs on, and its result is dropped.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def settle(value: Any, error: BaseException | None) -> None:
        if not future.done():
            if error is None:
                future.set_result(value)
            else:
                future.set_exception(error)

    def run() -> None:
        try:
            value, error = work(), None
        except BaseException as caught:  # noqa: BLE001 - the boundary of a thread: its caller gets the error
            value, error = None, caught
        try:
            loop.call_soon_threadsafe(settle, value, error)
        except RuntimeError:  # the loop is closed, and nothing waits for the result
            return

    threading.Thread(target=run, daemon=True, name=name).start()
    return await future
