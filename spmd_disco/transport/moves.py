"""The moves: what each collective does with MPI once all members have arrived.

A move is a list of steps (see atomic.py) on contiguous memory, prepared before the arrival with all
the memory that it needs, so that nothing can fail once it has begun. All members are there then,
so plain blocking MPI calls are right, and they are the fastest.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
from mpi4py import MPI

from .atomic import Step, run
from .layout import Array, as_bytes
from .reduce import Reduction, divide_steps

__all__ = ["Move", "Moves"]

#: The most bytes that one call is given as a plain count: not all MPIs take more than 2^31 - 1.
MOST_BYTES = 1 << 30
#: The most bytes of each worker that are reduced at a time, where the workers do it themselves: the
#: parts from all of them then stay in the cache.
REDUCED_AT_A_TIME = 1 << 20

_TYPES: dict[np.dtype[Any], MPI.Datatype] = {
    # First, since they are float64 and complex128 on some machines.
    np.dtype(np.longdouble): MPI.LONG_DOUBLE,
    np.dtype(np.clongdouble): MPI.C_LONG_DOUBLE_COMPLEX,
    np.dtype(np.int8): MPI.INT8_T,
    np.dtype(np.int16): MPI.INT16_T,
    np.dtype(np.int32): MPI.INT32_T,
    np.dtype(np.int64): MPI.INT64_T,
    np.dtype(np.uint8): MPI.UINT8_T,
    np.dtype(np.uint16): MPI.UINT16_T,
    np.dtype(np.uint32): MPI.UINT32_T,
    np.dtype(np.uint64): MPI.UINT64_T,
    np.dtype(np.float32): MPI.FLOAT,
    np.dtype(np.float64): MPI.DOUBLE,
    np.dtype(np.complex64): MPI.C_FLOAT_COMPLEX,
    np.dtype(np.complex128): MPI.C_DOUBLE_COMPLEX,
}
_OPS = {"add": MPI.SUM, "multiply": MPI.PROD, "minimum": MPI.MIN, "maximum": MPI.MAX}


def _mpi_type(dtype: np.dtype[Any]) -> MPI.Datatype:
    found = _TYPES.get(dtype)
    if found is None:
        # Types of the same size that compare equal may hash differently (long, long long).
        found = next(datatype for known, datatype in _TYPES.items() if known == dtype)
        _TYPES[dtype] = found
    return found


class Move:
    """One operation, ready to be done.

    Parameters
    ----------
    steps : sequence of Step
        What it does.
    detached : callable
        Makes the steps that do the same on memory of their own.
    quiet : bool
        False where NumPy may warn about the values.
    """

    __slots__ = ("detached", "done", "quiet", "steps")

    def __init__(
        self, steps: Sequence[Step], detached: Callable[[], Sequence[Step]], quiet: bool = True
    ) -> None:
        self.steps = steps
        self.detached: Callable[[], Sequence[Step]] | None = detached
        self.quiet = quiet
        self.done: list[Any] = []

    def run(self) -> None:
        """Do it, unless it has been done."""
        if self.done:
            return
        try:
            if self.quiet:
                run(self.steps, self.done)
            else:
                with np.errstate(all="ignore"):
                    run(self.steps, self.done)
        except (MPI.Exception, MemoryError):
            # It came out of a step: the peers have gone on, so it must not be repeated.
            self.done.append(None)
            raise

    def detach(self) -> None:
        """Let go of the user's arrays: they belong to a command that this worker has left.

        The peers may still need this worker in the operation, and by then a later command may use
        the arrays.
        """
        if self.done or self.detached is None:
            return
        steps = self.detached()
        self.steps = steps
        self.detached = None


class Moves:
    """The moves on one communicator.

    Parameters
    ----------
    comm : mpi4py.MPI.Comm
        Used for nothing else, and by all its members for the same moves in the same order.
    """

    def __init__(self, comm: MPI.Intracomm) -> None:
        self.comm = comm
        self.rank = comm.rank
        self.size = comm.size
        self._large_types: dict[int, MPI.Datatype] = {}

    def free(self) -> None:
        """Free what was made for these moves."""
        while self._large_types:
            self._large_types.popitem()[1].Free()

    def _bytes(self, x: Array, nbytes: int) -> tuple[Any, int, MPI.Datatype]:
        """Return MPI's description of pieces of `nbytes` bytes each in the memory of `x`."""
        buffer = as_bytes(x)
        if nbytes <= MOST_BYTES:
            return (buffer, nbytes, MPI.BYTE)
        datatype = self._large_types.get(nbytes)
        if datatype is None:
            blocks, rest = divmod(nbytes, MOST_BYTES)
            block = MPI.BYTE.Create_contiguous(MOST_BYTES)
            datatype = MPI.Datatype.Create_struct(
                [blocks, rest], [0, blocks * MOST_BYTES], [block, MPI.BYTE]
            ).Commit()
            block.Free()
            self._large_types[nbytes] = datatype
        return (buffer, 1, datatype)

    # Without arithmetic ---------------------------------------------------------------------------

    def allgather(self, send: Array, recv: Array) -> list[Step]:
        """Put the members' `send` one behind the other into `recv`."""
        size = send.nbytes
        return [partial(self.comm.Allgather, self._bytes(send, size), self._bytes(recv, size))]

    def broadcast(self, buffer: Array) -> list[Step]:
        """Copy the first member's `buffer` to the others."""
        return [partial(self.comm.Bcast, self._bytes(buffer, buffer.nbytes), 0)]

    def scatter(self, send: Array | None, recv: Array) -> list[Step]:
        """Distribute the parts of the first member's `send`."""
        parts = None if send is None else self._bytes(send, recv.nbytes)
        return [partial(self.comm.Scatter, parts, self._bytes(recv, recv.nbytes), 0)]

    def gather(self, send: Array, recv: Array | None) -> list[Step]:
        """Put the members' `send` one behind the other into the first one's `recv`."""
        parts = None if recv is None else self._bytes(recv, send.nbytes)
        return [partial(self.comm.Gather, self._bytes(send, send.nbytes), parts, 0)]

    # Reductions -----------------------------------------------------------------------------------

    def allreduce(self, how: Reduction, send: Array, recv: Array) -> list[Step]:
        """Reduce the members' `send` into everyone's `recv`; both of dtype `how.work`.

        They are the same array, or do not overlap.
        """
        steps: list[Step] = []
        if how.native:
            self._reduce_by_mpi(how, send, recv, steps)
        else:
            self._reduce_by_parts(how, send, recv, steps)
        return steps + divide_steps(how, recv, self.size)

    def _reduce_by_mpi(self, how: Reduction, send: Array, recv: Array, steps: list[Step]) -> None:
        datatype = _mpi_type(how.work)
        op = _OPS[how.ufunc]
        count = recv.size
        if recv.nbytes <= MOST_BYTES:
            given: Any = MPI.IN_PLACE if send is recv else (send, count, datatype)
            steps.append(partial(self.comm.Allreduce, given, (recv, count, datatype), op))
            return
        given, result = send.reshape(-1), recv.reshape(-1)
        at_a_time = MOST_BYTES // how.work.itemsize
        for start in range(0, count, at_a_time):
            part = result[start : start + at_a_time]
            source: Any = MPI.IN_PLACE
            if send is not recv:
                source = (given[start : start + at_a_time], part.size, datatype)
            steps.append(partial(self.comm.Allreduce, source, (part, part.size, datatype), op))

    def _reduce_by_parts(self, how: Reduction, send: Array, recv: Array, steps: list[Step]) -> None:
        """Let each member reduce one part with NumPy, in the order of the members.

        Every element is computed in one place, so all members get the same bits.
        """
        itemsize = how.work.itemsize
        reduce = getattr(np, how.ufunc).reduce
        given, result = send.reshape(-1), recv.reshape(-1)
        at_a_time = REDUCED_AT_A_TIME // itemsize
        scratch: Array | None = None
        for start in range(0, result.size, at_a_time):
            source = given[start : start + at_a_time]
            target = result[start : start + at_a_time]
            block = -(-source.size // self.size)
            bounds = [min(i * block, source.size) for i in range(self.size + 1)]
            counts = [b - a for a, b in itertools.pairwise(bounds)]
            own = counts[self.rank]
            if scratch is None:
                # The first round is the largest.
                scratch = np.empty(self.size * own, how.work)
            parts = scratch[: self.size * own]
            sent = ([itemsize * c for c in counts], [itemsize * b for b in bounds[:-1]])
            received = (
                [itemsize * own] * self.size,
                [itemsize * own * i for i in range(self.size)],
            )
            steps.append(
                partial(
                    self.comm.Alltoallv,
                    (as_bytes(source), sent, MPI.BYTE),
                    (as_bytes(parts), received, MPI.BYTE),
                )
            )
            if own:
                mine = target[bounds[self.rank] : bounds[self.rank + 1]]
                steps.append(partial(reduce, parts.reshape(self.size, own), 0, None, mine))
            steps.append(
                partial(self.comm.Allgatherv, MPI.IN_PLACE, (as_bytes(target), sent, MPI.BYTE))
            )
