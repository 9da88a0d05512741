"""TVM's tensor record: one array with its dtype and shape.

Little-endian: u64 magic; u64 0; i32 device type (1, the CPU); i32 device id 0; i32 ndim; u8 dtype
code, u8 bits, u16 lanes; i64 for each dimension; i64 bytes of the data; the data in C order. It is
what ``SaveDLTensor`` in TVM's ``runtime/tensor.h`` writes.
"""

from __future__ import annotations

import struct
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from .dtypes import (
    MAX_NDIM,
    check_shape,
    dtype_from_code,
    dtype_from_string,
    dtype_to_code,
    dtype_to_string,
)
from .streams import Array, PathOrFile, Reader, host_array, pieces, reading, write_all, writing

__all__ = [
    "MAGIC",
    "Header",
    "dtype_from_string",
    "dtype_to_string",
    "header_bytes",
    "load_tensor",
    "read_header",
    "save_tensor",
    "write_data",
]

MAGIC = 0xDD5E40F096B4A13F
CPU = 1


class Header(NamedTuple):
    """What stands before the data of a tensor record."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    nbytes: int


def save_tensor(path_or_file: PathOrFile, array: Any) -> None:
    """Save an array as TVM's tensor record, byte for byte as TVM writes it.

    Parameters
    ----------
    path_or_file : path-like or file
        A path, which has its name only when all is written; or a file open for writing in binary
        mode.
    array : array
        Of any shape and layout, of NumPy, or of CuPy, TVM or PyTorch. Its dtype is one that TVM
        has: bool, integers, float16 to float64, bfloat16, the float8 types of ml_dtypes, complex64
        and complex128, of either byte order.

    Raises
    ------
    ValueError
        It has another dtype; no file is written.
    """
    found = host_array(array, "what is saved")
    header = header_bytes(found)
    with writing(path_or_file) as stream:
        write_all(stream, header)
        write_data(stream, found)


def load_tensor(path_or_file: PathOrFile) -> Array:
    """Return the array of a file that TVM or `save_tensor` wrote.

    Parameters
    ----------
    path_or_file : path-like or file
        A path; or a file open in binary mode, which is read up to the end of the record.

    Returns
    -------
    ndarray
        In C order. The sub-byte dtypes and vectors of TVM are not read: see `save_tensor`.

    Raises
    ------
    ValueError
        It is no tensor record, or is too short or too long: the text names the file, the field, and
        what is there instead. Nothing is allocated that the file has not.
    """
    with reading(path_or_file) as reader:
        header = read_header(reader)
        return reader.array(header.shape, header.dtype, header.nbytes, "the data")


def header_bytes(array: Array) -> bytes:
    """Return what stands before the data of an array.

    Raises
    ------
    ValueError
        TVM has no such dtype.
    """
    return struct.pack(
        f"<QQiiiBBH{array.ndim}qq",
        MAGIC,
        0,
        CPU,
        0,
        array.ndim,
        *dtype_to_code(array.dtype),
        *array.shape,
        array.nbytes,
    )


def write_data(stream: BinaryIO, array: Array) -> None:
    """Write the elements of an array in C order, little-endian."""
    for piece in pieces(array):
        write_all(stream, piece.view(np.uint8))


def read_header(reader: Reader, tensor: str = "") -> Header:
    """Read and check what stands before the data, and that the data is there.

    Parameters
    ----------
    tensor : str
        What to call the tensor in messages, where there are several.
    """
    what = tensor or "the tensor"
    where = f"{reader.where}: {what}"
    magic, reserved = reader.numbers("QQ", f"the magic number of {what}")
    if magic != MAGIC:
        raise ValueError(f"{where} begins with {magic:#018x}, and a tensor with {MAGIC:#018x}")
    if reserved:
        raise ValueError(f"{where} has {reserved} in its reserved field: only 0 is known")
    device, number, ndim = reader.numbers("iii", f"the device of {what}")
    if device != CPU or number:
        raise ValueError(
            f"{where} has device type {device} and number {number}: only {CPU} and 0, the CPU, are "
            "allowed in files"
        )
    if not 0 <= ndim <= MAX_NDIM:
        raise ValueError(f"{where} has {ndim} dimensions: 0 to {MAX_NDIM} are allowed")
    code, bits, lanes = reader.numbers("BBH", f"the dtype of {what}")
    try:
        dtype = dtype_from_code(code, bits, lanes)
    except ValueError as e:
        raise ValueError(f"{where}: {e}") from None
    shape = reader.numbers(f"{ndim}q", f"the shape of {what}")
    expected = check_shape(shape, dtype.itemsize, where)
    nbytes = reader.number("q", f"the size of {what}")
    if nbytes != expected:
        raise ValueError(
            f"{where} has shape {list(shape)} and dtype {dtype}, which are {expected} bytes, but "
            f"says that it has {nbytes}"
        )
    reader.check(nbytes, f"the data of {what}")
    return Header(shape, dtype, nbytes)
