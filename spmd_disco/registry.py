"""Global functions by name, and how a name becomes a callable."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from types import BuiltinFunctionType, ModuleType
from typing import Any, TypeVar, overload

__all__ = [
    "Published",
    "connect",
    "functions",
    "get_global_func",
    "import_path",
    "importable",
    "is_foreign",
    "is_published",
    "keep_import",
    "keep_reference",
    "references",
    "register_func",
    "resolve",
]

F = TypeVar("F", bound=Callable[..., Any])

#: What an import path means as long as the module is in ``sys.modules`` by this name and has the
#: callable under this one: name of the module, module, its fields, name in there, callable.
_Import = tuple[str, ModuleType, dict[str, Any], str, Callable[..., Any]]

_functions: dict[str, Callable[..., Any]] = {}

#: What has been looked up already, for the native module: encoded references by name or callable,
#: and what they mean. Any registration may change what a name means, and empties both.
references: dict[Any, bytes] = {}
functions: dict[bytes, Callable[..., Any] | _Import] = {}
#: The most that either holds.
MOST_KNOWN = 4096

#: Names that another registry is to have, too, and the way there and back, where one is connected.
_published: set[str] = set()
_publish: Callable[[str, Callable[..., Any], bool], None] | None = None
_find: Callable[[str], Any] | None = None


class Published:
    """Stands for a function on its way to the workers that is to be published there."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)


def connect(
    find: Callable[[str], Any], publish: Callable[[str, Callable[..., Any], bool], None]
) -> None:
    """Connect another registry of functions, TVM's.

    Parameters
    ----------
    find : callable
        Returns its function of a name, or None.
    publish : callable
        Takes a name, a function and whether it may replace another one.
    """
    global _find, _publish
    _find, _publish = find, publish
    for name in _published:
        publish(name, _functions[name], False)


@overload
def register_func(
    name_or_func: F, f: None = None, override: bool = False, *, publish: bool = False
) -> F: ...
@overload
def register_func(
    name_or_func: str, f: F, override: bool = False, *, publish: bool = False
) -> F: ...
@overload
def register_func(
    name_or_func: str | None = None,
    f: None = None,
    override: bool = False,
    *,
    publish: bool = False,
) -> Callable[[F], F]: ...
def register_func(
    name_or_func: Any = None, f: Any = None, override: bool = False, *, publish: bool = False
) -> Any:
    """Register a global function, as TVM's ``register_global_func`` does.

    A function that the controller registers reaches the workers when its name is first used.

    Parameters
    ----------
    name_or_func : str or callable, optional
        The name, or the function itself (``@register_func`` without parentheses).
    f : callable, optional
        The function; without it, a decorator is returned.
    override : bool
        Whether an earlier registration of the name may be replaced.
    publish : bool
        Whether TVM has it, too, among its own global functions: compiled code can call it then, on
        every worker that has it. It takes and returns NumPy's arrays there, and plain values.

    Returns
    -------
    callable
        The function, or the decorator. The default name is ``module.qualname``.

    Raises
    ------
    ValueError
        The name is taken, and `override` is False.
    TypeError
        The name is no string, or the function not callable.
    """
    if callable(name_or_func) and not isinstance(name_or_func, str):
        if f is not None:
            raise TypeError(f"the name of a global function is a str, not {name_or_func!r}")
        return _register(_default_name(name_or_func), name_or_func, override, publish)
    if name_or_func is not None and not isinstance(name_or_func, str):
        raise TypeError(f"the name of a global function is a str, not {name_or_func!r}")
    if f is not None:
        return _register(name_or_func or _default_name(f), f, override, publish)

    def decorate(function: F) -> F:
        return _register(name_or_func or _default_name(function), function, override, publish)

    return decorate


def _default_name(function: Callable[..., Any]) -> str:
    try:
        return f"{function.__module__}.{function.__qualname__}"
    except AttributeError:
        raise TypeError(f"{function!r} has no name of its own: give one") from None


def _register(name: str, function: F, override: bool, publish: bool) -> F:
    if not callable(function):
        raise TypeError(f"the global function {name!r} must be callable, not {function!r}")
    if not override and _functions.get(name, function) is not function:
        raise ValueError(f"the global function {name!r} is registered already; use override=True")
    if publish or name in _published:
        if _publish is not None:
            _publish(name, function, override)
        _published.add(name)
    _functions[name] = function
    references.clear()
    functions.clear()
    return function


