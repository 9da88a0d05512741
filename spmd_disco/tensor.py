"""Arrays for worker functions: in peer memory, where the session has it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from . import cupy_support
from .device import Device, cpu
from .errors import DiscoError
from .transport.layout import aligned_empty
from .worker import Worker, current_worker

__all__ = ["allocate", "array_dtype", "check_scope", "empty", "empty_like"]

#: The memory scopes that there are: the devices' ordinary memory.
SCOPES = (None, "", "global")


def empty(
    shape: Sequence[int] | int,
    dtype: Any = np.float64,
    device: Device | str | None = None,
    mem_scope: str | None = None,
) -> np.ndarray[Any, Any]:
    """Return an uninitialised array, for use in worker functions.

    It lies in peer memory where the session has that, so that collectives need not copy it first:
    the best choice for what goes into them or comes out. Apart from that it is an ordinary array,
    which may outlive the session.

    Parameters
    ----------
    shape : tuple of int or int
    dtype : dtype_like
        A NumPy dtype or its name; ``"bfloat16"``, ``"float8_e4m3fn"`` and the like, too.
    device : Device, optional
        Default: the worker's own. ``"cpu"`` is there on every worker; ``"cuda:i"`` and
        ``"cuda_host"`` (memory that CUDA has pinned) where CuPy and a GPU are.
    mem_scope : str, optional
        As in TVM; of its scopes there is ``"global"``, which is the default.

    Returns
    -------
    ndarray
        In C order, at a multiple of 64 bytes if it is in peer memory. On a GPU it is a
        ``cupy.ndarray``.

    Raises
    ------
    MemoryError
        There is not so much peer memory; the text says how much there is, and what sets it.
    TypeError, ValueError
        Not a shape, a dtype, a scope or a device that there is; or a dtype of Python objects.
    DiscoError
        The calling thread runs no worker function.
    """
    worker = current_worker()
    if worker is None:
        raise DiscoError(
            "there is no current worker here: empty() works in a function that a session calls on "
            "its workers, in the thread that runs it; elsewhere use numpy.empty()"
        )
    check_scope(mem_scope)
    return allocate(
        shape, array_dtype(dtype), None if device is None else Device.of(device), worker
    )


def allocate(
    shape: Sequence[int] | int,
    dtype: np.dtype[Any],
    device: Device | None,
    worker: Worker | None,
) -> np.ndarray[Any, Any]:
    """Return an uninitialised array; see `empty`.

    Parameters
    ----------
    shape : tuple of int or int
    dtype : dtype
    device : Device or None
        None for the worker's own.
    worker : Worker or None
        None in the controller's program, which has no peer memory.
    """
    if device is None:
        device = cpu() if worker is None else worker.info.device
    if device.name == "cpu":
        if worker is None or worker.memory is None:
            return aligned_empty(shape, dtype)
        return worker.memory.empty(shape, dtype)
    if device.name == "cuda" and device.index < cupy_support.device_count():
        on_gpu: np.ndarray[Any, Any] = cupy_support.empty(shape, dtype, device)
        return on_gpu
    if device.name == "cuda_host" and cupy_support.device_count():
        return cupy_support.pinned_empty(shape, dtype)
    if worker is None:
        raise ValueError(f"there is no device {device} here: see runtime_enabled()")
    info = worker.info
    raise ValueError(f"worker {info.worker_id} has no device {device}, only {info.device}")


def check_scope(mem_scope: object) -> None:
    """Refuse a memory scope that no device here has.

    Raises
    ------
    ValueError
        There is no such scope.
    TypeError
        It is no string.
    """
    if mem_scope is not None and not isinstance(mem_scope, str):
        raise TypeError(f"a memory scope is a str, not {mem_scope!r}")
    if mem_scope not in SCOPES:
        raise ValueError(f"there is no memory scope {mem_scope!r}; allowed is 'global'")


def empty_like(array: Any) -> np.ndarray[Any, Any]:
    """Return an uninitialised array of the shape and dtype of `array`; see `empty`.

    Parameters
    ----------
    array : array_like

    Raises
    ------
    MemoryError, TypeError, DiscoError
        See `empty`.
    """
    if not hasattr(array, "dtype"):
        array = np.asarray(array)
    return empty(array.shape, array.dtype)


def array_dtype(dtype: Any) -> np.dtype[Any]:
    """Return the dtype that `dtype` names; also the names that ml_dtypes gives.

    Raises
    ------
    TypeError
        Nothing has that name, or its elements are Python objects.
    """
    try:
        result: np.dtype[Any] = np.dtype(dtype)
    except TypeError:
        import ml_dtypes

        extended = getattr(ml_dtypes, dtype, None) if isinstance(dtype, str) else None
        if extended is None:
            raise TypeError(f"{dtype!r} names no dtype") from None
        result = np.dtype(extended)
    if result.hasobject:
        raise TypeError(
            f"an array of {result} cannot move between workers: numeric and fixed-size dtypes can"
        )
    return result
