"""How arrays lie in memory: which can be handed to MPI as they are, and which are packed first."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from .atomic import Step

__all__ = [
    "aligned_empty",
    "as_bytes",
    "check_destination",
    "copy_into",
    "host_array",
    "overlapping",
    "packed",
    "same_memory",
    "unpack",
    "viewed",
    "views",
]

Array = npt.NDArray[Any]


#: By type, how arrays of other libraries become views; a bridge that is on fills it.
views: dict[type, Callable[[Any], Array]] = {}


def viewed(value: Any) -> Any:
    """Return `value` itself, or where it is an array of another library, a view of its memory."""
    view = views.get(type(value))
    return value if view is None else view(value)


def host_array(x: Any, what: str) -> Array:
    """Return `x` as a plain NumPy array that shares its memory.

    Parameters
    ----------
    x : array
        A NumPy array, or of a type in `views`.
    what : str
        Its name in error messages.

    Raises
    ------
    TypeError
        `x` is something else, or its elements cannot be copied between processes.
    """
    if type(x) is np.ndarray and not x.dtype.hasobject:
        return x
    x = viewed(x)
    if not isinstance(x, np.ndarray):
        hint = ""
        if hasattr(x, "__cuda_array_interface__"):
            hint = "; copy it to the host first (cupy.asnumpy)"
        elif isinstance(x, np.generic | int | float | complex | list | tuple):
            hint = "; wrap it with numpy.asarray, and keep that array if it is a destination"
        raise TypeError(f"{what} must be a numpy.ndarray, not {_name(type(x))}{hint}")
    if isinstance(x, np.ma.MaskedArray):
        raise TypeError(f"{what} is a masked array, whose mask would be lost; pass its .data")
    if x.dtype.hasobject:
        raise TypeError(
            f"{what} has dtype {x.dtype}, which holds references to Python objects; only values "
            "can be moved between workers: convert it to a numeric or fixed-size dtype"
        )
    return x.view(np.ndarray)


def _name(cls: type) -> str:
    return (
        cls.__qualname__ if cls.__module__ == "builtins" else f"{cls.__module__}.{cls.__qualname__}"
    )


#: Where arrays start that are made for workers, in bytes: compiled code wants it so.
ALIGNMENT = 64


def aligned_empty(shape: Sequence[int] | int, dtype: np.dtype[Any]) -> Array:
    """Return an uninitialised array in ordinary memory that starts at a multiple of 64 bytes."""
    shape = (shape,) if isinstance(shape, int | np.integer) else tuple(shape)
    nbytes = math.prod(map(operator.index, shape)) * dtype.itemsize
    if nbytes <= 0 or dtype.hasobject:
        return np.empty(shape, dtype)
    memory = np.empty(nbytes + ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % ALIGNMENT
    return np.ndarray(shape, dtype, memory.data, start)


def check_destination(x: Array, what: str) -> None:
    """Check that every element of `x` can be written, and on its own.

    Raises
    ------
    ValueError
        It is read-only, or several elements share their memory (a broadcast view).
    """
    flags = x.flags
    if not flags.writeable:
        raise ValueError(f"{what} is read-only and cannot be a destination; pass a copy")
    if (
        not flags.c_contiguous
        and x.itemsize
        and any(
            stride == 0 and length > 1 for stride, length in zip(x.strides, x.shape, strict=True)
        )
    ):
        raise ValueError(
            f"{what} is a broadcast view, in which elements share their memory, and cannot be a "
            "destination; pass a copy"
        )


def packed(x: Array, dtype: np.dtype[Any] | None = None) -> Array:
    """Return the elements of `x` in C order and one piece: `x` itself where it is that already."""
    if x.flags.c_contiguous and (dtype is None or x.dtype == dtype):
        return x
    return np.ascontiguousarray(x, dtype=dtype).reshape(x.shape)


def as_bytes(x: Array) -> npt.NDArray[np.uint8]:
    """Return the memory of the C-contiguous array `x` as a flat array of bytes."""
    if x.nbytes == 0:
        # Also dtypes without size («V0»), which have no view as bytes.
        return np.empty(0, np.uint8)
    return x.reshape(-1).view(np.uint8)


def same_memory(a: Array, b: Array) -> bool:
    """Whether two contiguous arrays of the same size start at the same address."""
    address: int = a.__array_interface__["data"][0]
    return address == b.__array_interface__["data"][0] and a.nbytes == b.nbytes


def overlapping(a: Array, b: Array) -> bool:
    """Whether two contiguous arrays share memory."""
    if a is not b and a.flags.owndata and b.flags.owndata:
        return False
    return np.may_share_memory(a, b) and a.nbytes > 0


def unpack(destination: Array, staging: Array) -> Step:
    """Return the step that puts `staging`, in C order, into `destination`, casting if needed."""
    # The slot method, because np.copyto runs Python code (see atomic.py).
    put: Callable[..., None] = destination.__setitem__
    return partial(put, Ellipsis, staging.reshape(destination.shape))


def copy_into(destination: Array, source: Array) -> None:
    """Copy element by element in C order; the shapes may differ, the memory may overlap."""
    if source.shape != destination.shape:
        source = source.reshape(destination.shape)
    destination[...] = source
