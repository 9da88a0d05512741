"""Tell whether a thread sits in an MPI call of the user's.

A worker function may call MPI itself, and then a peer that has failed never comes. Nothing in
Python or MPI says that a thread is inside MPI, so the thread's frame is looked at from outside: it
stands still at one instruction, and the source line there calls a blocking method of mpi4py's.
"""

from __future__ import annotations

import dis
import sys
from functools import lru_cache
from types import CodeType, FrameType, ModuleType
from typing import Any

__all__ = ["mpi_call"]

#: Methods of mpi4py that block and that nothing else has by these names.
PLAIN = frozenset(
    """
    Allgather Allgatherv Allreduce Alltoall Alltoallv Alltoallw Barrier Bcast Exscan Gather Gatherv
    Reduce Reduce_scatter Reduce_scatter_block Scan Scatter Scatterv
    allgather allreduce alltoall barrier bcast exscan gather scatter
    Recv Send Ssend Rsend Sendrecv Sendrecv_replace sendrecv Probe Mprobe
    Wait Waitall Waitany Waitsome waitall waitany waitsome
    Dup Split Split_type Create Free Disconnect Fence
    """.split()  # noqa: SIM905 - a list of words is easier to read
)
#: Names that others use too: something of mpi4py's must stand beside them.
AMBIGUOUS = frozenset({"recv", "send", "ssend", "probe", "mprobe", "wait", "reduce", "scan"})


@lru_cache(maxsize=256)
def _names_by_offset(code: CodeType) -> tuple[dict[int, int], dict[int, list[tuple[str, Any]]]]:
    """Return the line of each instruction, and by line the names that are loaded there."""
    lines: dict[int, int] = {}
    names: dict[int, list[tuple[str, Any]]] = {}
    line = code.co_firstlineno
    starts = dict(dis.findlinestarts(code))
    for instruction in dis.get_instructions(code):
        line = starts.get(instruction.offset) or line
        lines[instruction.offset] = line
        if instruction.opname.startswith("LOAD_") and isinstance(instruction.argval, str):
            names.setdefault(line, []).append((instruction.opname, instruction.argval))
    return lines, names


def _is_mpi(value: Any) -> bool:
    if isinstance(value, ModuleType):
        return value.__name__.startswith("mpi4py")
    return (type(value).__module__ or "").startswith("mpi4py")


def mpi_call(thread: int) -> tuple[tuple[int, int], str] | None:
    """Return where a thread is, if that is a blocking MPI call.

    Parameters
    ----------
    thread : int
        The thread's identifier.

    Returns
    -------
    tuple or None
        A token that stays the same while the thread stands still, and a text such as
        ``Barrier (app.py:12 in f)``. None where the thread is not in such a call.
    """
    frame: FrameType | None = sys._current_frames().get(thread)
    if frame is None:
        return None
    token = (id(frame), frame.f_lasti)
    # mpi4py's own Python code (its util package) calls MPI on the user's behalf.
    inside = None
    while frame is not None and frame.f_globals.get("__name__", "").startswith("mpi4py"):
        inside = frame.f_code.co_name
        frame = frame.f_back
    if frame is None:
        return None
    name = inside or _blocking_name(frame)
    if name is None:
        return None
    where = f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"
    return token, f"{name} ({where})"


def _blocking_name(frame: FrameType) -> str | None:
    try:
        lines, names = _names_by_offset(frame.f_code)
    except Exception:  # a code object that dis cannot read tells nothing
        return None
    loaded = names.get(lines.get(frame.f_lasti, -1), [])
    attributes: list[str] = [name for op, name in loaded if op in ("LOAD_ATTR", "LOAD_METHOD")]
    for name in attributes:
        if name in PLAIN:
            return name
    for name in attributes:
        if name in AMBIGUOUS:
            values = [frame.f_locals.get(n, frame.f_globals.get(n)) for _, n in loaded]
            if any(map(_is_mpi, values)) or any(a in ("comm", "group_comm") for a in attributes):
                return name
    return None
