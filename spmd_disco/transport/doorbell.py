"""What wakes a thread that waits for the others of its process."""

from __future__ import annotations

import queue
import threading

__all__ = ["Doorbell"]


class Doorbell:
    """Wake the threads that wait here, with the methods that `Waiter` uses of a `Node`.

    A `threading.Condition` would not do: it is written in Python, and a signal's handler that
    raises in the middle of it leaves it locked.
    """

    __slots__ = ("_bell", "_waiting", "spin")

    def __init__(self) -> None:
        #: A thread that polled would only keep the others from running.
        self.spin = 0.0
        self._bell = 0
        #: By thread, what it is woken by.
        self._waiting: dict[int, queue.SimpleQueue[None]] = {}

    @property
    def bell(self) -> int:
        """How often it has rung, about: what has rung since then shows by this or by `sleep`."""
        return self._bell

    def ring(self) -> None:
        """Wake all threads that wait."""
        self._bell += 1
        for rings in tuple(self._waiting.values()):
            # One is enough, however often it rings before the thread looks.
            if rings.empty():
                rings.put(None)

    def begin_wait(self) -> None:
        """Begin a wait of the calling thread, which looks at `bell` before it sleeps."""
        self._waiting[threading.get_ident()] = queue.SimpleQueue()

    def end_wait(self) -> None:
        """End it."""
        self._waiting.pop(threading.get_ident(), None)

    def sleep(self, seen: int, seconds: float) -> bool:
        """Sleep until it rings, `seconds` at most; say if it may have since `bell` was `seen`."""
        if self._bell != seen:
            return True
        try:
            self._waiting[threading.get_ident()].get(timeout=max(0.0, seconds))
        except queue.Empty:
            return False
        return True

    wait = sleep
