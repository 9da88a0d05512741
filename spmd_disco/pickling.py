"""Pickling by cloudpickle, with some improvements.

Code keeps the name of its file, which cloudpickle leaves out: the traceback of a function that was
sent by value then shows the program's own lines, wherever the file can be read. And arrays of
bfloat16 and the like go out of band, as NumPy's own dtypes do. Classes keep their slots, without
which their instances could not come back. And a class that comes back to the process that defined
it is left as it is there: cloudpickle would set its attributes to what they were when it was sent.
"""

from __future__ import annotations

import builtins
import functools
import io
import pickle
import weakref
from collections import ChainMap
from collections.abc import Callable, Iterable
from types import CodeType
from typing import Any, ClassVar

import cloudpickle
import numpy as np

__all__ = ["dumps", "loads", "reducers"]

#: Classes that were defined in this process and sent by value, and those that were received.
_originals: weakref.WeakSet[type] = weakref.WeakSet()
_received: weakref.WeakSet[type] = weakref.WeakSet()

_reduce_code_without_name = cloudpickle.Pickler.dispatch_table[CodeType]


def _make_code(file_name: str, args: tuple[Any, ...]) -> CodeType:
    return CodeType(*args).replace(co_filename=file_name)


def _reduce_code(code: CodeType) -> tuple[Any, ...]:
    _, args = _reduce_code_without_name(code)
    return _make_code, (code.co_filename, args)


def _make_array(bits: np.ndarray[Any, Any], dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    return bits.view(dtype)


def _claims_to_be_builtin(kind: type) -> bool:
    heap_type = 1 << 9  # Py_TPFLAGS_HEAPTYPE: not one of the interpreter's own, hidden ones
    return (
        kind.__module__ == "builtins"
        and bool(kind.__flags__ & heap_type)
        and getattr(builtins, kind.__qualname__, None) is not kind
    )


def _make_cached(function: Callable[..., Any], parameters: dict[str, Any]) -> Any:
    return functools.lru_cache(**parameters)(function)


#: By type, how values of other libraries are reduced; a bridge that is on fills it.
reducers: dict[type, Callable[[Any], tuple[Any, ...]]] = {}


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    dispatch_table: ClassVar[Any] = ChainMap(
        {CodeType: _reduce_code}, reducers, cloudpickle.Pickler.dispatch_table
    )

    def reducer_override(self, obj: Any) -> Any:
        # NumPy pickles arrays of dtypes that are not its own in band.
        if type(obj) is np.ndarray and obj.dtype.isbuiltin == 2:
            return _make_array, (obj.view(f"V{obj.dtype.itemsize}"), obj.dtype)
        if type(obj) is np.ndarray and not (obj.flags.forc or obj.dtype.hasobject):
            # In band, which is how NumPy pickles it, such an array loses its byte order.
            return obj.copy().__reduce_ex__(5)
        if isinstance(obj, functools._lru_cache_wrapper) and obj.__module__ == "__main__":
            # By itself it goes by name, which the workers' __main__ does not have.
            return _make_cached, (obj.__wrapped__, obj.cache_parameters())
        if isinstance(obj, type) and obj not in _received:
            _originals.add(obj)
        if isinstance(obj, type) and _claims_to_be_builtin(obj):
            # cloudpickle would send an empty class of that name.
            raise TypeError(
                f"the class {obj.__qualname__} says that it is in the module builtins, where it is "
                "not: refer to it through its module, as in «module.name»"
            )
        reduced = super().reducer_override(obj)
        if isinstance(obj, type) and "__slots__" in obj.__dict__ and isinstance(reduced, tuple):
            make, args, *rest = reduced
            if make is cloudpickle.cloudpickle._make_skeleton_class:
                kind, name, bases, namespace, *more = args
                namespace = {**namespace, "__slots__": obj.__dict__["__slots__"]}
                return make, (kind, name, bases, namespace, *more), *rest
        return reduced


def _set_class_state(kind: type, state: Any) -> Any:
    if kind in _originals:
        return kind
    _received.add(kind)
    return cloudpickle.cloudpickle._class_setstate(kind, state)


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if name == "_class_setstate" and module == "cloudpickle.cloudpickle":
            return _set_class_state
        return super().find_class(module, name)


def loads(data: bytes | memoryview, buffers: Iterable[Any] | None = None) -> Any:
    """Return the value of a pickle that `dumps` made.

    Parameters
    ----------
    buffers : iterable of buffers, optional
        As in `pickle.loads`.

    Raises
    ------
    Exception
        Whatever unpickling raises.
    """
    return _Unpickler(io.BytesIO(data), buffers=buffers).load()


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
