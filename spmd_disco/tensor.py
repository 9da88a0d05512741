"""Arrays for worker functions: in peer memory, where the session has it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from .device import Device
from .errors import DiscoError
from .worker import current_worker

__all__ = ["array_dtype", "empty", "empty_like"]


def empty(
    shape: Sequence[int] | int, dtype: Any = np.float64, device: Device | str | None = None
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
        Default: the worker's own.

    Returns
    -------
    ndarray
        In C order, at a multiple of 64 bytes if it is in peer memory.

    Raises
    ------
    MemoryError
        There is not so much peer memory; the text says how much there is, and what sets it.
    TypeError, ValueError
        Not a shape, a dtype or a device; or a dtype of Python objects.
    DiscoError
        The calling thread runs no worker function.
    """
    worker = current_worker()
    if worker is None:
        raise DiscoError(
            "there is no current worker here: empty() works in a function that a session calls on "
            "its workers, in the thread that runs it; elsewhere use numpy.empty()"
        )
    info = worker.info
    if device is not None:
        device = Device.of(device)
        if device != info.device and device.type != info.device.type:
            raise ValueError(f"worker {info.worker_id} has no device {device}, only {info.device}")
    dtype = array_dtype(dtype)
    if worker.memory is None:
        return np.empty(shape, dtype)
    return worker.memory.empty(shape, dtype)


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
