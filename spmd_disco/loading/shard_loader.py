"""TVM's shard loader: the functions ``runtime.disco.ShardLoader…`` of the workers.

Their names, arguments and meaning are TVM's. All workers call them alike: they work over the world,
whatever the groups.
"""

from __future__ import annotations

import operator
import os
from collections.abc import Callable
from typing import Any

import numpy as np

from ..files.tensor_cache import TensorCacheIndex
from ..registry import register_func
from ..tensor import empty
from ..worker import this_worker
from .chains import apply_chain, find_function, of_module
from .reading import reading
from .shard_info import check_chain, parse_shard_info, shard_name, split_name

__all__ = ["ShardLoader"]

PREFIX = "runtime.disco."
Array = np.ndarray[Any, Any]


class ShardLoader:
    """The parameters of a tensor cache, and the functions that cut them into shards.

    Parameters
    ----------
    path : str
        Of the index file, whose folder has the data files; or that folder.
    metadata : str
        What is in the index: JSON.
    shard_info : str
        By parameter the functions, see `parse_shard_info`. If empty, the module's
        ``get_shard_info()`` is asked, where there is one.
    module : object, optional
        Where functions are looked up before the global ones, as items or as attributes.

    Raises
    ------
    ValueError
        Index or shard_info are not what they should be, or a function is not defined.
    """

    def __init__(self, path: str, metadata: str, shard_info: str = "", module: Any = None) -> None:
        if not shard_info and module is not None:
            ask = of_module(module, "get_shard_info")
            if ask is not None:
                shard_info = str(ask())
        folder = path if os.path.isdir(path) else os.path.dirname(path)
        self.path = path
        self.records = TensorCacheIndex.parse(metadata, folder).records
        self.places = {record.name: i for i, record in enumerate(self.records)}
        chains = parse_shard_info(shard_info)
        self.chains = [chains.get(record.name, ()) for record in self.records]
        self.functions: dict[str, Callable[..., Any]] = {}
        for record, chain in zip(self.records, self.chains, strict=True):
            for step in chain:
                if step.function not in self.functions:
                    self.functions[step.function] = find_function(
                        step.function, record.name, module
                    )

    def __repr__(self) -> str:
        return f"<ShardLoader: {len(self.records)} parameters of {self.path}>"

    def place(self, name: str) -> int:
        """Return the position of a parameter."""
        try:
            return self.places[name]
        except KeyError:
            raise ValueError(
                f"{self.path} has no parameter {name!r}: there are {self._some_names()}"
            ) from None

    def _some_names(self) -> str:
        names = [record.name for record in self.records]
        return ", ".join(map(repr, names[:8])) + (", …" if len(names) > 8 else "") or "none"

    def check(self, i: int, count: int) -> None:
        """Refuse a position that is not one of `count`."""
        if not 0 <= i < count:
            raise ValueError(f"{self.path} has no parameter {i}: allowed are 0 to {count - 1}")

    def read(self, i: int) -> Array:
        """Return a whole parameter, on this worker alone."""
        record = self.records[i]
        out = empty(record.shape, record.dtype)
        with reading(record.name):
            record.source().read_into(out)
        return out

    def load(self, i: int) -> Array:
        """Return this worker's shard of a parameter, or a copy if it has no shard functions."""
        worker = this_worker()
        info = worker.info
        record, chain = self.records[i], self.chains[i]
        first = info.worker_id == 0
        if not chain:
            whole = self.read(i) if first else empty(record.shape, record.dtype)
            worker.ccl.broadcast_from_worker0(whole if first else None, False, whole)
            return whole
        check_chain(record.name, chain, info.num_workers, f"the {info.num_workers} workers")
        recv = empty(chain[-1].shape[1:], chain[-1].dtype)
        send = None
        if first:
            functions = [self.functions[step.function] for step in chain]
            send = apply_chain(record.name, self.read(i), chain, functions, info.num_workers)
        worker.ccl.scatter_from_worker0(send, False, recv)
        return recv

    def load_presharded(self, i: int) -> Array:
        """Return this worker's shard of the i-th parameter of a presharded cache."""
        info = this_worker().info
        count = len(self.records) // info.num_workers
        self.check(i, count)
        place = info.worker_id * count + i
        name = self.records[place].name
        parsed = split_name(name)
        if parsed is None:
            raise ValueError(
                f"parameter {name!r} of {self.path} is not presharded: its name does not end in "
                "_shard-I-of-N"
            )
        _, part, parts = parsed
        if parts != info.num_workers:
            raise ValueError(
                f"parameter {name!r} of {self.path} is one of {parts} shards, and there are "
                f"{info.num_workers} workers: the numbers must be equal"
            )
        if part != info.worker_id:
            raise ValueError(
                f"parameter {name!r} of {self.path} is shard {part + 1}, and stands where worker "
                f"{info.worker_id} has to find shard {info.worker_id + 1}: presharded parameters "
                "are ordered by shard, then by parameter"
            )
        return self.read(place)


