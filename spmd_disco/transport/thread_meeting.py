"""What the threads of a session share: who has come to which operation, and their messages."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from .arrival import State, Told, make_record, mismatch_text
from .doorbell import Doorbell
from .layout import Array

__all__ = ["Arrival", "Letter", "Meeting", "Threads"]


class Meeting:
    """An operation that all members have come to.

    Parameters
    ----------
    ids : sequence of int
        The members.
    sources : sequence
        What they have laid out.
    """

    def __init__(self, ids: Sequence[int], sources: Sequence[Array | None]) -> None:
        self.ids = ids
        self.sources = sources
        #: Those that need nothing of it any more.
        self.done: set[int] = set()


class Arrival:
    """A worker that has come to an operation, with what the others may need of it.

    Parameters
    ----------
    command, index : int
        The operation's place.
    sign : bytes
        Its signature.
    source : ndarray or None
    """

    __slots__ = ("command", "forsaken", "index", "meeting", "mismatch", "sign", "source")

    def __init__(self, command: int, index: int, sign: bytes, source: Array | None) -> None:
        self.command = command
        self.index = index
        self.sign = sign
        self.source = source
        #: What has become of it: all have come, or have come to different operations (which is said
        #: here), or one will not come.
        self.meeting: Meeting | None = None
        self.mismatch = ""
        self.forsaken = False

    @property
    def decided(self) -> bool:
        """Whether one of these has become of it."""
        return self.forsaken or self.meeting is not None or bool(self.mismatch)


class Letter(NamedTuple):
    """A message that has not been received."""

    command: int
    sign: bytes
    data: Array


class Threads:
    """What the workers of one session share.

    Parameters
    ----------
    num_workers, num_groups : int
    bells : sequence of Doorbell
        By worker.
    """

    def __init__(self, num_workers: int, num_groups: int, bells: Sequence[Doorbell]) -> None:
        self.bells = bells
        self.lock = threading.RLock()
        self.told = [Told()] * num_workers
        #: The newest command that each has begun.
        self.begun = [0] * num_workers
        #: How many workers wait for others.
        self.waiting = 0
        size = num_workers // num_groups
        self.world = range(num_workers)
        self.groups = [range(at, at + size) for at in range(0, num_workers, size)]
        #: Who has come where: to the world's operation, and to the group's.
        self.arrived: dict[range, dict[int, Arrival]] = {
            ids: {} for ids in (self.world, *self.groups)
        }
        #: See `PeerMemory.handed`.
        self.handed: dict[int, Array] = {}
        self.letters: dict[tuple[int, int], deque[Letter]] = {}

    def has_gone(self, worker: int, command: int) -> bool:
        """Whether a worker takes no part any more in `command`."""
        told = self.told[worker]
        return max(told.left, told.failed, self.begun[worker] - 1) >= command or told.closed != 0

    def ring(self, ids: Iterable[int]) -> None:
        """Have these workers look up."""
        for worker in ids:
            self.bells[worker].ring()

    def decide(self, ids: range) -> None:
        """See what becomes of those who have come to an operation of `ids`. With the lock."""
        arrived = self.arrived[ids]
        for mine in arrived.values():
            mine.forsaken = any(
                self.has_gone(worker, mine.command)
                for worker in ids
                if worker not in arrived or arrived[worker].command != mine.command
            )
        for worker in [worker for worker, mine in arrived.items() if mine.forsaken]:
            del arrived[worker]
            self.bells[worker].ring()
        if len(arrived) < len(ids) or len({mine.command for mine in arrived.values()}) > 1:
            return
        members = [arrived[worker] for worker in ids]
        if len({(mine.index, mine.sign) for mine in members}) == 1:
            meeting = Meeting(ids, [mine.source for mine in members])
            for mine in members:
                mine.meeting = meeting
        else:
            block = b"".join(
                make_record(State.ARRIVED, mine.index, mine.command, mine.sign) for mine in members
            )
            text = mismatch_text(block, ids, self.where(ids))
            for mine in members:
                mine.mismatch = text
        arrived.clear()
        self.ring(ids)

    def where(self, ids: range) -> str:
        """Say which workers these are."""
        if len(ids) == len(self.world):
            return "in the world"
        return f"in group {self.groups.index(ids)}"
