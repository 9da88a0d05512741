"""How parameters are split among workers: TVM's `shard_info`, its Python forms, presharded names.

Nothing here reads a file or knows a worker: everything can be checked before anything is sent.
"""

from __future__ import annotations

import json
import math
import operator
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from ..files.dtypes import dtype_from_string

__all__ = [
    "Placement",
    "ShardStep",
    "check_chain",
    "name_of",
    "parse_chain",
    "parse_shard_info",
    "part_of",
    "placement",
    "presharded",
    "shard_name",
    "split_name",
]

#: The word for a parameter that all workers have whole.
REPLICATE = "replicate"
#: Names of presharded parameters, such as ``w_shard-1-of-4``.
_SHARD = re.compile(r"(.*)_shard-([0-9]+)-of-([0-9]+)", re.DOTALL)


class ShardStep(NamedTuple):
    """One function of a chain, called as ``function(input, *extra, output)``.

    Attributes
    ----------
    function : str or callable
        A name, or in the Python form the function itself.
    shape : tuple of int
        The shape of its output.
    dtype : dtype
        The dtype of its output.
    extra : tuple
        What it takes between input and output.
    """

    function: Any
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    extra: tuple[Any, ...]


#: What becomes of a parameter: None for a copy on each worker, the axis along which it is split, or
#: the functions whose last output is split along its first dimension.
Placement = int | tuple[ShardStep, ...] | None


def parse_shard_info(text: str) -> dict[str, tuple[ShardStep, ...]]:
    """Return the chains in a `shard_info` as TVM writes it, by parameter.

    Parameters
    ----------
    text : str
        ``{"name": [["function", [[shape…], "dtype"], extra…], …], …}`` in JSON; an empty text
        stands for an empty object.

    Raises
    ------
    ValueError
        It is not that.
    """
    if not text.strip():
        return {}
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as e:
        raise ValueError(f"the shard_info {_short(text)} is not JSON: {e}") from None
    if not isinstance(value, dict):
        raise ValueError(
            f"the shard_info {_short(value)} is not a JSON object with a chain of functions for "
            "each parameter"
        )
    return {name: parse_chain(name, chain) for name, chain in value.items()}


def parse_chain(name: str, chain: Any) -> tuple[ShardStep, ...]:
    """Return the functions of a chain.

    Parameters
    ----------
    name : str
        The parameter, for errors.
    chain : sequence
        ``[[function, [shape, dtype], *extra], …]``: the function's name or (in Python) the function
        itself, the shape and the dtype of its output, and its other arguments.

    Raises
    ------
    ValueError, TypeError
        It is not that.
    """
    if isinstance(chain, str | bytes) or not isinstance(chain, Sequence):
        raise ValueError(
            f"the shard_info of {name!r} is {_short(chain)}, which is no chain: a list of "
            "[function, [shape, dtype], *extra]"
        )
    return tuple(_parse_step(name, step) for step in chain)


def _parse_step(name: str, step: Any) -> ShardStep:
    if isinstance(step, ShardStep):
        return step  # parsed already
    what = f"the shard_info of {name!r} has {_short(step)} in its chain"
    try:
        function, (shape, dtype), *extra = step
        if isinstance(step, str):
            raise ValueError
    except (TypeError, ValueError):
        raise ValueError(f"{what}, which is not [function, [shape, dtype], *extra]") from None
    if not (function and isinstance(function, str)) and not callable(function):
        raise ValueError(f"{what}, whose function is neither a name nor a callable")
    try:
        sizes = tuple(operator.index(n) for n in shape)
        if any(n < 0 or isinstance(n, bool) for n in shape):
            raise ValueError
    except (TypeError, ValueError):
        raise ValueError(f"{what}, whose shape {_short(shape)} is no list of sizes") from None
    try:
        if isinstance(dtype, str):
            kind = dtype_from_string(dtype)
        else:
            kind = np.dtype(dtype)
            if kind.hasobject:
                raise ValueError("its elements are Python objects")
    except (TypeError, ValueError) as e:
        raise ValueError(f"{what}, whose dtype {dtype!r} cannot be used: {e}") from None
    # Their number of bytes must be one that memory can be asked for.
    if math.prod(sizes) * max(kind.itemsize, 1) >= 1 << 63:
        raise ValueError(f"{what}, whose output would have {math.prod(sizes)} elements")
    for value in extra:
        if not isinstance(value, int | float | str | None):
            raise ValueError(
                f"{what}, whose extra argument {_short(value)} is none of int, float, str and None"
            )
    return ShardStep(function, sizes, kind, tuple(extra))


