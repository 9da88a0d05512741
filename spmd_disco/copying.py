"""Copies between arrays of equal element count and dtype."""

from __future__ import annotations

from typing import Any

import numpy as np

from .transport.layout import viewed

__all__ = ["copy_array"]


def copy_array(target: Any, source: Any, name: str) -> None:
    """Copy `source` into `target`, which may have another shape of as many elements.

    Raises
    ------
    ValueError
        The element counts or the dtypes differ.
    TypeError
        `target` is no array.
    """
    target = viewed(target)
    if not isinstance(target, np.ndarray):
        raise TypeError(f"{name} holds {_kind_of(target)}, not an array to copy into")
    array = np.asarray(viewed(source))
    if array.dtype != target.dtype:
        raise ValueError(
            f"{name} holds an array of {target.dtype}, which cannot take one of {array.dtype}"
        )
    if array.size != target.size:
        raise ValueError(
            f"{name} holds an array of shape {target.shape}, which cannot take the {array.size} "
            f"elements of one of shape {array.shape}"
        )
    # reshape() of the source copies at most; of a strided target it could copy and lose the result.
    np.copyto(target, array.reshape(target.shape))


def _kind_of(value: Any) -> str:
    return "None" if value is None else f"a {type(value).__name__}"
