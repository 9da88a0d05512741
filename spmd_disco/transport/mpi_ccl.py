"""The data plane over MPI, for NumPy arrays.

Every operation has two phases. *Arrive*: the members tell each other what they are about to do, by
a polled exchange that any of them can break off (arrival.py, positions.py). *Move*: only when all
have come to the same operation, by plain blocking MPI calls (moves.py). All that can raise comes
before the arrival; so nobody ever sits in an MPI call for a peer that does not come.
"""

from __future__ import annotations

import threading
from typing import Any

from mpi4py import MPI

from ..errors import PeerError, SessionClosedError
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
from .ccl import CCL, ReduceKind
from .layout import Array, copy_into, host_array
from .moves import Move, Moves
from .p2p import Mailbox
from .positions import Positions
from .prepare import (
    allreduce_move,
    broadcast_move,
    check_parts,
    copy_move,
    destination,
    elements,
    source_array,
)
from .reduce import reduction
from .wait import Waiter

__all__ = ["MPICCL"]


class _Members:
    """Those who take part in an operation: all workers, or one group."""

    def __init__(self, moves: Moves, positions: Positions | None, where: str) -> None:
        self.moves = moves
        #: None for a single member, who has nobody to arrive with.
        self.positions = positions
        self.size = moves.size
        self.first = moves.rank == 0
        self.where = where
        #: The command that the index counts in, and how many operations it has had.
        self.command = -1
        self.index = 0


class MPICCL(CCL):
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
        self.worker_id = comm.rank
        self.num_workers = comm.size
        self.num_groups = num_groups
        self.group_size = comm.size // num_groups
        self._waiter = waiter
        # Threads of the controller take turns by the session's lock, but a wait of any of them
        # may pump.
        self._lock = threading.RLock()
        self._command = 0
        self._closed = False
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
        if self._closed:
            raise SessionClosedError("the session has been shut down, and its collectives with it")
        return self._group if in_group else self._world

    def allreduce(self, send: Any, kind: object, in_group: bool, recv: Any) -> None:
        members = self._members_of(in_group)
        send = host_array(send, "send")
        recv = destination(recv, "recv", send.dtype)
        if type(kind) is not ReduceKind:
            kind = ReduceKind.of(kind)
        how = reduction(send.dtype, kind)
        if send.size != recv.size:
            raise ValueError(
                f"allreduce: send has {elements(send)} and recv {elements(recv)}; they must be "
                "as many"
            )
        if members.positions is None:
            copy_into(recv, send)
            return
        with self._lock:
            self._arrive(
                members,
                Operation.ALLREDUCE,
                kind,
                send,
                allreduce_move(members.moves, how, send, recv),
            )

    def allgather(self, send: Any, in_group: bool, recv: Any) -> None:
        members = self._members_of(in_group)
        send = host_array(send, "send")
        recv = destination(recv, "recv", send.dtype)
        check_parts("allgather", "recv", recv, members.size, send, "every worker's send")
        if members.positions is None:
            copy_into(recv, send)
            return
        with self._lock:
            move = copy_move(members.moves.allgather, send, recv)
            self._arrive(members, Operation.ALLGATHER, None, send, move)

    def broadcast_from_worker0(self, send: Any, in_group: bool, recv: Any) -> None:
        members = self._members_of(in_group)
        recv = destination(recv, "recv")
        if members.first:
            send = source_array(send, "broadcast_from_worker0", recv)
            if send.size != recv.size:
                raise ValueError(
                    f"broadcast_from_worker0: send has {elements(send)} and recv "
                    f"{elements(recv)}; they must be as many"
                )
            if members.positions is None:
                copy_into(recv, send)
                return
        else:
            send = None
        with self._lock:
            move = broadcast_move(members.moves, send, recv)
            self._arrive(members, Operation.BROADCAST_FROM_WORKER0, None, recv, move)

    def scatter_from_worker0(self, send: Any, in_group: bool, recv: Any) -> None:
        members = self._members_of(in_group)
        recv = destination(recv, "recv")
        if members.first:
            send = source_array(send, "scatter_from_worker0", recv)
            check_parts("scatter_from_worker0", "send", send, members.size, recv, "recv")
            if members.positions is None:
                copy_into(recv, send)
                return
        else:
            send = None
        with self._lock:
            move = copy_move(members.moves.scatter, send, recv)
            self._arrive(members, Operation.SCATTER_FROM_WORKER0, None, recv, move)

    def gather_to_worker0(self, send: Any, in_group: bool, recv: Any) -> None:
        members = self._members_of(in_group)
        send = host_array(send, "send")
        if members.first:
            recv = destination(recv, "recv", send.dtype)
            check_parts("gather_to_worker0", "recv", recv, members.size, send, "send")
            if members.positions is None:
                copy_into(recv, send)
                return
        else:
            recv = None
        with self._lock:
            move = copy_move(members.moves.gather, send, recv)
            self._arrive(members, Operation.GATHER_TO_WORKER0, None, send, move)

    # Point to point -------------------------------------------------------------------------------

    def _other(self, worker: Any, what: str) -> int:
        """Return `worker` as the id of another worker."""
        if isinstance(worker, bool) or not hasattr(worker, "__index__"):
            raise TypeError(f"{what} must be an integer, not {worker!r}")
        number = int(worker.__index__())
        if not 0 <= number < self.num_workers:
            raise ValueError(
                f"{what} is {number}; allowed are the ids of the workers, 0 to "
                f"{self.num_workers - 1}"
            )
        if number == self.worker_id:
            raise ValueError(
                f"{what} is {number}, this worker itself; allowed are the ids of the others"
            )
        return number

    def _send(self, buffer: Any, worker: int) -> None:
        buffer = host_array(buffer, "buffer")
        with self._lock:
            self._mailbox.send(worker, self._command, buffer)

    def _receive(self, buffer: Any, worker: int, name: str) -> None:
        buffer = destination(buffer, "buffer")
        with self._lock:
            self._wait = f"{name} from worker {worker}"
            try:
                self._mailbox.receive(worker, self._command, buffer, self._what)
            finally:
                self._wait = None

    def send_to_worker(self, buffer: Any, receiver_id: int) -> None:
        self._members_of(False)
        self._send(buffer, self._other(receiver_id, "receiver_id"))

    def recv_from_worker(self, buffer: Any, sender_id: int) -> None:
        self._members_of(False)
        self._receive(buffer, self._other(sender_id, "sender_id"), "recv_from_worker")

    def recv_from_worker0(self, buffer: Any) -> None:
        self._members_of(False)
        if self.worker_id != 0:
            self._receive(buffer, 0, "recv_from_worker0")

    def send_to_next_group(self, buffer: Any) -> None:
        self._members_of(False)
        receiver = self.worker_id + self.group_size
        if receiver >= self.num_workers:
            raise ValueError(
                f"send_to_next_group: worker {self.worker_id} is in the last of "
                f"{self.num_groups} groups, which has no next one; allowed in all groups before it"
            )
        self._send(buffer, receiver)

    def recv_from_prev_group(self, buffer: Any) -> None:
        self._members_of(False)
        sender = self.worker_id - self.group_size
        if sender < 0:
            raise ValueError(
                f"recv_from_prev_group: worker {self.worker_id} is in the first of "
                f"{self.num_groups} groups, which has no previous one; allowed in all groups "
                "after it"
            )
        self._receive(buffer, sender, "recv_from_prev_group")

    def sync_worker(self) -> None:
        # Nothing is queued: every operation on the host is done when it returns.
        return

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
