"""Many clients on open connections, each of which sends a request as soon as the previous one is answered, for a limited time."""

import asyncio
from collections import Counter
from dataclasses import dataclass, field

import raw_http


@dataclass
class Outcome:
    """The results of all requests.

    Attributes:
        answers: Number of responses for each status.
        lost: Requests on an open connection that got no response, because the connection was reset or closed.
        hurried: 503 responses without `Retry-After`.
    """

    answers: Counter[int] = field(default_factory=Counter)
    lost: int = 0
    hurried: int = 0


async def ask_until_refused(address: tuple[str, int], clients: int, *, outcome: Outcome, limit_s: float) -> None:
    """Runs concurrent clients until the service refuses connections. Counts the results in `outcome`.

    Raises:
        TimeoutError: The service still accepts connections after `limit_s` seconds.
    """
    async with asyncio.timeout(limit_s):
        await asyncio.gather(*(_ask(address, outcome) for _ in range(clients)))


async def _ask(address: tuple[str, int], outcome: Outcome) -> None:
    while True:
        try:
            reader, writer = await asyncio.open_connection(*address)
        except ConnectionRefusedError:
            return
        except ConnectionResetError:  # the connection was in the listener's queue when the listener was closed
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
    """Sends a request and reads its response; returns whether the connection stays open."""
    writer.write(raw_http.post())
    head = (await reader.readuntil(b"\r\n\r\n")).lower()
    status = int(head.split(b" ", 2)[1])
    lines = dict(line.split(b": ", 1) for line in head.split(b"\r\n")[1:] if line)
    await reader.readexactly(int(lines[b"content-length"]))
    outcome.answers[status] += 1
    outcome.hurried += status == 503 and b"retry-after" not in lines
    return lines.get(b"connection") != b"close"
