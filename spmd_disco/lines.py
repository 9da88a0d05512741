"""Text that arrives in any pieces, passed on in whole lines with a label before each."""

from __future__ import annotations

import contextlib
import io
import os
import re
import sys
from collections.abc import Iterator
from typing import TextIO

__all__ = [
    "LARGEST_WRITE",
    "LabelledLines",
    "keep_lines_whole",
    "write_between_lines",
    "write_lines",
]

#: A write of at most so many bytes to a pipe is atomic (POSIX's PIPE_BUF on Linux), and both MPI
#: launchers pass it on in one piece.
LARGEST_WRITE = 4096

_LINE = re.compile(r"[^\r\n]*(?:\r\n|\n|\r)")


class LabelledLines:
    r"""Holds text until a line is complete. ``"\r"`` ends one, too, so that progress bars move.

    Parameters
    ----------
    label : str
        Put before each line; may be empty.
    """

    __slots__ = ("_after_return", "_held", "_label")

    def __init__(self, label: str) -> None:
        self._label = label
        self._held: list[str] = []
        self._after_return = False

    @property
    def held(self) -> bool:
        """Whether there is a partial line."""
        return bool(self._held)

    def add(self, text: str) -> str:
        """Take some text, and return the lines that are complete by it, labelled."""
        if "\n" not in text and "\r" not in text:
            if text:
                self._held.append(text)
            return ""
        text = "".join(self._held) + text
        self._held.clear()
        out: list[str] = []
        if "\r" not in text:
            whole, end, rest = text.rpartition("\n")
            if self._after_return and text[0] == "\n":
                # The second half of a "\r\n" that came in two writes: the line is out already.
                whole, end = (whole[1:], end) if whole else ("", "")
                out.append("\n")
            if end:
                out.append(self._label + whole.replace("\n", "\n" + self._label) + end)
            self._after_return = False
        else:
            done = 0
            for match in _LINE.finditer(text):
                line = match.group()
                done = match.end()
                # A bare "\r" moves the cursor and is no line; so is the rest of a split "\r\n".
                bare = line == "\r" or (line == "\n" and self._after_return)
                out.append(line if bare else self._label + line)
                self._after_return = line[-1] == "\r"
            rest = text[done:]
        if rest:
            self._after_return = False
            self._held.append(rest)
        return "".join(out)

    def end(self) -> str:
        """Return the partial line, with a line end added; empty where there is none."""
        if not self._held:
            return ""
        text = "".join(self._held)
        self._held.clear()
        self._after_return = False
        return self._label + text + "\n"


def write_lines(target: TextIO, text: str) -> None:
    """Write whole lines to `target` such that none is torn where others write there, too."""
    # What others have written must not push a piece over the buffer's end.
    target.flush()
    for piece in _pieces(text):
        target.write(piece)
        target.flush()


def keep_lines_whole() -> contextlib.ExitStack:
    """Let the program's standard streams hold what it prints until a line is complete.

    That is what they do at a terminal. To a pipe they write blocks, which end anywhere, and with
    ``python -u`` each argument of `print` by itself. `flush` passes on a partial line as ever.

    Returns
    -------
    contextlib.ExitStack
        Closed, it gives the streams back as they were.
    """
    before = contextlib.ExitStack()
    for stream in (sys.stdout, sys.stderr):
        if type(stream) is io.TextIOWrapper and not stream.closed:
            before.callback(_set_buffering, stream, stream.line_buffering, stream.write_through)
            _set_buffering(stream, True, False)
    return before


def _set_buffering(stream: io.TextIOWrapper, line_buffering: bool, write_through: bool) -> None:
    if not stream.closed:
        stream.reconfigure(line_buffering=line_buffering, write_through=write_through)


def write_between_lines(target: TextIO, text: str) -> None:
    """Write whole lines to `target` while other threads may be in the middle of a line of theirs.

    ``print("a", 1)`` is four writes. A stream that holds its text until the line is complete is
    passed by, and goes on with its line behind ours; any other can be torn by this.
    """
    if type(target) is not io.TextIOWrapper or target.write_through or not target.line_buffering:
        write_lines(target, text)
        return
    fd = target.fileno()
    for piece in _pieces(text):
        rest = memoryview(piece.encode(target.encoding, target.errors or "strict"))
        while rest:
            rest = rest[os.write(fd, rest) :]


def _pieces(text: str) -> Iterator[str]:
    """Cut `text`, which ends with a line end, into pieces that one write passes on whole.

    A single line that is longer than that stays in one piece: it cannot be kept whole anyway.
    """
    if len(text) <= LARGEST_WRITE // 4 or (text.isascii() and len(text) <= LARGEST_WRITE):
        yield text
        return
    piece: list[str] = []
    size = 0
    for line in _LINE.findall(text):
        length = len(line) if line.isascii() else len(line.encode("utf-8", "surrogatepass"))
        if piece and size + length > LARGEST_WRITE:
            yield "".join(piece)
            piece, size = [], 0
        piece.append(line)
        size += length
    yield "".join(piece)
