"""What worker functions print: whole lines, each labelled with its worker.

Covered is what goes through ``sys.stdout`` and ``sys.stderr`` of Python. Output of subprocesses and
of C code goes straight to the file descriptors, unlabelled; so does what a worker function on the
controller prints from threads that it has started itself.
"""

from __future__ import annotations

import codecs
import io
import logging
import os
import sys
from threading import RLock, get_ident
from typing import Any, TextIO

from .config import flag
from .lines import LabelledLines, write_between_lines, write_lines

__all__ = ["ThreadOutput", "WorkerOutput", "stream_behind"]

logger = logging.getLogger("spmd_disco")

_lock = RLock()


def _renew_lock() -> None:
    """Replace the lock in a forked child, where the thread that holds it may not exist."""
    global _lock
    _lock = RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_lock)


class _Bytes(io.BufferedIOBase):
    """The ``buffer`` of a `_Stream`: bytes written to it take part in the lines."""

    def __init__(self, text: _Stream) -> None:
        self._text = text
        self._decoder = codecs.getincrementaldecoder("utf-8")("backslashreplace")

    def write(self, data: Any, /) -> int:
        data = bytes(data)
        self._text.write(self._decoder.decode(data))
        return len(data)

    def writable(self) -> bool:
        return True

    def flush(self) -> None:
        self._text.flush()

    def fileno(self) -> int:
        return self._text.fileno()

    def isatty(self) -> bool:
        return self._text.isatty()

    def close(self) -> None:
        """Do nothing: the stream outlives any one function."""


