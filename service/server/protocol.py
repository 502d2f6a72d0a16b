"""HttpProtocol: uvicorn's HTTP protocol with limits on the time and size of requests and answers. It knows only the routes of probes.

`Connections` checks all time limits once per second, so a request needs no timer.
"""

from __future__ import annotations

import asyncio
import select
from collections.abc import Callable
from functools import partial
from typing import Any

from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT

from bertserve.service.api import errors
from bertserve.service.api.errors import GONE, UNANSWERED
from bertserve.service.errors import BertServeError, SlowRequestError, UnavailableError
from bertserve.service.server.connections import LINGER_S
from bertserve.service.server.parsing import (
    BODY,
    COMPLETE,
    ENDING,
    FULL,
    HANDSHAKE,
    HEAD,
    STOPPING,
    WAITING,
    ReadControl,
    RequestParser,
    rendered,
)
from bertserve.service.server.reads import TLS_READ_BYTES

_HEADS = tuple(b"HTTP/1.1 %d" % digit for digit in (2, 3, 4, 5))  # not 100, after which the client only sends its body
_PEER_CLOSED = getattr(select, "POLLRDHUP", 0)  # only on Linux; elsewhere poll still reports errors and resets
_END_OF_HEAD = b"\r\n\r\n"
LARGE_BYTES = 2**16  # of a body that is written separately from its head, because copying it costs more than a system call


class CoalescingTransport(asyncio.Transport):
    """A transport that keeps the head of a response until the next write, or until the response is complete.

    uvicorn writes head and body separately, in two system calls and two packets, which would wake the client twice.

    Attributes:
        held: The head of a response that is not yet written.
        written: Bytes that the transport has got so far.
    """

    def __init__(self, transport: asyncio.Transport, drops_body: Callable[[], bool] = lambda: False) -> None:
        """Wraps a transport. `drops_body` returns whether the client still sends a body, which is dropped from now on."""
        super().__init__()
        self._transport = transport
        self._drops_body = drops_body
        self.held = b""
        self.written = 0
        self._measured_since: float | None = None  # start of the period in which the client must read enough of the unsent bytes
        self._read_before = 0  # bytes that it had read by then

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        """Returns information about the connection."""
        return self._transport.get_extra_info(name, default)

    def is_closing(self) -> bool:
        """Returns whether the connection is closed or closing."""
        return self._transport.is_closing()

    def pause_reading(self) -> None:
        """Stops reading."""
        self._transport.pause_reading()

    def resume_reading(self) -> None:
        """Resumes reading."""
        self._transport.resume_reading()

    def write(self, data: Any) -> None:
        """Writes bytes. A closed transport ignores them: asyncio's own transport does so too, but uvloop's does not."""
        if not self.held and data.startswith(_HEADS) and data.endswith(_END_OF_HEAD):
            self.held = bytes(data)
            return
        head, self.held = self.held, b""
        parts = [head, data] if len(data) > LARGE_BYTES else [head + data]
        for part in parts:
            if part and not self._transport.is_closing():
                self.written += len(part)
                self._transport.write(part)

    def close(self) -> None:
        """Closes the transport once everything is written, or only its sending half: closing with unread bytes would discard the answer."""
        if self._drops_body():
            self.end_sending()
        else:
            self.flush()
            self._transport.close()

    def end_sending(self) -> None:
        """Closes the sending half once everything is written. With TLS it stays open: closing would decrypt all that still arrives."""
        self.flush()
        if not self._transport.is_closing() and self._transport.can_write_eof():
            self._transport.write_eof()

    def abort(self) -> None:
        """Closes the transport at once; unwritten bytes are lost."""
        self.held = b""
        self._transport.abort()

    def get_write_buffer_size(self) -> int:
        """Returns the number of bytes that the client has not yet read."""
        return self._transport.get_write_buffer_size()

    def slow_since(self, now: float, min_rate: float) -> float | None:
        """Returns since when the client has read more slowly than a rate; None if it reads fast enough, or has read everything.

        Args:
            now: The loop's time in seconds.
            min_rate: Bytes per second.
        """
        unsent = self.get_write_buffer_size()
        if not unsent or self._measured_since is None:
            return None
        is_slow = self.written - unsent - self._read_before < (now - self._measured_since) * min_rate
        return self._measured_since if is_slow else None

    def is_read_slowly(self, now: float, timeout_s: float, min_rate: float) -> bool:
        """Returns whether the client has read more slowly than a rate for some time. It must be called about once per second.

        Args:
            now: The loop's time in seconds.
            timeout_s: Seconds for which the client may read more slowly.
            min_rate: Bytes per second.
        """
        unsent, slow_since = self.get_write_buffer_size(), self.slow_since(now, min_rate)
        if not unsent:
            self._measured_since = None
        elif self._measured_since is None or (slow_since is None and now - self._measured_since > timeout_s):
            self._measured_since, self._read_before = now, self.written - unsent
        return slow_since is not None and now - slow_since > timeout_s

    def peer_closed(self) -> bool:
        """Returns whether the peer has closed or reset the connection, even if reading is paused and the event loop cannot notice it."""
        if self._transport.is_closing():
            return False
        poll = select.poll()
        poll.register(self._transport.get_extra_info("socket").fileno(), _PEER_CLOSED)
        return bool(poll.poll(0))

    def flush(self) -> None:
        """Writes the kept head of a response, if any."""
        if self.held:
            self.write(b"")

    def release(self) -> None:
        """Drops the reference to the protocol, after the connection has closed."""
        self._drops_body = lambda: False


