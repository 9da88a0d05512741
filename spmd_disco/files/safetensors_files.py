"""Files of safetensors: what is in them is found out by the library, and read by ourselves.

The library's own slices copy each part twice, from bytes into an array.
"""

from __future__ import annotations

import math
import os
from typing import Any

import numpy as np

from .dtypes import check_shape, dtype_from_string
from .parts import Source
from .untrusted import file_size

__all__ = ["safetensors_sources"]

#: By the name in the file: TVM's. float4 and float6, which share bytes, are not read.
NAMES = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "U16": "uint16",
    "I16": "int16",
    "U32": "uint32",
    "I32": "int32",
    "U64": "uint64",
    "I64": "int64",
    "F16": "float16",
    "BF16": "bfloat16",
    "F32": "float32",
    "F64": "float64",
    "C64": "complex64",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2": "float8_e5m2",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F8_E8M0": "float8_e8m0fnu",
}


def safetensors_sources(path: str) -> tuple[list[Source], dict[str, str]]:
    """Return the tensors of a file, in its order, and its metadata.

    Raises
    ------
    ValueError
        The library refuses it, or it has a dtype that arrays cannot have.
    ImportError
        There is no safetensors, or one before 0.6.
    """
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError as e:
        raise ImportError(f"{path} is read with safetensors: pip install safetensors ({e})") from e
    size = file_size(path)
    if not os.access(path, os.R_OK):
        raise PermissionError(f"{path} cannot be read")
    try:
        with safe_open(path, framework="np") as file:
            return _sources(file, path, size), dict(file.metadata() or {})
    except SafetensorError as e:
        raise ValueError(f"{path} is no file of safetensors, or is damaged: {e}") from None


def _sources(file: Any, path: str, size: int) -> list[Source]:
    with open(path, "rb") as stream:
        start = 8 + int.from_bytes(stream.read(8), "little")
    if not hasattr(file, "offset_keys"):
        raise ImportError(f"{path} is read with safetensors 0.6 or newer: upgrade it")
    sources = []
    # The library has seen that the data have no gaps. Only of those without bytes it is not known
    # which comes first, and that does not matter.
    for name in file.offset_keys():
        part = file.get_slice(name)
        kind = str(part.get_dtype())
        where = f"{path}: parameter {name!r}"
        if kind not in NAMES:
            raise ValueError(
                f"{where} has dtype {kind}, which cannot be read: allowed are {', '.join(NAMES)}"
            )
        dtype = dtype_from_string(NAMES[kind])
        shape = tuple(part.get_shape())
        check_shape(shape, dtype.itemsize, where)
        sources.append(Source(name, shape, np.dtype(dtype), path, start, file_nbytes=size))
        start += math.prod(shape) * dtype.itemsize
    if start != size:
        raise ValueError(f"{path} has {size} bytes, and the data in it end at byte {start}")
    return sources
