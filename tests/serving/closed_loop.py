"""Many clients that each keep a connection and ask again as soon as they are answered: what a load balancer sends, bounded in time."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass, field

import raw_http


@dataclass
class Outcome:
    """What became of the requests.

    Attributes:
        answers: How often each status came.
        lost: Requests that were sent over an open connection and got no answer: it was reset or closed.
        hurried: Answers of 503 without `Retry-After`.
    """

    answers: Counter[int] = field(default_factory=Counter)
    lost: int = 0
    hurried: int = 0


async def ask_until_refused(address: tuple[str, int], clients: int, *, outcome: Outcome, limit_s: float) -> None:
    """Runs concurrent clients until the service refuses connections, and fills `outcome` meanwhile.

    Raises:
        TimeoutError: The service still answered after `limit_s` seconds.
    """
    async with asyncio.timeout(limit_s):
        await asyncio.gather(*(_ask(address, outcome) for _ in range(clients)))


async def _ask(address: tuple[str, int], outcome: Outcome) -> None:
    while True:
        try:
            reader, writer = await asyncio.open_connection(*address)
        except ConnectionRefusedError:
            return
        except ConnectionResetError:  # it lay in the listener's queue when that was closed
            outcome.lost += 1
            return
        try:
            while await _exchange(reader, writer, outcome):
                pass
        except (ConnectionError, asyncio.IncompleteReadError):
            outcome.lost += 1
        finally:
            writer.close()


async def _exchange(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, outcome: Outcome) -> bool:
    """Sends a request and reads its answer; returns whether the connection stays open."""
    writer.write(raw_http.post())
    head = (await reader.readuntil(b"\r\n\r\n")).lower()
    status = int(head.split(b" ", 2)[1])
    lines = dict(line.split(b": ", 1) for line in head.split(b"\r\n")[1:] if line)
    await reader.readexactly(int(lines[b"content-length"]))
    outcome.answers[status] += 1
    outcome.hurried += status == 503 and b"retry-after" not in lines
    return lines.get(b"connection") != b"close"
