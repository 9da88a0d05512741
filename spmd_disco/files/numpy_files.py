"""NumPy's own files: .npy, and .npz, which are zip files of these.

What is not compressed is read like any other file, in parts. Of what is compressed, all that stands
before the end of a part is uncompressed, piece by piece. Pickles are never loaded.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import struct
import tokenize
import zipfile
import zlib
from collections.abc import Iterator
from typing import Any, BinaryIO, cast

import numpy as np

from .dtypes import check_shape
from .parts import SWAPPED, Source, StoredBytes
from .untrusted import file_size, shown

__all__ = ["npy_sources", "npz_sources"]

#: Deflate makes no more than so many bytes out of one.
INFLATION = 1032
#: What NumPy raises where a header, which is an expression of Python, is damaged.
BAD_HEADER = (
    ValueError,
    TypeError,
    SyntaxError,
    tokenize.TokenError,
    RecursionError,
    MemoryError,
    OverflowError,
)
#: The end of a header that NumPy itself would read, and more than it ever writes.
MAX_HEADER = 1 << 16


def npy_sources(path: str) -> list[Source]:
    """Return the array of an .npy file, by the name of the file.

    Raises
    ------
    ValueError
        It is none, or is too short or too long, or holds Python objects.
    """
    name = os.path.splitext(os.path.basename(path))[0]
    size = file_size(path)
    with open(path, "rb") as stream:
        options = _header(stream, path)
        return [_source(name, path, stream.tell(), size, size, path, options)]


def npz_sources(path: str) -> list[Source]:
    """Return the arrays of an .npz file.

    Raises
    ------
    ValueError
        It is none, or a member is no array, or is encrypted, or compressed in another way than by
        NumPy, or its size is not the one that its header says.
    """
    size = file_size(path)
    try:
        with open(path, "rb") as stream, zipfile.ZipFile(stream) as archive:
            sources = [_member(archive, info, stream, path, size) for info in archive.infolist()]
    except (zipfile.BadZipFile, zlib.error, NotImplementedError, EOFError, struct.error) as e:
        raise ValueError(f"{path} is no .npz file, or is damaged: {e}") from None
    stored = sorted((s for s in sources if type(s) is Source), key=lambda s: s.offset)
    for a, b in itertools.pairwise(stored):
        if b.offset < a.offset + a.nbytes:
            raise ValueError(f"{path}: members {a.name!r} and {b.name!r} overlap")
    return sources


def _member(
    archive: zipfile.ZipFile, info: zipfile.ZipInfo, stream: BinaryIO, path: str, size: int
) -> Source:
    where = f"{path}: {shown(info.filename)}"
    if not 0 <= info.header_offset < size:
        raise ValueError(f"{where} is to be at byte {info.header_offset}, and the file has {size}")
    if info.flag_bits & 1:
        raise ValueError(f"{where} is encrypted: it cannot be read")
    if not info.filename.endswith(".npy"):
        raise ValueError(f"{where} is no array: in .npz files there are only .npy files")
    name = info.filename.removesuffix(".npy")
    if info.compress_type == zipfile.ZIP_DEFLATED:
        # Sizes are claims: these cannot be true.
        if info.file_size > INFLATION * (info.compress_size + 1) or info.compress_size > size:
            raise ValueError(
                f"{where} claims to be {info.file_size} bytes out of {info.compress_size}: that "
                "cannot be"
            )
        with archive.open(info) as member:
            options = _header(cast(BinaryIO, member), where)
            return _source(
                name, path, member.tell(), info.file_size, size, where, options, info.filename
            )
    if info.compress_type != zipfile.ZIP_STORED:
        raise ValueError(
            f"{where} is compressed by method {info.compress_type}: NumPy has 8, and 0"
        )
    stream.seek(info.header_offset)
    local = stream.read(30)
    if len(local) != 30 or not local.startswith(b"PK\x03\x04"):
        raise ValueError(f"{where} is not where the list of members says: it is damaged")
    start = info.header_offset + 30 + sum(struct.unpack("<HH", local[26:30]))
    end = start + info.file_size
    if end > size or info.compress_size != info.file_size:
        raise ValueError(
            f"{where} is to be {info.file_size} bytes at {start}, and the file has {size}"
        )
    stream.seek(start)
    options = _header(stream, where)
    return _source(name, path, stream.tell(), end, size, where, options)


def _header(stream: BinaryIO, where: str) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    """Read the header of an .npy file: shape, whether in Fortran order, dtype."""
    lib = np.lib.format
    try:
        version = lib.read_magic(stream)
        if version == (1, 0):
            return lib.read_array_header_1_0(stream, MAX_HEADER)
        if version == (2, 0):
            return lib.read_array_header_2_0(stream, MAX_HEADER)
    except BAD_HEADER as e:
        raise ValueError(f"{where} is no .npy file, or its header is damaged: {e}") from None
    raise ValueError(f"{where} is of version {version} of .npy files: allowed are 1.0 and 2.0")


def _source(
    name: str,
    path: str,
    start: int,
    end: int,
    size: int,
    where: str,
    options: tuple[tuple[int, ...], bool, np.dtype[Any]],
    member: str | None = None,
) -> Source:
    """Return what lies between two places, of a file or of a compressed member."""
    shape, fortran, dtype = options
    if dtype.hasobject:
        raise ValueError(
            f"{where} holds Python objects (dtype {dtype}), which are pickled: only numbers and "
            "other values of fixed size are read"
        )
    if not dtype.itemsize or dtype.subdtype is not None:
        raise ValueError(f"{where} has dtype {dtype}, whose elements cannot be read")
    if any(type(n) is not int for n in shape):
        raise ValueError(f"{where} has shape {shape!r}: dimensions have to be integers")
    native = dtype.newbyteorder("=")
    swapped = native != dtype
    nbytes = check_shape(shape, dtype.itemsize, where)
    if start + nbytes != end:
        raise ValueError(
            f"{where} has {end - start} bytes behind its header, and {list(shape)} of {dtype} are "
            f"{nbytes}"
        )
    encoding = SWAPPED if swapped else "raw"
    kind = Source
    if member is not None:
        kind = _Compressed
    source = kind(
        name,
        shape,
        native,
        path,
        start,
        encoding=encoding,
        file_nbytes=size,
        fortran=fortran and len(shape) > 1,
    )
    if isinstance(source, _Compressed):
        source.member = cast(str, member)
    return source


class _Compressed(Source):
    """A parameter in a compressed member of a zip file."""

    member: str

    @contextlib.contextmanager
    def _open(self) -> Iterator[StoredBytes]:
        if (found := file_size(self.path)) != self.file_nbytes:
            raise ValueError(
                f"{self.path} has {found} bytes, and {self.file_nbytes} when it was opened: it has "
                f"changed, and parameter {self.name!r} cannot be read"
            )
        try:
            with zipfile.ZipFile(self.path) as archive, archive.open(self.member) as stream:
                yield _Inflated(cast(BinaryIO, stream))
        except (zipfile.BadZipFile, zlib.error, KeyError, EOFError) as e:
            raise ValueError(f"{self.path}: parameter {self.name!r} is damaged: {e}") from None


class _Inflated:
    """The bytes of a compressed member, as they come."""

    sequential = True

    def __init__(self, stream: BinaryIO) -> None:
        self.stream = stream

    def fill(self, out: memoryview, offset: int) -> int:
        self.stream.seek(offset)  # forward: what lies between is uncompressed, too
        done = 0
        while done < len(out):
            got = self.stream.readinto(out[done:])  # type: ignore[attr-defined]
            if not got:
                break
            done += got
        return done

    @contextlib.contextmanager
    def view(self, offset: int, nbytes: int) -> Iterator[Any]:
        data = memoryview(bytearray(nbytes))
        got = self.fill(data, offset)
        if got != nbytes:
            raise ValueError(f"the data end {nbytes - got} bytes too early")
        yield data
