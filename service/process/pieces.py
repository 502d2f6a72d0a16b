"""What keeps the parser, which has no pause, from going beyond the end of a request: the pieces that it gets, and when reading is held."""

from __future__ import annotations

from uvicorn.protocols.http.flow_control import FlowControl

PIECE_BYTES = 16384  # in chunks of a byte they take about 2 ms to parse
_EMPTY_LINE = b"\r\n\r\n"


class PieceCutter:
    """Cuts reads into pieces, none of which goes beyond the end of a head or of a chunked body.

    Both end with an empty line, and the parser accepts no other line end than CRLF. An empty line in the data of a chunk makes two pieces of
    it, which the parser reads like one.
    """

    __slots__ = ("_last",)

    def __init__(self) -> None:
        """Creates it, before the first byte."""
        self._last = b""  # up to three bytes of the piece before, if it did not end with an empty line: one may have begun there

    def end(self, data: bytes, start: int) -> int:
        """Returns where the piece ends that starts there, at least a byte later. It must be taken: the next call goes on behind it."""
        if self._last:
            across = (self._last + data[start : start + 3]).find(_EMPTY_LINE)
            if across >= 0:
                end = start + across + 4 - len(self._last)
                self._last = b""
                return end
        found = data.find(_EMPTY_LINE, start, start + PIECE_BYTES)
        if found >= 0:
            self._last = b""
            return found + 4
        end = min(start + PIECE_BYTES, len(data))
        self._last = (self._last + data[max(start, end - 3) : end])[-3:]
        return end


class ReadControl(FlowControl):
    """uvicorn's flow control, but while reading is held nobody resumes it: each `receive` of an application tries to.

    Attributes:
        held: Whether enough bytes are read and not parsed.
    """

    held = False

    def resume_reading(self) -> None:
        """Reads again, unless reading is held."""
        if self.read_paused and not self.held:
            super().resume_reading()
