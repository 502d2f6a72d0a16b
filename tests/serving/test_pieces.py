"""Received bytes are parsed in pieces that never extend beyond the end of a head or a chunked body."""

from __future__ import annotations

import pytest

from bertserve.service.process.parsing import PIECE_BYTES, PieceCutter

HEADS = b"GET / HTTP/1.1\r\n\r\nPOST /a HTTP/1.1\r\nhost: a\r\n\r\n"


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 16, 100])
def test_a_piece_ends_at_an_empty_line(size: int) -> None:
    cutter, ends = PieceCutter(), set()
    for read in range(0, len(HEADS), size):
        data, start = HEADS[read : read + size], 0
        while start < len(data):
            start = cutter.end(data, start)
            ends.add(read + start)

    assert {18, len(HEADS)} <= ends
    assert ends <= {18} | {*range(size, len(HEADS), size)} | {len(HEADS)}


def test_a_piece_has_a_maximum_length() -> None:
    assert [PIECE_BYTES, 5000] == [PieceCutter().end(b"x" * 5000, 0), PieceCutter().end(b"x" * 5000, PIECE_BYTES)]
