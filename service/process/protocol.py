"""HttpProtocol: uvicorn's HTTP protocol, with limits for the time and size of what is still coming in. Knows no routes but the probes.

A connection is in one of five stages. Only what passes through `Connections` ends one from outside: its sweep, once a second, is what
keeps the time, so that a request costs no timer.
"""

from __future__ import annotations

import asyncio
import random
from typing import Any, cast

import httptools
from uvicorn import Config
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol
from uvicorn.server import ServerState

from service.errors import BertServeError, HeadTooLargeError, MalformedRequestError, SlowRequestError, UnavailableError
from service.http import auth, errors
from service.http.streaming import GONE, UNANSWERED
from service.process.connections import LINGER_S, Connections
from service.process.transport import CoalescingTransport

_PROBES = frozenset(path.encode() for path in (*auth.PROBES, auth.METRICS))  # answered when no other connection is taken

WAITING, HEAD, BODY, COMPLETE, ENDING = range(5)
"""Stages: no byte of a request, half a head, a head and half a body, a request to be answered, refused and about to close."""

_FULL = "the service has as many connections as it may have; try again later, or raise --max-connections."
_VERSIONS = frozenset({"1.1", "1.0"})
_PROBE = b"HTTP/1.1 100 Continue\r\n\r\n"  # to a client that is gone it brings a reset back, and any other one ignores it
_PROBED_AFTER_S = 0.05
_STOPPING = "the service is stopping; send the request to another instance, or try again later."
_ids = random.Random()  # noqa: S311 - ids tell requests apart, they guard nothing


