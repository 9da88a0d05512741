"""Make and find the memory that the workers of one node share for the control plane.

The controller makes a segment with the node block in it (native/src/node.h), and the workers map it
through the controller's process. A nonce, read through the mapping, proves that they are on its
node. Nothing here needs MPI: the address of the segment may come in any way.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from .. import native
from ..config import flag, setting
from ..errors import DiscoError

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from ..native._native import Node

__all__ = [
    "NodeAddress",
    "address_of",
    "attach_node",
    "channel_setting",
    "create_node",
    "named_memory",
    "open_node",
]

#: Bytes of the ring of commands, and of each worker's box of replies.
RING_SIZE = 1024 * 1024
BOX_SIZE = 64 * 1024


class NodeAddress(NamedTuple):
    """Where a worker finds the node block."""

    pid: int
    fd: int
    nonce: bytes


def named_memory() -> bool:
    """Return whether ``SPMD_DISCO_NAMED_MEMORY`` has shared memory get a name from the start.

    Without it a name is what is tried where a system lets processes find no memory without one.

    Raises
    ------
    ValueError
        It is not understood.
    """
    return flag("NAMED_MEMORY", False)


def create_node(num_workers: int, *, named: bool = False) -> Node:
    """Make the node block of a session, in the controller's process.

    Parameters
    ----------
    num_workers : int
    named : bool
        Give it a name, see `named_memory`, whatever the setting. Its ``segment.unlink()`` is to be
        called when all workers have mapped it.

    Raises
    ------
    DiscoError
        There is no native module.
    MemoryError
        The system has not so much shared memory.
    ValueError
        There are more workers than a node block has places for, or the setting is not understood.
    OSError
    """
    core = _core()
    size = core.node_size(num_workers, RING_SIZE, BOX_SIZE)
    segment = core.Segment.create(size, size, named or named_memory())
    return core.Node(segment, 0, num_workers, RING_SIZE, BOX_SIZE)  # type: ignore[no-any-return]


def address_of(node: Node) -> NodeAddress:
    """Return where the workers find a node block that this process has made."""
    import os

    return NodeAddress(os.getpid(), node.segment.fd, node.segment.nonce)


def attach_node(address: NodeAddress, worker: int) -> Node:
    """Map the controller's node block, as worker `worker`.

    Raises
    ------
    DiscoError
        There is no native module.
    OSError
        The controller is not on this node, or may not be looked into.
    ValueError
        It has another version of the package.
    """
    core = _core()
    return core.Node(core.Segment.attach(*address), worker)  # type: ignore[no-any-return]


def _core() -> Any:
    if native.core is None:
        raise DiscoError(f"there is no native module: {native.why_not}")
    return native.core


def channel_setting() -> str:
    """Return what ``SPMD_DISCO_CHANNEL`` asks for: "ring", "mpi", or "" for what is best.

    Raises
    ------
    ValueError
        It is something else.
    """

    def parse(text: str) -> str:
        if text not in ("ring", "mpi"):
            raise ValueError("allowed are ring and mpi")
        return text

    return setting("CHANNEL", "", parse)


def open_node(comm: Any) -> tuple[Node | None, str]:
    """Make or map the node block on all ranks of a communicator. Collective.

    Parameters
    ----------
    comm : mpi4py.MPI.Intracomm
        Rank 0 is the controller, rank i worker i.

    Returns
    -------
    Node or None
        This rank's end; None on all ranks where one of them cannot have it.
    str
        Why there is none.

    Raises
    ------
    ValueError
        ``SPMD_DISCO_CHANNEL`` is not understood on some rank, or differs; on all ranks.
    DiscoError
        It is "ring", and there can be no ring; on all ranks.
    """
    asked, error = "", ""
    try:
        asked = channel_setting()
    except ValueError as e:
        error = str(e)
    node: Node | None = None
    why = native.why_not
    if comm.rank == 0 and asked != "mpi" and not error and not why and comm.size > 1:
        node, why = _try(lambda: create_node(comm.size))
    address = None if node is None else address_of(node)
    known = comm.allgather((asked, error, why, address))
    for _, text, _, _ in known:
        if text:
            raise ValueError(text)
    settings = [setting for setting, _, _, _ in known]
    if len(set(settings)) > 1:
        shown = ", ".join(f"rank {i}: {s or 'unset'}" for i, s in enumerate(settings[:8]))
        raise ValueError(f"SPMD_DISCO_CHANNEL must be the same on all ranks; it is {shown}")
    if asked == "mpi" or comm.size == 1:
        return None, "SPMD_DISCO_CHANNEL=mpi" if asked else "there is one rank"
    reasons = {rank: why for rank, (_, _, why, _) in enumerate(known) if why}
    if not reasons:
        node, reasons = _attach_all(comm, node, known[0][3])
        if reasons:
            # They may find it by a name.
            if comm.rank == 0:
                node, why = _try(lambda: create_node(comm.size, named=True))
            address, why = comm.allgather((None if node is None else address_of(node), why))[0]
            if not why:
                node, again = _attach_all(comm, node, address)
                reasons = again and reasons
    if not reasons:
        return node, ""
    rank, why = next(iter(reasons.items()))
    more = f" (and {len(reasons) - 1} more ranks)" if len(reasons) > 1 else ""
    why = f"rank {rank}{more}: {why}"
    if asked == "ring":
        raise DiscoError(
            f"SPMD_DISCO_CHANNEL=ring, but the ranks cannot share memory; {why}; with the variable "
            "unset or set to mpi, MPI carries the commands"
        )
    return None, why


def _attach_all(
    comm: Any, node: Node | None, address: NodeAddress
) -> tuple[Node | None, dict[int, str]]:
    """Map rank 0's node block on all others; return why not, by rank. Collective."""
    why = ""
    if comm.rank > 0:
        node, why = _try(lambda: attach_node(address, comm.rank))
    reasons = {rank: why for rank, why in enumerate(comm.allgather(why)) if why}
    if comm.rank == 0 and node is not None:
        node.segment.unlink()
    return node, reasons


def _try(make: Callable[[], Node]) -> tuple[Node | None, str]:
    """Return a node, or why there is none: all ranks must come to the next exchange."""
    try:
        return make(), ""
    except (DiscoError, MemoryError, OSError, ValueError) as e:
        return None, str(e)
