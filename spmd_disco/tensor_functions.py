"""TVM's functions on tensors, for arrays of NumPy and CuPy, on the controller and on workers.

The meaning and the errors are those of the methods of ``tvm::runtime::Tensor``: copies go by bytes,
whatever the dtypes, and want contiguous memory of exactly equal size.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import Any

import numpy as np

from . import cupy_support
from .device import Device
from .dref import DRef
from .registry import register_func
from .tensor import allocate, array_dtype, check_scope, empty
from .worker import current_worker

__all__ = ["copy_from_bytes", "copy_from_to", "copy_to", "copy_to_bytes", "create_view"]

#: An array of NumPy or CuPy.
Array = Any


@register_func("runtime.disco.copy_from_to")
def copy_from_to(src: Array, dst: Array, stream: Any = None) -> Array:
    """Copy the bytes of one array into another, as TVM's ``Tensor::CopyFromTo`` does.

    Neither shapes nor dtypes need to agree, the sizes in bytes do. The two may overlap.

    Parameters
    ----------
    src, dst : ndarray
        Contiguous (in C order), of NumPy or CuPy, on any two devices.
    stream : cupy.cuda.Stream or int, optional
        Where a copy that has to do with a GPU is queued; it may still run on return then. Without
        a stream, a copy from or to the host is over on return. Between arrays of the host it is
        without meaning.

    Returns
    -------
    ndarray
        `dst`.

    Raises
    ------
    ValueError
        The sizes in bytes differ, an array is not contiguous, or `dst` is read-only.
    TypeError
        One is not an array, or holds Python objects.
    """
    src = _contiguous(src, "copy_from_to", "src")
    target = _writable(dst, "copy_from_to", "dst")
    if src.nbytes != target.nbytes:
        raise ValueError(
            f"copy_from_to(): src has {_size(src)} and dst {_size(target)}: they must have equally "
            "many bytes"
        )
    _move(src, target, stream)
    return dst


@register_func("runtime.disco.copy_to")
def copy_to(array: Array, device: Device | str | Any, mem_scope: str | None = None) -> Array:
    """Return a copy of an array on a device: a fresh allocation even where it is there already.

    As TVM's ``Tensor::CopyTo``. In worker functions a copy on the CPU lies in peer memory, see
    `empty`.

    Parameters
    ----------
    array : ndarray
        Of NumPy or CuPy, in any layout.
    device : Device
        Or what `Device.of` takes.
    mem_scope : str, optional
        As in TVM; of its scopes there is ``"global"``, which is the default.

    Returns
    -------
    ndarray
        Of the same shape and dtype, in C order.

    Raises
    ------
    ValueError
        There is no such device or scope here.
    TypeError
        `array` is not an array, or holds Python objects.
    MemoryError
        There is not so much memory.
    """
    source = _array(array, "copy_to", "array")
    check_scope(mem_scope)
    target = allocate(source.shape, source.dtype, Device.of(device), current_worker())
    if isinstance(source, np.ndarray) and isinstance(target, np.ndarray):
        np.copyto(target, source)
        return target
    if not source.flags.c_contiguous:
        source = source.copy(order="C")  # on its own device
    _move(source, target, None)
    return target


@register_func("runtime.disco.create_view")
def create_view(
    array: Array, shape: Sequence[int] | int, dtype: Any = None, byte_offset: int = 0
) -> Array:
    """Return another view of an array's memory, as TVM's ``Tensor::CreateView`` does.

    Parameters
    ----------
    array : ndarray
        Compact (contiguous in C order). The view keeps its memory alive, and is read-only where
        the array is.
    shape : tuple of int or int
    dtype : dtype_like, optional
        A NumPy dtype or its name; default that of `array`. The bytes are taken as they are.
    byte_offset : int
        Where in `array` the view begins, in bytes.

    Returns
    -------
    ndarray
        In C order, of the array's library.

    Raises
    ------
    ValueError
        The view does not lie in the array, or the array is not contiguous.
    TypeError
        Not an array, a shape, a dtype or an offset.
    """
    array = _contiguous(array, "create_view", "array")
    kind = array.dtype if dtype is None else array_dtype(dtype)
    if kind.itemsize == 0:
        raise TypeError(f"create_view(): the elements of {kind!r} have no size: give it one")
    shape = _shape(shape)
    byte_offset = operator.index(byte_offset)
    nbytes = math.prod(shape) * kind.itemsize
    if byte_offset < 0 or byte_offset + nbytes > array.nbytes:
        raise ValueError(
            f"create_view(): a view of shape {shape} and {kind} has {nbytes} bytes, and would be "
            f"bytes {byte_offset} to {byte_offset + nbytes} of an array of {_size(array)}: it must "
            "lie in the array"
        )
    if cupy_support.is_cupy_array(array):
        return cupy_support.view(array, shape, kind, byte_offset)
    return np.ndarray(shape, kind, _bytes_of(array), byte_offset)


@register_func("runtime.disco.copy_from_bytes")
def copy_from_bytes(array: Array, data: Any) -> Array:
    """Overwrite an array with bytes, as TVM's ``Tensor::CopyFromBytes`` does.

    Parameters
    ----------
    array : ndarray
        Contiguous (in C order), of NumPy or CuPy.
    data : bytes-like or ndarray
        Contiguous, of exactly the array's size in bytes.

    Returns
    -------
    ndarray
        `array`.

    Raises
    ------
    ValueError
        The sizes differ, one is not contiguous, or `array` is read-only.
    TypeError
        `array` is not an array, or `data` has no bytes.
    """
    target = _writable(array, "copy_from_bytes", "array")
    if isinstance(data, np.ndarray):
        source = _contiguous(data, "copy_from_bytes", "data")
    else:
        try:
            view = memoryview(data)
        except TypeError:
            raise TypeError(
                f"copy_from_bytes(): data is {_kind(data)}, not bytes or another buffer"
            ) from None
        if not view.c_contiguous:
            raise ValueError("copy_from_bytes(): data is not contiguous: copy it, with bytes()")
        source = np.frombuffer(view, np.uint8) if view.nbytes else np.empty(0, np.uint8)
    if source.nbytes != target.nbytes:
        raise ValueError(
            f"copy_from_bytes(): data has {source.nbytes} bytes and array {_size(target)}: they "
            "must have equally many"
        )
    _move(source, target, None)
    return array


@register_func("runtime.disco.copy_to_bytes")
def copy_to_bytes(array: Array) -> bytes:
    """Return an array's bytes, as TVM's ``Tensor::CopyToBytes`` does.

    Parameters
    ----------
    array : ndarray
        Contiguous (in C order), of NumPy or CuPy.

    Raises
    ------
    ValueError
        It is not contiguous.
    TypeError
        It is not an array, or holds Python objects.
    """
    array = _contiguous(array, "copy_to_bytes", "array")
    if cupy_support.is_cupy_array(array):
        on_host = np.empty(array.nbytes, np.uint8)
        _move(array, on_host, None)
        return on_host.tobytes()
    result: bytes = array.tobytes()
    return result


# TVM's own names, with its argument order.
register_func("runtime.TVMTensorCopyFromTo", copy_from_to)
register_func("runtime.TVMTensorCreateView", create_view)
register_func("runtime.TVMTensorAllocWithScope", empty)


def _move(src: Array, dst: Array, stream: Any) -> None:
    if dst.nbytes == 0:
        return
    if isinstance(src, np.ndarray) and isinstance(dst, np.ndarray):
        np.copyto(_bytes_of(dst), _bytes_of(src))
    else:
        cupy_support.copy_bytes(dst, src, stream)


def _bytes_of(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return the memory of a contiguous array as bytes, whatever its dtype."""
    if array.nbytes == 0:
        return np.empty(0, np.uint8)
    return array.reshape(-1).view(np.uint8)


