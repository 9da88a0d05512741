"""The data plane over MPI, for NumPy arrays.

Every operation has two phases. *Arrive*: the members tell each other what they are about to do, by
a polled exchange that any of them can break off (arrival.py, positions.py). *Move*: only when all
have come to the same operation, by plain blocking MPI calls (moves.py). All that can raise comes
before the arrival; so nobody ever sits in an MPI call for a peer that does not come.
"""

from __future__ import annotations

import threading

from mpi4py import MPI

from ..errors import PeerError
from .arrival import (
    Operation,
    State,
    Verdict,
    make_record,
    mismatch_text,
    peer_text,
    signature,
)
from .atomic import try_lock
from .ccl import ReduceKind
from .host_ccl import HostCCL
from .layout import Array
from .moves import Move, Moves
from .p2p import Mailbox
from .positions import Positions
from .prepare import allreduce_move, broadcast_move, copy_move
from .reduce import Reduction
from .wait import Waiter

__all__ = ["MPICCL"]


class _Members:
    """Those who take part in an operation: all workers, or one group."""

    def __init__(self, moves: Moves, positions: Positions | None, where: str) -> None:
        self.moves = moves
        #: None for a single member, who has nobody to arrive with.
        self.positions = positions
        self.size = moves.size
        self.where = where
        #: The command that the index counts in, and how many operations it has had.
        self.command = -1
        self.index = 0