class HttpProtocol(HttpToolsProtocol):
    """One connection.

    Attributes:
        surplus: Whether it came when there was no room: it may ask the probes, once.
    """

    transport: CoalescingTransport
    surplus = False

    def __init__(
        self, config: Config, server_state: ServerState, app_state: dict[str, Any], _loop: asyncio.AbstractEventLoop | None = None
    ) -> None:
        """Creates the protocol as uvicorn does; `server_state.connections` are `Connections`."""
        super().__init__(config, server_state, app_state, _loop)
        self._open = cast("Connections", server_state.connections)
        self._limits = self._open.limits
        self._now = self.loop.time
        self._stage = WAITING
        self._since = self._now()  # of the wait for the request that comes in, or for the next one
        self._received = 0  # bytes of the request that comes in
        self._chunk = 0  # bytes of the read that is being parsed
        self._served = False
        self._unsent, self._unsent_since = 0, 0.0
        self._refusal: tuple[BertServeError, str] | None = None
        self._read_again = b""  # the head of a request to upgrade, without that
        self._half_closed = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Takes a connection."""
        super().connection_made(CoalescingTransport(transport, self.loop))

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection is no more."""
        super().connection_lost(exc)
        if self.cycle is not None:
            self.cycle.scope[GONE] = True  # type: ignore[literal-required]

    def data_received(self, data: bytes) -> None:
        """Takes bytes."""
        if self._stage == ENDING:
            return
        self._chunk = len(data)
        try:
            self._parse(data)
        except httptools.HttpParserError:
            self._refuse(*(self._refusal or (MalformedRequestError("this is not HTTP/1.1 as RFC 9112 has it."), "malformed")))
            return
        self._received += self._chunk
        if self._stage == HEAD and self._received > self._limits.max_head_bytes:
            self._refuse(self._head_too_large(), "head_too_large")

    def _parse(self, data: bytes) -> None:
        """Feeds the parser. What stands behind a head that asks for another protocol it would not read as HTTP: its body, and other requests."""
        rest: bytes | memoryview = data
        while True:
            try:
                self.parser.feed_data(rest)
            except httptools.HttpParserUpgrade as upgrade:
                head, self._read_again = self._read_again, b""
                rest = memoryview(rest)[upgrade.args[0] :]
                self.parser.feed_data(head)
            else:
                return

    def on_message_begin(self) -> None:
        """The first byte of a request has come."""
        super().on_message_begin()
        self._stage = HEAD
        self._since = self._now()

    def on_headers_complete(self) -> None:
        """The head is complete: the application starts."""
        if self._received + self._chunk > self._limits.max_head_bytes and self._head_bytes() > self._limits.max_head_bytes:
            self._reject(self._head_too_large(), "head_too_large")
        if self.parser.should_upgrade():
            self._read_again = self._without_upgrade()
            return
        if (version := self.parser.get_http_version()) not in _VERSIONS:
            self._reject(MalformedRequestError(f"this is HTTP/{version}, and the service speaks HTTP/1.1 and 1.0."), "malformed")
        probes = self.url.partition(b"?")[0] in _PROBES
        if self.surplus and not probes:
            self._reject(UnavailableError(_FULL), "refused")
        if self._open.stopping and not probes:
            self.app = self._open.counting(self.config.loaded_app)
        super().on_headers_complete()
        self._stage = BODY
        if self.surplus or self._open.closing:
            self.cycle.keep_alive = False

    def on_message_complete(self) -> None:
        """The request is complete."""
        if self._read_again:
            return
        super().on_message_complete()
        self._received = -self._chunk  # what else this read has is not counted, and of the next request nothing is there yet
        if self.cycle.response_complete:
            self._stage = WAITING
            self._since = self._now()
        else:
            self._stage = COMPLETE

    def on_response_complete(self) -> None:
        """A request is answered: as uvicorn's, without its timer."""
        self.server_state.total_requests += 1
        if self.transport.is_closing():
            return
        if self._stage == ENDING:
            self.transport.close()
            return
        self.flow.resume_reading()
        if self.pipeline:
            self._start_asgi_task(*self.pipeline.pop())
            return
        if self._stage == COMPLETE:
            self._stage = WAITING
        self._since = self._now()
        self._served = True

    def eof_received(self) -> bool:  # type: ignore[override]
        """The client sends no more. Whether it still listens is not said; if not, a probe comes back as a reset.

        Returns:
            Whether the connection stays open, for the answer. It does not with TLS, which asyncio cannot half close, with HTTP/1.0,
            which has no answers that could be a probe, and on systems that do not tell of a reset.
        """
        if self._stage != COMPLETE or not self._answering or not self.transport.tells_resets:
            return False
        cycle = self.cycle
        if not (cycle.response_started or self.pipeline):  # otherwise the answer is the probe
            if cycle.scope["http_version"] == "1.0":
                return False
            self.transport.write(_PROBE)
            self.loop.call_later(_PROBED_AFTER_S, self._end_if_reset)
        cycle.keep_alive = False
        self._half_closed = True
        return True

    def check(self, now: float) -> None:
        """Ends the connection if it has taken more time than it may. Called about once a second."""
        limits, waited = self._limits, now - self._since
        if self._stalled(now):
            self._open.note("send_timeout")
            self.transport.abort()
        elif self._answering or self.transport.is_closing():
            if self._half_closed:
                self._end_if_reset()
            elif self._stage == HEAD:
                self._since = now  # the next request; the one before it is what takes so long
        elif self._stage == WAITING:
            if waited > (self.timeout_keep_alive if self._served else limits.head_timeout_s):
                if not self._served:
                    self._open.note("head_timeout")
                self.transport.close()
        elif self._stage == HEAD:
            if waited > limits.head_timeout_s:
                self._refuse(
                    SlowRequestError(f"the head of the request was not complete within {limits.head_timeout_s:g} s."), "head_timeout"
                )
        elif self._stage == BODY:
            self._check_body(now, waited)
        elif waited > LINGER_S:
            self.transport.abort()

    def wind_up(self, now: float) -> None:
        """Ends the connection of a service that has drained, unless its request is being answered or about to come."""
        if self._answering or self.transport.is_closing() or now - self._since < LINGER_S:
            return
        if self._stage == WAITING:
            self.transport.close()
        elif self._stage == ENDING:
            self.transport.abort()
        else:
            self._refuse(UnavailableError(_STOPPING), "stopping")

    def no_keep_alive(self) -> None:
        """The answer that is being made is the connection's last."""
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.keep_alive = False

    def abort(self) -> None:
        """Ends the connection at once."""
        self.transport.abort()

    @property
    def expendable_since(self) -> tuple[bool, float] | None:
        """Whether it is an idle one that was served, and since when it waits for a whole head; None if it does not."""
        if self._stage == BODY or self._answering:
            return None
        return self._served and self._stage == WAITING, self._since

    def evict(self) -> None:
        """Ends the connection to make room for another one."""
        self._open.note("evicted")
        if self._stage == HEAD:
            self.transport.write(self._rendered(UnavailableError(_FULL)))
        self._stage = ENDING
        self.transport.close()
        self._open.discard(self)

    @property
    def _answering(self) -> bool:
        """Whether a complete request has yet to be answered."""
        cycle = self.cycle
        return self._stage != BODY and cycle is not None and not (cycle.response_complete or cycle.disconnected)

    def _check_body(self, now: float, waited: float) -> None:
        limits, unanswered = self._limits, self.cycle.scope.get(UNANSWERED)
        if self.flow.read_paused or unanswered:
            self._since = now  # what takes so long is ours
            self._received *= unanswered is None
        elif waited <= limits.body_timeout_s:
            return
        elif unanswered == 0 and self._received >= waited * limits.min_body_rate:
            self._since, self._received = now, 0  # a stream has no end at which it could have been fast enough
        elif self.cycle.response_complete or self._received < waited * limits.min_body_rate:
            message = f"the body was not complete within {limits.body_timeout_s:g} s, and came at less than {limits.min_body_rate} bytes a second."
            self._refuse(SlowRequestError(message), "body_timeout")

    def _stalled(self, now: float) -> bool:
        """Returns whether the client takes nothing of its answer."""
        unsent = self.transport.get_write_buffer_size()
        if unsent == 0 or unsent != self._unsent:
            self._unsent, self._unsent_since = unsent, now
            return False
        return now - self._unsent_since > self._limits.body_timeout_s

    def _end_if_reset(self) -> None:
        """Ends a half closed connection whose client is gone: nobody reads from it any more, who would see the reset."""
        if not self.transport.is_closing() and self.transport.is_reset():
            self.transport.abort()

    def _without_upgrade(self) -> bytes:
        """Returns the head that has just been read, as one that does not ask for another protocol."""
        if self.parser.get_method() == b"CONNECT":
            self._reject(MalformedRequestError("CONNECT is for proxies, and this is none."), "malformed")
        headers = b"".join(b"%s: %s\r\n" % header for header in self.headers if header[0] != b"upgrade")
        return b"%s %s HTTP/%s\r\n%s\r\n" % (self.parser.get_method(), self.url, self.parser.get_http_version().encode(), headers)

    def _head_bytes(self) -> int:
        return len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)

    def _head_too_large(self) -> HeadTooLargeError:
        most = self._limits.max_head_bytes
        return HeadTooLargeError(f"the head of the request has more than {most} bytes; send fewer headers, or raise --max-head-bytes.")

    def _reject(self, error: BertServeError, reason: str) -> None:
        """Stops the parser, in one of its callbacks: it raises an error of its own for ours."""
        self._refusal = error, reason
        raise error

    def _refuse(self, error: BertServeError, reason: str) -> None:
        """Answers what will not become a request, and closes once the client has: a close with bytes unread would reset the answer."""
        self._open.note(reason)
        answering, stage = self._answering, self._stage
        self._stage, self._since = ENDING, self._now()
        if stage == BODY and self.pipeline:
            self.pipeline.popleft()
            answering = True
        if answering:  # an earlier request; `on_response_complete` closes
            return
        started = False
        if stage == BODY:
            started = self.cycle.response_started
            self.cycle.scope[errors.REFUSAL] = error  # type: ignore[literal-required]
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        if not started:
            self.transport.write(self._rendered(error, self.scope["path"] if stage == BODY else ""))
        self.flow.resume_reading()
        if self.transport.can_write_eof():
            self.transport.write_eof()
        else:
            self.transport.close()

    def _rendered(self, error: BertServeError, path: str = "") -> bytes:
        return rendered(error, self.server_state.default_headers, path)


def rendered(error: BertServeError | None = None, default_headers: list[tuple[bytes, bytes]] | None = None, path: str = "") -> bytes:
    """Returns the bytes of a whole response that closes the connection; without an error it says that there is no room."""
    request_id = f"{_ids.getrandbits(128):032x}"
    response = errors.response(error or UnavailableError(_FULL), request_id, path)
    headers = [*(default_headers or ()), *response.raw_headers, (b"x-request-id", request_id.encode()), (b"connection", b"close")]
    head = b"".join(b"%s: %s\r\n" % header for header in headers)
    return STATUS_LINE[response.status_code] + head + b"\r\n" + bytes(response.body)
