"""The data plane between the threads of one process, for NumPy arrays.

Arrive, then move, as everywhere: a worker that comes to an operation lays its arrays out, and when
all have come to the same one, each takes what it needs from where the others have it. It returns
when all have what they need. There is no native code in it; it runs wherever Python does.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from ..errors import PeerError
from .arrival import (
    Operation,
    gone_text,
    letter_text,
    same_dtype_and_count,
    signature,
)
from .ccl import ReduceKind
from .host_ccl import HostCCL
from .layout import Array, copy_into, packed
from .reduce import Reduction, divide_steps
from .thread_meeting import Arrival, Letter, Meeting, Threads
from .wait import Waiter

__all__ = ["ThreadCCL"]

#: Commands that failed here, remembered for messages of theirs that are taken late.
MOST_FAILED = 65536


class ThreadCCL(HostCCL):
    """Collectives and messages between threads.

    Parameters
    ----------
    shared : Threads
    worker_id, num_groups : int
    waiter : Waiter
        One that waits at this worker's doorbell.
    """

    name = "threads"
    polled = False

    def __init__(self, shared: Threads, worker_id: int, num_groups: int, waiter: Waiter) -> None:
        super().__init__(worker_id, len(shared.world), num_groups)
        self._shared = shared
        self._waiter = waiter
        self._command = 0
        #: By members: the command that the index counts in, and how many operations it has had.
        self._indices: dict[range, tuple[int, int]] = {}
        self._wait: str | None = None
        #: The newest command in which a peer did not come.
        self._forsaken = 0
        self._failed: dict[int, None] = {}
        #: Whether what runs has been cancelled by the controller.
        self.is_cancelled: Callable[[], bool] = lambda: False
        #: Whether an operation is under way, which sees by itself that it is cancelled.
        self.inside = False
        self.leave = self._leave

    # The interpreter's side -----------------------------------------------------------------------

    def begin(self, command: int) -> None:
        self._command = self._shared.begun[self.worker_id] = command
        self._look_up()

    def _leave(self, command: int) -> None:
        self._tell(left=command)

    def fail(self, command: int) -> None:
        self._failed[command] = None
        if len(self._failed) > MOST_FAILED:
            del self._failed[next(iter(self._failed))]
        self._tell(failed=command, consequence=self._forsaken == command)

    def _tell(self, **what: Any) -> None:
        told = self._shared.told
        told[self.worker_id] = told[self.worker_id]._replace(**what)
        self._look_up()

    def _look_up(self) -> None:
        """Let those who wait for this worker see what it has told."""
        shared = self._shared
        # Whoever waits has said so before it looked at what is told, and with the lock.
        if shared.waiting:
            with shared.lock:
                for ids, arrived in shared.arrived.items():
                    if arrived and self.worker_id in ids:
                        shared.decide(ids)
                shared.ring(worker for worker in shared.world if worker != self.worker_id)

    @property
    def outstanding(self) -> bool:
        return False

    def pump(self, idle: bool) -> None:
        """Do nothing: all that others wait for is told at once."""

    def close(self, command: int) -> None:
        self._closed = True
        self._tell(closed=command)

    # Waiting --------------------------------------------------------------------------------------

    @property
    def waiting(self) -> str | None:
        return self._wait

    def _until(self, ready: Callable[[], bool], what: str) -> None:
        shared = self._shared
        self._wait = what
        counted = False
        try:
            with shared.lock:
                shared.waiting += 1
                counted = True
            self._waiter.until(lambda: ready() or self.is_cancelled(), lambda: what, rung=True)
            if self.is_cancelled() and not ready():
                raise KeyboardInterrupt
        finally:
            if counted:
                with shared.lock:
                    shared.waiting -= 1
            self._wait = None

    @contextlib.contextmanager
    def _uninterrupted(self) -> Iterator[None]:
        """Let the controller's interrupt strike where this worker waits, or at the end."""
        self.inside = True
        try:
            yield
        finally:
            self.inside = False
        if self.is_cancelled():
            raise KeyboardInterrupt

    # Collectives ----------------------------------------------------------------------------------

    def _ids(self, in_group: bool) -> range:
        shared = self._shared
        return shared.groups[self.worker_id // self.group_size] if in_group else shared.world

    def _meet(
        self,
        operation: Operation,
        kind: ReduceKind | None,
        in_group: bool,
        like: Array,
        source: Array | None,
        target: Array | None,
        move: Callable[[Sequence[Array]], Array],
    ) -> None:
        """Do an operation: ``target = move(sources)``, when all members have come to it.

        Parameters
        ----------
        like : ndarray
            What must be alike on all members.
        source, target : ndarray or None
            What the others may need of this worker, and what it writes.
        move : callable
            From the members' sources that are there; it may return one of them, or a view.

        Raises
        ------
        ValueError
            They have come to different ones.
        PeerError
            One of them will not come.
        """
        shared, ids, command = self._shared, self._ids(in_group), self._command
        last, index = self._indices.get(ids, (command, 0))
        index = index if last == command else 0
        self._indices[ids] = command, index + 1
        what = f"{operation.name.lower()} {shared.where(ids)} (operation {index})"
        sign = signature(operation, kind, like.dtype, like.shape)
        mine = Arrival(command, index, sign, source)
        with self._uninterrupted():
            self._take_part(ids, mine, target, move, what)

    def _take_part(
        self,
        ids: range,
        mine: Arrival,
        target: Array | None,
        move: Callable[[Sequence[Array]], Array],
        what: str,
    ) -> None:
        shared = self._shared
        try:
            with shared.lock:
                shared.arrived[ids][self.worker_id] = mine
                shared.decide(ids)
            if not mine.decided:
                self._until(lambda: self._decide(ids, mine), what)
        except BaseException:
            with shared.lock:
                if shared.arrived[ids].get(self.worker_id) is mine:
                    del shared.arrived[ids][self.worker_id]
                if mine.meeting is not None:
                    mine.meeting.done.add(self.worker_id)
            raise
        if mine.meeting is not None:
            self._move(mine.meeting, target, move, what)
            return
        if mine.mismatch:
            raise ValueError(mine.mismatch)
        self._forsaken = mine.command
        others = [worker for worker in ids if worker != self.worker_id]
        raise PeerError(self._gone_text(others, mine.command, what))

    def _decide(self, ids: range, mine: Arrival) -> bool:
        if not mine.decided:
            with self._shared.lock:
                self._shared.decide(ids)
        return mine.decided

    def _gone_text(self, ids: Iterable[int], command: int, what: str) -> str:
        shared = self._shared
        told = [
            each._replace(left=max(each.left, each.failed, begun - 1))
            for each, begun in zip(shared.told, shared.begun, strict=True)
        ]
        return gone_text(told, ids, command, what)

    def _move(
        self,
        meeting: Meeting,
        target: Array | None,
        move: Callable[[Sequence[Array]], Array],
        what: str,
    ) -> None:
        shared, command = self._shared, self._command
        sources = [source for source in meeting.sources if source is not None]

        def all_done() -> bool:
            # One that was interrupted in here has left the command.
            return all(
                worker in meeting.done or shared.has_gone(worker, command) for worker in meeting.ids
            )

        late = False
        try:
            with np.errstate(all="ignore"):
                if target is not None:
                    # Also a source of others', who may not have read it yet: in place, for one.
                    late = any(np.may_share_memory(target, source) for source in sources)
                    result = move(sources)
                    if late:
                        result = result.copy()
                    else:
                        copy_into(target, result)
        finally:
            with shared.lock:
                meeting.done.add(self.worker_id)
                if len(meeting.done) == len(meeting.ids):
                    shared.ring(meeting.ids)
        if not all_done():
            self._until(all_done, what)
        if late and target is not None:
            copy_into(target, result)

    def _allreduce(
        self, in_group: bool, kind: ReduceKind, how: Reduction, send: Array, recv: Array
    ) -> None:
        def move(sources: Sequence[Array]) -> Array:
            total = np.array(sources[0], how.work, order="C", copy=True)
            combine = getattr(np, how.ufunc)
            for source in sources[1:]:
                combine(total, source.reshape(total.shape).astype(how.work, copy=False), out=total)
            for step in divide_steps(how, total, len(sources)):
                step()
            return total

        self._meet(Operation.ALLREDUCE, kind, in_group, send, send, recv, move)

    def _allgather(self, in_group: bool, send: Array, recv: Array) -> None:
        self._meet(Operation.ALLGATHER, None, in_group, send, send, recv, _joined)

    def _broadcast(self, in_group: bool, send: Array | None, recv: Array) -> None:
        def move(sources: Sequence[Array]) -> Array:
            return sources[0]

        self._meet(Operation.BROADCAST_FROM_WORKER0, None, in_group, recv, send, recv, move)

    def _scatter(self, in_group: bool, send: Array | None, recv: Array) -> None:
        def move(sources: Sequence[Array]) -> Array:
            at = (self.worker_id - self._ids(in_group)[0]) * recv.size
            return sources[0].reshape(-1)[at : at + recv.size]

        self._meet(Operation.SCATTER_FROM_WORKER0, None, in_group, recv, send, recv, move)

    def _gather(self, in_group: bool, send: Array, recv: Array | None) -> None:
        self._meet(Operation.GATHER_TO_WORKER0, None, in_group, send, send, recv, _joined)

    # Point to point -------------------------------------------------------------------------------

    def _send(self, buffer: Array, worker: int) -> None:
        shared = self._shared
        sign = signature(Operation.SEND, None, buffer.dtype, buffer.shape)
        data = packed(buffer)
        letter = Letter(self._command, sign, data.copy() if data is buffer else data)
        with shared.lock:
            shared.letters.setdefault((self.worker_id, worker), deque()).append(letter)
        shared.bells[worker].ring()

    def _receive(self, buffer: Array, worker: int, name: str) -> None:
        with self._uninterrupted():
            self._take(buffer, worker, name)

    def _take(self, buffer: Array, worker: int, name: str) -> None:
        what = f"{name} from worker {worker}"
        letters = self._shared.letters.setdefault((worker, self.worker_id), deque())

        def ready() -> bool:
            # In this order: it may send, and then leave.
            gone = self._shared.has_gone(worker, self._command)
            while letters and letters[0].command in self._failed:
                letters.popleft()
            return bool(letters) or gone

        if not ready():
            self._until(ready, what)
        if not letters or letters[0].command > self._command:
            self._forsaken = self._command
            raise PeerError(self._gone_text([worker], self._command, what))
        letter = letters.popleft()
        expected = signature(Operation.SEND, None, buffer.dtype, buffer.shape)
        if not same_dtype_and_count(letter.sign, expected):
            raise ValueError(letter_text(worker, letter.sign, self.worker_id, expected))
        copy_into(buffer, letter.data)


def _joined(sources: Sequence[Array]) -> Array:
    return np.concatenate([source.reshape(-1) for source in sources])
