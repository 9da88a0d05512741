"""How values cross between Python and TVM, without copies wherever that can be.

On our side are NumPy's arrays and plain values, on TVM's are its tensors and objects. Whatever goes
into a function of TVM's or comes out of one is converted here, by the classes `TVMFunction` and
`TVMModule`, which stand for TVM's own in registers.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any, NoReturn

import numpy as np
import tvm
import tvm_ffi
from tvm_ffi import core

from ..device import Device
from ..tensor import array_dtype
from ..transport.layout import ALIGNMENT, aligned_empty

__all__ = ["TVMFunction", "TVMModule", "TVMTuple", "array_of", "from_tvm", "tensor_of", "to_tvm"]

Array = np.ndarray[Any, Any]

#: Unsigned integers as wide as the dtypes that DLPack has and NumPy has not.
_BITS = {1: "uint8", 2: "uint16", 4: "uint32"}

#: An array, and the tensor with a copy of it that compiled code works on in its place.
_Copies = list[tuple[Array, Any]]


# Arrays -------------------------------------------------------------------------------------------


def tensor_of(array: Array, copies: _Copies | None = None) -> Any:
    """Return a NumPy array as a TVM tensor, of the same memory wherever that is possible.

    Parameters
    ----------
    array : ndarray
        Of a dtype that TVM has, bfloat16 and the float8 ones of `ml_dtypes` included. Memory that
        is read-only here is not so for TVM: it is on the caller to pass it as an input only.
    copies : list, optional
        Takes the array and its tensor where the tensor is a copy, in C order: if the array does not
        start at a multiple of 64 bytes, which compiled code wants, or is strided and of a dtype
        that NumPy cannot hand over by itself.

    Returns
    -------
    tvm.runtime.Tensor

    Raises
    ------
    TypeError
        TVM has no such dtype, or not in this byte order.
    """
    try:
        return core.from_dlpack(array, require_alignment=ALIGNMENT)
    except (BufferError, RuntimeError):
        pass
    return _tensor_of_unusual(array, copies)


def _tensor_of_unusual(array: Array, copies: _Copies | None) -> Any:
    dtype = array.dtype
    name = _extended_name(dtype)
    if name is None and (dtype.kind not in "biufc" or not dtype.isnative):
        raise TypeError(
            f"an array of {dtype!r} cannot go to TVM: numbers and bools in this machine's byte "
            "order can, bfloat16 and float8 included; convert it with astype"
        )
    elsewhere = array.ctypes.data % ALIGNMENT and array.size
    if elsewhere or (name is not None and not array.flags.c_contiguous):
        copy = aligned_empty(array.shape, dtype)
        copy[...] = array
        tensor = tensor_of(copy)
        if copies is not None:
            copies.append((array, tensor))
        return tensor
    if not array.flags.writeable:
        array = _writable_alias(array)
    if name is None:
        try:
            return core.from_dlpack(array)
        except (BufferError, RuntimeError) as e:
            raise TypeError(f"an array of {dtype} cannot go to TVM: {e}") from None
    bits = core.from_dlpack(array.view(_BITS[dtype.itemsize]))
    return bits._create_view(array.shape, name)


class _Alias:
    """Memory of a read-only array, as one that is not; keeps the array alive."""

    def __init__(self, array: Array) -> None:
        self.array = array
        # Of a dtype that this protocol can name.
        bits = array.view(_BITS[array.dtype.itemsize]) if array.dtype.isbuiltin == 2 else array
        interface = dict(bits.__array_interface__)
        interface["data"] = (interface["data"][0], False)
        self.__array_interface__ = interface


def _writable_alias(array: Array) -> Array:
    """Return the array's memory as writable, which DLPack in its old version insists on."""
    return np.asarray(_Alias(array)).view(array.dtype)


@functools.lru_cache(maxsize=256)
def _extended_name(dtype: np.dtype[Any]) -> str | None:
    """Return TVM's name of a dtype that is not NumPy's own, or None for any other."""
    if dtype.isbuiltin != 2 or not _whole_bytes(dtype.name):
        return None
    try:
        return str(tvm_ffi.dtype(dtype.name))
    except ValueError:
        return None


def _whole_bytes(name: str) -> bool:
    """Whether a dtype takes whole bytes for each element, as NumPy always has it."""
    return name.startswith(("bfloat16", "float8"))


