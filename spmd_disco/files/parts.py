"""Arrays in files, of which any part can be read without the rest."""

from __future__ import annotations

import contextlib
import itertools
import math
import mmap
import os
import stat
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import ml_dtypes
import numpy as np

from .streams import Array

__all__ = ["BFLOAT16", "SWAPPED", "FileBytes", "Source", "StoredBytes"]

#: Encodings: how the bytes become the array. float32 that are stored as bfloat16; and big-endian.
BFLOAT16, SWAPPED = "f32-to-bf16", "big-endian"

#: Where arrays begin that are used where they are: other libraries want that, too.
ALIGNMENT = 64
#: Bytes read by one call, so that signals get through.
READ = 16 << 20
#: Bytes of bfloat16 that are read before they are converted: they stay in the cache.
CONVERTED = 128 << 10
#: Separate runs of as many bytes at least are read one by one. Shorter ones are copied out of a map
#: of the file: that takes as long at 4 KiB, and at 1 KiB a third of the time. To read all and copy
#: a part takes twice as long as the map.
OWN_READ = 16 << 10
#: What is mapped at a time, and what is read at a time where nothing can be mapped.
WINDOW, SEQUENTIAL_WINDOW = 32 << 20, 1 << 20

Index = tuple[slice, ...]


class StoredBytes(Protocol):
    """The bytes of a file, or of one that is within another. They are asked for in their order."""

    #: Whether they may only be read in their order, and what is left out is read as well.
    sequential: bool

    def fill(self, out: memoryview, offset: int) -> int:
        """Fill `out` with the bytes from `offset` on; return how many there were."""

    def view(self, offset: int, nbytes: int) -> contextlib.AbstractContextManager[Any]:
        """Return a buffer that has these bytes for as long as the context lasts."""


class FileBytes:
    """The bytes of an open file.

    Parameters
    ----------
    fd : int
        Its descriptor.
    """

    sequential = False

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def fill(self, out: memoryview, offset: int) -> int:
        done = 0
        while done < len(out):
            got = os.preadv(self.fd, [out[done : done + READ]], offset + done)
            if not got:
                break
            done += got
        return done

    @contextlib.contextmanager
    def view(self, offset: int, nbytes: int) -> Iterator[Any]:
        start = offset - offset % mmap.ALLOCATIONGRANULARITY
        length = offset + nbytes - start
        with (
            mmap.mmap(self.fd, length, prot=mmap.PROT_READ, offset=start) as mapped,
            memoryview(mapped) as whole,
            whole[offset - start :] as part,
        ):
            yield part


