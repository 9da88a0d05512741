"""What the native data plane is told of NumPy's arrays, and how others are made ready for it."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

import numpy as np

from .. import native
from .arrival import Operation, signature
from .atomic import Step
from .ccl import ReduceKind
from .layout import Array, unpack
from .reduce import reduction

__all__ = [
    "KINDS",
    "address",
    "contiguous",
    "describe",
    "digest",
    "reduction_code",
    "together",
]

#: The numbers of reductions by the names that users give them.
KINDS: dict[object, int] = {
    **{kind: int(kind) for kind in ReduceKind},
    **{kind.name: int(kind) for kind in ReduceKind},
    **{kind.name.lower(): int(kind) for kind in ReduceKind},
}
_apply = partial.__call__


def address(x: Array) -> int:
    """Return where `x` lies in memory."""
    where: int = x.__array_interface__["data"][0]
    return where


def together(steps: list[Step]) -> Callable[[], None]:
    """Return the steps as one call that runs no code of Python's, and so no signal handler."""
    return partial(deque[Any](maxlen=0).extend, map(_apply, steps))


def contiguous(recv: Array | None, dtype: np.dtype[Any] | None) -> tuple[Array | None, list[Step]]:
    """Return contiguous memory of `dtype` for `recv`, and the steps that bring it there."""
    if recv is None or (recv.flags.c_contiguous and (dtype is None or recv.dtype == dtype)):
        return recv, []
    target = np.empty(recv.shape, recv.dtype if dtype is None else dtype)
    return target, [unpack(recv, target)]


@lru_cache(maxsize=1024)
def digest(sign: bytes) -> int:
    """Return what stands for a signature in comparisons."""
    return int.from_bytes(hashlib.blake2b(sign, digest_size=8).digest(), "little")


def reduction_code(dtype: np.dtype[Any]) -> int | None:
    """Return the native module's number of a dtype that it can reduce."""
    assert native.core is not None
    found: int | None = native.core.DTYPES.get(dtype.name)
    return found if dtype.isnative else None


def describe(
    operation: int, kind: int, dtype: np.dtype[Any], shape: tuple[int, ...]
) -> tuple[bytes, int, int, int] | None:
    """Return what the native side's fast path needs to know of arrays, unless they are not for it.

    Returns
    -------
    tuple or None
        The signature, its digest, the bytes of an element, and the dtype's number in reductions.
    """
    if dtype.hasobject:
        return None
    code: int | None = 0
    if operation == Operation.ALLREDUCE:
        try:
            reduction(dtype, ReduceKind(kind))
        except TypeError:
            return None
        code = reduction_code(dtype)
    if code is None:
        return None
    sign = signature(
        Operation(operation), None if kind < 0 else ReduceKind(kind), dtype, tuple(shape)
    )
    return sign, digest(sign), dtype.itemsize, code
