"""TVM's parameter dictionary: names, and then as many tensor records.

Little-endian: u64 magic; u64 0; u64 n; n times u64 length and name in UTF-8; u64 n again; n tensor
records. It is what ``tvm.runtime.save_param_dict`` makes, in the order of the dict.
"""

from __future__ import annotations

import io
import struct
from collections.abc import Iterable, Mapping
from typing import Any, BinaryIO

from .records import header_bytes, read_header, write_data
from .streams import Array, PathOrFile, Reader, host_array, reading, write_all, writing

__all__ = [
    "MAGIC",
    "load_param_dict",
    "load_param_dict_from_bytes",
    "named_arrays",
    "read_names",
    "save_param_dict",
    "save_param_dict_to_bytes",
]

MAGIC = 0xF7E58D4F05049CB7

Params = Mapping[str, Any] | Iterable[tuple[str, Any]]


def save_param_dict(path_or_file: PathOrFile, params: Params) -> None:
    """Save named arrays as TVM's ``save_param_dict_to_file`` does, byte for byte.

    Parameters
    ----------
    path_or_file : path-like or file
        A path, which has its name only when all is written; or a file open for writing in binary
        mode.
    params : dict or iterable of (str, array)
        Arrays as in `save_tensor`. The file has their order.

    Raises
    ------
    TypeError, ValueError
        A name is no str or is there twice, or TVM has no such dtype; no file is written.
    """
    arrays = dict(named_arrays(params))
    headers = {name: _named_header(name, array) for name, array in arrays.items()}
    with writing(path_or_file) as stream:
        _write(stream, arrays, headers)


def save_param_dict_to_bytes(params: Params) -> bytes:
    """Return what `save_param_dict` writes: TVM's ``save_param_dict``."""
    stream = io.BytesIO()
    save_param_dict(stream, params)
    return stream.getvalue()


def load_param_dict(path_or_file: PathOrFile) -> dict[str, Array]:
    """Return the named arrays of a file that TVM or `save_param_dict` wrote.

    Parameters
    ----------
    path_or_file : path-like or file
        A path; or a file open in binary mode, which is read up to the end of the last record.

    Returns
    -------
    dict of str to ndarray
        In the order of the file; each array has memory of its own.

    Raises
    ------
    ValueError
        It is no parameter dictionary, or is too short or too long, or has a name twice: the text
        names the file, the field, and what is there instead. Nothing is allocated that the file has
        not.
    """
    with reading(path_or_file) as reader:
        return _read(reader)


def load_param_dict_from_bytes(data: bytes | bytearray | memoryview) -> dict[str, Array]:
    """Return the named arrays of bytes that TVM or `save_param_dict_to_bytes` made.

    The arrays are copies. See `load_param_dict`; also what is too long is refused.
    """
    if not isinstance(data, bytes | bytearray | memoryview):
        raise TypeError(f"a parameter dictionary is read from bytes, not {type(data).__name__}")
    reader = Reader(io.BytesIO(data), "the bytes")
    params = _read(reader)
    reader.at_end()
    return params


def named_arrays(params: Params) -> Iterable[tuple[str, Array]]:
    """Give names and arrays, as they come.

    Raises
    ------
    TypeError, ValueError
        A name is no str, no valid Unicode, or is there twice; or there is no array.
    """
    seen = set()
    for item in params.items() if isinstance(params, Mapping) else params:
        try:
            name, value = item
        except (TypeError, ValueError):
            kind = type(item).__name__
            raise TypeError(
                f"parameters are a dict, or pairs of a name and an array, not {kind}"
            ) from None
        if not isinstance(name, str):
            raise TypeError(
                f"the name of a parameter is a str, not {type(name).__name__}: {name!r}"
            )
        if name in seen:
            raise ValueError(f"parameter {name!r} is there twice")
        seen.add(name)
        try:
            name.encode()
        except UnicodeEncodeError as e:
            raise ValueError(f"the name {name!r} cannot be written: {e}") from None
        yield name, host_array(value, f"parameter {name!r}")


def read_names(reader: Reader) -> list[str]:
    """Read what stands before the first tensor record."""
    magic, reserved = reader.numbers("QQ", "the magic number")
    if magic != MAGIC:
        raise ValueError(
            f"{reader.where} begins with {magic:#018x}, and a parameter dictionary with "
            f"{MAGIC:#018x}"
        )
    if reserved:
        raise ValueError(f"{reader.where} has {reserved} in its reserved field: only 0 is known")
    count = reader.number("Q", "the number of names")
    reader.check(count * 8, f"{count} names")
    names: dict[str, None] = {}
    for i in range(count):
        length = reader.number("Q", f"the length of name {i} of {count}")
        raw = reader.take(length, f"name {i} of {count}")
        try:
            name = raw.decode()
        except UnicodeDecodeError as e:
            raise ValueError(f"{reader.where}: name {i} of {count} is not UTF-8: {e}") from None
        if name in names:
            raise ValueError(f"{reader.where} has parameter {name!r} twice")
        names[name] = None
    tensors = reader.number("Q", "the number of tensors")
    if tensors != count:
        raise ValueError(f"{reader.where} has {count} names, but {tensors} tensors")
    return list(names)


def _read(reader: Reader) -> dict[str, Array]:
    params = {}
    for name in read_names(reader):
        what = f"parameter {name!r}"
        header = read_header(reader, what)
        params[name] = reader.array(header.shape, header.dtype, header.nbytes, what)
    return params


def _named_header(name: str, array: Array) -> bytes:
    try:
        return header_bytes(array)
    except ValueError as e:
        raise ValueError(f"parameter {name!r}: {e}") from None


def _write(stream: BinaryIO, arrays: Mapping[str, Array], headers: Mapping[str, bytes]) -> None:
    encoded = [name.encode() for name in arrays]
    write_all(stream, struct.pack("<QQQ", MAGIC, 0, len(encoded)))
    for name in encoded:
        write_all(stream, struct.pack("<Q", len(name)) + name)
    write_all(stream, struct.pack("<Q", len(encoded)))
    for key, array in arrays.items():
        write_all(stream, headers[key])
        write_data(stream, array)
