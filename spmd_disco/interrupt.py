"""Ctrl-C on the controller and on the workers."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any, TypeVar

__all__ = [
    "INTERRUPTED",
    "PATIENCE_AFTER_INTERRUPT",
    "ControllerInterrupts",
    "WorkerInterrupts",
    "uninterrupted",
]

#: The exit status of what Ctrl-C has ended, as shells have it.
INTERRUPTED = 128 + signal.SIGINT
#: Seconds that a worker function gets to end after Ctrl-C.
PATIENCE_AFTER_INTERRUPT = 1.0

T = TypeVar("T")


def uninterrupted(function: Callable[[], T]) -> T:
    """Return ``function()``; a signal handler that raises meanwhile does so afterwards.

    Python runs the handlers in the main thread, so the function runs in another one.
    """
    if threading.current_thread() is not threading.main_thread():
        return function()
    results: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(function())
        except BaseException as e:
            errors.append(e)
        finally:
            done.set()

    done = threading.Event()
    struck: BaseException | None = None
    thread = threading.Thread(target=run, name="spmd_disco-uninterrupted")
    try:
        thread.start()
    except BaseException as e:
        struck = e
    while not done.is_set():
        try:
            done.wait(0.1)
            if struck is not None and not thread.is_alive() and not done.is_set():
                break  # it never started
        except BaseException as e:
            struck = e
    if errors:
        raise errors[0]
    if struck is not None:
        raise struck
    return results[0]


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

    def _replaces(self, handler: Any) -> bool:
        if isinstance(getattr(handler, "__self__", None), ControllerInterrupts):
            # Of a session that was left in the middle of something.
            self._previous = signal.default_int_handler
            return True
        return handler is signal.default_int_handler

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.hit = True
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