class HttpProtocol(RequestParser):
    """One connection.

    Attributes:
        handshake: The task of the handshake; it can be cancelled to end a connection during its handshake.
    """

    transport: CoalescingTransport
    handshake: asyncio.Task[Any] | None = None
    _served = False  # whether it has answered a request

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Handles a new connection."""
        # With TLS it would be 512 KiB. With this limit it holds at most two pieces of an answer; with 0, uvloop's TLS sometimes never asks
        # for the next piece.
        transport.set_write_buffer_limits(HIGH_WATER_LIMIT)
        if transport.get_extra_info("sslcontext") is not None:
            transport.set_read_buffer_limits(TLS_READ_BYTES)  # type: ignore[attr-defined]
        super().connection_made(CoalescingTransport(transport, self._drops_body))
        self.flow = ReadControl(self.transport)
        if self._stage == HANDSHAKE:
            self._stage = WAITING

    def connection_lost(self, exc: Exception | None) -> None:
        """Handles a closed connection."""
        super().connection_lost(exc)
        self.transport.release()
        self._unparsed = b""
        if self.cycle is not None and (gone := self.cycle.scope.get(GONE)) is not None:
            gone()  # type: ignore[operator]

    def on_response_complete(self) -> None:
        """Handles an answered request: does the same as uvicorn, but without its timer."""
        if self.transport.held:  # an answer to HEAD has no body after its head
            self.transport.flush()
        self.cycle.body = bytearray()  # what was not read; it would take memory, and keep reading paused
        self.server_state.total_requests += 1
        self._since = self._now()
        self._served = True
        if self.transport.is_closing():
            self._stage = ENDING
            return
        if self._stage == COMPLETE:
            self._stage = WAITING
            if self._unparsed:
                self._open.eager.add(partial(self._parse_on, True))
        if self.flow.read_paused:
            self.flow.resume_reading()

    def check(self, now: float) -> None:
        """Ends the connection if it exceeds a time limit. Called about once per second."""
        limits, waited = self._limits, now - self._since
        if self._stage == HANDSHAKE:  # the handshake has its own timeout
            return
        if self.transport.is_read_slowly(now, limits.body_timeout_s, limits.min_body_rate):
            self._open.note("send_timeout")
            self.transport.abort()
        elif self.flow.read_paused and self.transport.peer_closed():
            self.transport.abort()
        elif self._stage == COMPLETE:
            return
        elif self.transport.is_closing():  # uvloop waits without a limit for a client of TLS that has closed only its sending half
            if waited > limits.body_timeout_s and not self.transport.get_write_buffer_size():
                self.transport.abort()
        elif self._stage == WAITING:
            self._check_idle(now, waited)
        elif self._stage == HEAD:
            if waited > limits.header_timeout_s:
                self._refuse(
                    SlowRequestError(
                        "the request line and headers were not complete within {header_timeout_s:g} s.",
                        header_timeout_s=limits.header_timeout_s,
                    ),
                    "head_timeout",
                )
        elif self._stage == BODY:
            self._check_body(now, waited)
        elif waited > LINGER_S and not self.transport.get_write_buffer_size():
            self.transport.abort()

    @property
    def closing(self) -> bool:
        """Whether the service has closed the connection, or is closing it."""
        return self._stage != HANDSHAKE and self.transport.is_closing()

    def wind_up(self, now: float) -> None:
        """Ends the connection during shutdown, unless its request is being answered or about to arrive."""
        if self._stage == COMPLETE or now - self._since < LINGER_S:
            return
        if self._stage == HANDSHAKE:
            self.abort()
        elif self.transport.is_closing():
            return
        elif self._stage == WAITING:
            if not self._unparsed:  # else its request is parsed soon
                self.transport.close()
        elif self._stage == ENDING:
            if not self.transport.get_write_buffer_size():
                self.transport.abort()
        else:
            self._refuse(UnavailableError(STOPPING), "stopping")

    def no_keep_alive(self) -> None:
        """Closes the connection after the current answer."""
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.keep_alive = False

    def abort(self) -> None:
        """Ends the connection at once."""
        if self._stage == HANDSHAKE:
            assert self.handshake is not None
            self.handshake.cancel()
        else:
            self.transport.abort()

    @property
    def expendable_since(self) -> tuple[bool, float] | None:
        """Whether the connection is idle after a request, and the start of its wait for the client; None if it must not be evicted.

        With unread bytes or half a body, it can be evicted if the client is slower than the minimum rate, or if the body is not needed.
        """
        if self._stage != HANDSHAKE and self.transport.get_write_buffer_size():
            slow_since = self.transport.slow_since(self._now(), self._limits.min_body_rate)
            return None if slow_since is None else (False, slow_since)
        if self._stage == COMPLETE or (self._stage == WAITING and self._unparsed):
            return None
        if self._stage == BODY and not self.cycle.response_complete:
            waited = self._now() - self._since
            if self._waits_for_service() or self._received >= waited * self._limits.min_body_rate:
                return None
        return self._served and self._stage == WAITING, self._since

    def evict(self) -> None:
        """Ends the connection in favor of another one."""
        self._open.note("evicted")
        self._open.discard(self)
        self._unparsed = b""
        if self._stage in (HEAD, BODY) and not self.transport.get_write_buffer_size():
            self._answer(UnavailableError(FULL))
            self._stage = ENDING
            self.transport.close()
            self.loop.call_later(LINGER_S, self.transport.abort)  # TLS waits for the client to close
        else:
            self.abort()
            self._stage = ENDING

    def _waits_for_service(self) -> bool:
        """Returns whether the body is slow because the application has not yet read or answered the part so far."""
        return self.flow.read_paused or bool(self.cycle.scope.get(UNANSWERED))

    def _check_idle(self, now: float, waited: float) -> None:
        if not self._unparsed and waited > (self.timeout_keep_alive if self._served else self._limits.header_timeout_s):
            if not self._served:
                self._open.note("head_timeout")
            self._since = now
            self.transport.close()

    def _check_body(self, now: float, waited: float) -> None:
        limits, unanswered = self._limits, self.cycle.scope.get(UNANSWERED)
        if self._waits_for_service():
            self._since = now  # the delay is caused by the service
            self._received *= unanswered is None
        elif waited <= limits.body_timeout_s:
            return
        elif unanswered == 0 and self._received >= waited * limits.min_body_rate:
            self._since, self._received = now, 0  # a stream may have no end, so its rate is measured anew
        elif self.cycle.response_complete or self._received < waited * limits.min_body_rate:
            error = SlowRequestError(
                "the body was not complete within {limit:g} s, and arrived at less than {rate} bytes per second.",
                limit=limits.body_timeout_s,
                rate=limits.min_body_rate,
            )
            self._refuse(error, "body_timeout")

    def _refuse(self, error: BertServeError, reason: str, *, answers: bool = True) -> None:
        """Refuses a request, and closes the connection after the client does: closing with unread bytes would discard the answer."""
        self._open.note(reason)
        if answers:
            self._answer(error)
        self._end()
        self.transport.end_sending()

    def _drops_body(self) -> bool:
        """Drops the rest of the body, if it is not yet complete, and returns whether it is not."""
        if self._stage != BODY:
            return False
        self._end()
        return True

    def _end(self) -> None:
        """Drops what the client still sends, until it closes the connection."""
        self._stage, self._since = ENDING, self._now()
        self._unparsed = b""
        self.flow.held = False
        self.flow.resume_reading()

    def _answer(self, error: BertServeError) -> None:
        """Answers an incomplete request, unless an answer has started."""
        path, started = "", False
        if self._stage == BODY:
            path, started = self.scope["path"], self.cycle.response_started
            self.cycle.scope[errors.REFUSAL] = error  # type: ignore[literal-required]
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        if not started:
            self.transport.write(rendered(error, self.server_state.default_headers, path))
