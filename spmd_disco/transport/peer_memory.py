"""Peer memory: arrays that all workers of a node can reach, without a copy and without MPI.

Each worker has a pool of its own, which the others of the node map. Where it cannot be had on all
workers, none of them uses it: then arrays are in ordinary memory, and everything goes through MPI.
"""

from __future__ import annotations

import logging
import math
import os
import pathlib
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy as np

from .. import native
from ..config import byte_count, setting
from .layout import aligned_empty
from .memory_limits import available, limits
from .node import named_memory

if TYPE_CHECKING:
    from ..native._native import Block, Pool, PoolTable

__all__ = ["Lent", "LoanOffer", "PeerMemory", "node_identity"]

logger = logging.getLogger("spmd_disco")

#: Which part of what the node has left its first worker may take, which lends what is shared; the
#: others take an equal part of as much. What is really there is looked at again as they grow.
DEFAULT_SHARE = 0.5
CACHE_LINE = 64
#: What a worker has made of a loan, besides taking it; pool_loan.c has the same numbers.
_OFFERED, _GIVEN_BACK = 0, 2

#: Everyone's ``exchange(mine)``: what all workers gave, by worker id.
Exchange = Callable[[Any], Sequence[Any]]
#: Where a worker finds what another lends: the lender, the offset in its pool, and the bytes.
LoanOffer = tuple[int, int, int]


def node_identity() -> str:
    """Return what processes have in common that can map each other's memory."""
    boot = pathlib.Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    # Process ids mean the same only within one namespace of them.
    return f"{boot} {os.readlink('/proc/self/ns/pid')}"


class _Wish(NamedTuple):
    """What a worker says before pools are opened."""

    node: str = ""
    #: The setting; None for a share of what the node has.
    size: int | None = None
    #: Why this worker has no peer memory, and whether that is worth a warning.
    why_not: str = ""
    warn: bool = False
    #: What is wrong with a setting.
    error: str = ""
    #: Whether its pool is to have a name.
    named: bool = False

    @classmethod
    def mine(cls) -> _Wish:
        try:
            size = setting("PEER_POOL", None, byte_count)
            named = named_memory()
        except ValueError as e:
            return cls(error=str(e))
        if size == 0:
            return cls(why_not="it is switched off by SPMD_DISCO_PEER_POOL")
        if not native.available():
            return cls(why_not=f"the native module is {native.why_not}")
        try:
            return cls(node_identity(), size, named=named)
        except OSError as e:
            return cls(why_not=f"the node cannot be told from others: {e}", warn=True)