def array_of(tensor: Any) -> Any:
    """Return a TVM tensor as an array of the same memory.

    Parameters
    ----------
    tensor : tvm.runtime.Tensor

    Returns
    -------
    ndarray
        Writable. On a GPU a ``cupy.ndarray``.

    Raises
    ------
    TypeError
        NumPy has no such dtype, or the tensor is on a device whose memory cannot be used here.
    """
    try:
        return np.from_dlpack(tensor)
    except (BufferError, RuntimeError, TypeError):
        pass
    return _array_of_unusual(tensor)


def _array_of_unusual(tensor: Any) -> Any:
    dtype, device = str(tensor.dtype), Device.of(tensor.device)
    if device.name in ("cuda", "cuda_host", "cuda_managed"):
        import cupy

        return cupy.from_dlpack(tensor)
    if device.name == "cpu" and _whole_bytes(dtype):
        target = array_dtype(dtype)
        return np.from_dlpack(tensor._create_view(tensor.shape, _BITS[target.itemsize])).view(
            target
        )
    raise TypeError(f"a TVM tensor of {dtype} on {device} cannot be used as an array here")


# Everything else ----------------------------------------------------------------------------------


class TVMTuple(tuple[Any, ...]):
    """A tuple that TVM has returned; it goes back to TVM as the object that it came as.

    Attributes
    ----------
    array : tvm_ffi.Array
    """

    array: Any

    def __reduce__(self) -> tuple[object, ...]:
        return TVMTuple._of, (tuple(self),)

    @classmethod
    def _of(cls, values: Iterable[Any]) -> TVMTuple:
        return _tuple_of(tvm_ffi.Array([to_tvm(value) for value in values]))


def _tuple_of(array: Any) -> TVMTuple:
    value = TVMTuple([from_tvm(element) for element in array])
    value.array = array
    return value


class _InTVM:
    """An object of TVM's, with methods that take and return our values."""

    def __init__(self, raw: Any) -> None:
        self.raw = raw

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise TypeError(f"{self!r} stays on its worker: pass the register to sess.call()")


class TVMFunction(_InTVM):
    """A function of TVM's, for arrays of NumPy and plain values.

    Parameters
    ----------
    raw : tvm_ffi.Function
    name : str
        What errors call it.
    keep : object, optional
        What must live as long as it, such as its module.
    """

    def __init__(self, raw: Any, name: str = "a function of TVM", keep: object = None) -> None:
        super().__init__(raw)
        self.__module__ = "tvm"
        self.__qualname__ = self.__name__ = name
        self._keep = keep

    def __repr__(self) -> str:
        return f"<TVM function: {self.__name__}>"

    def __call__(self, *args: Any) -> Any:
        """Call it.

        Raises
        ------
        Exception
            What it raises, with TVM's traceback.
        """
        copies: _Copies = []
        result = self.raw(
            *[
                tensor_of(arg, copies) if type(arg) is np.ndarray else to_tvm(arg, copies)
                for arg in args
            ]
        )
        for array, tensor in copies:
            # It may be meant to be written; what is read-only is not.
            if array.flags.writeable:
                array[...] = array_of(tensor)
        return from_tvm(result)


class TVMModule(_InTVM):
    """A module of TVM's: functions by name.

    Parameters
    ----------
    raw : tvm_ffi.Module
    name : str
        What errors call it.
    """

    def __init__(self, raw: Any, name: str = "") -> None:
        super().__init__(raw)
        self.name = name or f"of kind {raw.kind}"

    def __repr__(self) -> str:
        return f"<TVM module {self.name}>"

    def __getitem__(self, name: str) -> TVMFunction:
        """Return a function; see `get_function`."""
        return self.get_function(name, True)

    def implements_function(self, name: str, query_imports: bool = False) -> bool:
        """Whether it, or with `query_imports` a module that it imports, has the function `name`."""
        return bool(self.raw.implements_function(name, query_imports))

    def get_function(self, name: str, query_imports: bool = False) -> TVMFunction:
        """Return the function `name`.

        Raises
        ------
        ValueError
            There is none.
        """
        if not isinstance(name, str):
            raise TypeError(f"the name of a function is a str, not {name!r}")
        try:
            raw = self.raw.get_function(name, query_imports)
        except AttributeError:
            raise ValueError(f"the module {self.name} has no function {name!r}") from None
        return TVMFunction(raw, name, self)