class _Stream(io.TextIOBase):
    """A text stream that passes on whole lines to `target`, with a prefix.

    Parameters
    ----------
    owner : WorkerOutput
    prefix : str
        Put before each line; may be empty.
    """

    def __init__(self, owner: WorkerOutput, prefix: str) -> None:
        self._owner = owner
        self._lines = LabelledLines(prefix)
        self._bytes = _Bytes(self)
        self.target: TextIO | None = None

    def write(self, text: str, /) -> int:
        if not isinstance(text, str):
            raise TypeError(f"write() argument must be str, not {type(text).__name__}")
        if not self._owner._mine():
            return 0 if self.target is None else self.target.write(text)
        with _lock:
            whole = self._lines.add(text)
            self._owner._pending |= self._lines.held
            if whole and self.target is not None:
                self._owner._write(self.target, whole)
        return len(text)

    def __getattr__(self, name: str) -> Any:
        # What a stream of another library offers besides. With rich, for one, sys.stdout is a proxy
        # that would otherwise write to this stream, which writes to the proxy.
        if name.startswith("_") or self.target is None:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self.target, name)

    def end(self) -> None:
        """Pass on a held partial line, with a line end added."""
        with _lock:
            rest = self._lines.end()
            if rest and self.target is not None:
                self._owner._write(self.target, rest)

    def flush(self) -> None:
        # A partial line stays held: another worker might go on in the middle of it.
        if self.target is not None:
            self.target.flush()

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        if self.target is None:
            raise io.UnsupportedOperation("fileno")
        return self.target.fileno()

    def isatty(self) -> bool:
        return self.target is not None and self.target.isatty()

    def close(self) -> None:
        """Do nothing: the stream outlives any one function."""

    def reconfigure(self, **options: Any) -> None:
        """Reconfigure the stream behind this one (its encoding, say)."""
        reconfigure = getattr(self.target, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(**options)

    @property
    def buffer(self) -> _Bytes:
        return self._bytes

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return getattr(self.target, "encoding", None) or "utf-8"

    @property
    def errors(self) -> str | None:  # type: ignore[override]
        return getattr(self.target, "errors", None)

    @property
    def line_buffering(self) -> bool:
        return True

    @property
    def name(self) -> str:
        return getattr(self.target, "name", "<worker output>")

    @property
    def mode(self) -> str:
        return "w"

    def __repr__(self) -> str:
        return f"<output of worker {self._owner.worker_id} to {self.target!r}>"


def stream_behind(stream: Any) -> Any:
    """Return the program's own stream, for which `stream` stands while a worker function runs."""
    while isinstance(stream, _Stream):
        stream = stream.target
    return stream


class WorkerOutput:
    r"""Labels what a worker's functions print, and keeps its lines whole.

    Between `enter` and `leave`, ``sys.stdout`` and ``sys.stderr`` are streams that hold text until
    a line is complete and pass it on, behind ``[worker i] ``, to the stream that they stand for.
    On worker 0 that holds only for the thread that called `enter`: the controller's other threads
    write as ever. ``"\r"`` ends a line too, so that progress bars move.

    Parameters
    ----------
    worker_id : int
    prefix : bool or None
        Whether lines are labelled; None for the setting ``SPMD_DISCO_PREFIX`` (default yes).
    """

    __slots__ = (
        "_depth",
        "_err",
        "_only_thread",
        "_out",
        "_pending",
        "_real_err",
        "_real_out",
        "_thread",
        "worker_id",
    )

    def __init__(self, worker_id: int, prefix: bool | None = None) -> None:
        if prefix is None:
            prefix = flag("PREFIX", True)
        label = f"[worker {worker_id}] " if prefix else ""
        self.worker_id = worker_id
        self._only_thread = worker_id == 0
        self._out = _Stream(self, label)
        self._err = _Stream(self, label)
        # What the streams stand for: kept here as well, where it is cheaper to look at.
        self._real_out: TextIO | None = None
        self._real_err: TextIO | None = None
        self._thread = 0
        self._depth = 0
        self._pending = False

    def _write(self, target: TextIO, text: str) -> None:
        """Write whole lines to the stream behind one of these."""
        write_lines(target, text)

    def _mine(self) -> bool:
        """Tell whether what the calling thread writes is the worker's."""
        return self._depth > 0 and (not self._only_thread or get_ident() == self._thread)

    def enter(self) -> None:
        """From here on a worker function may print. Cheap: called around every command."""
        if self._depth:
            self._depth += 1
            return
        out = sys.stdout
        err = sys.stderr
        # A stream of ours that some other code has put back late stands for the same target.
        if out is not self._real_out and out is not self._out:
            self._real_out = self._out.target = out
        if err is not self._real_err and err is not self._err:
            self._real_err = self._err.target = err
        self._thread = get_ident()
        self._depth = 1
        sys.stdout = self._out
        sys.stderr = self._err

    def leave(self) -> None:
        """Give the streams back as `enter` found them, whatever the function has put there."""
        if self._depth == 1:
            if self._pending:
                self.end_command()
            # The depth last, so that a signal's handler that raises in here can be made good.
            sys.stdout = self._real_out
            sys.stderr = self._real_err
            self._depth = 0
        elif self._depth:
            self._depth -= 1

    def give_back(self) -> None:
        """Do what `leave` does, after an interrupt in `enter` or `leave` themselves."""
        if self._depth:
            self._depth = 1
            self.leave()

    def end_command(self) -> None:
        """Pass on partial lines that a command has left behind. Cheap when there is none."""
        if not self._pending:
            return
        self._pending = False
        for stream in (self._out, self._err):
            try:
                stream.end()
            except (OSError, ValueError) as e:
                # The stream is closed, or cannot encode the text. The command itself is over, and
                # nobody would expect this from whatever comes next.
                logger.warning("output of worker %d is lost: %s", self.worker_id, e)


class ThreadOutput(WorkerOutput):
    """`WorkerOutput` of a worker that is a thread of the program's own process.

    It is entered once, and then ``sys.stdout`` is a chain of the workers' streams, each of which
    takes what its own thread writes. `remove` ends that.
    """

    __slots__ = ()

    def __init__(self, worker_id: int) -> None:
        super().__init__(worker_id)
        self._only_thread = True

    def _write(self, target: TextIO, text: str) -> None:
        # The program's thread may be in the middle of a line.
        write_between_lines(stream_behind(target), text)

    def remove(self) -> None:
        """Take the streams out, those of the last worker first; the program may have others."""
        if sys.stdout is self._out:
            sys.stdout = self._real_out
        if sys.stderr is self._err:
            sys.stderr = self._real_err
