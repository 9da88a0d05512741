"""A progress bar for bytes, on standard error."""

from __future__ import annotations

import os
import shutil
import sys
import time
from types import TracebackType
from typing import TextIO

__all__ = ["Progress", "bytes_text", "line"]

#: Seconds between two drawings.
INTERVAL = 0.1
#: The widest that the bar itself gets, in characters.
BAR = 30


class Progress:
    """A bar with bytes, rate and remaining time; nothing where it is not to be shown.

    Parameters
    ----------
    what : str
        What goes on, such as "loading".
    total : int
        Bytes.
    show : bool, optional
        Default: where standard error is a terminal.
    """

    def __init__(self, what: str, total: int, show: bool | None = None) -> None:
        self._what = what
        self._total = total
        self._done = 0
        # As it is now: inside worker functions it is another one.
        self._stream: TextIO | None = sys.stderr
        self._start = time.monotonic()
        self._drawn = -INTERVAL
        if show is None:
            # What other programs take for a terminal, too, behind the pipe of a launcher.
            told = os.environ.get("TTY_COMPATIBLE") == "1"
            show = told or (self._stream is not None and self._stream.isatty())
        if not show:
            self._stream = None

    def __enter__(self) -> Progress:
        self._draw()
        return self

    def advance(self, nbytes: int) -> None:
        """Count `nbytes` more as done."""
        self._done += nbytes
        if time.monotonic() - self._start - self._drawn >= INTERVAL:
            self._draw()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._draw("\n")

    def _draw(self, end: str = "") -> None:
        if self._stream is None:
            return
        self._drawn = time.monotonic() - self._start
        # One column less than there are: in the last one some terminals begin a new line.
        width = shutil.get_terminal_size().columns - 1
        text = line(self._what, self._done, self._total, self._drawn, width)
        try:
            self._stream.write(f"\r{text}{end}")
            self._stream.flush()
        except (OSError, ValueError):
            self._stream = None  # nobody looks at it any more, which is no reason to fail


def line(what: str, done: int, total: int, seconds: float, width: int) -> str:
    """Return what the bar looks like.

    Parameters
    ----------
    what : str
    done, total : int
        Bytes.
    seconds : float
        Since the start.
    width : int
        Columns; the text has exactly so many.
    """
    share = done / total if total else 1.0
    rate = done / seconds if seconds > 0 else 0.0
    text = f" {share:4.0%} {bytes_text(done)} of {bytes_text(total)}, {bytes_text(rate)}/s"
    if done >= total:
        text += f", {_time(seconds)}"
    elif rate:
        text += f", {_time((total - done) / rate)} left"
    room = min(BAR, width - len(what) - len(text) - 3)
    if room >= 4:
        filled = int(share * room)
        text = f" [{'#' * filled}{' ' * (room - filled)}]{text}"
    return f"{what}{text}"[:width].ljust(max(width, 0))


def bytes_text(n: float) -> str:
    """Return a number of bytes with a unit."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if n < 999.5:
            return f"{n:.3g} {unit}"
        n /= 1024
    return f"{n:.3g} TiB" if n < 999.5 else f"{n:.0f} TiB"


def _time(seconds: float) -> str:
    minutes, rest = divmod(int(seconds + 0.5), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