def get_global_func(name: str, allow_missing: bool = False) -> Any:
    """Return the global function `name` of this process, where need be of TVM.

    Parameters
    ----------
    name : str
        The name that it was registered with.
    allow_missing : bool
        Whether to return None where there is none.

    Raises
    ------
    ValueError
        There is none, and `allow_missing` is False.
    """
    function = _functions.get(name)
    if function is None and _find is not None:
        function = _find(name)
    if function is None and not allow_missing:
        raise ValueError(f"no global function {name!r} is registered")
    return function


def is_foreign(name: str) -> bool:
    """Whether a global function is not of this registry, but of the one that is connected."""
    return name not in _functions


def is_published(name: str) -> bool:
    """Whether the global function `name` is to be in the other registry, too."""
    return name in _published


def import_path(path: str) -> Any:
    """Return what ``module:qualname`` or a dotted path such as ``numpy.linalg.norm`` names.

    Raises
    ------
    ValueError
        Nothing has that name.
    """
    module_name, colon, qualname = path.partition(":")
    if colon:
        return _attributes(importlib.import_module(module_name), qualname.split("."), path)
    names = path.split(".")
    if not all(names):
        raise ValueError(f"{path!r} is neither a global function nor a dotted path")
    for split in range(len(names) - 1, 0, -1):
        module_name = ".".join(names[:split])
        try:
            module = importlib.import_module(module_name)
        except ModuleNotFoundError as e:
            # The module's own imports may be at fault; that must not pass for a wrong name.
            if e.name is None or not (
                module_name == e.name or module_name.startswith(e.name + ".")
            ):
                raise
            continue
        return _attributes(module, names[split:], path)
    why = f"there is no module {names[0]!r}" if len(names) > 1 else "a path has a dot in it"
    raise ValueError(f"{path!r} is neither a global function nor a dotted path to import: {why}")


def keep_import(reference: bytes, path: str, value: Any) -> None:
    """Note that an encoded reference to `path` means `value`, if it can be told when that ends."""
    module_name, _, name = path.rpartition(":" if ":" in path else ".")
    module = sys.modules.get(module_name)
    # Not what a class has, or a module makes up when it is asked.
    if type(module) is not ModuleType or vars(module).get(name) is not value:
        return
    if callable(value):
        if len(functions) >= MOST_KNOWN:
            functions.clear()
        functions[reference] = (module_name, module, vars(module), name, value)


def keep_reference(func: Any, reference: bytes) -> None:
    """Note how `func`, a name or a callable, is encoded."""
    kind: Any = type(func)
    # Of callables those that are equal only to themselves, and hashed without the program's code.
    by_identity = kind.__hash__ is object.__hash__ and kind.__eq__ is object.__eq__
    if by_identity or kind in (str, BuiltinFunctionType):
        if len(references) >= MOST_KNOWN:
            references.clear()
        references[func] = reference


def _attributes(value: Any, names: list[str], path: str) -> Any:
    for name in names:
        try:
            value = getattr(value, name)
        except AttributeError:
            raise ValueError(f"{path!r}: {value!r} has no attribute {name!r}") from None
    return value


def resolve(name: str) -> Any:
    """Return the callable that `name` means: a global function, else a dotted path.

    Raises
    ------
    ValueError
        Nothing has that name.
    TypeError
        What has that name is not callable.
    """
    function = get_global_func(name, allow_missing=True)
    if function is None:
        function = import_path(name)
        if not callable(function):
            raise TypeError(f"{name!r} names {function!r}, which is not callable")
    return function


def importable(function: Any) -> str | None:
    """Return ``module:qualname`` where other processes can import `function` by it, else None."""
    module_name = getattr(function, "__module__", None)
    qualname = getattr(function, "__qualname__", None)
    if (
        not isinstance(module_name, str)
        or not isinstance(qualname, str)
        or module_name in ("__main__", "__mp_main__")
        or "<" in qualname
    ):
        return None
    module = sys.modules.get(module_name)
    # A module that was made by hand, or run from a string, has no spec: nobody else has it.
    if module is None or getattr(module, "__spec__", None) is None:
        return None
    value: Any = module
    for name in qualname.split("."):
        value = getattr(value, name, None)
    # A bound method is made anew at each look-up, hence the comparison.
    if value is not function and not (value == function and type(value) is type(function)):
        return None
    return f"{module_name}:{qualname}"
