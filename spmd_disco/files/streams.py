"""Open files and paths alike, for reading and for writing."""

from __future__ import annotations

import contextlib
import io
import os
import stat
import struct
import uuid
from collections.abc import Iterator
from typing import Any, BinaryIO

import numpy as np

__all__ = ["PathOrFile", "Reader", "host_array", "pieces", "reading", "write_all", "writing"]

PathOrFile = str | os.PathLike[str] | BinaryIO
Array = np.ndarray[Any, Any]

#: What is copied or converted at a time, in bytes.
PIECE = 1 << 20


# ---- Reading


class Reader:
    """Read what is in a file in order, and never more than is there.

    Parameters
    ----------
    stream : file
        Binary, at the beginning of what is to be read.
    where : str
        What to call it in messages.

    Attributes
    ----------
    left : int or None
        The bytes that are still to come; None where the file cannot tell.
    """

    def __init__(self, stream: BinaryIO, where: str) -> None:
        self.stream = stream
        self.where = where
        self.position = 0
        self.left: int | None = None
        if _seekable(stream):
            here = stream.tell()
            self.left = max(stream.seek(0, os.SEEK_END) - here, 0)
            stream.seek(here)

    def check(self, nbytes: int, what: str) -> None:
        """See that so many bytes are still to come, where the file can tell."""
        if self.left is not None and nbytes > self.left:
            self._too_short(what, nbytes, self.left)

    def _too_short(self, what: str, nbytes: int, found: int) -> None:
        raise ValueError(
            f"{self.where} is too short: at byte {self.position} {what} needs {nbytes} bytes, and "
            f"{found} are there"
        )

    def take(self, nbytes: int, what: str) -> bytes | bytearray:
        """Return the next `nbytes` bytes. Never more is allocated than has been read."""
        self.check(nbytes, what)
        data = bytearray()
        while len(data) < nbytes:
            piece: Any = self.stream.read(min(nbytes - len(data), PIECE))
            if not isinstance(piece, bytes | bytearray | memoryview):
                kind = type(piece).__name__
                raise TypeError(
                    f"{self.where} gives {kind}: only files opened in binary mode ('rb'), which "
                    "block, can be read"
                )
            if not piece:
                self._too_short(what, nbytes, len(data))
            data += piece
        self._advance(nbytes)
        return data

    def array(self, shape: tuple[int, ...], dtype: np.dtype[Any], nbytes: int, what: str) -> Array:
        """Return the array that comes next."""
        self.check(nbytes, what)
        readinto = getattr(self.stream, "readinto", None)
        if self.left is None or readinto is None:
            # Nobody knows whether all that is there: grow with what comes.
            return np.frombuffer(self.take(nbytes, what), np.uint8).view(dtype).reshape(shape)
        out = np.empty(shape, dtype)
        rest = out.reshape(-1).view(np.uint8).data
        while rest:
            got = readinto(rest[: 16 * PIECE])
            if not got:
                self._too_short(what, nbytes, nbytes - len(rest))
            rest = rest[got:]
        self._advance(nbytes)
        return out

    def skip(self, nbytes: int, what: str) -> None:
        """Go past the next bytes of a file that can tell its size."""
        self.check(nbytes, what)
        self.stream.seek(nbytes, os.SEEK_CUR)
        self._advance(nbytes)

    def numbers(self, layout: str, what: str) -> tuple[int, ...]:
        """Return the next numbers, little-endian, by a layout as in `struct`."""
        return struct.unpack("<" + layout, self.take(struct.calcsize("<" + layout), what))

    def number(self, layout: str, what: str) -> int:
        """Return the next number."""
        return self.numbers(layout, what)[0]

    def at_end(self) -> None:
        """See that nothing more comes."""
        if self.left:
            raise ValueError(
                f"{self.where} is too long: it has {self.left} bytes behind what belongs into it, "
                f"which ends at byte {self.position}"
            )

    def _advance(self, nbytes: int) -> None:
        self.position += nbytes
        if self.left is not None:
            self.left -= nbytes


def _seekable(stream: BinaryIO) -> bool:
    ask = getattr(stream, "seekable", None)
    return bool(ask()) if ask is not None else False


