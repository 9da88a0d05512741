"""The data plane for workers that are all on one node: through memory that they share.

Arrivals, small operations and the moves of large ones are the native module's (`Cells`). What it
does not take as it is, arrays of other layouts and dtypes that NumPy has to reduce, is prepared
here, before the arrival. MPI is not needed.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from .. import native
from ..errors import PeerError
from .arrival import (
    Operation,
    State,
    Told,
    gone_text,
    letter_text,
    make_record,
    mismatch_text,
    same_dtype_and_count,
    signature,
)
from .atomic import Step
from .ccl import ReduceKind
from .host_ccl import HostCCL
from .layout import Array, overlapping, packed, same_memory, unpack
from .peer_arrays import KINDS, address, contiguous, describe, digest, reduction_code, together
from .reduce import Reduction, divide_steps
from .wait import Waiter

if TYPE_CHECKING:
    from ..native._native import Node, PoolTable, Segment

__all__ = ["PeerCCL"]

#: What the native side answers: nothing has been done, or not yet all; or how it ended.
OTHERWISE, WAIT, MOVED, MISMATCH, GONE, DEAD = range(-1, 5)
#: The most bytes of each worker that NumPy reduces at a time.
REDUCED_AT_A_TIME = 1 << 20
#: Commands that failed here, remembered for messages of theirs that come late.
MOST_FAILED = 65536


class PeerCCL(HostCCL):
    """Collectives and messages through shared memory.

    Parameters
    ----------
    block : Segment
        Zeroed memory of `required_bytes` bytes that all workers have mapped, for this data plane
        alone.
    worker_id, num_workers : int
    waiter : Waiter
        Where it waits.
    num_groups : int
        How many groups of equal size there are.
    node : Node, optional
        Where workers that sleep are woken. All workers have one, or none has.
    pools : PoolTable, optional
        The workers' memory pools by worker id, likewise.
    """

    name = "peer"
    polled = False

    def __init__(
        self,
        block: Segment,
        worker_id: int,
        num_workers: int,
        waiter: Waiter,
        *,
        num_groups: int,
        node: Node | None = None,
        pools: PoolTable | None = None,
    ) -> None:
        super().__init__(worker_id, num_workers, num_groups)
        assert native.core is not None
        example = np.zeros((3, 5), np.float32)
        view = example.T
        view.flags.writeable = False
        self._waiter = waiter
        self._wait: str | None = None
        self._command = 0
        self._failed: dict[int, None] = {}
        self._cells = native.core.Cells(
            block,
            worker_id,
            num_workers,
            num_groups,
            describe,
            KINDS,
            (example, view),
            address(example),
            waiter.spin,
            node,
            pools,
        )
        if num_workers > 1:
            waiter.add_hook(self.pump)
        # Asked at every command and operation.
        self.leave = self._cells.leave
        self._fast_allreduce = self._cells.allreduce
        self._fast_allgather = self._cells.allgather
        self._fast_broadcast = self._cells.broadcast
        self._fast_scatter = self._cells.scatter
        self._fast_gather = self._cells.gather

    @staticmethod
    def required_bytes(num_workers: int, num_groups: int) -> int:
        """Return how large the block must be."""
        assert native.core is not None
        return int(native.core.Cells.required(num_workers, num_groups))

    # The interpreter's side -----------------------------------------------------------------------

    def begin(self, command: int) -> None:
        self._command = command
        self._cells.begin(command)

    def fail(self, command: int) -> None:
        if self._closed:
            return
        self._failed[command] = None
        if len(self._failed) > MOST_FAILED:
            del self._failed[next(iter(self._failed))]
        self._cells.fail(command)

    @property
    def outstanding(self) -> bool:
        return not self._closed and bool(self._cells.outstanding)

    def pump(self, idle: bool) -> None:
        if self._closed:
            return
        if idle:
            self._cells.leave(self._command)
        if idle or self._cells.outstanding:
            self._cells.pump()

    def close(self, command: int) -> None:
        self._command = max(self._command, command)
        self._cells.close(command)
        # Others may still take what was sent to them, until they close in turn.
        self._wait = "the other workers to shut down"
        try:
            self._waiter.until(self._emptied, self._what, rung=True)
        finally:
            self._wait = None
        self._closed = True
        # Sessions are cycles of references, which would keep the memory for long.
        self._cells.release()

    def _emptied(self) -> bool:
        self._cells.pump()
        return not self._cells.outstanding and not self._cells.lends

    def bury(self, worker: int) -> None:
        """Take note that the process of a worker has ended, so that nobody waits for it."""
        if self._closed:
            return
        self._cells.bury(worker)

    # Waiting --------------------------------------------------------------------------------------

    @property
    def waiting(self) -> str | None:
        operation = self._cells.waiting
        return self._wait if operation is None else self._phrase(*operation)

    def _what(self) -> str:
        return self.waiting or "the other workers"

    def _where(self, in_group: bool) -> str:
        if not in_group or self.num_groups == 1:
            return "in the world"
        return f"in group {self.worker_id // self.group_size}"

    def _phrase(self, operation: int, index: int, in_group: bool) -> str:
        name = Operation(operation).name.lower()
        return f"{name} {self._where(in_group)} (operation {index})"

    def _ids(self, in_group: bool) -> range:
        if not in_group:
            return range(self.num_workers)
        first = self.worker_id // self.group_size * self.group_size
        return range(first, first + self.group_size)

    def _conclude(self, verdict: int, in_group: bool) -> None:
        """Wait until an operation has ended, and raise what follows from how it did."""
        if verdict == WAIT:
            try:
                verdict = self._waiter.until(self._cells.resume, self._what, rung=True)
            except BaseException:
                self._cells.abandon()
                raise
        if verdict == MOVED:
            return
        command = self._command
        operation, index = self._cells.last
        if verdict == MISMATCH:
            signatures = self._cells.signatures(in_group)
            size = len(signatures) // len(self._ids(in_group))
            block = b"".join(
                make_record(State.ARRIVED, index, command, signatures[at : at + size])
                for at in range(0, len(signatures), size)
            )
            raise ValueError(mismatch_text(block, self._ids(in_group), self._where(in_group)))
        what = self._phrase(operation, index, in_group)
        worker = self._cells.withdrawn(in_group)
        if verdict == DEAD:
            raise PeerError(f"{what}: the process of worker {worker} has ended in the middle of it")
        if worker is not None:
            raise PeerError(f"{what}: worker {worker} has broken off its wait for the others")
        raise PeerError(self._gone_text(self._ids(in_group), command, what))

    def _gone_text(self, ids: range, command: int, what: str) -> str:
        """Say who will not come to what: the one that began it, as far as that can be told."""
        told = [Told(*each) for each in self._cells.told()]
        others = (worker for worker in ids if worker != self.worker_id)
        return gone_text(told, others, command, what)

    # Collectives ----------------------------------------------------------------------------------

    def allreduce(self, send: Any, kind: object, in_group: bool, recv: Any) -> None:
        verdict = self._fast_allreduce(send, kind, in_group, recv)
        if verdict == OTHERWISE:
            super().allreduce(send, kind, in_group, recv)
        elif verdict != MOVED:
            self._conclude(verdict, in_group)

    def allgather(self, send: Any, in_group: bool, recv: Any) -> None:
        verdict = self._fast_allgather(send, in_group, recv)
        if verdict == OTHERWISE:
            super().allgather(send, in_group, recv)
        elif verdict != MOVED:
            self._conclude(verdict, in_group)

    def broadcast_from_worker0(self, send: Any, in_group: bool, recv: Any) -> None:
        verdict = self._fast_broadcast(send, in_group, recv)
        if verdict == OTHERWISE:
            super().broadcast_from_worker0(send, in_group, recv)
        elif verdict != MOVED:
            self._conclude(verdict, in_group)

    def scatter_from_worker0(self, send: Any, in_group: bool, recv: Any) -> None:
        verdict = self._fast_scatter(send, in_group, recv)
        if verdict == OTHERWISE:
            super().scatter_from_worker0(send, in_group, recv)
        elif verdict != MOVED:
            self._conclude(verdict, in_group)

    def gather_to_worker0(self, send: Any, in_group: bool, recv: Any) -> None:
        verdict = self._fast_gather(send, in_group, recv)
        if verdict == OTHERWISE:
            super().gather_to_worker0(send, in_group, recv)
        elif verdict != MOVED:
            self._conclude(verdict, in_group)

    # Point to point -------------------------------------------------------------------------------

    def _send(self, buffer: Array, worker: int) -> None:
        sign = signature(Operation.SEND, None, buffer.dtype, buffer.shape)
        buffer = packed(buffer)
        self._cells.send(worker, sign, address(buffer), buffer.nbytes)

    def _receive(self, buffer: Array, worker: int, name: str) -> None:
        self._wait = f"{name} from worker {worker}"
        try:
            letter = self._waiter.until(partial(self._letter, worker), self._what, rung=True)
            if letter[0] is None:
                raise PeerError(
                    self._gone_text(range(worker, worker + 1), self._command, self._what())
                )
            _, nbytes, sign = letter
            expected = signature(Operation.SEND, None, buffer.dtype, buffer.shape)
            if not same_dtype_and_count(sign, expected) or nbytes != buffer.nbytes:
                self._cells.drop(worker)
                raise ValueError(letter_text(worker, sign, self.worker_id, expected))
            target, after = contiguous(buffer, None)
            assert target is not None
            try:
                self._waiter.until(
                    partial(self._cells.read, worker, address(target), nbytes),
                    self._what,
                    rung=True,
                )
            except BaseException:
                self._cells.drop(worker)
                raise
            for step in after:
                step()
        finally:
            self._wait = None

    def _letter(self, worker: int) -> tuple[int | None, int, bytes] | None:
        """Return the oldest message that may be taken now, (None, …) where none will come."""
        while True:
            letter: tuple[int, int, bytes] | Literal[False] | None = self._cells.letter(worker)
            if letter is None:
                return None
            if letter is False:
                return None, 0, b""
            if letter[0] not in self._failed:
                return letter
            self._cells.drop(worker)

    # On arrays that the native side does not take as they are -------------------------------------

    def _copy(
        self,
        operation: Operation,
        in_group: bool,
        like: Array,
        send: Array | None,
        recv: Array | None,
    ) -> None:
        """Do a collective that moves elements; each member's part is as large as `like`."""
        source = None if send is None else packed(send)
        target, after = contiguous(recv, None)
        if (
            source is not None
            and target is not None
            and overlapping(source, target)
            and not same_memory(source, target)
        ):
            source = source.copy()
        sign = signature(operation, None, like.dtype, like.shape)
        self._start(operation, None, in_group, sign, like.nbytes, source, target, after)

    def _allgather(self, in_group: bool, send: Array, recv: Array) -> None:
        self._copy(Operation.ALLGATHER, in_group, send, send, recv)

    def _broadcast(self, in_group: bool, send: Array | None, recv: Array) -> None:
        self._copy(Operation.BROADCAST_FROM_WORKER0, in_group, recv, send, recv)

    def _scatter(self, in_group: bool, send: Array | None, recv: Array) -> None:
        self._copy(Operation.SCATTER_FROM_WORKER0, in_group, recv, send, recv)

    def _gather(self, in_group: bool, send: Array, recv: Array | None) -> None:
        self._copy(Operation.GATHER_TO_WORKER0, in_group, send, send, recv)

    def _allreduce(
        self, in_group: bool, kind: ReduceKind, how: Reduction, send: Array, recv: Array
    ) -> None:
        sign = signature(Operation.ALLREDUCE, kind, send.dtype, send.shape)
        native_order = send.dtype.newbyteorder("=")
        code = reduction_code(native_order)
        with np.errstate(all="ignore"):
            if code is None:
                self._reduce_by_numpy(in_group, sign, how, send, recv)
                return
            source = packed(send, native_order)
            target, after = contiguous(recv, native_order)
            assert target is not None
            if overlapping(source, target) and not same_memory(source, target):
                source = source.copy()
            self._start(
                Operation.ALLREDUCE,
                kind,
                in_group,
                sign,
                source.nbytes,
                source,
                target,
                after,
                code=code,
                count=source.size,
            )

    def _reduce_by_numpy(
        self, in_group: bool, sign: bytes, how: Reduction, send: Array, recv: Array
    ) -> None:
        """Gather the members' elements in pieces, and let each member reduce them all alike."""
        size = len(self._ids(in_group))
        given = packed(send, how.work).reshape(-1)
        result = np.empty(given.size, how.work)
        at_a_time = max(1, REDUCED_AT_A_TIME // how.work.itemsize)
        first = given[:at_a_time]
        scratch = np.empty(size * first.size, how.work)
        reduce = getattr(np, how.ufunc).reduce
        steps: list[Step] = []
        for start in range(0, given.size, at_a_time):
            part = given[start : start + at_a_time]
            if start:
                steps.append(
                    partial(self._cells.exchange, part.nbytes, address(part), address(scratch))
                )
            rows = scratch[: size * part.size].reshape(size, part.size)
            steps.append(partial(reduce, rows, 0, None, result[start : start + part.size]))
        steps += divide_steps(how, result, size)
        steps.append(unpack(recv, result))
        self._start(
            Operation.ALLGATHER, None, in_group, sign, first.nbytes, first, scratch, steps,
            staged=True, owners=(given, scratch)
        )  # fmt: skip

    def _start(
        self,
        flow: Operation,
        kind: ReduceKind | None,
        in_group: bool,
        sign: bytes,
        nbytes: int,
        source: Array | None,
        target: Array | None,
        after: list[Step],
        *,
        code: int = 0,
        count: int = 0,
        staged: bool = False,
        owners: object = None,
    ) -> None:
        """Arrive with the signature `sign`, and move data as `flow` does."""
        verdict = self._cells.start(
            int(flow),
            0 if kind is None else int(kind),
            in_group,
            sign,
            digest(sign),
            code,
            count,
            nbytes,
            0 if source is None else address(source),
            0 if target is None else address(target),
            (source, target, owners),
            together(after) if after else None,
            staged,
        )
        if verdict != MOVED:
            self._conclude(verdict, in_group)
