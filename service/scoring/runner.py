"""Runner: sends windows of rows through a Scorer to an output, in order; two windows overlap, so that no inference thread is idle.

Files are read and written on threads, because these calls block.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from tqdm import tqdm

from bertserve.service.errors import StartError, classify, plural
from bertserve.service.scheduling.daemon_thread import on_thread
from bertserve.service.scoring.formats import Reader, Writer
from bertserve.service.scoring.part import ScoringProgress
from bertserve.service.scoring.row import RowAnswer, Window
from bertserve.service.scoring.scorer import Scorer
from bertserve.service.wire.json_text import to_json

# Maximum bytes of a window's rows in the file, so that long rows need no more memory than short ones.
WINDOW_BYTES = 2**24
# Windows at the same time: while the last rows of a window run, the next window starts.
WINDOWS = 2
THREAD = "scoring"

_BAR = "{percentage:3.0f}%|{bar}| {postfix}, {elapsed} so far, {remaining} left"
_ENDLESS = "{postfix}, {elapsed} so far"


class Sink(Protocol):
    """A destination of the output."""

    def append(self, data: bytes, rejected: bytes, progress: ScoringProgress) -> ScoringProgress:
        """Writes bytes of the output and of the rejected rows; returns the progress with their sizes."""
        ...


class TooManyRejectedError(StartError):
    """More rows than allowed were rejected."""


class ProgressBar:
    """Shows the progress of a run on stderr, if it is a terminal: rows per second and the remaining time."""

    def __init__(self, total: int | None, done: int) -> None:
        """Starts the display.

        Args:
            total: Size of the input, in the unit of rows' sizes; None if unknown.
            done: Size of the part that an earlier run has finished.
        """
        bar_format = _ENDLESS if total is None else _BAR
        self._bar = tqdm(total=total, initial=done, leave=False, disable=None, bar_format=bar_format)
        self._start, self._rows = time.perf_counter(), 0

    def advance(self, size: int, rows: int) -> None:
        """Counts finished rows."""
        self._rows += rows
        self._bar.set_postfix_str(f"{self._rows / (time.perf_counter() - self._start):,.0f} rows/s", refresh=False)
        self._bar.update(size)

    def close(self) -> float:
        """Removes the bar; returns the seconds since its start."""
        self._bar.close()
        return time.perf_counter() - self._start


@dataclass(slots=True)
class ScoringRun:
    """A run: it reads windows, has them answered, and writes the answers in order.

    `rejected_to` is the file of rejected rows, for errors; None if there is no such file, so that the first rejected row ends the run.
    `progress` is that of the stored output, and a window has at most `window_rows` rows.
    """

    reader: Reader
    scorer: Scorer
    writer: Writer
    sink: Sink
    progress: ScoringProgress
    bar: ProgressBar
    max_rejected: int
    rejected_to: Path | None
    window_rows: int

    async def __call__(self) -> None:
        """Scores the input from the current progress to the end.

        Raises:
            TooManyRejectedError: More rows than allowed were rejected.
            StartError: The input is broken. Stored rows stay valid.
            OSError: The output cannot be written. Stored rows stay valid.
        """
        waiting: deque[tuple[Window, asyncio.Task[list[RowAnswer]]]] = deque()
        more = True
        try:
            while True:
                while more and len(waiting) < WINDOWS:
                    window = await on_thread(lambda: self.reader.window(self.window_rows, WINDOW_BYTES), name=THREAD)
                    more = window is not None
                    if window is not None:
                        waiting.append((window, asyncio.create_task(self.scorer.answer(window.rows, self.bar.advance))))
                if not waiting:
                    break
                window, answers = waiting[0]
                answered = await answers
                waiting.popleft()
                await self._write(window, answered)
            if self.progress.place.row == 0:
                await self._append(self.writer.head, b"", self.progress)
        finally:
            for _, task in waiting:
                task.cancel()
            await asyncio.gather(*(task for _, task in waiting), return_exceptions=True)

    async def _write(self, window: Window, answers: Sequence[RowAnswer]) -> None:
        data, errors = await on_thread(lambda: self.writer.write(window, answers), name=THREAD)
        if self.progress.place.row == 0:
            data = self.writer.head + data
        answers = [replace(answer, error=errors.get(index, answer.error)) for index, answer in enumerate(answers)]
        lines = [_rejection(window, index, answer) for index, answer in enumerate(answers) if answer.error is not None]
        progress = replace(
            self.progress,
            place=window.after,
            rejected=self.progress.rejected + len(lines),
            warned=self.progress.warned + sum(bool(answer.warnings) and answer.error is None for answer in answers),
        )
        if lines and self.rejected_to is None:
            first = next((row, answer.error) for row, answer in zip(window.rows, answers, strict=True) if answer.error is not None)
            raise TooManyRejectedError(
                f"row {first[0].number} cannot be answered: {first[1] and first[1].message} To continue without such "
                "rows, give --rejected FILE."
            )
        if progress.rejected > self.max_rejected:
            raise TooManyRejectedError(
                f"{plural(progress.rejected, 'row')} up to row {window.after.row} cannot be answered, and --max-rejected is "
                f"{self.max_rejected}. The first of these rows: {lines[0].decode().strip()} Fix the input or the flags, "
                "or raise --max-rejected and start again."
            )
        await self._append(data, b"".join(lines), progress)

    async def _append(self, data: bytes, rejected: bytes, progress: ScoringProgress) -> None:
        self.progress = await on_thread(lambda: self.sink.append(data, rejected, progress), name=THREAD)


def _rejection(window: Window, index: int, answer: RowAnswer) -> bytes:
    """Returns the line about a row without an answer."""
    row, error = window.rows[index], answer.error
    assert error is not None, "only rows with an error are rejected"
    line = {} if row.line is None else {"line": row.line}
    return to_json({"row": row.number, **line, "error": error.message, "error_type": classify(error)[1]}) + b"\n"
