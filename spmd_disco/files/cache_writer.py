"""Writing tensor caches as ``tvm.contrib.tvmjs.dump_tensor_cache`` does, byte for byte."""

from __future__ import annotations

import contextlib
import copy
import hashlib
import json
import numbers
import os
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from .bfloat16 import to_bfloat16_bits
from .dtypes import dtype_to_string
from .param_dict import named_arrays
from .streams import Array, pieces, temporary_name, write_all
from .tensor_cache import FORMATS, INDEX_NAMES
from .untrusted import read_json

__all__ = ["dump_tensor_cache", "remove_indexes"]

#: The index that gives all that is stored as bfloat16 as such.
BFLOAT16_INDEX = "tensor-cache-b16.json"

Record = dict[str, Any]


def dump_tensor_cache(
    folder: str | os.PathLike[str],
    params: Mapping[str, Any] | Iterable[tuple[str, Any]],
    metadata: Any = None,
    encode_format: str | Mapping[str, str] = "f32-to-bf16",
    shard_cap_mb: float = 32,
) -> None:
    """Save named arrays as a tensor cache of TVM, byte for byte as TVM does.

    The folder gets ``tensor-cache.json``, data files ``params_shard_0.bin``, ``…_1.bin``, …, and
    where something is stored as bfloat16 also ``tensor-cache-b16.json``, which gives it as such.
    An older cache in the folder is replaced when all is written, and not if something goes wrong
    before.

    Parameters
    ----------
    folder : path-like
        It is made if it is not there.
    params : dict or iterable of (str, array)
        Arrays as in `save_tensor`. Of an iterator no more than one is needed at a time.
    metadata : dict, optional
        Goes into the index: whatever can be JSON, or a callable that returns it, called when all
        arrays are written.
    encode_format : str or dict of str to str
        ``"f32-to-bf16"`` stores float32 as bfloat16, in half the bytes: rounded to the nearest, or
        where it is out of range, cut off. Other dtypes stay as they are. ``"raw"`` stores all as it
        is. A dict has one of them for each name; ``"*"`` is for the names that it has not.
    shard_cap_mb : float
        Data files are kept below so many MiB. An array of half as much or more that does not fit
        into the file at hand has one of its own, of any size, which comes before the file at hand.

    Raises
    ------
    TypeError, ValueError
        Wrong names or arguments, a name that is there twice, or a dtype that TVM has not.
    """
    formats = _formats(encode_format)
    cap: Any = shard_cap_mb
    if isinstance(cap, bool) or not isinstance(cap, numbers.Real):
        raise TypeError(f"shard_cap_mb is a number of MiB, not {shard_cap_mb!r}")
    if not shard_cap_mb >= 0:
        raise ValueError(f"shard_cap_mb is {shard_cap_mb}: it has to be 0 or more")
    if not callable(metadata):
        _json(metadata)  # before all the work
    path = os.fsdecode(folder)
    os.makedirs(path, exist_ok=True)
    with _Writer(path, shard_cap_mb * (1 << 20)) as writer:
        for name, array in named_arrays(params):
            writer.add(name, array, formats(name))
        writer.end_shard()
        writer.finish(metadata() if callable(metadata) else metadata)


def _formats(encode_format: str | Mapping[str, str]) -> Callable[[str], str]:
    """Return what says how a parameter is stored."""
    table = {"*": encode_format} if isinstance(encode_format, str) else encode_format
    if not isinstance(table, Mapping):
        raise TypeError(
            f"encode_format is a str or a dict by parameter, not {type(table).__name__}"
        )
    for name, kind in table.items():
        if kind not in FORMATS:
            raise ValueError(
                f"encode_format is {kind!r} for {name!r}: allowed are {', '.join(FORMATS)}"
            )

    def choose(name: str) -> str:
        try:
            return table[name] if name in table else table["*"]
        except KeyError:
            raise ValueError(
                f"encode_format has neither parameter {name!r} nor '*', which would stand for it"
            ) from None

    return choose