class Source:
    """A parameter in a file.

    It holds no open file, and can be pickled.

    Parameters
    ----------
    name : str
    shape : tuple of int
    dtype : dtype
        As it is given out, in native byte order.
    path : str
        The file.
    offset : int
        Where its bytes begin.
    encoding : str
        "raw", `BFLOAT16` or `SWAPPED`.
    file_nbytes : int, optional
        The size that the file had.
    fortran : bool
        Whether the bytes are in Fortran order, the first dimension varying fastest.

    Attributes
    ----------
    nbytes : int
        In the file.
    """

    def __init__(
        self,
        name: str,
        shape: tuple[int, ...],
        dtype: np.dtype[Any],
        path: str,
        offset: int,
        *,
        encoding: str = "raw",
        file_nbytes: int | None = None,
        fortran: bool = False,
    ) -> None:
        self.name = name
        self.shape = shape
        self.dtype = dtype
        self.path = path
        self.offset = offset
        self.encoding = encoding
        self.file_nbytes = file_nbytes
        self.fortran = fortran
        stored = ml_dtypes.bfloat16 if encoding == BFLOAT16 else dtype
        self.itemsize = np.dtype(stored).itemsize
        self.nbytes = math.prod(shape) * self.itemsize

    def __repr__(self) -> str:
        return f"<Source: {self.name!r}, {self.shape} of {self.dtype}, in {self.path}>"

    def read(self) -> Array:
        """Return the array, in C order.

        Raises
        ------
        ValueError
            The file has changed.
        """
        with self._open() as stored:
            return self._read(stored, np.empty(self.shape, self.dtype), ())

    def mapped(self) -> Array | None:
        """Return the array where it lies in the page cache, as far as it is used.

        It can be written, which makes copies in memory of what is written to; the file stays as it
        is. A file that is cut short while it is mapped ends the process (SIGBUS).

        Returns
        -------
        ndarray or None
            None where the file has it in another form than memory would.

        Raises
        ------
        ValueError
            The file has changed.
        """
        if self.encoding != "raw" or self.fortran or self.offset % ALIGNMENT or not self.nbytes:
            return None
        with self._open() as stored:
            if not isinstance(stored, FileBytes):
                return None
            start = self.offset - self.offset % mmap.ALLOCATIONGRANULARITY
            data = mmap.mmap(
                stored.fd,
                self.offset + self.nbytes - start,
                flags=mmap.MAP_PRIVATE,
                prot=mmap.PROT_READ | mmap.PROT_WRITE,
                offset=start,
            )
        return np.ndarray(self.shape, self.dtype, data, offset=self.offset - start)

    def read_into(self, out: Array, index: Index = ()) -> None:
        """Fill an array with a part, of which no other bytes of the file are read.

        Runs of bytes that belong together in the file and in `out` are read into it directly.
        Shorter ones are copied out of the page cache.

        Parameters
        ----------
        out : ndarray
            Exactly of the shape and the dtype of the part; of any layout.
        index : tuple of slice
            Of step 1, for the leading dimensions; missing ones mean all.

        Raises
        ------
        ValueError
            `out` or `index` do not fit; or the file has changed since it was looked at.
        """
        bounds = self._bounds(index)
        shape = tuple(stop - start for start, stop in bounds)
        if out.shape != shape or out.dtype != self.dtype:
            raise ValueError(
                f"parameter {self.name!r}: the part has shape {shape} and dtype {self.dtype}, and "
                f"is to be read into an array of shape {out.shape} and dtype {out.dtype}"
            )
        if not out.flags.writeable:
            raise ValueError(f"parameter {self.name!r} is to be read into a read-only array")
        with self._open() as stored:
            self._read(stored, out, index)

    @contextlib.contextmanager
    def _open(self) -> Iterator[StoredBytes]:
        """Open the file, and see that the bytes are there."""
        fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            status = os.fstat(fd)
            found, end = status.st_size, self.offset + self.nbytes
            expected = self.file_nbytes
            if not stat.S_ISREG(status.st_mode):
                raise ValueError(f"{self.path} is no regular file")
            if found < end or (expected is not None and found != expected):
                size = f"at least {end}" if expected is None else str(expected)
                raise ValueError(
                    f"{self.path} has {found} bytes, and for parameter {self.name!r} it needs to "
                    f"have {size}: it has changed"
                )
            yield FileBytes(fd)
        finally:
            os.close(fd)

    def _bounds(self, index: Index) -> list[tuple[int, int]]:
        """Return start and stop for each dimension."""
        if not isinstance(index, tuple) or len(index) > len(self.shape):
            raise ValueError(
                f"parameter {self.name!r} has {len(self.shape)} dimensions: the index of a part is "
                f"a tuple of at most as many slices, not {index!r}"
            )
        bounds = []
        for part, n in itertools.zip_longest(index, self.shape, fillvalue=slice(None)):
            if not isinstance(part, slice) or part.step not in (None, 1):
                raise ValueError(
                    f"parameter {self.name!r}: the index of a part has slices of step 1, not "
                    f"{part!r}"
                )
            start, stop, _ = part.indices(n)  # type: ignore[arg-type]
            bounds.append((start, max(start, stop)))
        return bounds

    def _read(self, stored: StoredBytes, out: Array, index: Index) -> Array:
        bounds, shape, target = self._bounds(index), self.shape, out
        if self.fortran:
            bounds, shape, target = bounds[::-1], shape[::-1], out.T
        if target.size:
            strides = [self.itemsize] * len(shape)
            for i in range(len(shape) - 1, 0, -1):
                strides[i - 1] = strides[i] * shape[i]
            start = self.offset + sum(b[0] * s for b, s in zip(bounds, strides, strict=True))
            _Reading(self, stored, strides).fill(target, start)
        if self.encoding == SWAPPED:
            out.byteswap(inplace=True)
        return out


