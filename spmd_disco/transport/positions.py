"""The exchange of records on one communicator (see arrival.py), over MPI.

Each position is one nonblocking allgather, from a small pool of persistent ones used in turn. Posts
that no wait has seen to the end stay in `outstanding`, oldest first; `progress` looks at those that
are complete. What was learnt at any position about who has left which command is kept, since a
member tells that only once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from functools import partial
from typing import Any

from mpi4py import MPI

from .arrival import RECORD_SIZE, Record, State, Verdict, decide, make_record, parse
from .atomic import Step, post
from .moves import Move

__all__ = ["Position", "Positions"]

#: The most posts that wait for the peers; each needs a persistent request of its own.
MOST_OUTSTANDING = 4


class _Slot:
    """A persistent allgather with its buffers."""

    def __init__(self, comm: MPI.Intracomm) -> None:
        self.mine = bytearray(RECORD_SIZE)
        self.block = bytearray(RECORD_SIZE * comm.size)
        self.request: Any = comm.Allgather_init(
            (self.mine, RECORD_SIZE, MPI.BYTE), (self.block, RECORD_SIZE, MPI.BYTE)
        )
        self.start: tuple[Step] = (partial(self.request.Start),)


class Position:
    """What this member posted at one position.

    Attributes
    ----------
    verdict : Verdict or None
        What follows from it; None until all members have posted there.
    """

    __slots__ = ("block", "command", "left", "move", "number", "record", "slot", "state", "verdict")

    def __init__(
        self, number: int, slot: _Slot, state: State, command: int, record: bytes, move: Move | None
    ) -> None:
        self.number = number
        self.slot = slot
        self.state = state
        self.command = command
        self.left = command - 1 if state is State.ARRIVED else command
        self.record = record
        self.move = move
        self.verdict: Verdict | None = None
        self.block: bytes | None = None


class Positions:
    """The positions of one communicator, as this member sees them.

    Parameters
    ----------
    comm : mpi4py.MPI.Comm
        Used for nothing else. `close` frees it.
    ids : sequence of int
        The worker ids of its members.
    """

    def __init__(self, comm: MPI.Intracomm, ids: Sequence[int]) -> None:
        self.comm = comm
        self.ids = ids
        self.outstanding: deque[tuple[Any, Position]] = deque()
        #: The newest command that some member has left, as far as it is known here.
        self.gone = -1
        #: The newest operation for which a member that we have seen waits for us.
        self.asked = -1
        self.shut_down = False
        self._slots = [_Slot(comm) for _ in range(MOST_OUTSTANDING)]
        self._next = 0
        self._left = -1
        #: What each member that has left something last told.
        self._told: dict[int, Record] = {}
        self._deferred: tuple[State, int] | None = None

    @property
    def left(self) -> int:
        """The newest command that this member has told to have left."""
        return max(self._left, self.outstanding[-1][1].left) if self.outstanding else self._left

    @property
    def pending(self) -> bool:
        """Whether something of this member is unfinished."""
        return bool(self.outstanding) or self._deferred is not None

    @property
    def arrived(self) -> bool:
        """Whether a position at which this member has arrived is open."""
        return any(p.state is State.ARRIVED for _, p in self.outstanding)

    def post(self, state: State, command: int, record: bytes, move: Move | None = None) -> Position:
        """Post a record at the next position; there is room for it."""
        outstanding = self.outstanding
        number = outstanding[-1][1].number + 1 if outstanding else self._next
        slot = self._slots[number % MOST_OUTSTANDING]
        slot.mine[:] = record
        position = Position(number, slot, state, command, record, move)
        post(slot.start, (position,), outstanding)
        return position

    def tell(self, state: State, command: int) -> None:
        """Tell the others that this member takes no part any more in `command`.

        Nothing happens where that has been told. With too many posts outstanding it is told later;
        only the newest matters then.
        """
        if command <= self.left:
            return
        if len(self.outstanding) < MOST_OUTSTANDING:
            self.post(state, command, make_record(state, 0, command))
        elif self._deferred is None or self._deferred[1] < command:
            self._deferred = (state, command)

    def forget_deferred(self) -> None:
        """Drop what would have been told later: something newer is about to be posted."""
        self._deferred = None

    def who_left(self, command: int) -> tuple[int, Record]:
        """Return the worker, and what it told, because of which `command` cannot be done.

        One that failed in this command comes first, then the one that left it last.
        """
        return min(
            ((worker, record) for worker, record in self._told.items() if record.left >= command),
            key=lambda told: (
                told[1].command != command or told[1].state is not State.FAILED,
                told[1].state is State.SHUTDOWN,
                told[1].command,
                told[0],
            ),
        )

    def progress(self) -> None:
        """Look at the positions that are complete, in order, and post what was deferred."""
        outstanding = self.outstanding
        while outstanding:
            position = outstanding[0][1]
            if not position.slot.request.Test():
                break
            self.look(position)
        if self._deferred is not None and len(self.outstanding) < MOST_OUTSTANDING:
            state, command = self._deferred
            self.tell(state, command)
            self._deferred = None

    def look(self, position: Position) -> None:
        """Do what follows from the oldest outstanding position, which is complete.

        Interrupted anywhere, it can be repeated.
        """
        slot = position.slot
        verdict = decide(position.record, slot.block)
        if verdict is Verdict.MOVE:
            # Nobody waits for us any more.
            self.asked = -1
            if position.move is not None:
                position.move.run()
            elif position.state is State.SHUTDOWN:
                self.shut_down = True
        else:
            position.block = bytes(slot.block)
            self._learn(parse(position.block))
        position.verdict = verdict
        if position.left > self._left:
            self._left = position.left
        self._next = position.number + 1
        self.outstanding.popleft()

    def _learn(self, records: list[Record]) -> None:
        for member, record in enumerate(records):
            worker = self.ids[member]
            if member == self.comm.rank:
                continue
            told = self._told.get(worker)
            if told is None or (record.left, record.state is State.FAILED) > (
                told.left,
                told.state is State.FAILED,
            ):
                self._told[worker] = record
            self.gone = max(self.gone, record.left)
            if record.state is State.ARRIVED:
                self.asked = max(self.asked, record.command)

    def close(self) -> None:
        """Free what was made; nothing is outstanding, and all members do this."""
        while self._slots:
            # It may have been freed by a call of this method that was interrupted.
            if self._slots[-1].request != MPI.REQUEST_NULL:
                self._slots[-1].request.Free()
            self._slots.pop()
        if self.comm != MPI.COMM_NULL:
            self.comm.Free()
