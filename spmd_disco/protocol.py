"""The commands, and how they become messages. Pure functions, no I/O.

A message is a fixed header, the ids of the registers that have died, and a payload:

    header   u64 number, u8 action, u8 flags, u32 kills, i32 target, u64 register
    kills    u64 each
    payload  by action

The header and the kills cannot fail to decode, so an argument that fails to unpickle is the failure
of that command and no more. All numbers are little-endian.
"""

from __future__ import annotations

import enum
import pickle
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from .codec import HAS_BUFFERS, Part, Reader, assemble, encode_value, no_registers
from .errors import Failure

__all__ = [
    "ALL",
    "Command",
    "DiscoAction",
    "Reply",
    "decode_command",
    "decode_reply",
    "decode_reply_value",
    "encode_command",
    "encode_reply",
    "has_buffers",
    "payload_offset",
    "reply_number",
]


class DiscoAction(enum.IntEnum):
    """What a command does, with the values of TVM's ``DiscoAction``."""

    SHUT_DOWN = 0
    KILL_REG = 1
    GET_GLOBAL_FUNC = 2
    CALL_PACKED = 3
    SYNC_WORKER = 4
    COPY_FROM_WORKER0 = 5
    COPY_TO_WORKER0 = 6
    DEBUG_GET_FROM_REMOTE = 7
    DEBUG_SET_REGISTER = 8


#: The target of a command that is for every worker.
ALL = -1

_HEADER = struct.Struct("<QBBIiQ")
_U64 = struct.Struct("<Q")


@dataclass(slots=True)
class Command:
    """One decoded command.

    Attributes
    ----------
    number : int
        Its place in the session's stream, from 1.
    action : DiscoAction
    target : int
        The worker that it is for, or `ALL`.
    register : int
        The register that takes the result, or that the command is about.
    kills : sequence of int
        Registers that have died; they are dropped before the command runs.
    payload : memoryview
        By action; see `codec`.
    offset : int
        Where the payload starts in its message.
    local : sequence or None
        On worker 0: the arguments, where nothing would be gained by decoding them again, as all of
        them are immutable. Registers stand in it as `RegisterRef`.
    """

    number: int
    action: DiscoAction
    flags: int
    target: int
    register: int
    kills: Sequence[int]
    payload: memoryview
    offset: int
    local: Sequence[Any] | None = None


def encode_command(
    number: int,
    action: DiscoAction,
    payload: Sequence[Part] = (),
    flags: int = 0,
    target: int = ALL,
    register: int = 0,
    kills: Sequence[int] = (),
) -> bytes:
    """Return the message of one command. `payload` is a list of parts, see `assemble`."""
    head = _HEADER.pack(number, action, flags, len(kills), target, register)
    if kills:
        head += struct.pack(f"<{len(kills)}Q", *kills)
    if flags & HAS_BUFFERS:
        return assemble(payload, head)
    return b"".join((head, *payload))


def payload_offset(kills: Sequence[int]) -> int:
    """Return where the payload starts in the message of a command with these kills."""
    return _HEADER.size + 8 * len(kills)


_ACTIONS = tuple(DiscoAction)


def decode_command(message: bytes | memoryview) -> Command:
    """Decode the header and the kills of `message`; the payload stays encoded."""
    view = memoryview(message)
    number, action, flags, count, target, register = _HEADER.unpack_from(view)
    end = _HEADER.size
    kills: tuple[int, ...] = ()
    if count:
        kills = struct.unpack_from(f"<{count}Q", view, end)
        end += 8 * count
    return Command(number, _ACTIONS[action], flags, target, register, kills, view[end:], end)


# Replies ------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Reply:
    """What a worker answers to a command that asks.

    Attributes
    ----------
    number : int
        The command.
    value : object
        What was asked for.
    failure : Failure or None
        Why there is no value.
    failures : list of Failure
        What has failed on the worker since its last reply.
    dropped : int
        How many more have failed than are kept.
    """

    number: int
    value: Any = None
    failure: Failure | None = None
    failures: list[Failure] = field(default_factory=list)
    dropped: int = 0


def has_buffers(message: bytes) -> bool:
    """Whether a command brings arrays, which are to be views of memory of the worker's own."""
    return bool(_HEADER.unpack_from(message)[2] & HAS_BUFFERS)


def encode_reply(reply: Reply) -> list[Part]:
    """Return the parts of a reply's message, for `assemble`.

    Raises
    ------
    Exception
        Whatever pickling the value raises.
    """
    report = None
    if reply.failure or reply.failures or reply.dropped:
        report = pickle.dumps((reply.failure, reply.failures, reply.dropped), 5)
    head, _ = encode_value(report)
    value, _ = encode_value(reply.value)
    return [_U64.pack(reply.number), *head, *value]


def reply_number(message: memoryview) -> int:
    """Return the number of the command that a reply answers."""
    return int(_U64.unpack_from(message)[0])


def decode_reply(message: memoryview) -> Reply:
    """Decode a reply; `decode_reply_value` gives its value, which may fail by itself."""
    reader = Reader(message, 0, _U64.size)
    report = reader.value(no_registers)
    reply = Reply(reply_number(message), value=(message, reader.pos))
    if report is not None:
        reply.failure, reply.failures, reply.dropped = pickle.loads(report)
    return reply


def decode_reply_value(message: memoryview, position: int) -> Any:
    """Decode a reply's value.

    Raises
    ------
    Exception
        Whatever unpickling the value raises.
    """
    return Reader(message, 0, position).value(no_registers)
