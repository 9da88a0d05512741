"""How values and function references become bytes. Pure functions, no I/O.

A value starts with one byte that says how it is encoded. Values outside the compact set go by
pickle 5, the arguments of a call in one pickle, so that what is shared among them stays shared. All
numbers are little-endian.
"""

from __future__ import annotations

import contextlib
import enum
import pickle
import struct
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from . import pickling
from .device import Device

__all__ = [
    "ALIGNMENT",
    "COMPACT",
    "HAS_BUFFERS",
    "REGISTER_REFERENCE_SIZE",
    "FunctionKind",
    "Part",
    "Reader",
    "RegisterRef",
    "aligned_memory",
    "assemble",
    "decode_arguments",
    "decode_function",
    "decode_value",
    "encode_arguments",
    "encode_function",
    "encode_register_reference",
    "encode_value",
    "register_reference",
    "replace_containers",
]

#: The payload holds out-of-band buffers, whose arrays must be views of writable memory.
HAS_BUFFERS = 1

#: Out-of-band buffers start at multiples of this in a message, which aligns the arrays in them.
ALIGNMENT = 64

Part = bytes | memoryview

#: What the encoding of arguments starts with that are all in the compact set.
COMPACT = b"A"

_U8 = struct.Struct("<B")
_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")
_I64 = struct.Struct("<q")
_F64 = struct.Struct("<d")
_DEVICE = struct.Struct("<ii")
_PICKLE = struct.Struct("<IQ")


