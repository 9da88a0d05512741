"""Which data plane a session has: the same on all workers, and chosen when it is opened.

`SPMD_DISCO_CCL` says which. Without it the workers of one node use the memory that they share, and
others MPI. What cannot be had on all workers is had on none.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from .. import native
from ..config import setting
from .node import named_memory
from .peer_memory import PeerMemory, node_identity
from .wait import Waiter

if TYPE_CHECKING:
    from ..native._native import Node, Segment
    from .peer_ccl import PeerCCL

__all__ = ["ccl_setting", "open_peer_ccl"]

logger = logging.getLogger("spmd_disco")

#: Everyone's ``exchange(mine)``: what all workers gave, by worker id; collective.
Exchange = Callable[[Any], Sequence[Any]]


def ccl_setting() -> str:
    """Return what ``SPMD_DISCO_CCL`` asks for: "peer", "mpi", or "" for what is best.

    Raises
    ------
    ValueError
        It is something else.
    """

    def parse(text: str) -> str:
        if text not in ("peer", "mpi"):
            raise ValueError("allowed are peer and mpi")
        return text

    return setting("CCL", "", parse)


class _Wish(NamedTuple):
    """What a worker says at first."""

    setting: str = ""
    node: str = ""
    why_not: str = ""
    error: str = ""

    @classmethod
    def mine(cls) -> _Wish:
        try:
            wanted = ccl_setting()
            named_memory()
        except ValueError as e:
            return cls(error=str(e))
        if not native.available():
            return cls(wanted, why_not=f"the native module is {native.why_not}")
        try:
            return cls(wanted, node_identity())
        except OSError as e:
            return cls(wanted, why_not=f"the node cannot be told from others: {e}")


class _Warned:
    """Whether this process has said that the data plane asked for cannot be had."""

    yet: ClassVar[bool] = False


def open_peer_ccl(
    exchange: Exchange,
    worker_id: int,
    num_workers: int,
    waiter: Waiter,
    *,
    num_groups: int,
    node: Node | None,
    memory: PeerMemory | None,
) -> tuple[PeerCCL | None, str]:
    """Open the data plane through shared memory, if that is the one to have. Collective.

    Parameters
    ----------
    exchange : callable
        Gives a value to all workers, and returns theirs by worker id.
    worker_id, num_workers : int
    waiter : Waiter
    num_groups : int
    node : Node or None
        Where workers that sleep are woken; all have one, or none has.
    memory : PeerMemory or None
        Their memory pools, likewise.

    Returns
    -------
    PeerCCL or None
        None on all workers where one of them cannot have it, or MPI was asked for.
    str
        Why not.

    Raises
    ------
    ValueError
        A worker's setting ``SPMD_DISCO_CCL`` cannot be understood, or they differ; on all workers.
    """
    wishes = [_Wish(*wish) for wish in exchange(tuple(_Wish.mine()))]
    for worker, wish in enumerate(wishes):
        if wish.error:
            raise ValueError(f"worker {worker}: {wish.error}")
    asked = {wish.setting for wish in wishes}
    if len(asked) > 1:
        raise ValueError(
            "SPMD_DISCO_CCL must be the same for all workers; it is "
            + ", ".join(repr(wish.setting) for wish in wishes[:8])
        )
    if asked == {"mpi"}:
        return None, "SPMD_DISCO_CCL=mpi"
    why = next((f"worker {w}: {wish.why_not}" for w, wish in enumerate(wishes) if wish.why_not), "")
    if not why and len({wish.node for wish in wishes}) > 1:
        why = "the workers are on several nodes"
    block = None
    if not why:
        from .peer_ccl import PeerCCL

        size = PeerCCL.required_bytes(num_workers, num_groups)
        block, why = _share_block(exchange, worker_id, size)
    if why and asked == {"peer"} and worker_id == 0 and not _Warned.yet:
        _Warned.yet = True
        logger.warning(
            "SPMD_DISCO_CCL=peer: the data plane through shared memory cannot be had, and MPI is "
            "used, since %s; SPMD_DISCO_CCL=mpi silences this",
            why,
        )
    if block is None:
        return None, why
    pools = memory.table if memory is not None and len(memory.node) == num_workers else None
    ccl = PeerCCL(
        block, worker_id, num_workers, waiter, num_groups=num_groups, node=node, pools=pools
    )
    return ccl, ""


def _share_block(exchange: Exchange, worker_id: int, size: int) -> tuple[Segment | None, str]:
    """Return memory of worker 0's in which all workers meet, or None and why not. Collective."""
    core = native.core
    assert core is not None
    why = ""
    # Where it cannot be found through worker 0's process, there is a name.
    for named in (named_memory(), True):
        block, mine, why = None, None, ""
        try:
            if worker_id == 0:
                block = core.Segment.create(size, size, named)
                mine = (os.getpid(), block.fd, block.nonce)
        except (OSError, MemoryError) as e:
            why = str(e)
        address, why = exchange((mine, why))[0]
        if address is None:
            return None, why
        try:
            if block is None:
                block = core.Segment.attach(*address)
        except OSError as e:
            why = f"worker {worker_id}: {e}"
        # Worker 0 keeps its handle at least until all have answered.
        why = next((text for text in exchange(why) if text), "")
        if block is not None:
            block.unlink()
        if not why:
            return block, ""
    return None, why
