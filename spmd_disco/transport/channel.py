"""The control plane: what carries commands to the workers, and replies back.

A session knows these interfaces, and not which channel it has.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from typing import Any

from ..codec import Part

__all__ = ["ControllerChannel", "WorkerChannel"]


class ControllerChannel(ABC):
    """The controller's end of a channel to all workers but worker 0.

    Attributes
    ----------
    published : int
        The number of the last command that has been published.
    """

    #: The ring of commands that the native module may publish to by itself, if there is one, and
    #: the boxes of the replies to it.
    ring: Any = None
    boxes: Any = None

    @property
    @abstractmethod
    def published(self) -> int: ...

    @abstractmethod
    def reserve(self, size: int) -> None:
        """Wait until a message of `size` bytes may be published: unread commands are bounded."""

    @abstractmethod
    def publish(self, number: int, target: int, message: bytes) -> None:
        """Hand a message to the channel, to all of its readers or to none.

        An interrupt at any point leaves `published` and what the workers get in agreement.
        """

    @abstractmethod
    def poll(self) -> deque[tuple[int, memoryview]]:
        """Return the replies that have come, as pairs of worker and message. Never waits.

        The caller takes them from the queue's left, each once it has recorded it.
        """

    @abstractmethod
    def executed(self) -> list[int]:
        """Return, per worker but worker 0, the last command that it is known to have left.

        Known since the last `pump`; any thread may ask.
        """

    @abstractmethod
    def pump(self) -> None:
        """Complete what was lent to the channel, and hear how far the workers are. Never waits.

        Only for the thread that may publish.
        """

    @abstractmethod
    def close(self) -> None:
        """Complete everything. Collective; the communicator is the caller's."""


class WorkerChannel(ABC):
    """A worker's end of a channel."""

    def drain(self, worker: Any, *, once: bool) -> bool:
        """Let the native module work off the plain calls that are here.

        Parameters
        ----------
        worker : Worker
        once : bool
            Whether to stop after each of them.

        Returns
        -------
        bool
            Whether it has stopped after one; else the next message is for `receive`.
        """
        return False

    @abstractmethod
    def receive(self) -> memoryview:
        """Wait for the next message, and return it in memory that is the caller's."""

    @abstractmethod
    def done(self, number: int, size: int) -> None:
        """Say that the message of command `number` has been worked off."""

    @abstractmethod
    def reply(self, parts: Sequence[Part]) -> None:
        """Send a reply to the controller. Never waits."""

    @abstractmethod
    def pump(self, idle: bool) -> None:
        """Complete what was lent to the channel; when idle, say how far the worker has got."""

    @abstractmethod
    def close(self) -> None:
        """Complete everything. Collective; the communicator is the caller's."""