def aligned_memory(size: int) -> memoryview:
    """Return uninitialised memory, aligned as the arrays that may come to lie in it want it."""
    memory = np.empty(size + ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % ALIGNMENT
    return memoryview(memory[start : start + size])  # type: ignore[arg-type]


def assemble(parts: Sequence[Part], head: bytes = b"") -> bytes:
    """Join `head` and `parts`, with padding before each memoryview, which is a buffer."""
    size = len(head)
    out: list[Part] = [head]
    for part in parts:
        if type(part) is memoryview:
            padding = -size % ALIGNMENT
            if padding:
                out.append(bytes(padding))
                size += padding
        out.append(part)
        size += len(part)
    return b"".join(out)


class RegisterRef:
    """Stands for a DRef in encoded arguments: on a worker, the value of that register."""

    __slots__ = ("id",)

    def __init__(self, register: int) -> None:
        self.id = register

    def __reduce__(self) -> tuple[object, ...]:
        return _resolve, (self.id,)


_decoding = threading.local()


def _resolve(register: int) -> Any:
    lookup = getattr(_decoding, "lookup", None)
    if lookup is None:
        raise TypeError(f"register {register} stands in a pickle that no worker is decoding")
    return lookup(register)


def _encode_int(value: int) -> bytes:
    return b"i" + _I64.pack(value)


def _encode_str(value: str) -> bytes:
    data = value.encode("utf-8", "surrogatepass")
    return b"s" + _U32.pack(len(data)) + data


def _encode_bytes(value: bytes) -> bytes:
    return b"b" + _U32.pack(len(value)) + value


def _encode_tuple(value: tuple[Any, ...]) -> bytes:
    return b"t" + _U8.pack(len(value)) + b"".join([_COMPACT[type(v)](v) for v in value])


#: Encoders by exact type. They raise KeyError or struct.error for what does not fit; pickle then
#: takes all of the arguments.
_COMPACT: dict[type, Callable[[Any], bytes]] = {
    type(None): lambda value: b"N",
    bool: lambda value: b"T" if value else b"F",
    int: _encode_int,
    float: lambda value: b"f" + _F64.pack(value),
    str: _encode_str,
    bytes: _encode_bytes,
    tuple: _encode_tuple,
    Device: lambda value: b"D" + _DEVICE.pack(value.type, value.index),
    RegisterRef: lambda value: b"r" + _U64.pack(value.id),
}
for _scalar in (*np.sctypeDict.values(), np.object_):
    _dtype_class = type(np.dtype(_scalar))
    if np.dtype(_scalar).itemsize and np.dtype(_scalar).kind in "biufc":
        _COMPACT[_dtype_class] = lambda value: _encode_dtype(value)


def _encode_dtype(value: np.dtype[Any]) -> bytes:
    text = value.str.encode()
    return b"d" + _U8.pack(len(text)) + text


def _pickle(value: Any) -> tuple[list[Part], int]:
    buffers: list[memoryview] = []

    def keep(buffer: pickle.PickleBuffer) -> bool:
        view = buffer.raw()
        # Small ones are cheaper inside.
        if view.nbytes < ALIGNMENT:
            return True
        buffers.append(view)
        return False

    data = pickling.dumps(value, keep)
    head = b"P" + _PICKLE.pack(len(buffers), len(data))
    sizes = b"".join([_I64.pack(-v.nbytes - 1 if v.readonly else v.nbytes) for v in buffers])
    return [head, sizes, data, *buffers], HAS_BUFFERS if buffers else 0


def encode_value(value: Any) -> tuple[list[Part], int]:
    """Return the parts that encode `value`, and the flags that they need in a command.

    Raises
    ------
    Exception
        Whatever pickling `value` raises.
    """
    encode = _COMPACT.get(type(value))
    if encode is not None:
        with contextlib.suppress(KeyError, struct.error, RecursionError):
            return [encode(value)], 0
    return _pickle(value)


def encode_arguments(args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[list[Part], int]:
    """Return the parts that encode the arguments of a call, and the flags that they need.

    The first part of arguments that are all in the compact set, and thus immutable, is `COMPACT`.

    DRefs must have been replaced by `RegisterRef`.

    Raises
    ------
    Exception
        Whatever pickling the arguments raises.
    """
    if not kwargs and len(args) < 256:
        try:
            return [COMPACT, _U8.pack(len(args)), *[_COMPACT[type(v)](v) for v in args]], 0
        except (KeyError, struct.error, RecursionError):
            pass
    return _pickle((tuple(args), kwargs))


class Reader:
    """A cursor over a payload."""

    __slots__ = ("base", "pos", "view")

    def __init__(self, view: memoryview, base: int, pos: int = 0) -> None:
        self.view = view
        self.base = base
        self.pos = pos

    def take(self, size: int) -> memoryview:
        end = self.pos + size
        if end > len(self.view):
            raise ValueError(f"the payload ends {end - len(self.view)} bytes too early")
        part = self.view[self.pos : end]
        self.pos = end
        return part

    def number(self, kind: struct.Struct) -> Any:
        value = kind.unpack_from(self.view, self.pos)[0]
        self.pos += kind.size
        return value

    def value(self, lookup: Callable[[int], Any]) -> Any:
        tag = self.view[self.pos]
        self.pos += 1
        if tag == 0x69:  # i
            return self.number(_I64)
        if tag == 0x72:  # r
            return lookup(self.number(_U64))
        if tag == 0x73:  # s
            return str(self.take(self.number(_U32)), "utf-8", "surrogatepass")
        if tag == 0x66:  # f
            return self.number(_F64)
        if tag == 0x4E:  # N
            return None
        if tag == 0x54:  # T
            return True
        if tag == 0x46:  # F
            return False
        if tag == 0x74:  # t
            return tuple([self.value(lookup) for _ in range(self.number(_U8))])
        if tag == 0x62:  # b
            return bytes(self.take(self.number(_U32)))
        if tag == 0x64:  # d
            return np.dtype(str(self.take(self.number(_U8)), "ascii"))
        if tag == 0x44:  # D
            kind, index = _DEVICE.unpack(self.take(_DEVICE.size))
            return Device(kind, index)
        if tag == 0x50:  # P
            return self.pickled(lookup)
        raise ValueError(f"the payload has a value of the unknown kind {tag}")

    def pickled(self, lookup: Callable[[int], Any]) -> Any:
        count, length = _PICKLE.unpack(self.take(_PICKLE.size))
        sizes = struct.unpack(f"<{count}q", self.take(8 * count))
        data = self.take(length)
        buffers: list[memoryview] = []
        for size in sizes:
            self.take(-(self.base + self.pos) % ALIGNMENT)
            # A buffer that was read-only at its source is so here, too.
            view = self.take(-size - 1).toreadonly() if size < 0 else self.take(size)
            buffers.append(view)
        # Pickles do not nest: one that an object's own __setstate__ loads has no registers in it.
        _decoding.lookup = lookup
        try:
            return pickling.loads(data, buffers)
        finally:
            _decoding.lookup = None


def no_registers(register: int) -> Any:
    raise TypeError(f"register {register} stands where only plain values can")


def decode_value(
    view: memoryview, base: int = 0, lookup: Callable[[int], Any] = no_registers
) -> Any:
    """Decode one value. `base` is where `view` starts in its message."""
    return Reader(view, base).value(lookup)


def decode_arguments(
    view: memoryview, base: int, lookup: Callable[[int], Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Decode what `encode_arguments` encoded, with `lookup` giving the values of registers."""
    reader = Reader(view, base)
    if view[0] == 0x41:  # A
        reader.pos = 2
        return tuple([reader.value(lookup) for _ in range(view[1])]), {}
    args, kwargs = reader.value(lookup)
    return args, kwargs


# Which function a call means ----------------------------------------------------------------------


class FunctionKind(enum.IntEnum):
    """How a call names its function."""

    REGISTER = 0  # u64 id
    GLOBAL = 1  # name, then the kind and data of its definition, or NONE
    IMPORT = 2  # "module:qualname"
    CODE = 3  # digest, then its pickle: by value, for the first time
    KNOWN = 4  # digest: by value, sent before
    NONE = 5


DIGEST_SIZE = 16


def encode_function(kind: FunctionKind, data: int | str | bytes | None, code: bytes = b"") -> bytes:
    """Encode the reference to a function: a register, a name, or a digest with or without code."""
    head = _U8.pack(kind)
    if kind == FunctionKind.REGISTER:
        return head + _U64.pack(data)
    if kind == FunctionKind.NONE:
        return head
    if isinstance(data, str):
        text = data.encode()
        return head + _U32.pack(len(text)) + text
    assert isinstance(data, bytes)
    if kind == FunctionKind.CODE:
        return head + data + _U64.pack(len(code)) + code
    return head + data


#: The members of an enum are slow to look at, and this one is looked at for every call.
_REGISTER = int(FunctionKind.REGISTER)
_REGISTER_REFERENCE = struct.Struct("<BQ")
REGISTER_REFERENCE_SIZE = _REGISTER_REFERENCE.size


def encode_register_reference(register: int) -> bytes:
    """Encode the reference to a function that a register holds."""
    return _REGISTER_REFERENCE.pack(_REGISTER, register)


def register_reference(view: memoryview) -> int | None:
    """Return the register that a function reference is, None where it is of another kind.

    `decode_function` for the kind that is worth it to be quick.
    """
    if view[0] != _REGISTER:
        return None
    register: int = _REGISTER_REFERENCE.unpack_from(view)[1]
    return register


def decode_function(
    view: memoryview, pos: int = 0
) -> tuple[FunctionKind, int | str | bytes | None, memoryview | None, int]:
    """Return kind, data, code and the position behind, of a function reference."""
    reader = Reader(view, 0, pos)
    kind = FunctionKind(reader.number(_U8))
    if kind == FunctionKind.REGISTER:
        return kind, reader.number(_U64), None, reader.pos
    if kind == FunctionKind.NONE:
        return kind, None, None, reader.pos
    if kind in (FunctionKind.GLOBAL, FunctionKind.IMPORT):
        return kind, str(reader.take(reader.number(_U32)), "utf-8"), None, reader.pos
    digest = bytes(reader.take(DIGEST_SIZE))
    code = reader.take(reader.number(_U64)) if kind == FunctionKind.CODE else None
    return kind, digest, code, reader.pos


def replace_containers(value: Any, replace: Callable[[Any], Any], memo: dict[int, Any]) -> Any:
    """Return `value` with ``replace(leaf)`` for each leaf in its tuples, lists and dicts.

    Containers in which nothing changes are returned as they are. What is shared, or contains
    itself, stays so.
    """
    kind = type(value)
    if kind not in (tuple, list, dict) and not _is_namedtuple(value):
        return replace(value)
    known = memo.get(id(value))
    if known is not None:
        return known[1]
    if kind is list:
        items: list[Any] = []
        memo[id(value)] = (value, items)
        items.extend(replace_containers(v, replace, memo) for v in value)
        return items
    if kind is dict:
        pairs: dict[Any, Any] = {}
        memo[id(value)] = (value, pairs)
        pairs.update((k, replace_containers(v, replace, memo)) for k, v in value.items())
        return pairs
    new: Iterable[Any] = [replace_containers(v, replace, memo) for v in value]
    result = tuple(new) if kind is tuple else kind._make(new)
    memo[id(value)] = (value, result)
    return result


def _is_namedtuple(value: Any) -> bool:
    return isinstance(value, tuple) and hasattr(value, "_fields")
