"""The checks of a collective's arguments, on one worker and before anything is sent."""

from __future__ import annotations

from typing import Any

import numpy as np

from .layout import Array, check_destination, host_array

__all__ = ["check_parts", "destination", "elements", "source_array"]


def destination(x: Any, what: str, dtype: np.dtype[Any] | None = None) -> Array:
    """Return `x` as an array that can be written, of `dtype` where one is given."""
    array = host_array(x, what)
    check_destination(array, what)
    if dtype is not None and array.dtype != dtype:
        _refuse_dtypes(dtype, array.dtype)
    return array


def source_array(x: Any, operation: str, recv: Array) -> Array:
    """Return worker 0's `send` as an array, of the dtype of `recv`."""
    if x is None:
        raise TypeError(f"{operation}: send is None on worker 0, whose array is the source")
    array = host_array(x, "send")
    if array.dtype != recv.dtype:
        _refuse_dtypes(array.dtype, recv.dtype)
    return array


def _refuse_dtypes(send: np.dtype[Any], recv: np.dtype[Any]) -> None:
    raise TypeError(
        f"send has dtype {send} and recv {recv}; they must be equal: convert one with astype"
    )


def elements(x: Array) -> str:
    """Say how many elements `x` has, and its shape."""
    return f"{x.size} element{'' if x.size == 1 else 's'} {x.shape}"


def check_parts(
    operation: str, whole_name: str, whole: Array, parts: int, part: Array, part_name: str
) -> None:
    """Check that `whole` is as large as `parts` arrays like `part`."""
    if whole.size % parts:
        raise ValueError(
            f"{operation}: {whole_name} has {elements(whole)}, which cannot be divided evenly "
            f"among {parts} workers"
        )
    if whole.size != parts * part.size:
        raise ValueError(
            f"{operation}: {whole_name} has {elements(whole)}, and {part_name} "
            f"{elements(part)}; with {parts} workers {whole_name} must have "
            f"{parts * part.size}"
        )
