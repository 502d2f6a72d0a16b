"""Answers to clients of HTTP/1.0, which has no chunks: one whose length is not known ends with its connection."""

from __future__ import annotations

import sys
from collections.abc import Callable

from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle


def unchunked(app: ASGIApp, cycle: Callable[[], RequestResponseCycle]) -> ASGIApp:
    """Returns an application whose answers are sent without chunks.

    Args:
        app: The application.
        cycle: Returns uvicorn's state of the request, which decides on chunks.
    """

    async def run(scope: Scope, receive: Receive, send: Send) -> None:
        unknown_length = False

        async def send_unchunked(message: Message) -> None:
            nonlocal unknown_length
            if message["type"] == "http.response.start":
                unknown_length = all(name.lower() != b"content-length" for name, _ in message.get("headers", ()))
                if unknown_length:
                    cycle().chunked_encoding, cycle().expected_content_length = False, sys.maxsize
            elif unknown_length and not message.get("more_body", False):
                cycle().expected_content_length = len(message.get("body", b""))  # so that uvicorn takes the body for complete
            await send(message)

        await app(scope, receive, send_unchunked)

    return run