def placement(name: str, shape: Sequence[int], spec: Any, parts: int, among: str) -> Placement:
    """Return what becomes of a parameter, checked.

    Parameters
    ----------
    name : str
    shape : sequence of int
        The parameter's.
    spec : None, "replicate", int or sequence
        As `Session.load_params` takes it: an axis, which may count from the end, or a chain.
    parts : int
        How many workers share it.
    among : str
        Who these are, in words for errors, such as "the 4 workers".

    Raises
    ------
    ValueError, TypeError
        It is none of these, or does not fit the parameter or the number of workers.
    """
    if spec is None or (isinstance(spec, str) and spec == REPLICATE):
        return None
    if isinstance(spec, str | bytes | bool | Mapping):
        raise _no_placement(name, spec)
    try:
        axis = operator.index(spec)
    except TypeError:
        if not isinstance(spec, Sequence):
            raise _no_placement(name, spec) from None
        chain = parse_chain(name, spec)
        if not chain:
            return None  # as in TVM
        check_chain(name, chain, parts, among)
        return chain
    shape = tuple(shape)
    if not -len(shape) <= axis < len(shape):
        allowed = f"{-len(shape)} to {len(shape) - 1}" if shape else "none: it has no dimensions"
        raise ValueError(
            f"parameter {name!r} of shape {shape} has no axis {axis} to be split along: allowed "
            + (f"are {allowed}" if shape else f"is {allowed}")
        )
    axis %= len(shape)
    if shape[axis] % parts:
        raise ValueError(
            f"parameter {name!r} of shape {shape} cannot be split along axis {axis} among {among}: "
            f"{shape[axis]} is not divisible by {parts}"
        )
    return axis


def _no_placement(name: str, spec: Any) -> ValueError:
    return ValueError(
        f"the shard_info of {name!r} is {_short(spec)}: allowed are an axis (an int), "
        f"{REPLICATE!r}, and a chain [[function, [shape, dtype], *extra], …]"
    )


def check_chain(name: str, chain: Sequence[ShardStep], parts: int, among: str) -> None:
    """Check that the last output of a chain has a first dimension of one for each worker.

    Raises
    ------
    ValueError
        It has not.
    """
    last = chain[-1]
    if not last.shape or last.shape[0] != parts:
        raise ValueError(
            f"parameter {name!r}: the output of its last shard function {name_of(last.function)} "
            f"has the shape {last.shape}, whose first dimension must be {parts}, one for each of "
            f"{among}"
        )


def name_of(function: Any) -> str:
    """Return how errors name a shard function."""
    return repr(function if isinstance(function, str) else getattr(function, "__name__", function))


def part_of(shape: Sequence[int], axis: int, part: int, parts: int) -> tuple[slice, ...]:
    """Return the index of one of `parts` equal parts of an array along `axis`."""
    size = shape[axis] // parts
    return (*(slice(0, n) for n in shape[:axis]), slice(part * size, (part + 1) * size))


# Presharded parameters ----------------------------------------------------------------------------


def shard_name(name: str, part: int, parts: int) -> str:
    """Return the name of a parameter's part, counted from 0, in a presharded cache."""
    return f"{name}_shard-{part + 1}-of-{parts}"


def split_name(name: str) -> tuple[str, int, int] | None:
    """Return parameter, part (from 0) and number of parts that a presharded name stands for.

    None where it is no such name.

    Raises
    ------
    ValueError
        It has the form of one, and there is no such part.
    """
    match = _SHARD.fullmatch(name)
    if match is None:
        return None
    part, parts = int(match[2]), int(match[3])
    if not 1 <= part <= parts:
        raise ValueError(
            f"the parameter name {name!r} means shard {part} of {parts}, which does not exist: "
            "shards count from 1"
        )
    return match[1], part - 1, parts


def presharded(names: Iterable[str]) -> dict[str, int]:
    """Return the parameters that are cut up already, and into how many parts.

    Parameters
    ----------
    names : iterable of str
        All names of a file or folder.

    Raises
    ------
    ValueError
        One of them has not all of its parts, or is also there in another number of parts, or whole.
    """
    names = list(names)
    found: dict[str, dict[int, set[int]]] = {}
    for name in names:
        parsed = split_name(name)
        if parsed is not None:
            base, part, parts = parsed
            found.setdefault(base, {}).setdefault(parts, set()).add(part)
    whole = set(names)
    result = {}
    for base, numbers in found.items():
        if len(numbers) > 1 or base in whole:
            ways = [f"in {parts} shards" for parts in sorted(numbers)]
            ways += ["whole"] if base in whole else []
            raise ValueError(f"parameter {base!r} is there {' and '.join(ways)}: one is allowed")
        ((parts, have),) = numbers.items()
        if len(have) < parts:
            # Not a set of all: the number is what a file claims.
            missing = next(i for i in range(parts) if i not in have)
            raise ValueError(
                f"parameter {base!r} has {len(have)} of its {parts} shards: "
                f"{shard_name(base, missing, parts)!r} is missing"
            )
        result[base] = parts
    return result


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 120 else f"{text[:117]}…"
