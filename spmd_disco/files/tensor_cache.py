"""TVM's tensor cache: an index in JSON, and data files with the bytes of many arrays.

The layout is the one of ``tvm.contrib.tvmjs`` and ``runtime/vm/tensor_cache_support.cc``.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .dtypes import check_shape, dtype_from_string
from .parts import BFLOAT16, Source
from .streams import Array
from .untrusted import (
    data_file,
    dimensions,
    field,
    file_size,
    natural,
    parse_json,
    read_json,
    shown,
)

__all__ = [
    "FORMATS",
    "INDEX_NAMES",
    "DataFile",
    "TensorCacheIndex",
    "TensorRecord",
    "load_tensor_cache",
    "tensor_cache_metadata",
]

#: The names of an index, in the order in which they are looked for; the last one is older.
INDEX_NAMES = ("tensor-cache.json", "ndarray-cache.json")
FORMATS = ("raw", "f32-to-bf16")

Path = str | os.PathLike[str]


@dataclass(frozen=True)
class TensorRecord:
    """Where a parameter is, and what it is."""

    name: str
    shape: tuple[int, ...]
    #: As it is given out.
    dtype: np.dtype[Any]
    #: "raw" or "f32-to-bf16"
    format: str
    #: The data file.
    path: str
    offset: int
    #: In the file.
    nbytes: int
    #: The size that the data file has to have.
    file_nbytes: int

    @property
    def encoding(self) -> str:
        """How the bytes become the array, as `Source` calls it."""
        return BFLOAT16 if self.format == "f32-to-bf16" and self.dtype == np.float32 else "raw"

    def source(self) -> Source:
        """Return what reads it, and parts of it."""
        return Source(
            self.name,
            self.shape,
            self.dtype,
            self.path,
            self.offset,
            encoding=self.encoding,
            file_nbytes=self.file_nbytes,
        )


@dataclass(frozen=True)
class DataFile:
    """A data file, as the index says."""

    name: str
    path: str
    nbytes: int
    md5sum: str | None


class TensorCacheIndex:
    """The index of a tensor cache, checked.

    Attributes
    ----------
    metadata : dict
        What whoever made the cache put there. TVM lets that be anything that JSON has.
    records : list of TensorRecord
        In the order of the index.
    files : list of DataFile
    """

    def __init__(
        self, path: str, metadata: Any, records: list[TensorRecord], files: list[DataFile]
    ) -> None:
        self.path = path
        self.metadata = metadata
        self.records = records
        self.files = files

    def __repr__(self) -> str:
        return f"<TensorCacheIndex: {len(self.records)} parameters of {self.path}>"

    @classmethod
    def open(cls, path: Path) -> TensorCacheIndex:
        """Read the index of a folder, or an index file, and see that the data files are there.

        Raises
        ------
        ValueError
            Something in it is not as it should be, or a data file has another size.
        OSError
            There is no index or no data file.
        """
        index = cls._read(path)
        for file in index.files:
            found = file_size(file.path)
            if found != file.nbytes:
                raise ValueError(
                    f"{file.path} has {found} bytes, and {index.path} says that it has "
                    f"{file.nbytes}"
                )
        return index

    @classmethod
    def _read(cls, path: Path) -> TensorCacheIndex:
        file = index_file(path)
        return cls._checked(read_json(file), os.path.dirname(file), file)

    @classmethod
    def parse(cls, json_text: str, folder: Path) -> TensorCacheIndex:
        """Check an index given as text. Data files are not looked for: they may be elsewhere.

        Parameters
        ----------
        folder : path-like
            Where the data files are.

        Raises
        ------
        ValueError
            Something in it is not as it should be: the text names the field and its value.
        """
        where = "the index of the tensor cache"
        return cls._checked(parse_json(json_text, where), os.fsdecode(folder), where)

    @classmethod
    def _checked(cls, content: Any, folder: str, where: str) -> TensorCacheIndex:
        records: list[TensorRecord] = []
        files: list[DataFile] = []
        known: set[str] = set()
        places: dict[str, str] = {}
        for i, shard in enumerate(field(content, "records", list, where)):
            file = _data_file(shard, folder, f"data file {i} of {where}")
            real = os.path.realpath(file.path)
            if real in places:
                also = "" if places[real] == file.name else f", also as {places[real]!r}"
                raise ValueError(f"{where} has the data file {file.name!r} twice{also}")
            places[real] = file.name
            files.append(file)
            own = [
                _record(entry, file, f"record {j} of {file.name!r} in {where}")
                for j, entry in enumerate(
                    field(shard, "records", list, f"{file.name!r} in {where}")
                )
            ]
            _check_overlaps(own, f"{file.name!r} in {where}")
            for record in own:
                if record.name in known:
                    raise ValueError(f"{where} has parameter {record.name!r} twice")
                known.add(record.name)
            records += own
        return cls(where, content.get("metadata", {}), records, files)


def _data_file(shard: Any, folder: str, where: str) -> DataFile:
    name = field(shard, "dataPath", str, where)
    path = data_file(folder, name, where)
    kind = field(shard, "format", str, where)
    if kind != "raw-shard":
        raise ValueError(f"'format' of {where} is {shown(kind)}: only 'raw-shard' is allowed")
    md5sum = None if "md5sum" not in shard else field(shard, "md5sum", str, where)
    return DataFile(name, path, natural(shard, "nbytes", where), md5sum)


def _record(entry: Any, file: DataFile, where: str) -> TensorRecord:
    name = field(entry, "name", str, where)
    where = f"parameter {shown(name)}, {where},"
    kind = field(entry, "format", str, where)
    if kind not in FORMATS:
        raise ValueError(f"'format' of {where} is {shown(kind)}: allowed are {', '.join(FORMATS)}")
    text = field(entry, "dtype", str, where)
    try:
        dtype = dtype_from_string(text)
    except ValueError as e:
        raise ValueError(f"{where} {e}") from None
    shape = dimensions(entry, "shape", where)
    expected = check_shape(shape, dtype.itemsize, where)
    stored = text
    if kind == "f32-to-bf16" and text == "float32":
        expected //= 2
        stored = "bfloat16"
    nbytes = natural(entry, "nbytes", where)
    if nbytes != expected:
        raise ValueError(
            f"'nbytes' of {where} is {nbytes}, but {list(shape)} of {stored} are {expected} bytes"
        )
    offset = natural(entry, "byteOffset", where)
    if offset + nbytes > file.nbytes:
        raise ValueError(
            f"{where} lies at bytes {offset} to {offset + nbytes}, outside its file, which has "
            f"{file.nbytes}"
        )
    return TensorRecord(name, shape, dtype, kind, file.path, offset, nbytes, file.nbytes)


def _check_overlaps(records: Sequence[TensorRecord], where: str) -> None:
    filled = sorted((r for r in records if r.nbytes), key=lambda r: r.offset)
    for a, b in itertools.pairwise(filled):
        if b.offset < a.offset + a.nbytes:
            raise ValueError(
                f"parameters {a.name!r} and {b.name!r} of {where} overlap: the first one ends at "
                f"byte {a.offset + a.nbytes}, and the other one begins at {b.offset}"
            )


def index_file(path: Path) -> str:
    """Return the index file of a folder, or the one that is given itself.

    Raises
    ------
    FileNotFoundError
        There is none in the folder.
    """
    given = os.fsdecode(path)
    if not os.path.isdir(given):
        return given
    for name in INDEX_NAMES:
        file = os.path.join(given, name)
        if os.path.exists(file):
            return file
    raise FileNotFoundError(f"{given} has no tensor cache: neither {' nor '.join(INDEX_NAMES)}")


def tensor_cache_metadata(folder: Path) -> Any:
    """Return the metadata of a tensor cache, as a rule a dict. Data files are not looked at.

    Parameters
    ----------
    folder : path-like
        With ``tensor-cache.json`` or ``ndarray-cache.json``; or an index file.

    Raises
    ------
    ValueError
        The index is not as it should be.
    OSError
        There is none.
    """
    return TensorCacheIndex._read(folder).metadata


def load_tensor_cache(folder: Path, verify: bool = False) -> dict[str, Array]:
    """Return all parameters of a tensor cache of TVM or MLC.

    Parameters
    ----------
    folder : path-like
        With ``tensor-cache.json`` or ``ndarray-cache.json``; or an index file.
    verify : bool
        Whether to compare the MD5 of each data file with the index, before anything is loaded.

    Returns
    -------
    dict of str to ndarray
        In the order of the index; each array has memory of its own. What is stored as bfloat16 by
        the format ``"f32-to-bf16"`` comes as float32. See `tensor_cache_metadata` for the rest.

    Raises
    ------
    ValueError
        Index and files are not as they should be: fields of the wrong type, sizes that do not fit
        shapes and dtypes, parameters outside their file or overlapping, names that are there twice,
        data files outside the folder or of another size, an MD5 that differs. The text names the
        file, the field and both values. Nothing is allocated that the files have not.
    OSError
        There is no index, or no data file.
    """
    index = TensorCacheIndex.open(folder)
    if verify:
        for file in index.files:
            _verify(file, index.path)
    return {record.name: record.source().read() for record in index.records}


def _verify(file: DataFile, where: str) -> None:
    if file.md5sum is None:
        raise ValueError(f"{where} has no 'md5sum' for {file.name!r}: it cannot be verified")
    found = file_md5(file.path)
    if found != file.md5sum.lower():
        raise ValueError(
            f"{file.path} has MD5 {found}, and {where} says that it has {shown(file.md5sum)}: the "
            "file has changed or is damaged"
        )


def file_md5(path: str) -> str:
    """Return the MD5 of a file in hexadecimal."""
    import hashlib

    known = hashlib.md5(usedforsecurity=False)
    buffer = bytearray(1 << 20)
    with open(path, "rb", buffering=0) as stream:
        while got := stream.readinto(buffer):
            known.update(memoryview(buffer)[:got])
    return known.hexdigest()
