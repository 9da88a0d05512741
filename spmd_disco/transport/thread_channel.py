"""The control plane between the threads of one process: queues, each with a doorbell beside it."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from ..codec import Part, aligned_memory, assemble
from ..errors import SessionClosedError
from ..protocol import has_buffers
from .arrival import name_workers
from .atomic import run
from .channel import ControllerChannel, WorkerChannel

if TYPE_CHECKING:
    from .doorbell import Doorbell
    from .wait import Waiter

__all__ = ["ThreadControllerChannel", "ThreadWorkerChannel"]

#: How far a worker may lag behind the controller: commands, and their bytes.
MOST_UNREAD = 4096
MOST_BYTES = 256 * 1024 * 1024


class ThreadWorkerChannel(WorkerChannel):
    """The end of any worker but worker 0, and its queue of commands.

    Parameters
    ----------
    waiter : Waiter
        One that waits at `bell`.
    bell, controller_bell : Doorbell
        The worker's, and the controller's.
    """

    def __init__(self, waiter: Waiter, bell: Doorbell, controller_bell: Doorbell) -> None:
        self._waiter = waiter
        self.bell = bell
        self._controller_bell = controller_bell
        self.commands: deque[bytes] = deque()
        self.replies: deque[memoryview] = deque()
        #: The last command that has been left, and the bytes of all up to it.
        self.executed = 0
        self.executed_bytes = 0
        self.closed = False

    def give_up(self) -> None:
        """On the controller: let the worker end without the command that shuts down."""
        self.closed = True
        self.bell.ring()

    def receive(self) -> memoryview:
        return self._waiter.until(self._next, lambda: "the next command", idle=True, limited=False)

    def _next(self) -> memoryview | None:
        if self.closed:
            raise SessionClosedError("the controller has given up the session")
        if not self.commands:
            return None
        message = self.commands.popleft()
        if not has_buffers(message):
            return memoryview(message)
        # The arrays in it are to be this worker's own, and writable.
        copy = aligned_memory(len(message))
        copy[:] = message
        return copy

    def done(self, number: int, size: int) -> None:
        self.executed = number
        self.executed_bytes += size
        self._controller_bell.ring()

    def reply(self, parts: Sequence[Part]) -> None:
        self.replies.append(memoryview(bytearray(assemble(parts))))
        self._controller_bell.ring()

    def pump(self, idle: bool) -> None:
        """Do nothing: all is done at once."""

    def close(self) -> None:
        """Do nothing: the queues go with the last reference to them."""


class ThreadControllerChannel(ControllerChannel):
    """The controller's end.

    Parameters
    ----------
    workers : sequence of ThreadWorkerChannel
        Of workers 1 and up.
    waiter : Waiter
        One that waits at the controller's doorbell.
    """

    def __init__(self, workers: Sequence[ThreadWorkerChannel], waiter: Waiter) -> None:
        self._workers = list(workers)
        self._waiter = waiter
        self._queue: deque[tuple[int, memoryview]] = deque()
        #: The number of the last command, and the bytes of all: changed by C code alone.
        self._published = [0, 0]
        self._appends = [worker.commands.append for worker in self._workers]

    @property
    def published(self) -> int:
        return self._published[0]

    def _slow(self, size: int) -> list[int]:
        """Return the workers that have no room for a message of so many bytes."""
        number, total = self._published
        return [
            i
            for i, worker in enumerate(self._workers, 1)
            if number - worker.executed >= MOST_UNREAD
            or (number > worker.executed and total - worker.executed_bytes + size > MOST_BYTES)
        ]

    def reserve(self, size: int) -> None:
        if self._slow(size):
            self._waiter.until(
                lambda: not self._slow(size),
                lambda: f"{name_workers(self._slow(size))} to work off earlier commands",
                idle=True,
            )

    def publish(self, number: int, target: int, message: bytes) -> None:
        # All workers get it, whoever is meant: what it says of registers that died is for all.
        counts = slice(0, 2), (number, self._published[1] + len(message))
        steps = [partial(append, message) for append in self._appends]
        run([*steps, partial(self._published.__setitem__, *counts)], [])
        for worker in self._workers:
            worker.bell.ring()

    def poll(self) -> deque[tuple[int, memoryview]]:
        for i, worker in enumerate(self._workers, 1):
            while worker.replies:
                self._queue.append((i, worker.replies.popleft()))
        return self._queue

    def executed(self) -> list[int]:
        return [worker.executed for worker in self._workers]

    def pump(self) -> None:
        """Do nothing: workers say by themselves how far they are."""

    def close(self) -> None:
        """Do nothing: the queues go with the last reference to them."""
