"""The control plane over MPI: messages from rank 0 to every other rank, and replies back.

Everything is nonblocking and polled. A message up to `EAGER` bytes is one MPI message; a larger one
is announced by its size and follows in fragments. Workers acknowledge what they have worked off,
now and then and when they go idle, so that unread commands are bounded and the controller can tell
how far each worker is.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Sequence
from functools import partial
from itertools import repeat

import numpy as np
from mpi4py import MPI

from ..codec import Part, aligned_memory, assemble
from ..protocol import ALL
from .atomic import run
from .channel import ControllerChannel, WorkerChannel
from .wait import Waiter, sched_yield

__all__ = ["TAG_WATCH", "MPIControllerChannel", "MPIWorkerChannel"]

TAG_COMMAND = 1
TAG_COMMAND_FRAGMENT = 2
TAG_REPLY = 3
TAG_REPLY_FRAGMENT = 4
TAG_ACK = 5
#: Messages of the watchers, see `watch.py`.
TAG_WATCH = 6

#: Messages up to this size travel whole.
EAGER = 64 * 1024
FRAGMENT = 32 * 1024 * 1024
#: What stands for a larger message: a command number that no command has, and the size.
_ANNOUNCEMENT = struct.Struct("<QQ")
_NUMBER = struct.Struct("<Q")

#: Bounds of what is published and not yet acknowledged.
WINDOW_COMMANDS = 4096
WINDOW_BYTES = 64 * 1024 * 1024
#: A worker acknowledges after so much, and when it goes idle.
ACK_COMMANDS = 512
ACK_BYTES = 4 * 1024 * 1024

#: The number in a worker's last acknowledgement.
_LAST = 2**64 - 1

#: Completed sends are dropped from the list when there are so many.
KEEP_REQUESTS = 64


def _fragments(message: memoryview) -> list[memoryview]:
    return [message[at : at + FRAGMENT] for at in range(0, len(message), FRAGMENT)]


def _buffer(size: int) -> memoryview:
    return memoryview(bytearray(size)) if size <= EAGER else aligned_memory(size)


def _announced(message: memoryview) -> int:
    """Return the size of the message that `message` announces, or 0 where it is one itself."""
    if len(message) == _ANNOUNCEMENT.size:
        number, size = _ANNOUNCEMENT.unpack(message)
        if number == 0:
            return int(size)
    return 0


class _Sender:
    """Sends of this process that MPI has not finished with, each with a number of the caller's."""

    def __init__(self, comm: MPI.Intracomm) -> None:
        self.comm = comm
        self.sent: deque[tuple[MPI.Request, int]] = deque([(MPI.REQUEST_NULL, 0)])
        #: Whether there are large messages among them, which come forward only while MPI is called.
        self.large = False

    @property
    def last(self) -> int:
        """The number of the last send."""
        return self.sent[-1][1]

    def send(
        self, message: bytes, ranks: Sequence[int], tag: int, fragment_tag: int, number: int = 0
    ) -> None:
        """Post `message` to all of `ranks`, and remember that, without an interrupt in between.

        The list is extended by C code alone, and signal handlers run between Python's bytecodes.
        """
        isend = self.comm.Isend
        if not ranks:
            self.sent.append((MPI.REQUEST_NULL, number))
        elif len(message) <= EAGER:
            requests = map(isend, repeat(message), ranks, repeat(tag))
            self.sent.extend(zip(requests, repeat(number)))
        else:
            self.large = True
            head = _ANNOUNCEMENT.pack(0, len(message))
            parts = [head, *_fragments(memoryview(message))]
            tags = [tag] + [fragment_tag] * (len(parts) - 1)
            requests = map(
                isend,
                parts * len(ranks),
                [rank for rank in ranks for _ in parts],
                tags * len(ranks),
            )
            self.sent.extend(zip(requests, repeat(number)))

    def add(self, request: MPI.Request) -> None:
        """Keep another request until it is complete."""
        self.sent.append((request, self.last))

    def pump(self) -> None:
        """Forget what is complete; the last one stays, for its number."""
        # In order, up to the first that is not complete: each look then costs a constant. Test() of
        # what has completed before is harmless, so an interrupt loses none.
        while len(self.sent) > 1 and self.sent[0][0].Test():
            self.sent.popleft()
        if len(self.sent) == 1 and self.sent[0][0].Test():
            self.large = False

    def done(self) -> bool:
        """Whether everything is complete."""
        self.pump()
        return len(self.sent) == 1 and self.sent[0][0].Test()