def to_tvm(value: Any, copies: _Copies | None = None) -> Any:
    """Return a value as TVM takes it.

    Arrays become tensors of the same memory (see `tensor_of`), tuples of ints shapes, other tuples
    and lists ``tvm_ffi.Array``, dicts ``tvm_ffi.Map``, devices and dtypes TVM's own, functions
    functions that convert what they are given and what they return. None, bools, numbers, strings,
    bytes and TVM's own objects stay what they are, and so does any other object: to TVM it is
    opaque.

    Parameters
    ----------
    value : object
    copies : list, optional
        See `tensor_of`.

    Raises
    ------
    TypeError
        There is an array in it that TVM cannot take.
    """
    convert = _TO_TVM.get(type(value))
    if convert is not None:
        return convert(value, copies)
    if isinstance(value, core.CObject | core.PyNativeObject | str):
        return value
    if isinstance(value, np.ndarray):
        return tensor_of(np.asarray(value), copies)
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.dtype):
        return tvm_ffi.dtype(value.name)
    if isinstance(value, tuple | list | dict):  # of a subclass
        base = next(kind for kind in (tuple, list, dict) if isinstance(value, kind))
        return _TO_TVM[base](value, copies)
    if callable(value):
        return callback(value)
    return value


def callback(function: Callable[..., Any]) -> Any:
    """Return a Python function as a function that TVM can call."""

    @functools.wraps(function, updated=())
    def call(*args: Any) -> Any:
        try:
            return to_tvm(function(*map(from_tvm, args)))
        except Exception as e:
            if type(e) in core.ERROR_TYPE_TO_NAME:
                raise
            # Through TVM only the names of types go that it knows, and the message.
            raise RuntimeError(f"{type(e).__qualname__}: {e}") from e

    return tvm_ffi.convert(call)


def _sequence(value: Any, copies: _Copies | None) -> Any:
    return tvm_ffi.Array([to_tvm(element, copies) for element in value])


def _tuple(value: Any, copies: _Copies | None) -> Any:
    if value and all(type(n) is int for n in value):
        return tvm_ffi.Shape(value)
    return _sequence(value, copies)


def _map(value: Any, copies: _Copies | None) -> Any:
    return tvm_ffi.Map({k: to_tvm(v, copies) for k, v in value.items()})


def _unchanged(value: Any, copies: _Copies | None) -> Any:
    return value


_TO_TVM: dict[type, Callable[[Any, _Copies | None], Any]] = {
    np.ndarray: tensor_of,
    tuple: _tuple,
    list: _sequence,
    dict: _map,
    TVMTuple: lambda value, copies: value.array,
    TVMFunction: lambda value, copies: value.raw,
    TVMModule: lambda value, copies: value.raw,
    Device: lambda value, copies: tvm_ffi.device(value.name, value.index),
    **dict.fromkeys((type(None), bool, int, float, str, bytes), _unchanged),
}


def from_tvm(value: Any) -> Any:
    """Return a value of TVM's as we have it: the reverse of `to_tvm`.

    Tensors become arrays of the same memory, shapes tuples, ``tvm_ffi.Array`` a `TVMTuple`,
    ``tvm_ffi.Map`` a dict, functions and modules a `TVMFunction` and a `TVMModule`. Any other
    object of TVM's stays what it is.

    Raises
    ------
    TypeError
        See `array_of`.
    """
    convert = _FROM_TVM.get(type(value))
    return value if convert is None else convert(value)


_FROM_TVM: dict[type, Callable[[Any], Any]] = {
    **dict.fromkeys((core.Tensor, tvm.runtime.Tensor), array_of),
    tvm_ffi.Shape: tuple,
    tvm_ffi.Array: _tuple_of,
    tvm_ffi.Map: lambda value: {from_tvm(k): from_tvm(v) for k, v in value.items()},
    core.String: str.__str__,
    core.Bytes: bytes,
    core.Function: TVMFunction,
    **dict.fromkeys((core.Device, tvm.runtime.Device), Device.of),
    tvm_ffi.dtype: lambda value: array_dtype(str(value)),
    **dict.fromkeys((tvm_ffi.Module, tvm.runtime.Module), TVMModule),
}


# Where a raw value is met -------------------------------------------------------------------------


def _itself(value: Any) -> Any:
    return value


def reduce(value: Any) -> tuple[object, ...]:
    """Reduce a raw value of TVM's for pickling: it arrives as our own."""
    converted = from_tvm(value)
    if isinstance(converted, _InTVM):
        return converted.__reduce_ex__(5)
    return _itself, (converted,)


#: The raw types that are pickled by `reduce`.
PICKLED = tuple(kind for kind in _FROM_TVM if kind not in (core.String, core.Bytes))
TENSORS = (core.Tensor, tvm.runtime.Tensor)