class MPICCL(HostCCL):
    """Collectives and messages over MPI.

    Its `pump` is added to the waiter's hooks.

    Parameters
    ----------
    comm : mpi4py.MPI.Comm
        The workers; rank i is worker i. Used for nothing else from now on.
    group_comm : mpi4py.MPI.Comm
        The worker's group, a block of consecutive ids; `comm` itself when there is one group.
    waiter : Waiter
        Where it waits.
    num_groups : int
        How many groups of equal size there are.
    """

    name = "mpi"

    def __init__(
        self, comm: MPI.Intracomm, group_comm: MPI.Intracomm, waiter: Waiter, *, num_groups: int
    ) -> None:
        super().__init__(comm.rank, comm.size, num_groups)
        self._waiter = waiter
        # Threads of the controller take turns by the session's lock, but a wait of any of them
        # may pump.
        self._lock = threading.RLock()
        self._command = 0
        #: What is being waited for: (operation, its index, where), or the text itself.
        self._wait: tuple[Operation, int, str] | str | None = None
        #: Where an arrival is under way.
        self._arriving: Positions | None = None

        self._positions: list[Positions] = []
        self._world = self._members(comm, range(comm.size), "in the world")
        self._group = self._world
        if num_groups > 1:
            group = comm.rank // self.group_size
            ids = range(group * self.group_size, (group + 1) * self.group_size)
            self._group = self._members(group_comm, ids, f"in group {group}")
        self._mailbox = Mailbox(comm, waiter)
        if self.num_workers > 1:
            waiter.add_hook(self.pump)

    def _members(self, comm: MPI.Intracomm, ids: range, where: str) -> _Members:
        positions = None
        if comm.size > 1:
            # Blocking and nonblocking collectives must come in the same order on all members of a
            # communicator. An abandoned arrival breaks that, so the two have one each.
            positions = Positions(comm.Dup(), ids)
            self._positions.append(positions)
        return _Members(Moves(comm), positions, where)

    # The interpreter's side -----------------------------------------------------------------------

    def begin(self, command: int) -> None:
        self._command = command
        if self.outstanding:
            with self._lock:
                self._let_go()
                self._progress(command - 1, waiting=False)

    def fail(self, command: int) -> None:
        if self._closed or self.num_workers == 1:
            return
        with self._lock:
            self._let_go()
            for positions in self._positions:
                positions.tell(State.FAILED, command)
            self._mailbox.fail(command)

    @property
    def outstanding(self) -> bool:
        # Asked at every command, so without generators.
        for positions in self._positions:
            if positions.outstanding or positions.pending or positions.asked > positions.left:
                return True
        return self._mailbox.pending

    def pump(self, idle: bool) -> None:
        if self._closed or self.num_workers == 1:
            return
        got: list[bool] = []
        try:
            # Another thread that has the lock makes progress itself.
            try_lock(self._lock, got)
            if got[0]:
                left = self._command if idle else self._command - 1
                self._progress(left, waiting=idle or self._wait is not None)
        finally:
            if got and got[0]:
                self._lock.release()

    def _progress(self, left: int, *, waiting: bool) -> None:
        """Bring everything forward; `left` is the newest command that this worker has left.

        A worker that waits tells everywhere what it has left, lest a peer wait for it in turn.
        """
        for positions in self._positions:
            positions.progress()
            if (
                not positions.pending
                and positions is not self._arriving
                and positions.left < left
                and (waiting or positions.asked > positions.left)
            ):
                positions.tell(State.LEFT, left)
        self._mailbox.progress(left)

    def _let_go(self) -> None:
        """Let abandoned arrivals work on memory of their own from now on."""
        for positions in self._positions:
            for _, position in positions.outstanding:
                if position.move is not None:
                    position.move.detach()

    @property
    def waiting(self) -> str | None:
        wait = self._wait
        return wait if wait is None or isinstance(wait, str) else _phrase(*wait)

    def _what(self) -> str:
        return self.waiting or "the other workers"

    # Arrivals -------------------------------------------------------------------------------------

    def _arrive(
        self,
        members: _Members,
        operation: Operation,
        kind: ReduceKind | None,
        array: Array,
        move: Move,
    ) -> None:
        """Do `move` when all members have come to the same operation on arrays like `array`.

        Raises
        ------
        ValueError
            They have come to different ones.
        PeerError
            One of them will not come.
        """
        positions = members.positions
        assert positions is not None
        command = self._command
        if members.command != command:
            members.command, members.index = command, 0
        index = members.index
        members.index = index + 1
        record = make_record(
            State.ARRIVED, index, command, signature(operation, kind, array.dtype, array.shape)
        )
        self._wait = (operation, index, members.where)
        try:
            while True:
                if positions.gone < command and self._unsettled():
                    self._settle(positions, command)
                if positions.gone >= command:
                    worker, told = positions.who_left(command)
                    raise PeerError(
                        peer_text(worker, told, command, _phrase(operation, index, members.where))
                    )
                self._arriving = positions
                position = positions.post(State.ARRIVED, command, record, move)
                # A hook may complete it meanwhile; Test then says so again.
                self._waiter.until(position.slot.request.Test, self._what)
                if position.verdict is None:
                    positions.look(position)
                verdict = position.verdict
                if verdict is Verdict.MOVE:
                    return
                if verdict is Verdict.MISMATCH:
                    assert position.block is not None
                    raise ValueError(mismatch_text(position.block, positions.ids, members.where))
        finally:
            self._wait = self._arriving = None

    def _unsettled(self) -> bool:
        for positions in self._positions:  # noqa: SIM110 (a generator costs a microsecond)
            if positions.outstanding:
                return True
        return False

    def _settle(self, here: Positions, command: int | None = None) -> None:
        """See earlier posts through: all of those here, and abandoned arrivals anywhere.

        A member that goes on to arrive elsewhere while it owes a move could be waited for by one
        that it waits for itself, in two moves on two communicators.

        It ends early when it turns out that somebody has left `command`: then this member does not
        arrive any more, and the others need not complete what is outstanding.
        """

        def settled() -> bool:
            for positions in self._positions:
                positions.progress()
            if command is not None and here.gone >= command:
                return True
            return not here.outstanding and not any(p.arrived for p in self._positions)

        here.forget_deferred()
        self._arriving = here
        try:
            self._waiter.until(settled, self._what)
        finally:
            self._arriving = None

    # Collectives ----------------------------------------------------------------------------------

    def _members_of(self, in_group: bool) -> _Members:
        return self._group if in_group else self._world

    def _allreduce(
        self, in_group: bool, kind: ReduceKind, how: Reduction, send: Array, recv: Array
    ) -> None:
        members = self._members_of(in_group)
        with self._lock:
            move = allreduce_move(members.moves, how, send, recv)
            self._arrive(members, Operation.ALLREDUCE, kind, send, move)

    def _allgather(self, in_group: bool, send: Array, recv: Array) -> None:
        members = self._members_of(in_group)
        with self._lock:
            move = copy_move(members.moves.allgather, send, recv)
            self._arrive(members, Operation.ALLGATHER, None, send, move)

    def _broadcast(self, in_group: bool, send: Array | None, recv: Array) -> None:
        members = self._members_of(in_group)
        with self._lock:
            move = broadcast_move(members.moves, send, recv)
            self._arrive(members, Operation.BROADCAST_FROM_WORKER0, None, recv, move)

    def _scatter(self, in_group: bool, send: Array | None, recv: Array) -> None:
        members = self._members_of(in_group)
        with self._lock:
            move = copy_move(members.moves.scatter, send, recv)
            self._arrive(members, Operation.SCATTER_FROM_WORKER0, None, recv, move)

    def _gather(self, in_group: bool, send: Array, recv: Array | None) -> None:
        members = self._members_of(in_group)
        with self._lock:
            move = copy_move(members.moves.gather, send, recv)
            self._arrive(members, Operation.GATHER_TO_WORKER0, None, send, move)

    # Point to point -------------------------------------------------------------------------------

    def _send(self, buffer: Array, worker: int) -> None:
        with self._lock:
            self._mailbox.send(worker, self._command, buffer)

    def _receive(self, buffer: Array, worker: int, name: str) -> None:
        with self._lock:
            self._wait = f"{name} from worker {worker}"
            try:
                self._mailbox.receive(worker, self._command, buffer, self._what)
            finally:
                self._wait = None

    # The end --------------------------------------------------------------------------------------

    def close(self, command: int) -> None:
        with self._lock:
            if not self._closed:
                self._take_leave(command)
                self._closed = True
            # Interrupted, the rest of it can be done by the next call.
            while self._positions:
                self._positions[-1].close()
                self._positions.pop()
            for members in (self._world, self._group):
                members.moves.free()

    def _take_leave(self, command: int) -> None:
        """Meet all workers at the end, on every communicator, and empty the mailbox."""
        self._command = max(self._command, command)
        record = make_record(State.SHUTDOWN, 0, command)
        self._wait = "the other workers to shut down"
        try:
            for positions in self._positions:
                while True:
                    self._settle(positions)
                    if positions.shut_down:
                        break
                    positions.post(State.SHUTDOWN, command, record)
            if self.num_workers > 1:
                self._mailbox.close(self._what)
        finally:
            self._wait = None


def _phrase(operation: Operation, index: int, where: str) -> str:
    return f"{operation.name.lower()} {where} (operation {index})"