class _Reading:
    """One part of one array being read."""

    def __init__(self, source: Source, stored: StoredBytes, strides: Sequence[int]) -> None:
        self.source = source
        self.stored = stored
        self.strides = strides
        self.itemsize = source.itemsize
        self.converted = source.encoding == BFLOAT16

    def fill(self, out: Array, start: int) -> None:
        """Fill an array with what begins at byte `start`."""
        run, outer = self._runs(out.shape)
        if out.flags.c_contiguous and (outer == 0 or run * self.itemsize >= OWN_READ):
            flat = out.reshape(-1)
            ranges = [
                range(0, n * stride, stride)
                for n, stride in zip(out.shape[:outer], self.strides[:outer], strict=True)
            ]
            data, length = flat.view(np.uint8).data, run * self.itemsize
            for i, place in enumerate(itertools.product(*ranges)):
                if self.converted:
                    self._fill_converted(flat[i * run : (i + 1) * run], start + sum(place))
                else:
                    self._fill_bytes(data[i * length : (i + 1) * length], start + sum(place))
        else:
            self._copy(out, start, 0)

    def _runs(self, shape: Sequence[int]) -> tuple[int, int]:
        """Return the elements of a run, and how many dimensions there are outside of it."""
        run = 1
        for i in range(len(shape) - 1, -1, -1):
            if shape[i] > 1 and self.strides[i] != run * self.itemsize:
                return run, i + 1
            run *= shape[i]
        return run, 0

    def _fill_converted(self, out: Array, start: int) -> None:
        step = CONVERTED // self.itemsize
        stored = np.empty(min(step, len(out)), ml_dtypes.bfloat16)
        for i in range(0, len(out), step):
            some = stored[: len(out) - i]
            self._fill_bytes(some.view(np.uint8).data, start + i * self.itemsize)
            out[i : i + len(some)] = some

    def _fill_bytes(self, out: memoryview, start: int) -> None:
        got = self.stored.fill(out, start)
        if got != len(out):
            raise ValueError(
                f"{self.source.path} ends at byte {start + got}, and parameter "
                f"{self.source.name!r} needs {len(out) - got} more: it has changed"
            )

    def _copy(self, out: Array, start: int, axis: int) -> None:
        """Copy a part out of the page cache, in windows of the file.

        `axis` is the axis of the array in the file that is the first one of `out`.
        """
        strides = self.strides[axis:]
        span = sum((n - 1) * s for n, s in zip(out.shape, strides, strict=True)) + self.itemsize
        limit = SEQUENTIAL_WINDOW if self.stored.sequential else WINDOW
        if span > limit and out.ndim:
            if len(out) == 1:
                self._copy(out[0], start, axis + 1)
                return
            step = max(limit // strides[0], 1)
            for i in range(0, len(out), step):
                self._copy(out[i : i + step], start + i * strides[0], axis)
            return
        with self.stored.view(start, span) as data:
            if self.converted:
                out[...] = np.ndarray(out.shape, ml_dtypes.bfloat16, data, strides=strides)
            elif strides[-1] == out.strides[-1] == self.itemsize:
                # As bytes, since the file's elements may lie at odd addresses.
                plain = out.view(np.uint8)
                plain[...] = np.ndarray(plain.shape, np.uint8, data, strides=(*strides[:-1], 1))
            else:
                kind = f"V{self.itemsize}"
                out.view(kind)[...] = np.ndarray(out.shape, kind, data, strides=strides)