class _Incoming:
    """A message on its way to this process, whole or in fragments."""

    __slots__ = ("buffer", "comm", "message", "requests", "source", "tag")

    def __init__(self, comm: MPI.Intracomm, source: int, message: memoryview, tag: int) -> None:
        self.comm = comm
        self.source = source
        self.message = message
        self.tag = tag
        self.buffer: memoryview | None = None
        self.requests: list[MPI.Request] = []

    def complete(self) -> memoryview | None:
        """Return the message if all of it is here. Never waits."""
        size = _announced(self.message)
        if not size:
            return self.message
        if self.buffer is None:
            self.buffer = _buffer(size)
        if not self.requests:
            parts = _fragments(self.buffer)
            self.requests.extend(map(self.comm.Irecv, parts, repeat(self.source), repeat(self.tag)))
        return self.buffer if all(r.Test() for r in self.requests) else None


class MPIControllerChannel(ControllerChannel):
    """Rank 0's end.

    Parameters
    ----------
    comm : mpi4py.MPI.Intracomm
        The control communicator, for this channel alone.
    waiter : Waiter
    """

    def __init__(self, comm: MPI.Intracomm, waiter: Waiter) -> None:
        self._comm = comm
        self._waiter = waiter
        self._others = range(1, comm.size)
        self._sender = _Sender(comm)
        #: Per worker, as it says: the last command left, and the bytes of all up to there.
        self._acks = np.zeros((comm.size, 2), np.uint64)
        #: The last command, and the bytes so far, that went to all; and to single workers beside.
        self._all_number = 0
        self._all_bytes = 0
        self._own_number = dict.fromkeys(self._others, 0)
        self._own_bytes = dict.fromkeys(self._others, 0)
        #: What may be published before anybody needs to look at the acknowledgements again.
        self._free_commands = WINDOW_COMMANDS
        self._free_bytes = WINDOW_BYTES
        self._incoming: dict[int, deque[_Incoming]] = {i: deque() for i in self._others}
        self._replies: deque[tuple[int, memoryview]] = deque()
        # One for each, as one thread may poll for replies while another publishes.
        self._ack_status = MPI.Status()
        self._reply_status = MPI.Status()

    @property
    def published(self) -> int:
        return self._sender.last

    def reserve(self, size: int) -> None:
        self._free_commands -= 1
        self._free_bytes -= size
        if (self._free_commands < 0 or self._free_bytes < 0) and not self._has_room(size):
            self._waiter.until(
                lambda: self._has_room(size),
                lambda: f"worker {self._slowest()} to work off earlier commands",
                idle=True,
            )

    def _unread(self, rank: int) -> tuple[int, int]:
        """Return the commands and bytes that a worker has not acknowledged."""
        number, size = (int(v) for v in self._acks[rank])
        return (
            max(self._all_number, self._own_number[rank]) - number,
            self._all_bytes + self._own_bytes[rank] - size,
        )

    def _has_room(self, size: int) -> bool:
        self.pump()
        unread = [self._unread(rank) for rank in self._others]
        commands = max((c for c, _ in unread), default=0)
        unread_bytes = max((b for _, b in unread), default=0)
        self._free_commands = WINDOW_COMMANDS - commands - 1
        self._free_bytes = WINDOW_BYTES - unread_bytes - size
        # A message larger than the window goes alone.
        return self._free_commands >= 0 and (self._free_bytes >= 0 or unread_bytes == 0)

    def _slowest(self) -> int:
        return max(self._others, key=self._unread)

    def publish(self, number: int, target: int, message: bytes) -> None:
        # The counts go first: one that is too large does no harm.
        if target == ALL:
            ranks: Sequence[int] = self._others
            self._all_number = number
            self._all_bytes += len(message)
        elif target == 0:
            ranks = ()
        else:
            ranks = (target,)
            self._own_number[target] = number
            self._own_bytes[target] += len(message)
        self._sender.send(message, ranks, TAG_COMMAND, TAG_COMMAND_FRAGMENT, number)
        if len(self._sender.sent) > KEEP_REQUESTS:
            self._sender.pump()
            if len(self._sender.sent) > KEEP_REQUESTS:
                # The workers are behind. With more of them than cores they may want this one.
                sched_yield()

    def _poll_acks(self) -> None:
        status = self._ack_status
        while self._comm.Iprobe(MPI.ANY_SOURCE, TAG_ACK, status):
            source = status.Get_source()
            self._comm.Recv(self._acks[source], source, TAG_ACK)

    def poll(self) -> deque[tuple[int, memoryview]]:
        comm, status = self._comm, self._reply_status
        while comm.Iprobe(MPI.ANY_SOURCE, TAG_REPLY, status):
            source = status.Get_source()
            message = memoryview(bytearray(status.Get_count(MPI.BYTE)))
            incoming = _Incoming(comm, source, message, TAG_REPLY_FRAGMENT)
            run(
                (
                    partial(comm.Recv, message, source, TAG_REPLY),
                    partial(self._incoming[source].append, incoming),
                ),
                [],
            )
        # Fragments of one source come in order, so its messages are completed in order.
        for source, queue in self._incoming.items():
            while queue and (complete := queue[0].complete()) is not None:
                run(
                    (
                        partial(self._replies.append, (source, complete)),
                        partial(queue.popleft),
                    ),
                    [],
                )
        return self._replies

    def executed(self) -> list[int]:
        return [int(self._acks[i, 0]) for i in self._others]

    def pump(self) -> None:
        self._sender.pump()
        self._poll_acks()

    def busy(self) -> bool:
        """Whether MPI still works on messages of this process; any thread may ask."""
        return self._sender.large

    def close(self) -> None:
        self._waiter.until(self._sender.done, lambda: "messages to the workers")

        # Nothing may be left for a later communicator to which MPI gives the context of this one.
        # The last replies have been taken; the last acknowledgements say that they are.
        def all_here() -> bool:
            self._poll_acks()
            return bool((self._acks[1:, 0] == _LAST).all())

        self._waiter.until(all_here, lambda: "the workers to leave the session")


