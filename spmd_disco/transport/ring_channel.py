"""The control plane over memory that the processes of one node share: the ring and the reply boxes.

The work is done in native/src/ring.c; each step of it is a single call, so that no signal handler
of Python's runs in the middle. Whatever a process may wait for rings its doorbell.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..codec import Part, assemble
from ..errors import DiscoError, SessionClosedError
from ..native import core
from .channel import ControllerChannel, WorkerChannel

if TYPE_CHECKING:
    from ..native._native import Node, Replies, Ring
    from ..worker import Worker
    from .wait import Waiter

__all__ = ["RingControllerChannel", "RingWorkerChannel"]


class RingControllerChannel(ControllerChannel):
    """The controller's end.

    Parameters
    ----------
    node : Node
    waiter : Waiter
        One that waits at the node's doorbell.
    """

    def __init__(self, node: Node, waiter: Waiter) -> None:
        self._node: Node | None = node
        self._waiter = waiter
        self._ring: Ring | None
        self._replies: Replies | None
        self._ring, self._replies = _ends(node)
        self._queue: deque[tuple[int, memoryview]] = deque()
        #: The last state, once the memory has been given back.
        self._published = 0
        self._executed: list[int] = []

    @property
    def published(self) -> int:
        ring = self._ring
        return self._published if ring is None else ring.published

    @property
    def ring(self) -> Ring | None:
        return self._ring

    @property
    def boxes(self) -> Replies | None:
        return self._replies

    def _open_ring(self) -> Ring:
        if self._ring is None:
            raise SessionClosedError("the session's channel is closed")
        return self._ring

    def reserve(self, size: int) -> None:
        ring = self._open_ring()
        if not ring.has_room(size):
            self._waiter.until(
                lambda: ring.has_room(size),
                lambda: f"worker {ring.slowest()} to work off earlier commands",
                idle=True,
            )

    def publish(self, number: int, target: int, message: bytes) -> None:
        # All workers get it, whoever is meant: what it says of registers that died is for all.
        if not self._open_ring().try_push(number, message):
            raise DiscoError(
                f"command {number} was published without room for its {len(message)} bytes"
            )

    def poll(self) -> deque[tuple[int, memoryview]]:
        if self._replies is not None:
            self._replies.poll(self._queue)
        return self._queue

    def executed(self) -> list[int]:
        node = self._node
        return self._executed if node is None else node.executed()

    def pump(self) -> None:
        if self._ring is not None:
            self._ring.collect()

    def close(self) -> None:
        if self._ring is not None and self._node is not None:
            self._published, self._executed = self._ring.published, self._node.executed()
        # The memory goes with the last reference to it.
        self._ring = self._replies = self._node = None


class RingWorkerChannel(WorkerChannel):
    """The end of any worker but worker 0.

    Parameters
    ----------
    node : Node
    waiter : Waiter
        One that waits at the node's doorbell.
    """

    def __init__(self, node: Node, waiter: Waiter) -> None:
        self._node = node
        self._waiter = waiter
        self._ring, self._replies = _ends(node)
        #: Whether replies wait for room in the box.
        self._pending = False
        #: Whether the next message has been polled for as long as that is worth it.
        self._polled = False
        waiter.add_hook(self.pump)

    def drain(self, worker: Worker, *, once: bool) -> bool:
        if self._pending:
            return False
        done = worker.drain(self._ring, self._replies, once)
        self._pending = self._replies.pump()
        self._polled = done is None
        return bool(done)

    def receive(self) -> memoryview:
        polled, self._polled = self._polled, False
        if not polled and not self._pending:
            # Most waits of a busy session end here, without a call of Python's.
            message: memoryview | None = self._ring.spin()
            if message is not None:
                return message
        return self._waiter.until(
            self._next, _the_next_command, idle=True, limited=False, spin=self._pending
        )

    def _next(self) -> memoryview | None:
        if self._pending:
            # At every ring of the doorbell: the controller makes room in small pieces.
            self._pending = self._replies.pump()
        message: memoryview | None = self._ring.pop()
        if message is None and self._node.closed:
            raise SessionClosedError("the controller has given up the session")
        return message

    def done(self, number: int, size: int) -> None:
        self._node.leave_command(number)

    def reply(self, parts: Sequence[Part]) -> None:
        self._pending = True
        self._pending = self._replies.send(assemble(parts))

    def pump(self, idle: bool) -> None:
        if self._pending:
            self._pending = self._replies.pump()

    def close(self) -> None:
        self._waiter.until(
            lambda: not self._replies.pump(), lambda: "room for the last replies", idle=True
        )
        self._waiter.remove_hook(self.pump)
        del self._ring, self._replies, self._node


def _ends(node: Node) -> tuple[Ring, Replies]:
    """Return this process's ends of the ring and of the boxes."""
    assert core is not None
    return core.Ring(node), core.Replies(node)


def _the_next_command() -> str:
    return "the next command"