class PeerMemory:
    """The peer memory of one worker of a session. Opening it is collective.

    Parameters
    ----------
    exchange : callable
        ``exchange(mine)`` returns what all workers gave, by worker id; collective.
    worker_id : int

    Attributes
    ----------
    pool : Pool or None
        This worker's own; None where peer memory is off, or the worker is alone on its node.
    table : PoolTable or None
        The pools that it can reach, by worker id.
    node : tuple of int
        The workers of this node, where peer memory is on; else this one alone.
    leaders : tuple of int
        The first worker of each node; likewise.
    why_not : str
        Why it is off; empty where it is on.

    Raises
    ------
    ValueError
        A worker has a setting ``SPMD_DISCO_PEER_POOL`` that cannot be understood; on all workers.
    """

    #: What threads of one process share in its place: arrays of the controller, while they are
    #: handed out.
    handed: dict[int, np.ndarray[Any, Any]] | None = None
    #: Whether this process has said that peer memory cannot be had.
    warned: ClassVar[bool] = False

    def __init__(self, exchange: Exchange, worker_id: int) -> None:
        self.worker_id = worker_id
        self.pool: Pool | None = None
        self.table: PoolTable | None = None
        self.node: tuple[int, ...] = (worker_id,)
        self.leaders: tuple[int, ...] = (worker_id,)
        self.why_not = ""
        self.num_workers = 1
        self._lent: list[Lent] = []
        if not self._agree(exchange):
            self.pool = self.table = None
            self.node = self.leaders = (worker_id,)

    @property
    def available(self) -> bool:
        """Whether the session has peer memory; the same on all workers."""
        return self.table is not None

    def _agree(self, exchange: Exchange) -> bool:
        """Open the pools, and map those of the node; return whether all workers could."""
        wishes = [_Wish(*wish) for wish in exchange(tuple(_Wish.mine()))]
        self.num_workers = len(wishes)
        for worker, wish in enumerate(wishes):
            if wish.error:
                raise ValueError(f"worker {worker}: {wish.error}")
        if not self._everyone([wish.why_not for wish in wishes], any(w.warn for w in wishes)):
            return False
        if len(wishes) == 1:
            self.why_not = "there is one worker"
            return False
        mine = wishes[self.worker_id]
        self.node = tuple(i for i, wish in enumerate(wishes) if wish.node == mine.node)
        nodes = [wish.node for wish in wishes]
        self.leaders = tuple(nodes.index(node) for node in dict.fromkeys(nodes))
        reasons: Sequence[str] = ()
        # Where they cannot be found through their processes, there are names.
        for named in (mine.named, True):
            handle, why_not = self._open(mine, named)
            opened = exchange((handle, why_not))
            if not self._everyone([why_not for _, why_not in opened]):
                return False
            reasons = exchange(self._map([handle for handle, _ in opened]))
            if self.pool is not None:
                self.pool.unlink()
            if not any(reasons):
                return True
        return self._everyone(reasons)

    def _everyone(self, reasons: Sequence[str], warn: bool = True) -> bool:
        """Return whether no worker has a reason against it; if one has, tell, once."""
        first = next(((i, text) for i, text in enumerate(reasons) if text), None)
        if first is None:
            return True
        worker, text = first
        self.why_not = f"worker {worker}: {text}" if warn else text
        if warn and self.worker_id == 0 and not PeerMemory.warned:
            PeerMemory.warned = True
            logger.warning(
                "arrays are in ordinary memory, and collectives take longer, since peer memory "
                "cannot be had: %s (SPMD_DISCO_PEER_POOL=0 silences this)",
                self.why_not,
            )
        return False

    def _open(self, wish: _Wish, named: bool) -> tuple[tuple[int, int, bytes] | None, str]:
        """Open this worker's pool; return how others find it, or why there is none."""
        if len(self.node) == 1:
            return None, ""
        cap = wish.size
        if cap is None:
            cap = int(DEFAULT_SHARE * available())
            if self.worker_id != self.node[0]:
                cap //= len(self.node)
        assert native.core is not None
        try:
            pool = native.core.Pool(cap, limits=tuple(map(tuple, limits())), named=named)
        except (OSError, MemoryError) as e:
            return None, f"no pool of {cap} bytes can be opened: {e}"
        self.pool = pool
        return (os.getpid(), pool.fd, pool.nonce), ""

    def _map(self, handles: Sequence[tuple[int, int, bytes] | None]) -> str:
        """Map the pools of the node; return why that was not possible."""
        assert native.core is not None
        members: list[Any] = [None] * len(handles)
        for worker in self.node:
            handle = handles[worker]
            if worker == self.worker_id:
                members[worker] = self.pool
            elif handle is not None:
                try:
                    members[worker] = native.core.PeerMap(*handle)
                except OSError as e:
                    return f"the pool of worker {worker} cannot be mapped: {e}"
        self.table = native.core.PoolTable(members)
        return ""

    # Arrays ---------------------------------------------------------------------------------------

    def empty(self, shape: Sequence[int] | int, dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
        """Return an uninitialised array, in the pool if there is one.

        Raises
        ------
        MemoryError
            The pool cannot give so much; it says how much was asked, is used and may be.
        RuntimeError
            This process was forked from the worker.
        """
        if self.pool is None:
            return aligned_empty(shape, dtype)
        if type(shape) is not tuple:
            shape = (int(shape),) if isinstance(shape, int | np.integer) else tuple(shape)
        size = math.prod(shape)
        if size < 0:
            raise ValueError(f"the shape {shape} has a negative dimension")
        return np.ndarray(shape, dtype, self._block(size * dtype.itemsize))

    def _block(self, nbytes: int) -> Any:  # NumPy's types know no other buffers than its own
        assert self.pool is not None
        try:
            return self.pool.empty(nbytes)
        except MemoryError:
            if not self.take_back():
                raise
        return self.pool.empty(nbytes)

    # Loans ----------------------------------------------------------------------------------------

    def lend(self, shape: Sequence[int], dtype: np.dtype[Any]) -> tuple[Lent, np.ndarray[Any, Any]]:
        """Return a loan to the workers of the node, and its array, which the lender is to fill.

        The block stays until none of them has it any more. They only read it.

        Raises
        ------
        MemoryError
            The pool cannot give so much.
        """
        self.take_back()
        header = -(-self.num_workers // CACHE_LINE) * CACHE_LINE
        nbytes = math.prod(shape) * dtype.itemsize
        block = self._block(header + nbytes)
        others = (i for i in range(self.num_workers) if i not in self.node)
        lent = Lent(block, (self.worker_id, block.offset, nbytes), self.num_workers, others)
        self._lent.append(lent)
        return lent, np.ndarray(shape, dtype, buffer=block, offset=header)

    def borrow(
        self, offer: LoanOffer, shape: Sequence[int], dtype: np.dtype[Any]
    ) -> np.ndarray[Any, Any]:
        """Return the array that a worker of the node lends, read-only. Once for each loan."""
        assert native.core is not None
        loan = native.core.Loan(self.table, *offer, self.worker_id, self.num_workers)
        return np.ndarray(shape, dtype, buffer=loan)

    def take_back(self, executed: Sequence[int] | None = None) -> int:
        """Free the blocks of loans that no worker has any more; return how many.

        Parameters
        ----------
        executed : sequence of int, optional
            By worker, the last command that it has left, see `Lent.command`.
        """
        before = len(self._lent)
        self._lent = [lent for lent in self._lent if not lent.over(executed)]
        return before - len(self._lent)

    def close(self) -> None:
        """Have no part in it any more; arrays stay valid as long as they live."""
        if self.pool is None:
            return
        # Nobody who has not taken a loan so far can come to have it.
        for lent in self._lent:
            lent.withdraw()
        self.take_back()
        # The peers may still read the rest, even when the objects here have gone.
        _kept.extend(self._lent)
        self._lent.clear()
        _kept[:] = [lent for lent in _kept if not lent.over(None)]
        self.pool.close()
        self.pool = self.table = None


class Lent:
    """A block that is lent to the workers of the node.

    Attributes
    ----------
    offer : tuple
        What `PeerMemory.borrow` takes.
    command : int or None
        Who has left this command has taken it, or never will; None while that is not known.
    """

    def __init__(
        self, block: Block, offer: LoanOffer, workers: int, without: Iterable[int]
    ) -> None:
        self.block = block
        self.offer = offer
        self.command: int | None = None
        # Bytes, so that a look at one is a single load.
        self._states = memoryview(block)[:workers]
        for worker in range(workers):
            self._states[worker] = _OFFERED
        for worker in without:
            self._states[worker] = _GIVEN_BACK

    def over(self, executed: Sequence[int] | None) -> bool:
        """Whether no worker has it, or can still take it."""
        return all(
            state == _GIVEN_BACK
            or (
                state == _OFFERED
                and executed is not None
                and self.command is not None
                and executed[worker] >= self.command
            )
            for worker, state in enumerate(self._states)
        )

    def withdraw(self) -> None:
        """Count it as given back by those who have not taken it, and cannot any more."""
        for worker, state in enumerate(self._states):
            if state == _OFFERED:
                self._states[worker] = _GIVEN_BACK


#: What has been lent in sessions that are over, and is still read.
_kept: list[Lent] = []
