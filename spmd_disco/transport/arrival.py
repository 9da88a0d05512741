"""What workers tell each other before data moves, and what follows from it: pure functions.

On each communicator there are positions 0, 1, 2, …; at each of them every member posts exactly one
`Record`-sized block of bytes, and sees those of all others. A member that wants to do an operation
posts that it has *arrived*, with the operation's signature. One that fails in a command, leaves it
or shuts down posts that. `decide` says what a member does at a completed position.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable, Sequence
from enum import Enum, IntEnum
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from .ccl import ReduceKind

__all__ = [
    "RECORD_SIZE",
    "Operation",
    "Record",
    "State",
    "Told",
    "Verdict",
    "decide",
    "describe_signature",
    "gone_text",
    "letter_text",
    "make_record",
    "mismatch_text",
    "name_workers",
    "parse",
    "peer_text",
    "same_dtype_and_count",
    "signature",
]


class State(IntEnum):
    """What a record or a message says."""

    #: At an operation of the command.
    ARRIVED = 1
    #: Failed in the command, and so takes part in nothing more of it.
    FAILED = 2
    #: Has done the command, and so takes part in nothing more of it.
    LEFT = 3
    #: At the end of the session.
    SHUTDOWN = 4


class Operation(IntEnum):
    """The operations among all members of a communicator."""

    NONE = 0
    ALLREDUCE = 1
    ALLGATHER = 2
    BROADCAST_FROM_WORKER0 = 3
    SCATTER_FROM_WORKER0 = 4
    GATHER_TO_WORKER0 = 5
    #: Point-to-point messages have the signature of what they carry.
    SEND = 6

    # Enum's own is written in Python, and operations are keys of a cache that each of them asks.
    __hash__ = int.__hash__


class Verdict(Enum):
    """What a member that arrived, or that shuts down, does after a position."""

    #: All say the same: do the operation.
    MOVE = 1
    #: All are at the same command, and not at the same operation on the same kind of arrays.
    MISMATCH = 2
    #: Somebody takes no part any more in this command.
    GONE = 3
    #: Somebody is still at an older command: arrive again at the next position.
    AGAIN = 4


#: State, index within the command, command.
_HEAD = struct.Struct("<BxxxIq")
#: Operation, kind (255 for none), number of dimensions, elements, the first dimensions, digest of
#: the dtype, digest of the shape, text of the dtype.
_SIGNATURE = struct.Struct("<BBBxxxxxq6q8s8s40s")
_pack_head = _HEAD.pack
_DIMENSIONS = 6
_NO_KIND = 255

RECORD_SIZE = _HEAD.size + _SIGNATURE.size
_NO_SIGNATURE = bytes(_SIGNATURE.size)


class Record(NamedTuple):
    """The first part of what a member posted."""

    state: State
    ordinal: int
    command: int

    @property
    def left(self) -> int:
        """The newest command in which this member takes no part any more."""
        return self.command - 1 if self.state is State.ARRIVED else self.command


@lru_cache(maxsize=1024)
def signature(
    operation: Operation, kind: ReduceKind | None, dtype: np.dtype[Any], shape: tuple[int, ...]
) -> bytes:
    """Return the part of a record that must be the same on all members."""
    count = 1
    for length in shape:
        count *= length
    text = str(dtype).encode("utf-8", "replace")
    # The digests decide, since text and dimensions may be cut. Never Python's own hash of a str:
    # that differs between processes.
    return _SIGNATURE.pack(
        operation,
        _NO_KIND if kind is None else kind,
        len(shape),
        count,
        *(*shape, *[0] * _DIMENSIONS)[:_DIMENSIONS],
        _digest(f"{dtype!r} {dtype.itemsize}"),
        _digest(str(shape)),
        text,
    )


def _digest(text: str) -> bytes:
    return hashlib.blake2b(text.encode(), digest_size=8).digest()


def same_dtype_and_count(a: bytes, b: bytes) -> bool:
    """Whether two signatures are of the same dtype and as many elements, in any shape."""
    x, y = _SIGNATURE.unpack(a), _SIGNATURE.unpack(b)
    return (x[3], x[10]) == (y[3], y[10])


def letter_text(worker: int, sent: bytes, receiver: int, expected: bytes) -> str:
    """Say that what `worker` has sent does not fit into the receiver's buffer, by signatures."""
    return (
        f"worker {worker} sent {describe_signature(sent)}, and the buffer of worker {receiver} is "
        f"{describe_signature(expected)}: dtype and element count must be equal"
    )


def make_record(
    state: State, ordinal: int, command: int, signature: bytes = _NO_SIGNATURE
) -> bytes:
    """Return the record of one member."""
    return _pack_head(state, ordinal, command) + signature


def parse(block: bytes | bytearray | memoryview) -> list[Record]:
    """Return the records of all members, from their bytes one behind the other."""
    return [
        Record(State(state), index, command)
        for state, index, command in (
            _HEAD.unpack_from(block, offset) for offset in range(0, len(block), RECORD_SIZE)
        )
    ]


