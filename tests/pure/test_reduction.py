"""Which dtypes are reduced how, and how kinds are given."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from spmd_disco.transport.ccl import ReduceKind
from spmd_disco.transport.reduce import divide_dtype, reduction

ARITHMETIC = [ReduceKind.SUM, ReduceKind.PROD]
EXTREMA = [ReduceKind.MIN, ReduceKind.MAX]
AVG = ReduceKind.AVG


@pytest.mark.parametrize(
    "given", [3, ReduceKind.MAX, "max", "MAX", (3,), [3], ("max",), np.int8(3)]
)
def test_kind(given: object) -> None:
    assert ReduceKind.of(given) is ReduceKind.MAX


@pytest.mark.parametrize("given", [5, -1, "mean", "", (), (1, 2), None, 1.0, True, b"max", ((),)])
def test_no_kind(given: object) -> None:
    with pytest.raises(ValueError, match=r"'sum' \(0\), .*'avg' \(4\)"):
        ReduceKind.of(given)


@pytest.mark.parametrize("dtype", ["i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "l", "q"])
def test_integers(dtype: str) -> None:
    for kind in ARITHMETIC + EXTREMA:
        how = reduction(np.dtype(dtype), kind)
        assert how.plain
        assert how.work == np.dtype(dtype)
    assert reduction(np.dtype(dtype), AVG).divide == "truncate"


@pytest.mark.parametrize("dtype", ["f4", "f8", "g", ">f4", ">f8"])
def test_floats(dtype: str) -> None:
    for kind in ARITHMETIC:
        assert reduction(np.dtype(dtype), kind).plain
    for kind in EXTREMA:
        # MPI's own differ in what they make of NaN.
        assert not reduction(np.dtype(dtype), kind).native
    how = reduction(np.dtype(dtype), AVG)
    assert (how.ufunc, how.divide) == ("add", "true")
    assert how.work.isnative


@pytest.mark.parametrize("dtype", ["f2", ">f2", ml_dtypes.bfloat16], ids=str)
def test_halves_are_reduced_in_float32(dtype: Any) -> None:
    for kind in ReduceKind:
        assert reduction(np.dtype(dtype), kind).work == np.float32


@pytest.mark.parametrize("dtype", ["F", "D", "G", ">c8"])
def test_complex(dtype: str) -> None:
    for kind in [*ARITHMETIC, AVG]:
        assert reduction(np.dtype(dtype), kind).native
    for kind in EXTREMA:
        with pytest.raises(TypeError, match="no order"):
            reduction(np.dtype(dtype), kind)


def test_bool_and_timedelta() -> None:
    dtype = np.dtype("?")
    assert [reduction(dtype, k).ufunc for k in ARITHMETIC + EXTREMA] == [
        "maximum",
        "minimum",
        "minimum",
        "maximum",
    ]
    with pytest.raises(TypeError, match="bool has no average"):
        reduction(dtype, AVG)
    duration = np.dtype("m8[s]")
    assert all(not reduction(duration, k).native for k in [ReduceKind.SUM, *EXTREMA, AVG])
    with pytest.raises(TypeError, match="product of durations"):
        reduction(duration, ReduceKind.PROD)


@pytest.mark.parametrize("kind", ReduceKind)
@pytest.mark.parametrize(
    "dtype",
    [
        "float8_e4m3fn",
        "float8_e4m3b11fnuz",
        "float8_e5m2",
        "int4",
        "uint4",
        "M8[s]",
        "S3",
        "U3",
        "V4",
        "i4,f4",
        "O",
    ],
)
def test_refused(dtype: str, kind: ReduceKind) -> None:
    real = np.dtype(getattr(ml_dtypes, dtype, dtype))
    with pytest.raises(TypeError, match=r"cannot be reduced .*only moved") as caught:
        reduction(real, kind)
    assert str(real) in str(caught.value)


def test_divide_dtype() -> None:
    assert divide_dtype(np.dtype("i1"), 127) == np.int8
    assert divide_dtype(np.dtype("i1"), 128) == np.int64
    assert divide_dtype(np.dtype("u8"), 10**6) == np.uint64