class MPIWorkerChannel(WorkerChannel):
    """The end of any rank but 0.

    Parameters
    ----------
    comm : mpi4py.MPI.Intracomm
        The control communicator.
    waiter : Waiter
    """

    def __init__(self, comm: MPI.Intracomm, waiter: Waiter) -> None:
        self._comm = comm
        self._waiter = waiter
        self._sender = _Sender(comm)
        self._status = MPI.Status()
        self._number = 0
        self._bytes = 0
        self._acked = (0, 0)
        waiter.add_hook(self.pump)

    def receive(self) -> memoryview:
        message = self._waiter.until(
            self._poll, lambda: "the next command", idle=True, limited=False
        )
        size = _announced(message)
        if not size:
            return message
        incoming = _Incoming(self._comm, 0, message, TAG_COMMAND_FRAGMENT)
        return self._waiter.until(
            incoming.complete, lambda: "the rest of a large command", idle=True, limited=False
        )

    def _poll(self) -> memoryview | None:
        if not self._comm.Iprobe(0, TAG_COMMAND, self._status):
            return None
        message = memoryview(bytearray(self._status.Get_count(MPI.BYTE)))
        self._comm.Recv(message, 0, TAG_COMMAND)
        return message

    def done(self, number: int, size: int) -> None:
        self._number = number
        self._bytes += size
        if number - self._acked[0] >= ACK_COMMANDS or self._bytes - self._acked[1] >= ACK_BYTES:
            self._acknowledge()

    def _acknowledge(self) -> None:
        self._acked = (self._number, self._bytes)
        self._sender.add(self._comm.Isend(np.array(self._acked, np.uint64), 0, TAG_ACK))

    def reply(self, parts: Sequence[Part]) -> None:
        self._sender.send(assemble(parts), (0,), TAG_REPLY, TAG_REPLY_FRAGMENT)
        self._sender.pump()

    def pump(self, idle: bool) -> None:
        if idle and self._acked[0] != self._number:
            self._acknowledge()
        self._sender.pump()

    def close(self) -> None:
        self._number = _LAST
        self._acknowledge()
        self._waiter.until(self._sender.done, lambda: "messages to the controller")
