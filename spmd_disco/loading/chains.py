"""Shard functions applied in order, on the worker that has the whole parameter."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ..errors import DiscoError
from ..registry import get_global_func
from ..tensor import empty
from .shard_info import ShardStep, name_of

__all__ = ["apply_chain", "find_function"]


def apply_chain(
    name: str,
    array: np.ndarray[Any, Any],
    chain: Sequence[ShardStep],
    functions: Sequence[Callable[..., Any]],
    workers: int,
) -> np.ndarray[Any, Any]:
    """Return what the last function of a chain makes of a parameter.

    Parameters
    ----------
    name : str
        The parameter.
    array : ndarray
    chain : sequence of ShardStep
    functions : sequence of callable
        Those of the chain. Each is called as ``function(input, *extra, output)``, where `output` is
        uninitialised memory of the shape and dtype that the chain says.
    workers : int
        How many workers share the result, for errors.

    Raises
    ------
    DiscoError
        One of them raised; the cause is there. It names parameter, function and shapes.
    MemoryError
    """
    for step, function in zip(chain, functions, strict=True):
        output = empty(step.shape, step.dtype)
        try:
            function(array, *step.extra, output)
        except Exception as e:
            raise DiscoError(
                f"parameter {name!r}: the shard function {name_of(step.function)} failed, for "
                f"{workers} worker{'s' * (workers != 1)}, on an input of shape {array.shape} and "
                f"{array.dtype} and an output of shape {step.shape} and {step.dtype}: "
                f"{type(e).__name__}: {e}"
            ) from e
        array = output
    return array


def find_function(name: str, parameter: str, module: Any) -> Callable[..., Any]:
    """Return a shard function by name: the module's, else the global one.

    Parameters
    ----------
    name : str
    parameter : str
        Whose chain names it, for errors.
    module : object, optional
        Whatever has functions by name, as items or as attributes.

    Raises
    ------
    ValueError
        Neither has it.
    """
    function = None if module is None else of_module(module, name)
    if function is None:
        function = get_global_func(name, allow_missing=True)
    if function is None:
        where = "" if module is None else f"in the module {module!r} nor "
        raise ValueError(
            f"parameter {parameter!r}: its shard function {name!r} is not defined, {where}"
            "among the global functions: register it with register_func()"
        )
    return function  # type: ignore[no-any-return]


def of_module(module: Any, name: str) -> Any:
    """Return a function of a module, or None where it has none of that name."""
    if callable(getattr(module, "implements_function", None)):  # TVM's, with what it imports
        return module.get_function(name, True) if module.implements_function(name, True) else None
    if hasattr(type(module), "__getitem__"):
        try:
            return module[name]
        except (AttributeError, LookupError):
            return None
    function = getattr(module, name, None)
    return function if callable(function) else None
