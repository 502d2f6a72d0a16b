"""TextLines: the lines of a file or of stdin as bytes, with the place after each, and none longer than its limit in memory."""

from __future__ import annotations

from typing import BinaryIO

from bertserve.service.scoring.row import Place

_BOM = b"\xef\xbb\xbf"


class TextLines:
    """Reads lines, and knows where it is."""

    def __init__(self, file: BinaryIO, place: Place, max_bytes: int) -> None:
        """Begins to read at a place.

        Args:
            file: The file, at its beginning.
            place: Where to begin; a file that cannot be sought begins at its beginning.
            max_bytes: Of a line.
        """
        self._file, self._max_bytes = file, max_bytes
        self.offset, self.number = place.offset, place.line
        if place.offset:
            file.seek(place.offset)

    def next(self) -> tuple[bytes, bool]:
        """Returns the next line with its end, and whether it is whole; b"" at the end. Of a line over the limit the beginning is kept."""
        line = self._file.readline(self._max_bytes + 1)
        self.offset += len(line)
        self.number += bool(line)
        whole = len(line) <= self._max_bytes
        piece = line
        while not whole and not piece.endswith(b"\n"):
            piece = self._file.readline(2**20)
            self.offset += len(piece)
            if not piece:
                break
        if self.number == 1 and line.startswith(_BOM):
            line = line[len(_BOM) :]
        return line, whole

    def close(self) -> None:
        """Closes the file."""
        self._file.close()