@register_func(PREFIX + "ShardLoader")
def _create(path: str, metadata: str, shard_info: str, module: Any) -> ShardLoader:
    """Return a shard loader."""
    return ShardLoader(path, metadata, shard_info, module)


@register_func(PREFIX + "ShardLoaderLoad")
def _load(loader: ShardLoader, weight_index: Any) -> Array:
    """Return this worker's shard of the parameter at a position of the index."""
    i = _position(weight_index)
    _check_loader(loader).check(i, len(loader.records))
    return loader.load(i)


@register_func(PREFIX + "ShardLoaderLoadAll")
def _load_all(loader: ShardLoader) -> list[Array]:
    """Return this worker's shards of ``param_0``, ``param_1``, … in this order."""
    places = [
        _check_loader(loader).place(f"param_{i}") for i in range(len(_check_loader(loader).records))
    ]
    return [loader.load(place) for place in places]


@register_func(PREFIX + "ShardLoaderLoadPresharded")
def _load_presharded(loader: ShardLoader, weight_index: Any) -> Array:
    """Return this worker's shard of a parameter that was cut up before, by its position."""
    return _check_loader(loader).load_presharded(_position(weight_index))


@register_func(PREFIX + "ShardLoaderLoadAllPresharded")
def _load_all_presharded(loader: ShardLoader) -> list[Array]:
    """Return this worker's shards of ``param_0``, ``param_1``, … that were cut up before."""
    info = this_worker().info
    places = [
        _check_loader(loader).place(shard_name(f"param_{i}", info.worker_id, info.num_workers))
        for i in range(len(_check_loader(loader).records) // info.num_workers)
    ]
    return [loader.read(place) for place in places]


@register_func(PREFIX + "ShardLoaderLoadParamOnWorker0")
def _load_param_on_worker0(loader: ShardLoader, param_index: Any) -> Array:
    """Return ``param_i`` whole on worker 0, and an uninitialised array like it on the others."""
    place = _check_loader(loader).place(f"param_{_position(param_index)}")
    if this_worker().info.worker_id == 0:
        return loader.read(place)
    record = loader.records[place]
    return empty(record.shape, record.dtype)


def _check_loader(loader: ShardLoader) -> ShardLoader:
    if not isinstance(loader, ShardLoader):
        raise TypeError(f"a shard loader is what runtime.disco.ShardLoader returns, not {loader!r}")
    return loader


def _position(index: Any) -> int:
    """Return the int that an int or, as in TVM, a shape of length 1 means."""
    value = index
    if not isinstance(value, bool) and not hasattr(value, "__index__"):
        try:
            (value,) = index
        except (TypeError, ValueError):
            value = None
    try:
        if isinstance(value, bool):
            raise TypeError
        return operator.index(value)
    except TypeError:
        raise TypeError(
            f"the position of a parameter is an int or a shape of one, not {index!r}"
        ) from None
