"""Pickling by cloudpickle, but code keeps the name of its file.

cloudpickle leaves the file name out. With it, the traceback of a function that was sent by value
shows the program's own lines, wherever the file can be read.
"""

from __future__ import annotations

import io
import pickle
from collections import ChainMap
from collections.abc import Callable
from types import CodeType
from typing import Any, ClassVar

import cloudpickle

__all__ = ["dumps"]

_reduce_code_without_name = cloudpickle.Pickler.dispatch_table[CodeType]


def _make_code(file_name: str, args: tuple[Any, ...]) -> CodeType:
    return CodeType(*args).replace(co_filename=file_name)


def _reduce_code(code: CodeType) -> tuple[Any, ...]:
    _, args = _reduce_code_without_name(code)
    return _make_code, (code.co_filename, args)


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    dispatch_table: ClassVar[Any] = ChainMap(
        {CodeType: _reduce_code}, cloudpickle.Pickler.dispatch_table
    )


def dumps(
    value: Any, buffer_callback: Callable[[pickle.PickleBuffer], object] | None = None
) -> bytes:
    """Return the pickle of `value`, functions and classes of the program itself by value.

    Parameters
    ----------
    buffer_callback : callable, optional
        As in `pickle.dumps`.

    Raises
    ------
    Exception
        Whatever pickling `value` raises.
    """
    file = io.BytesIO()
    _Pickler(file, protocol=5, buffer_callback=buffer_callback).dump(value)
    return file.getvalue()
