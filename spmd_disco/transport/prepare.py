"""From a collective's arguments, which have been checked, to a move: arrays of any layout.

All that can raise in an operation happens here at the latest, before the arrival.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from .atomic import Step
from .layout import Array, overlapping, packed, same_memory, unpack
from .moves import Move, Moves
from .reduce import Reduction

__all__ = ["allreduce_move", "broadcast_move", "copy_move"]


def allreduce_move(moves: Moves, how: Reduction, send: Array, recv: Array) -> Move:
    """Prepare a reduction: what is not contiguous or of another dtype goes through a copy."""
    work = how.work
    quiet = how.plain and work == send.dtype
    source, target = send, recv
    after: list[Step] = []
    if work == np.uint8 and send.dtype == np.bool_:
        source = packed(send).view(np.uint8)
        if recv.flags.c_contiguous:
            target = recv.view(np.uint8)
    elif not (quiet and send.flags.c_contiguous):
        with np.errstate(all="ignore"):
            source = packed(send, work)
    if target.dtype != work or not target.flags.c_contiguous:
        target = np.empty(recv.shape, work)
        after = [unpack(recv, target)]
    if source is not target and overlapping(source, target):
        source = target if same_memory(source, target) else source.copy()

    def detached() -> list[Step]:
        result = source.copy() if source is target else np.empty_like(target)
        return moves.allreduce(how, result if source is target else source.copy(), result)

    steps = moves.allreduce(how, source, target)
    steps += after
    return Move(steps, detached, quiet)


def copy_move(
    make: Callable[[Any, Any], list[Step]], send: Array | None, recv: Array | None
) -> Move:
    """Prepare a move of bytes from `send` to `recv`, where they are given."""
    source = None if send is None else packed(send)
    target = recv
    after: list[Step] = []
    if recv is not None and not recv.flags.c_contiguous:
        target = np.empty(recv.shape, recv.dtype)
        after = [unpack(recv, target)]
    if source is not None and target is not None and overlapping(source, target):
        source = source.copy()

    def detached() -> list[Step]:
        return make(
            None if source is None else source.copy(),
            None if target is None else np.empty_like(target),
        )

    return Move([*make(source, target), *after], detached)


def broadcast_move(moves: Moves, send: Array | None, recv: Array) -> Move:
    """Prepare a broadcast: from `send` on the first member, into `recv` on the others."""
    after: list[Step] = []
    if send is not None:
        buffer = packed(send)
        if send is not recv:
            if buffer is send and overlapping(send, recv):
                # `recv` is written from it only after it has been sent, but may lie across it.
                buffer = buffer.copy()
            after = [unpack(recv, buffer)]
    elif recv.flags.c_contiguous:
        buffer = recv
    else:
        buffer = np.empty(recv.shape, recv.dtype)
        after = [unpack(recv, buffer)]
    return Move([*moves.broadcast(buffer), *after], lambda: moves.broadcast(buffer.copy()))
