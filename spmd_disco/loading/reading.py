"""What `Session.load_params` calls on the workers."""

from __future__ import annotations

import contextlib
import hashlib
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np

from ..files.sources import ParamFiles, Source, open_params
from ..registry import register_func
from ..tensor import empty
from ..worker import this_worker
from .chains import apply_chain
from .shard_info import ShardStep, part_of, shard_name

__all__ = ["fingerprint"]

PREFIX = "runtime.disco._load_"
#: The bytes of a parameter that is worth a thread.
READ_AHEAD = 1 << 20


def fingerprint(files: ParamFiles) -> str:
    """Return what is equal where the same parameters are found, whatever their values are."""
    known = hashlib.blake2b(digest_size=16)
    for name, source in files.items():
        known.update(
            repr((name, tuple(source.shape), str(source.dtype))).encode("utf-8", "replace")
        )
    return known.hexdigest()


@contextlib.contextmanager
def reading(name: str) -> Iterator[None]:
    """Say in an error which parameter could not be read, and where."""
    try:
        yield
    except OSError as e:
        info = this_worker().info
        raise OSError(
            e.errno,
            f"parameter {name!r} cannot be read by worker {info.worker_id} of {info.num_workers}: "
            f"{e.strerror or e}",
            e.filename,
        ) from e


class OpenedParams:
    """The parameters' files on one worker, and what is read ahead of them.

    While a shard function runs and its result is scattered, the next parameter is read.
    """

    def __init__(self, files: ParamFiles) -> None:
        self.files = files
        self._ahead: tuple[str, np.ndarray[Any, Any], Future[None]] | None = None

    def whole(self, name: str) -> np.ndarray[Any, Any]:
        """Return a whole parameter."""
        source = self.files[name]
        ahead, self._ahead = self._ahead, None
        with reading(name):
            if ahead is not None and ahead[0] == name:
                ahead[2].result()
                return ahead[1]
            out = empty(source.shape, source.dtype)
            source.read_into(out)
        return out

    def input_of_chain(self, name: str) -> np.ndarray[Any, Any]:
        """Return a whole parameter for a shard function, without a copy where that can be."""
        if self._ahead is None or self._ahead[0] != name:
            with reading(name):
                mapped = self.files[name].mapped()
            if mapped is not None:
                return mapped
        return self.whole(name)

    def read_ahead(self, name: str) -> None:
        """Begin to read a parameter, for which there has to be memory."""
        source = self.files[name]
        if source.nbytes < READ_AHEAD or source.mapped() is not None:
            return
        try:
            out = empty(source.shape, source.dtype)
        except MemoryError:
            return  # it comes when it is needed, and there may be memory by then
        future: Future[None] = Future()
        # An interrupt need not wait for the thread: nobody else has its array.
        threading.Thread(target=_fill, args=(source, out, future), daemon=True).start()
        self._ahead = name, out, future


def _fill(source: Source, out: np.ndarray[Any, Any], future: Future[None]) -> None:
    try:
        source.read_into(out)
    except BaseException as e:
        future.set_exception(e)
    else:
        future.set_result(None)


@register_func(PREFIX + "open")
def _open(path: str, expected: str) -> OpenedParams:
    """Open the parameters here, too, and see that they are those that the controller has seen."""
    files = open_params(path)
    if fingerprint(files) != expected:
        info = this_worker().info
        files.close()
        raise ValueError(
            f"{path} has other parameters on worker {info.worker_id} of {info.num_workers} than on "
            "the controller: all workers need the same files under the same path"
        )
    return OpenedParams(files)


@register_func(PREFIX + "slice")
def _slice(opened: OpenedParams, name: str, axis: int, parts: int) -> np.ndarray[Any, Any]:
    """Return this worker's part of a parameter; nothing else of it is read."""
    source = opened.files[name]
    part = this_worker().info.worker_id % parts
    index = part_of(source.shape, axis, part, parts)
    shape = (*source.shape[:axis], source.shape[axis] // parts, *source.shape[axis + 1 :])
    out = empty(shape, source.dtype)
    with reading(name):
        source.read_into(out, index)
    return out


@register_func(PREFIX + "presharded")
def _presharded(opened: OpenedParams, name: str, parts: int) -> np.ndarray[Any, Any]:
    """Return this worker's part of a parameter that is cut up already."""
    return opened.whole(shard_name(name, this_worker().info.worker_id % parts, parts))


@register_func(PREFIX + "replicated")
def _replicated(opened: OpenedParams, name: str) -> np.ndarray[Any, Any]:
    """Return the node's one copy of a parameter, which cannot be written.

    The node's first worker reads it into memory that it lends to the others.
    """
    source = opened.files[name]
    worker = this_worker()
    memory, ccl, me = worker.memory, worker.ccl, worker.info.worker_id
    if memory is None or not memory.available or len(memory.node) == 1:
        copy = opened.whole(name)
        copy.flags.writeable = False
        return copy
    if me != memory.node[0]:
        place = np.empty(3, np.int64)
        ccl.recv_from_worker(place, memory.node[0])
        offer = (int(place[0]), int(place[1]), int(place[2]))
        return memory.borrow(offer, source.shape, source.dtype)
    lent, copy = memory.lend(source.shape, source.dtype)
    # Who has left this command has taken the loan by then, or never will.
    lent.command = worker.number
    try:
        with reading(name):
            source.read_into(copy)
        mine = memory.borrow(lent.offer, source.shape, source.dtype)
    except BaseException:
        lent.withdraw()
        raise
    for other in memory.node[1:]:
        ccl.send_to_worker(np.array(lent.offer, np.int64), other)
    return mine


@register_func(PREFIX + "chain")
def _chain(
    opened: OpenedParams,
    name: str,
    functions: Sequence[Callable[..., Any]],
    chain: Sequence[Sequence[Any]],
    in_group: bool,
    following: str | None,
) -> np.ndarray[Any, Any]:
    """Return this worker's part of what shard functions make of a parameter.

    They run on worker 0, or in_group on the first worker of each group; `following` is the next
    parameter with such functions.
    """
    worker = this_worker()
    info = worker.info
    steps = [ShardStep(*step) for step in chain]
    parts = info.group_size if in_group else info.num_workers
    recv = empty(steps[-1].shape[1:], steps[-1].dtype)
    send = None
    if info.worker_id % parts == 0:
        array = opened.input_of_chain(name)
        if following is not None:
            opened.read_ahead(following)
        send = apply_chain(name, array, steps, functions, parts)
        del array
    worker.ccl.scatter_from_worker0(send, in_group, recv)
    return recv
