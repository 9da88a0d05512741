"""Parameters of the workers into a presharded tensor cache, as TVM's shard loader reads it.

Each worker writes its own data files, under temporary names. Only when all have done so do these
take their names, and only then is the index written. A failure before that leaves the folder as it
was; one in between leaves it without an index, not with one that does not fit.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import numbers
import os
import secrets
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from ..dref import DRef
from ..errors import DiscoError
from ..files.cache_writer import remove_indexes
from ..files.dtypes import dtype_to_string
from ..files.streams import host_array, pieces, write_all
from ..files.tensor_cache import INDEX_NAMES
from ..registry import register_func
from ..session_part import SessionPart
from ..worker import this_worker
from .progress import Progress
from .shard_info import shard_name, split_name

__all__ = ["save"]

PREFIX = "runtime.disco._save_"
#: Bytes that are written at a time, and converted where that is needed.
CHUNK = 4 << 20


class TensorPlace(NamedTuple):
    """Where a tensor goes in a data file."""

    name: str
    shape: tuple[int, ...]
    #: By TVM's name.
    dtype: str
    offset: int
    nbytes: int


class DataFile(NamedTuple):
    """A data file of the cache."""

    name: str
    tensors: tuple[TensorPlace, ...]

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in self.tensors)


# On the controller --------------------------------------------------------------------------------


def save(
    sess: SessionPart,
    folder: str | os.PathLike[str],
    drefs: Mapping[str, DRef],
    in_group: bool,
    metadata: Mapping[str, Any] | None,
    shard_cap_mb: float,
    progress: bool | None,
) -> None:
    """Do what `Session.save_params` says."""
    sess._controller.check()
    path = os.path.abspath(os.fspath(folder))
    if not isinstance(path, str):
        raise TypeError(f"the folder is a str or path-like, not {folder!r}")
    _check_names(sess, drefs)
    cap: Any = shard_cap_mb
    if isinstance(cap, bool) or not isinstance(cap, numbers.Real):
        raise TypeError(f"shard_cap_mb is a number of MiB, not {shard_cap_mb!r}")
    if not 0 < shard_cap_mb < math.inf:
        raise ValueError(f"shard_cap_mb is {shard_cap_mb!r}: it has to be above 0, and finite")
    head = dict(metadata or {})
    json.dumps(head)  # raises TypeError or ValueError before anything is sent
    os.makedirs(path, exist_ok=True)

    parts = sess.group_size if in_group else sess.num_workers
    arrays = dict(drefs)
    described = sess._call(PREFIX + "describe", (arrays,), {}).get_all()
    _check_groups(described, parts)
    plan = _plan(described[:parts], parts, int(shard_cap_mb * (1 << 20)))
    total = sum(file.nbytes for files in plan for file in files)
    token = secrets.token_hex(4)
    written = False
    with Progress("saving", total, progress) as bar:
        try:
            sums = sess._call(PREFIX + "write", (path, token, arrays, plan), {}).get_all()
            for worker in range(parts, sess.num_workers):
                _check_copy(plan[worker % parts], sums[worker], sums[worker % parts], worker, parts)
            _check_visible(path, token, plan)
            # From here on the old cache, if there is one, is no more.
            old = remove_indexes(path)
            sess._call(PREFIX + "commit", (path, token, plan), {})
            sess.sync()
            written = True
        finally:
            if not written and not sess._controller.closed:
                sess._call(PREFIX + "discard", (path, token, plan), {})
        bar.advance(total)
    _write_index(path, head, plan, sums, token)
    for name in old - {file.name for files in plan for file in files}:
        with contextlib.suppress(OSError):  # what cannot be tidied up does no harm
            os.unlink(os.path.join(path, name))


def _check_names(sess: SessionPart, drefs: Mapping[str, DRef]) -> None:
    if not isinstance(drefs, Mapping):
        raise TypeError(f"the parameters are a dict of DRefs by name, not {type(drefs).__name__}")
    for name, dref in drefs.items():
        if not isinstance(name, str):
            raise TypeError(f"the name of a parameter is a str, not {name!r}")
        if not isinstance(dref, DRef):
            raise TypeError(f"parameter {name!r} is a {type(dref).__name__}, and must be a DRef")
        sess._encoder.own(dref)
        if split_name(name) is not None:
            raise ValueError(
                f"the parameter name {name!r} is that of a shard: give it without its ending, "
                "which save_params adds"
            )


def _check_groups(described: Sequence[Sequence[Any]], parts: int) -> None:
    for worker, mine in enumerate(described):
        for tensor, other in zip(mine, described[worker % parts], strict=True):
            if tensor != other:
                raise ValueError(_differs(worker, parts, f"parameter {tensor[0]!r}"))


def _check_copy(
    files: Sequence[DataFile], mine: Sequence[str], first: Sequence[str], worker: int, parts: int
) -> None:
    for file, digest, expected in zip(files, mine, first, strict=True):
        if digest != expected:
            names = ", ".join(repr(t.name) for t in file.tensors[:8])
            more = ", …" if len(file.tensors) > 8 else ""
            raise ValueError(_differs(worker, parts, f"one of the parameters {names}{more}"))


def _differs(worker: int, parts: int, what: str) -> str:
    return (
        f"{what} on worker {worker} is not that on worker {worker % parts}, and only the first "
        "group's would be saved: give in_group=False to save those of all workers"
    )


def _plan(
    described: Sequence[Sequence[tuple[str, tuple[int, ...], str, int]]], parts: int, cap: int
) -> list[list[DataFile]]:
    """Say what each worker writes where.

    The order is that of TVM: by worker, then by parameter. No file has tensors of two workers.
    """
    plan: list[list[DataFile]] = []
    number = 0
    for worker, tensors in enumerate(described):
        files: list[DataFile] = []
        pending: list[TensorPlace] = []
        offset = 0
        for name, shape, dtype, nbytes in tensors:
            if pending and offset + nbytes > cap:
                files.append(DataFile(f"params_shard_{number}.bin", tuple(pending)))
                number, pending, offset = number + 1, [], 0
            pending.append(
                TensorPlace(shard_name(name, worker, parts), shape, dtype, offset, nbytes)
            )
            offset += nbytes
        if pending:
            files.append(DataFile(f"params_shard_{number}.bin", tuple(pending)))
            number += 1
        plan.append(files)
    return plan


def _check_visible(path: str, token: str, plan: Sequence[Sequence[DataFile]]) -> None:
    """Refuse a folder that is not the same one for all workers."""
    for worker, files in enumerate(plan):
        for file in files:
            name = os.path.join(path, _temporary(file.name, token))
            size = os.path.getsize(name) if os.path.exists(name) else None
            if size != file.nbytes:
                found = "is not there" if size is None else f"has {size} bytes"
                raise DiscoError(
                    f"{file.name}, which worker {worker} has written with {file.nbytes} bytes, "
                    f"{found} for the controller: {path} has to be one folder for all nodes"
                )


def _write_index(
    path: str,
    metadata: Mapping[str, Any],
    plan: Sequence[Sequence[DataFile]],
    sums: Sequence[Sequence[str]],
    token: str,
) -> None:
    records = [
        {
            "dataPath": file.name,
            "format": "raw-shard",
            "nbytes": file.nbytes,
            "records": [
                {
                    "name": t.name,
                    "shape": list(t.shape),
                    "dtype": t.dtype,
                    "format": "raw",
                    "nbytes": t.nbytes,
                    "byteOffset": t.offset,
                }
                for t in file.tensors
            ],
            "md5sum": digest,
        }
        for files, digests in zip(plan, sums, strict=False)
        for file, digest in zip(files, digests, strict=True)
    ]
    name = os.path.join(path, INDEX_NAMES[0])
    temporary = _temporary(name, token)
    with open(temporary, "w", encoding="utf-8") as stream:
        json.dump({"metadata": metadata, "records": records}, stream, indent=4)
    os.replace(temporary, name)


# On the workers -----------------------------------------------------------------------------------


def _temporary(name: str, token: str) -> str:
    return f"{name}.{token}.tmp"


def _mine(plan: Sequence[Sequence[Any]]) -> tuple[list[DataFile], bool]:
    """Return this worker's files, and whether it is to write them or has a copy of them."""
    me = this_worker().info.worker_id
    files = [
        DataFile(name, tuple(TensorPlace(*t) for t in tensors))
        for name, tensors in plan[me % len(plan)]
    ]
    return files, me < len(plan)