def _json(metadata: Any) -> str:
    try:
        return json.dumps(metadata, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as e:
        raise type(e)(f"metadata has to be what JSON can hold: {e}") from None


class _Shard:
    """A data file that is being written, by a temporary name."""

    def __init__(self, folder: str) -> None:
        self.temporary = temporary_name(os.path.join(folder, "params_shard"))
        self.stream = open(self.temporary, "xb")  # noqa: SIM115 - closed by whoever ends it
        self.nbytes = 0
        self.md5 = hashlib.md5(usedforsecurity=False)
        self.records: list[Record] = []

    def add(self, record: Record, array: Array) -> None:
        record["byteOffset"] = self.nbytes
        self.records.append(record)
        convert = record["format"] == "f32-to-bf16" and record["dtype"] == "float32"
        for piece in pieces(array):
            data = (to_bfloat16_bits(piece) if convert else piece).view(np.uint8)
            self.md5.update(data.data)
            write_all(self.stream, data)
        self.nbytes += record["nbytes"]


def remove_indexes(folder: str) -> set[str]:
    """Remove the indexes of a cache that is replaced; return the data files that they name."""
    old: set[str] = set()
    for name in (*INDEX_NAMES, BFLOAT16_INDEX):
        path = os.path.join(folder, name)
        if not os.path.lexists(path):
            continue
        try:
            found = {str(shard["dataPath"]) for shard in read_json(path)["records"]}
        except (OSError, ValueError, LookupError, TypeError):
            found = set()  # no index of a cache: its files are not known to be ours
        old |= {file for file in found if re.fullmatch(r"params_shard_\d+\.bin", file)}
        os.unlink(path)
    return old


class _Writer:
    """TVM's ``TensorCacheShardingManager``, which decides what goes into which data file."""

    def __init__(self, folder: str, cap: float) -> None:
        self.folder = folder
        self.cap = cap
        self.pending: _Shard | None = None
        self.shards: list[Record] = []
        #: Temporary and final names.
        self.written: list[tuple[str, str]] = []

    def __enter__(self) -> _Writer:
        return self

    def __exit__(self, *error: object) -> None:
        if self.pending is not None:
            self._end(self.pending)
        for temporary, _ in self.written:  # those that have got their names are no longer there
            with contextlib.suppress(FileNotFoundError):
                os.unlink(temporary)

    def add(self, name: str, array: Array, kind: str) -> None:
        try:
            dtype = dtype_to_string(array.dtype)
        except ValueError as e:
            raise ValueError(f"parameter {name!r}: {e}") from None
        nbytes = array.nbytes
        if kind == "f32-to-bf16" and dtype == "float32":
            nbytes //= 2
        record = {
            "name": name,
            "shape": list(array.shape),
            "dtype": dtype,
            "format": kind,
            "nbytes": nbytes,
        }
        if (self.pending.nbytes if self.pending else 0) + nbytes >= self.cap:
            if nbytes * 2 >= self.cap:
                shard = _Shard(self.folder)
                try:
                    shard.add(record, array)
                finally:
                    self._end(shard)
                return
            self.end_shard()
        if self.pending is None:
            self.pending = _Shard(self.folder)
        self.pending.add(record, array)

    def end_shard(self) -> None:
        """End the data file at hand."""
        shard, self.pending = self.pending, None
        if shard is not None:
            self._end(shard)

    def _end(self, shard: _Shard) -> None:
        name = f"params_shard_{len(self.shards)}.bin"
        self.written.append((shard.temporary, name))
        self.shards.append(
            {
                "dataPath": name,
                "format": "raw-shard",
                "nbytes": shard.nbytes,
                "records": shard.records,
                "md5sum": shard.md5.hexdigest(),
            }
        )
        shard.stream.close()

    def finish(self, metadata: Any) -> None:
        """Write the indexes, and give everything its name."""
        content = {"metadata": {} if metadata is None else metadata, "records": self.shards}
        _json(content["metadata"])
        converted = copy.deepcopy(self.shards)
        count = 0
        for record in (r for shard in converted for r in shard["records"]):
            if record["format"] == "f32-to-bf16" and record["dtype"] == "float32":
                record.update(format="raw", dtype="bfloat16")
                count += 1
        if count:
            self._index(BFLOAT16_INDEX, {**content, "records": converted})
        self._index(INDEX_NAMES[0], content)
        # From here on there is no cache, until the last one, the index, has its name.
        old = remove_indexes(self.folder)
        for temporary, name in self.written:
            os.replace(temporary, os.path.join(self.folder, name))
        for name in old - {name for _, name in self.written}:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(os.path.join(self.folder, name))

    def _index(self, name: str, content: Record) -> None:
        temporary = temporary_name(os.path.join(self.folder, name))
        self.written.append((temporary, name))
        with open(temporary, "x", encoding="ascii") as stream:
            json.dump(content, stream, indent=4)