def _array(value: Any, function: str, name: str) -> Array:
    """Return `value` if it is an array of plain values."""
    if isinstance(value, DRef):
        raise TypeError(
            f"{function}(): {name} is a DRef: call the function on the workers, with "
            f"sess.call(di.{function}, …)"
        )
    if isinstance(value, np.ndarray):
        # Of subclasses only the memory counts.
        value = np.asarray(value)
    elif not cupy_support.is_cupy_array(value):
        raise TypeError(f"{function}(): {name} is {_kind(value)}, not an array of NumPy or CuPy")
    if value.dtype.hasobject:
        raise TypeError(f"{function}(): {name} is an array of {value.dtype}, which has no bytes")
    return value


def _contiguous(value: Any, function: str, name: str) -> Array:
    array = _array(value, function, name)
    if not array.flags.c_contiguous:
        raise ValueError(
            f"{function}(): {name}, of shape {array.shape} and strides {array.strides}, is not "
            "contiguous in C order: numpy.ascontiguousarray() makes a copy that is"
        )
    return array


def _writable(value: Any, function: str, name: str) -> Array:
    array = _contiguous(value, function, name)
    if isinstance(array, np.ndarray) and not array.flags.writeable:
        raise ValueError(f"{function}(): {name} is read-only")
    return array


def _shape(shape: Sequence[int] | int) -> tuple[int, ...]:
    dimensions = shape if isinstance(shape, Sequence) else (shape,)
    result = tuple(map(operator.index, dimensions))
    if any(n < 0 for n in result):
        raise ValueError(f"the shape {result} has a negative dimension")
    return result


def _size(array: Array) -> str:
    return f"{array.nbytes} bytes (shape {array.shape}, {array.dtype})"


def _kind(value: object) -> str:
    return "None" if value is None else f"of type {type(value).__name__}"