@register_func(PREFIX + "describe")
def _describe(arrays: Mapping[str, Any]) -> list[tuple[str, tuple[int, ...], str, int]]:
    """Say what this worker has."""
    return [(name, *_describe_one(name, array)) for name, array in arrays.items()]


def _describe_one(name: str, value: Any) -> tuple[tuple[int, ...], str, int]:
    what = f"parameter {name!r} on worker {this_worker().info.worker_id}"
    array = host_array(value, what)
    try:
        return array.shape, dtype_to_string(array.dtype), array.nbytes
    except ValueError as e:
        raise ValueError(f"{what} cannot be saved: {e}") from None


@register_func(PREFIX + "write")
def _write(
    path: str, token: str, arrays: Mapping[str, Any], plan: Sequence[Sequence[Any]]
) -> list[str]:
    """Write this worker's files by temporary names, or only look through them; return their MD5."""
    files, write = _mine(plan)
    if write:
        os.makedirs(path, exist_ok=True)
    sums = []
    names = iter(arrays)
    for file in files:
        digest = hashlib.md5(usedforsecurity=False)
        with contextlib.ExitStack() as stack:
            stream = None
            if write:
                name = os.path.join(path, _temporary(file.name, token))
                stream = stack.enter_context(open(name, "xb", buffering=0))
            for tensor in file.tensors:
                array = host_array(arrays[next(names)], tensor.name)
                if array.nbytes != tensor.nbytes:
                    raise ValueError(f"{tensor.name} has changed while it was saved")
                for piece in pieces(array, CHUNK):
                    data: Any = piece.view(np.uint8)  # NumPy's types know no other buffers
                    digest.update(data)
                    if stream is not None:
                        write_all(stream, data)
        sums.append(digest.hexdigest())
    return sums


@register_func(PREFIX + "commit")
def _commit(path: str, token: str, plan: Sequence[Sequence[Any]]) -> None:
    """Give this worker's files their names."""
    files, write = _mine(plan)
    for file in files if write else []:
        name = os.path.join(path, file.name)
        os.replace(_temporary(name, token), name)


@register_func(PREFIX + "discard")
def _discard(path: str, token: str, plan: Sequence[Sequence[Any]]) -> None:
    """Remove what this worker has written by temporary names."""
    files, write = _mine(plan)
    for file in files if write else []:
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            os.unlink(_temporary(os.path.join(path, file.name), token))
