"""Ctrl-C on the controller and on the workers."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

__all__ = ["ControllerInterrupts", "WorkerInterrupts"]


class _Handler:
    """A SIGINT handler for as long as it is needed, where it is ours to install one."""

    def __init__(self) -> None:
        self._previous: Any = None
        self._installed = False

    def install(self) -> None:
        """Install the handler, in the main thread."""
        if threading.current_thread() is not threading.main_thread():
            return
        self._previous = signal.getsignal(signal.SIGINT)
        if self._replaces(self._previous):
            signal.signal(signal.SIGINT, self._handle)
            self._installed = True

    def remove(self) -> None:
        """Put back what was there, unless the program has installed something else meanwhile."""
        if self._installed and threading.current_thread() is threading.main_thread():
            if signal.getsignal(signal.SIGINT) == self._handle:
                signal.signal(signal.SIGINT, self._previous)
            self._installed = False

    def _replaces(self, handler: Any) -> bool:
        raise NotImplementedError

    def _handle(self, number: int, frame: FrameType | None) -> None:
        raise NotImplementedError


class ControllerInterrupts(_Handler):
    """Python's own handling of SIGINT, and a note that there was one.

    A KeyboardInterrupt that a worker function raises by itself is that function's failure and no
    more; one that comes from the terminal also ends what the controller is doing.

    Parameters
    ----------
    on_hit : callable
        Called when one has come.
    """

    def __init__(self, on_hit: Callable[[], None]) -> None:
        super().__init__()
        self._on_hit = on_hit
        self.hit = False
        self._defer = False
        self._pending = False

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """Let a Ctrl-C strike only when this context ends."""
        self._defer = True
        try:
            yield
        finally:
            self._defer = False
            pending, self._pending = self._pending, False
        if pending:
            raise KeyboardInterrupt

    def _replaces(self, handler: Any) -> bool:
        return handler is signal.default_int_handler

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.hit = True
        if self._defer:
            self._pending = True
            return
        self._on_hit()
        signal.default_int_handler(number, frame)


class WorkerInterrupts(_Handler):
    """On the other ranks: the terminal's SIGINT is the controller's affair.

    Parameters
    ----------
    wanted : callable
        Whether the controller has cancelled what runs now.
    """

    def __init__(self, wanted: Callable[[], bool]) -> None:
        super().__init__()
        self._wanted = wanted

    def _replaces(self, handler: Any) -> bool:
        return True

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._wanted():
            raise KeyboardInterrupt
