"""Dtypes in files: the codes of DLPack, and TVM's names."""

from __future__ import annotations

import sys
from typing import Any

import ml_dtypes
import numpy as np

__all__ = [
    "check_shape",
    "dtype_from_code",
    "dtype_from_string",
    "dtype_to_code",
    "dtype_to_string",
]

DType = np.dtype[Any]

#: By TVM's name: DLPack's DLDataTypeCode and the bits of an element.
CODES = {
    **{f"int{bits}": (0, bits) for bits in (8, 16, 32, 64)},
    **{f"uint{bits}": (1, bits) for bits in (8, 16, 32, 64)},
    **{f"float{bits}": (2, bits) for bits in (16, 32, 64)},
    "bfloat16": (4, 16),
    "complex64": (5, 64),
    "complex128": (5, 128),
    "bool": (6, 8),
    "float8_e3m4": (7, 8),
    "float8_e4m3": (8, 8),
    "float8_e4m3b11fnuz": (9, 8),
    "float8_e4m3fn": (10, 8),
    "float8_e4m3fnuz": (11, 8),
    "float8_e5m2": (12, 8),
    "float8_e5m2fnuz": (13, 8),
    "float8_e8m0fnu": (14, 8),
}

#: The other codes, for messages.
FAMILIES = {
    0: "int",
    1: "uint",
    2: "float",
    3: "handle",
    4: "bfloat",
    5: "complex",
    6: "bool",
    15: "float6_e2m3fn",
    16: "float6_e3m2fn",
    17: "float4_e2m1fn",
}


def _numpy_dtype(name: str) -> DType | None:
    """Return the dtype of a name; None where this ml_dtypes is too old for it."""
    if name.startswith(("float8", "bfloat")):
        own = getattr(ml_dtypes, name, None)
        return None if own is None else np.dtype(own)
    return np.dtype(name)


DTYPES = {name: _numpy_dtype(name) for name in CODES}
NAMES = {dtype: name for name, dtype in DTYPES.items() if dtype is not None}
BY_CODE = {code: name for name, code in CODES.items()}

#: What NumPy allows.
MAX_NDIM = 64 if np.lib.NumpyVersion(np.__version__) >= "2.0.0" else 32
MAX_BYTES = 2**63 - 1


def _find(name: str) -> DType:
    _check_byte_order()
    dtype = DTYPES[name]
    if dtype is None:
        raise ValueError(
            f"dtype {name!r} needs a newer ml_dtypes than {ml_dtypes.__version__}: upgrade it"
        )
    return dtype


def _check_byte_order() -> None:
    if sys.byteorder != "little":
        raise NotImplementedError(
            "the files of TVM and safetensors are little-endian, and this machine is not: only "
            ".npy and .npz files are read here"
        )


def dtype_from_string(text: str) -> DType:
    """Return the dtype that TVM calls so.

    Parameters
    ----------
    text : str
        ``"float32"``, ``"bfloat16"``, ``"float8_e4m3fn"``, ``"bool"``, …

    Raises
    ------
    ValueError
        There is no such dtype; or elements are smaller than a byte (``"int4"``) or vectors
        (``"float32x4"``), for which TVM's files have no layout that all agree on.
    """
    if text in CODES:
        return _find(text)
    raise ValueError(f"dtype {text!r} is none that can be read: allowed are {', '.join(CODES)}")


def dtype_to_string(dtype: Any) -> str:
    """Return TVM's name of a dtype, of whatever byte order.

    Raises
    ------
    ValueError
        TVM has no such dtype, or no layout in files for it.
    """
    _check_byte_order()
    given = np.dtype(dtype)
    name = NAMES.get(given.newbyteorder("="))
    if name is None:
        raise ValueError(
            f"an array of dtype {str(given)!r} cannot be saved: allowed are {', '.join(CODES)}"
        )
    return name


def dtype_from_code(code: int, bits: int, lanes: int) -> DType:
    """Return the dtype of a DLDataType.

    Raises
    ------
    ValueError
        See `dtype_from_string`.
    """
    name = BY_CODE.get((code, bits))
    if name is None or lanes != 1:
        what = name or FAMILIES.get(code)
        shown = f"code {code}" if what is None else what
        raise ValueError(
            f"dtype {shown} of {bits} bits and {lanes} lanes (DLPack code {code}) is none that can "
            f"be read: allowed are {', '.join(CODES)}"
        )
    return _find(name)


def dtype_to_code(dtype: Any) -> tuple[int, int, int]:
    """Return the code, bits and lanes of the DLDataType of a dtype.

    Raises
    ------
    ValueError
        See `dtype_to_string`.
    """
    return (*CODES[dtype_to_string(dtype)], 1)


def check_shape(shape: tuple[int, ...], itemsize: int, where: str) -> int:
    """Return the bytes of an array, having seen that there can be such an array.

    Parameters
    ----------
    shape : tuple of int
        Of any size, as a file says it.
    where : str
        What is in the file, and in which, for messages.

    Raises
    ------
    ValueError
        There are too many dimensions, a negative one, or too many elements.
    """
    if len(shape) > MAX_NDIM:
        raise ValueError(f"{where} has {len(shape)} dimensions: at most {MAX_NDIM} are allowed")
    extent = itemsize
    for n in shape:
        if n < 0:
            raise ValueError(f"{where} has shape {list(shape)}, with a negative dimension")
        extent *= max(n, 1)
    # NumPy's own limit, which leaves dimensions of 0 out: (0, 2**62, 4) is too large, too.
    if extent > MAX_BYTES:
        raise ValueError(
            f"{where} has shape {list(shape)} and elements of {itemsize} bytes: that is more than "
            "memory can be addressed"
        )
    return 0 if 0 in shape else extent
