"""What the tests of files have in common: arrays of all dtypes and layouts, and comparison."""

from __future__ import annotations

import pathlib
from typing import Any

import ml_dtypes
import numpy as np

SAMPLES = pathlib.Path(__file__).parents[1] / "samples"
PLAIN = [f"{kind}{bits}" for kind in ("int", "uint") for bits in (8, 16, 32, 64)]
PLAIN += ["float16", "float32", "float64", "complex64", "complex128", "bool"]
SMALL_FLOATS = [name for name in dir(ml_dtypes) if name.startswith("float8_") or name == "bfloat16"]
DTYPES = [*PLAIN, *SMALL_FLOATS]


def dtype_of(name: str) -> np.dtype[Any]:
    return np.dtype(getattr(ml_dtypes, name, None) or name)


def any_bits(shape: tuple[int, ...], dtype: Any, seed: int = 0) -> np.ndarray:
    """Return an array in C order with all kinds of bits, NaN among them."""
    dtype = np.dtype(dtype)
    rng = np.random.default_rng(seed)
    if dtype == np.bool_:
        return rng.integers(0, 2, shape).astype(bool)
    count = int(np.prod(shape)) * dtype.itemsize
    found = np.frombuffer(rng.bytes(count), np.uint8).copy().view(dtype.newbyteorder("="))
    return found.reshape(shape).astype(dtype)


def layouts(a: np.ndarray) -> dict[str, np.ndarray]:
    """Return arrays that are equal to `a`, in other layouts."""
    wide = np.empty((*a.shape[:-1], a.shape[-1] * 2), a.dtype) if a.ndim else a.copy()
    strided = wide[..., ::2] if a.ndim else wide
    strided[...] = a
    backwards = a[..., ::-1].copy()[..., ::-1] if a.ndim else a
    odd = np.frombuffer(b"\0" + a.tobytes(), a.dtype, offset=1, count=a.size) if a.size else a
    read_only = a.copy()
    read_only.flags.writeable = False
    found = {
        "C": a,
        "Fortran": np.array(a, order="F"),
        "strided": strided,
        "backwards": backwards,
        "unaligned": odd.reshape(a.shape),
        "read-only": read_only,
    }
    if a.dtype.isbuiltin == 1 and a.dtype.itemsize > 1:
        found["big-endian"] = a.astype(a.dtype.newbyteorder(">"))
    return found


def same(a: Any, b: Any) -> None:
    """See that dtype, shape and all bits are equal."""
    assert isinstance(a, np.ndarray)
    assert a.dtype == b.dtype.newbyteorder("=")
    assert a.dtype.isnative
    assert a.shape == b.shape
    assert a.tobytes() == b.astype(b.dtype.newbyteorder("=")).tobytes()