def decide(mine: bytes, block: bytes | bytearray) -> Verdict:
    """Say what a member that posted `mine` does, having seen the records of all in `block`.

    All members whose own record is of the same command come to the same verdict.
    """
    if block == mine * (len(block) // RECORD_SIZE):
        return Verdict.MOVE
    own = parse(mine)[0]
    records = parse(block)
    if own.state is State.SHUTDOWN:
        return Verdict.AGAIN
    if any(record.left >= own.command for record in records):
        return Verdict.GONE
    if any(record.command < own.command for record in records):
        return Verdict.AGAIN
    return Verdict.MISMATCH


def describe_signature(block: bytes | bytearray | memoryview) -> str:
    """Say in words what a signature stands for, such as «allreduce sum of float32 (4, 2)»."""
    op, kind, ndim, count, *shape, dtype_digest, shape_digest, text = _SIGNATURE.unpack(block)
    operation = Operation(op)
    dimensions = [str(length) for length in shape[: min(ndim, _DIMENSIONS)]]
    if ndim > _DIMENSIONS:
        # What does not show is told apart by its digest.
        dimensions.append(f"… [{shape_digest.hex()[:8]}]")
    shape_text = f"({', '.join(dimensions)}{',' if ndim == 1 else ''})"
    dtype = text.rstrip(b"\0").decode("utf-8", "replace")
    if not text.endswith(b"\0"):
        dtype += f"… [{dtype_digest.hex()[:8]}]"
    if operation is Operation.SEND:
        return f"{dtype} {shape_text}, {count} elements"
    reduction = "" if kind == _NO_KIND else f" {ReduceKind(kind).name.lower()}"
    return f"{operation.name.lower()}{reduction} of {dtype} {shape_text}"


def name_workers(ids: Sequence[int]) -> str:
    """Name some workers, not too many."""
    if len(ids) == 1:
        return f"worker {ids[0]}"
    shown = ", ".join(str(i) for i in ids[:8])
    return f"workers {shown}" + (f" and {len(ids) - 8} more" if len(ids) > 8 else "")


def mismatch_text(block: bytes | bytearray, ids: Sequence[int], where: str) -> str:
    """Say who called what, where the members are not at the same operation.

    It depends on the records only, so it is the same on all members.
    """
    groups: dict[str, list[int]] = {}
    records = parse(block)
    indices = {record.ordinal for record in records}
    for member, record in enumerate(records):
        at = member * RECORD_SIZE
        text = describe_signature(block[at + _HEAD.size : at + RECORD_SIZE])
        if len(indices) > 1:
            text += f" (as operation {record.ordinal})"
        groups.setdefault(text, []).append(ids[member])
    given = "; ".join(f"{name_workers(who)}: {text}" for text, who in groups.items())
    return (
        f"command {records[0].command}: the workers {where} did not call the same operation with "
        f"the same dtype and shape, and nothing has moved: {given}"
    )


def peer_text(worker: int, record: Record, command: int, what: str) -> str:
    """Say why `what` cannot be done in `command`, given what `worker` last told."""
    if record.state is State.FAILED and record.command == command:
        why = f"worker {worker} failed in this command ({command})"
    elif record.state is State.SHUTDOWN:
        why = f"worker {worker} is shutting down and takes no part in command {command}"
    elif record.left == command:
        why = f"worker {worker} left this command ({command}) without taking part"
    else:
        why = (
            f"worker {worker} left this command ({command}) without taking part, and is at "
            f"command {record.command}"
        )
    return f"{what}: {why}"


class Told(NamedTuple):
    """What a worker has last told of itself, where the workers share memory.

    Attributes
    ----------
    left : int
        The newest command in which it takes no part any more.
    failed : int
        The newest that failed there.
    consequence : bool
        Whether that was for a peer's sake alone.
    closed : int
        The command with which it has shut down; negative where its process has ended, else 0.
    """

    left: int = 0
    failed: int = 0
    consequence: bool = False
    closed: int = 0


def gone_text(told: Sequence[Told], ids: Iterable[int], command: int, what: str) -> str:
    """Say why `what` cannot be done in `command`: which of the workers `ids` will not come.

    It names the one that began it, as far as that can be told.
    """
    gone = []
    for worker in ids:
        left, failed, consequence, closed = told[worker]
        if left < command:
            continue
        if closed < 0:
            return f"{what}: the process of worker {worker} has ended"
        if closed:
            record = Record(State.SHUTDOWN, 0, closed)
        elif failed == command:
            record = Record(State.FAILED, 0, command)
        else:
            record = Record(State.LEFT, 0, left)
        rank = 0 if failed != command else 1 if consequence else -1
        gone.append(((rank, bool(closed), record.command, worker), worker, record))
    _, worker, record = min(gone)
    return peer_text(worker, record, command, what)
