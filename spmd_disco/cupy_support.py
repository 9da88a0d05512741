"""The little that arrays on GPUs need of CuPy. It is imported only when one of these asks for it.

None of this has run on a GPU so far.
"""

from __future__ import annotations

import functools
import importlib.util
import math
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from .device import Device

__all__ = [
    "available",
    "copy_bytes",
    "current_stream",
    "default_pool",
    "device_count",
    "empty",
    "is_cupy_array",
    "nccl_available",
    "pinned_empty",
    "total_memory",
    "view",
]


@functools.cache
def available() -> bool:
    """Whether CuPy can be imported and there is a GPU."""
    if importlib.util.find_spec("cupy") is None:
        return False
    try:
        import cupy
    except Exception:
        # An installation that does not fit the machine cannot be used; `--info` says what it says.
        return False
    return bool(cupy.is_available())


@functools.cache
def nccl_available() -> bool:
    """Whether CuPy has NCCL, and there is a GPU for it."""
    if not available():
        return False
    try:
        from cupy.cuda import nccl
    except ImportError:
        return False
    return bool(getattr(nccl, "available", True))


def device_count() -> int:
    """Return the number of GPUs; 0 without CuPy."""
    if not available():
        return 0
    import cupy

    return int(cupy.cuda.runtime.getDeviceCount())


def is_cupy_array(value: object) -> bool:
    """Whether `value` is an array of CuPy's; never imports it."""
    cupy = sys.modules.get("cupy")
    return cupy is not None and isinstance(value, getattr(cupy, "ndarray", ()))


def empty(shape: Sequence[int] | int, dtype: np.dtype[Any], device: Device) -> Any:
    """Return an uninitialised CuPy array on a GPU."""
    import cupy

    with cupy.cuda.Device(device.index):
        return cupy.empty(shape, dtype)


def pinned_empty(shape: Sequence[int] | int, dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    """Return an uninitialised NumPy array in memory that CUDA has pinned."""
    import cupy

    count = math.prod(shape) if isinstance(shape, Sequence) else shape
    memory = cupy.cuda.alloc_pinned_memory(max(count * dtype.itemsize, 1))
    return np.ndarray(shape, dtype, memory)


def current_stream() -> Any:
    """Return the calling thread's stream of the current GPU."""
    import cupy

    return cupy.cuda.get_current_stream()


def _address(array: Any) -> int:
    return int(array.data.ptr if is_cupy_array(array) else array.ctypes.data)


def copy_bytes(dst: Any, src: Any, stream: Any = None) -> None:
    """Copy all bytes between contiguous arrays of equal size, at least one of which is CuPy's.

    Parameters
    ----------
    dst, src : array
    stream : cupy.cuda.Stream or int, optional
        The copy is queued there, and may still run on return: the caller keeps both arrays, and
        waits for it. Default: the current stream, and where one array is on the host, the copy is
        over on return.
    """
    import cupy

    on_gpu = dst if is_cupy_array(dst) else src
    with on_gpu.device:
        queue = current_stream() if stream is None else stream
        cupy.cuda.runtime.memcpyAsync(
            _address(dst),
            _address(src),
            dst.nbytes,
            cupy.cuda.runtime.memcpyDefault,
            int(getattr(queue, "ptr", queue)),
        )
        if stream is None and not (is_cupy_array(dst) and is_cupy_array(src)):
            queue.synchronize()


def view(array: Any, shape: Sequence[int], dtype: np.dtype[Any], byte_offset: int) -> Any:
    """Return another view of a CuPy array's memory, which it keeps alive."""
    import cupy

    return cupy.ndarray(tuple(shape), dtype, array.data + byte_offset)


def default_pool() -> Any:
    """Return the pool that CuPy's arrays come from."""
    import cupy

    return cupy.get_default_memory_pool()


def total_memory(device: Device) -> int:
    """Return the bytes of a GPU's memory."""
    import cupy

    with cupy.cuda.Device(device.index):
        return int(cupy.cuda.runtime.memGetInfo()[1])
