"""Which dtypes can be reduced, and how: one pure function.

What MPI can do well is left to MPI. Three things it cannot, or not alike everywhere: it knows
neither bfloat16 nor NumPy's bool and timedelta64, its minimum and maximum treat NaN differently in
each implementation, and it has no average.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any, Literal

import ml_dtypes
import numpy as np

from .atomic import Step
from .ccl import ReduceKind
from .layout import Array

__all__ = ["Reduction", "divide_dtype", "divide_steps", "reduction"]

_BFLOAT16 = np.dtype(ml_dtypes.bfloat16)

_UFUNCS = {
    ReduceKind.SUM: "add",
    ReduceKind.PROD: "multiply",
    ReduceKind.MIN: "minimum",
    ReduceKind.MAX: "maximum",
    ReduceKind.AVG: "add",
}


@dataclass(frozen=True)
class Reduction:
    """How one dtype is reduced.

    Parameters
    ----------
    work : numpy.dtype
        What is reduced in; inputs of another dtype are converted first, and the result is rounded
        once at the end.
    ufunc : str
        The NumPy ufunc that combines two inputs: add, multiply, minimum or maximum.
    native : bool
        Whether MPI does it; else the workers reduce parts with the ufunc and exchange these.
    divide : str or None
        What an average does with the sum: "true" division, or division that "truncates" toward
        zero.

    Attributes
    ----------
    plain : bool
        Whether it is a single call of MPI.
    """

    work: np.dtype[Any]
    ufunc: Literal["add", "multiply", "minimum", "maximum"]
    native: bool
    divide: Literal["true", "truncate"] | None = None
    plain: bool = field(init=False)

    def __post_init__(self) -> None:
        # Asked at every operation.
        object.__setattr__(self, "plain", self.native and self.divide is None)


@lru_cache(maxsize=512)
def reduction(dtype: np.dtype[Any], kind: ReduceKind) -> Reduction:
    """Return how arrays of `dtype` are reduced.

    Raises
    ------
    TypeError
        They cannot be reduced by `kind`.
    """
    ufunc: Any = _UFUNCS[kind]
    extremum = kind in (ReduceKind.MIN, ReduceKind.MAX)
    average = kind is ReduceKind.AVG
    # Dtypes that other packages register (ml_dtypes) may claim the kind of a float.
    builtin = dtype.isbuiltin != 2
    work = dtype.newbyteorder("=")
    if dtype == _BFLOAT16 or work == np.float16:
        work = np.dtype(np.float32)
    match work.kind:
        case "b" if average:
            raise TypeError(
                "bool has no average (avg); convert to a float dtype, or use sum (logical "
                "or), prod (logical and), min or max"
            )
        case "b":
            # As NumPy has it: sum is «or», product is «and». As bytes 0 and 1 these are maximum
            # and minimum, which MPI knows.
            either = kind in (ReduceKind.SUM, ReduceKind.MAX)
            return Reduction(np.dtype(np.uint8), "maximum" if either else "minimum", native=True)
        case "i" | "u" if builtin:
            return Reduction(work, ufunc, native=True, divide="truncate" if average else None)
        case "f" if builtin or work != dtype:
            return Reduction(work, ufunc, native=not extremum, divide="true" if average else None)
        case "c" if extremum:
            raise TypeError(
                f"complex numbers have no order: {dtype} cannot be reduced with "
                f"{kind.name.lower()}; allowed are sum, prod and avg"
            )
        case "c":
            return Reduction(work, ufunc, native=True, divide="true" if average else None)
        case "m" if kind is ReduceKind.PROD:
            raise TypeError(
                f"a product of durations is no duration: {dtype} cannot be reduced with prod; "
                "allowed are sum, min, max and avg"
            )
        case "m":
            return Reduction(work, ufunc, native=False, divide="truncate" if average else None)
    raise TypeError(
        f"arrays of dtype {dtype} cannot be reduced ({kind.name.lower()}), only moved; allowed are "
        "bool, integers, float16, bfloat16, float32, float64, longdouble, complex and timedelta64: "
        "convert first"
    )


def divide_dtype(work: np.dtype[Any], members: int) -> np.dtype[Any]:
    """Return the integer dtype in which a sum of `work` can be divided by `members`."""
    if work.kind in "iu" and members > np.iinfo(work).max:
        return np.dtype(np.int64)
    return work


def divide_steps(how: Reduction, total: Array, members: int) -> list[Step]:
    """Return the steps that make averages of the sums in `total`, where `how` asks for that."""
    steps: list[Step] = []
    if how.divide is None:
        return steps
    if how.divide == "true":
        steps.append(partial(np.divide, total, how.work.type(members), total))
    elif how.work.kind == "m":
        # NumPy truncates durations toward zero, and keeps NaT.
        steps.append(partial(np.divide, total, np.int64(members), total))
    else:
        work = divide_dtype(how.work, members)
        sums = total if work == how.work else np.empty(total.shape, work)
        rest = np.empty(total.shape, work)
        number = work.type(members)
        if sums is not total:
            steps.append(partial(sums.__setitem__, Ellipsis, total))
        # The remainder that has the sign of the sum, as in C, leaves a multiple.
        steps.append(partial(np.fmod, sums, number, rest))
        steps.append(partial(np.subtract, sums, rest, sums))
        steps.append(partial(np.floor_divide, sums, number, sums))
        if sums is not total:
            steps.append(partial(total.__setitem__, Ellipsis, sums))
    return steps