@contextlib.contextmanager
def reading(path_or_file: PathOrFile) -> Iterator[Reader]:
    """Read a path to its end, or an open binary file from where it is.

    Raises
    ------
    TypeError
        It is neither.
    ValueError
        At the end: the path has not been read to its end.
    """
    if hasattr(path_or_file, "read"):
        stream = _binary(path_or_file)
        yield Reader(stream, str(getattr(stream, "name", "the file")))
        return
    path = _path(path_or_file)
    with open(path, "rb", opener=_open_at_once) as stream:
        _regular(stream, path)
        reader = Reader(stream, path)
        yield reader
        reader.at_end()


def _open_at_once(path: str, flags: int) -> int:
    """Open a file without waiting for the other end of a pipe, which is refused then."""
    return os.open(path, flags | os.O_NONBLOCK)


def _path(path_or_file: Any) -> str:
    try:
        return os.fsdecode(path_or_file)
    except TypeError:
        kind = type(path_or_file).__name__
        raise TypeError(f"a path or a file opened in binary mode is needed, not {kind}") from None


def _binary(file: Any) -> BinaryIO:
    if isinstance(file, io.TextIOBase):
        raise TypeError(f"{file!r} is open in text mode: open it in binary mode ('rb', 'wb')")
    found: BinaryIO = file
    return found


def _regular(stream: BinaryIO, path: str) -> None:
    if not stat.S_ISREG(os.fstat(stream.fileno()).st_mode):
        raise ValueError(f"{path} is no regular file: open it, and pass the open file")


# ---- Writing


@contextlib.contextmanager
def writing(path_or_file: PathOrFile) -> Iterator[BinaryIO]:
    """Write to a path, which gets its name when all is written, or to an open binary file."""
    if hasattr(path_or_file, "write"):
        yield _binary(path_or_file)
        return
    path = os.path.realpath(_path(path_or_file))  # what a link leads to is replaced, not the link
    if os.path.exists(path) and not os.path.isfile(path):
        with open(path, "wb") as stream:  # a device or a pipe; a folder raises
            yield stream
        return
    temporary = temporary_name(path)
    try:
        with open(temporary, "xb") as stream:
            if os.path.exists(path):
                os.fchmod(stream.fileno(), stat.S_IMODE(os.stat(path).st_mode))
            yield stream
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        raise


def temporary_name(path: str) -> str:
    """Return a name beside `path` that nobody else uses."""
    folder, name = os.path.split(path)
    return os.path.join(folder, f".{name[:100]}.{uuid.uuid4().hex[:12]}.tmp")


def write_all(stream: BinaryIO, data: Any) -> None:
    """Write all of a buffer, also where a file takes less at a time."""
    rest = memoryview(data).cast("B")
    while rest:
        written = stream.write(rest)
        if written is None or written == len(rest):
            return
        rest = rest[written:]


# ---- Arrays


def host_array(value: Any, what: str) -> Array:
    """Return `value` as an ndarray in this process's memory, a copy only where it has to be.

    Raises
    ------
    TypeError
        It is no array, or a masked one.
    """
    if not isinstance(value, np.ndarray):
        if hasattr(value, "__cuda_array_interface__") and hasattr(value, "get"):
            value = value.get()  # of CuPy
        elif callable(getattr(value, "numpy", None)):
            value = value.numpy()  # of TVM, PyTorch
        value = np.asarray(value)
    if isinstance(value, np.ma.MaskedArray):
        raise TypeError(f"{what} is a masked array, whose mask would be lost: pass its .data")
    found: Array = value.view(np.ndarray)
    return found


def pieces(array: Array, nbytes: int = PIECE) -> Iterator[Array]:
    """Give the elements in C order and native byte order, as 1-d arrays of about `nbytes` bytes.

    What is in this order already is not copied.
    """
    native = array.dtype.newbyteorder("=")
    if array.flags.c_contiguous:
        flat = array.reshape(-1)
        if flat.dtype == native:
            step = max(nbytes // native.itemsize, 1)
            for i in range(0, flat.size, step):
                yield flat[i : i + step]
            return
        array = flat
    if array.nbytes <= nbytes or not array.ndim:
        if array.size:
            yield np.ascontiguousarray(array, native).reshape(-1)
        return
    if len(array) == 1:
        yield from pieces(array[0], nbytes)
        return
    step = max(nbytes // max(array[0].nbytes, 1), 1)
    for i in range(0, len(array), step):
        yield from pieces(array[i : i + step], nbytes)
