"""What the pickle of a function depends on, so that it need not be pickled again while that stays.

A function that is sent by value takes along what it refers to: globals, closure, defaults. Pickling
it costs tens of microseconds, looking whether all of that is still the same a few.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType

import cloudpickle

from . import registry

__all__ = ["fingerprint", "is_settled"]

#: Values of these types never change.
_CONSTANTS = (type(None), bool, int, float, complex, str, bytes, type(Ellipsis))
#: Functions that are looked through, at most; what refers to more is pickled anew each time.
MOST_FUNCTIONS = 32

#: Stands for a global that does not exist, or not yet.
_MISSING = object()

_names: dict[int, tuple[CodeType, tuple[str, ...]]] = {}


def _names_in(code: CodeType) -> tuple[str, ...]:
    """Return the names that `code`, and the code within it, may look up among the globals."""
    known = _names.get(id(code))
    if known is not None:
        return known[1]
    names = dict.fromkeys(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            names.update(dict.fromkeys(_names_in(constant)))
    if len(_names) > 4096:
        _names.clear()
    # The code object itself is kept, so that its id stays its own.
    _names[id(code)] = code, tuple(names)
    return _names[id(code)][1]


def fingerprint(function: FunctionType) -> list[object] | None:
    """Return the objects that the pickle of `function` is made from.

    As long as each of them is the very same object, and all are settled (see `is_settled`), the
    pickle is the same.

    Returns
    -------
    list or None
        None where that cannot be told.
    """
    parts: list[object] = []
    seen: list[FunctionType] = [function]
    for number, each in enumerate(seen):
        if number == MOST_FUNCTIONS:
            return None
        values = _parts_of(each)
        if values is None:
            return None
        parts += values
        for value in values:
            # One that others can import goes by its name, whatever it refers to.
            if (
                type(value) is FunctionType
                and not any(value is other for other in seen)
                and registry.importable(value) is None
            ):
                seen.append(value)
    return parts


def _parts_of(function: FunctionType) -> list[object] | None:
    code = function.__code__
    parts: list[object] = [
        code,
        function.__name__,
        function.__qualname__,
        function.__module__,
        function.__doc__,
    ]
    if function.__defaults__:
        parts += function.__defaults__
    for fields in (function.__kwdefaults__, function.__dict__, function.__annotations__):
        if fields:
            parts += fields.keys()
            parts += fields.values()
    if getattr(function, "__type_params__", ()):
        return None
    if function.__closure__:
        try:
            parts += [cell.cell_contents for cell in function.__closure__]
        except ValueError:  # a cell that is still empty
            return None
    names = _names_in(code)
    if names:
        fields = function.__globals__
        values = [fields.get(name, _MISSING) for name in names]
        parts += values
        if any(hasattr(value, "__path__") for value in values):
            # The pickle of a function that uses a package names the submodules that are imported.
            parts.append(sys.intern(str(len(sys.modules))))
    return parts


def is_settled(parts: Iterable[object]) -> bool:
    """Whether no object in a fingerprint can change and still be the same object."""
    if cloudpickle.list_registry_pickle_by_value():
        return False  # then even a module may go by value
    return all(map(_is_settled, parts))


def _is_settled(value: object) -> bool:
    if isinstance(value, ModuleType):
        # By name, if others can import it.
        return sys.modules.get(value.__name__) is value and value.__spec__ is not None
    if type(value) in _CONSTANTS or isinstance(value, CodeType) or value is _MISSING:
        return True
    if type(value) is tuple:
        # Functions in there have not been looked through.
        return all(type(v) is not FunctionType and _is_settled(v) for v in value)
    if type(value) is FunctionType:
        # Either by name, or its own parts are in the fingerprint.
        return True
    if isinstance(value, type | BuiltinFunctionType):
        return registry.importable(value) is not None
    return False
