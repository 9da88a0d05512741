"""The ``runtime.disco.*`` functions that workers offer, with TVM's names and argument order."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from . import log_context
from .device import Device
from .errors import DiscoError
from .registry import register_func
from .tensor import empty as allocate
from .transport.layout import viewed
from .worker import current_worker, get_worker, this_worker

if TYPE_CHECKING:
    from .transport.ccl import CCL
    from .transport.peer_memory import LoanOffer

__all__: list[str] = []

PREFIX = "runtime.disco."


def _ccl() -> CCL:
    return this_worker().ccl


@register_func(PREFIX + "empty")
def empty(
    shape: Sequence[int] | int,
    dtype: Any,
    device: Any = None,
    worker0_only: bool = False,
    in_group: bool = True,
    mem_scope: str | None = None,
) -> np.ndarray[Any, Any] | None:
    """Return an uninitialised array; None on workers that are to have none, see `Session.empty`."""
    if worker0_only:
        info = get_worker()
        first = info.worker_id % info.group_size == 0 if in_group else info.worker_id == 0
        if not first:
            return None
    return allocate(shape, dtype, device, mem_scope)


@register_func(PREFIX + "allreduce")
def allreduce(send: Any, kind: Any, in_group: bool, recv: Any) -> None:
    """Reduce `send` over the workers into `recv` on each of them."""
    _ccl().allreduce(send, kind, bool(in_group), recv)


@register_func(PREFIX + "allgather")
def allgather(send: Any, in_group: bool, recv: Any) -> None:
    """Gather `send` of all workers into `recv` on each of them, in the workers' order."""
    _ccl().allgather(send, bool(in_group), recv)


@register_func(PREFIX + "broadcast_from_worker0")
def broadcast_from_worker0(send: Any, in_group: bool, recv: Any) -> None:
    """Copy `send` of worker 0, or of the group's first worker, into `recv` on all."""
    _ccl().broadcast_from_worker0(send, bool(in_group), recv)


@register_func(PREFIX + "scatter_from_worker0")
def scatter_from_worker0(send: Any, in_group: bool, recv: Any) -> None:
    """Split `send` of worker 0, or of the group's first worker, into equal parts, one for each."""
    _ccl().scatter_from_worker0(send, bool(in_group), recv)


@register_func(PREFIX + "gather_to_worker0")
def gather_to_worker0(send: Any, in_group: bool, recv: Any) -> None:
    """Gather `send` of all into `recv` on worker 0, or on the group's first worker."""
    _ccl().gather_to_worker0(send, bool(in_group), recv)


@register_func(PREFIX + "recv_from_worker0")
def recv_from_worker0(buffer: Any) -> None:
    """Receive what worker 0 sends with `send_to_worker`; does nothing on worker 0."""
    _ccl().recv_from_worker0(buffer)


@register_func(PREFIX + "send_to_next_group")
def send_to_next_group(buffer: Any) -> None:
    """Send to the worker at this one's place in the next group."""
    _ccl().send_to_next_group(buffer)


@register_func(PREFIX + "recv_from_prev_group")
def recv_from_prev_group(buffer: Any) -> None:
    """Receive from the worker at this one's place in the previous group."""
    _ccl().recv_from_prev_group(buffer)


@register_func(PREFIX + "send_to_worker")
def send_to_worker(buffer: Any, receiver_id: int) -> None:
    """Send to a worker; never waits for it."""
    _ccl().send_to_worker(buffer, receiver_id)


@register_func(PREFIX + "recv_from_worker")
def recv_from_worker(buffer: Any, sender_id: int) -> None:
    """Receive from a worker."""
    _ccl().recv_from_worker(buffer, sender_id)


@register_func(PREFIX + "sync_worker")
def sync_worker() -> None:
    """Wait until what is queued on this worker's device is done."""
    _ccl().sync_worker()


@register_func(PREFIX + "worker_id")
def worker_id() -> tuple[int]:
    """Return this worker's id as a shape, as TVM does."""
    return (get_worker().worker_id,)


@register_func(PREFIX + "worker_rank")
def worker_rank() -> int:
    """Return this worker's id."""
    return get_worker().worker_id


@register_func(PREFIX + "world_size")
def world_size() -> int:
    """Return the number of workers."""
    return get_worker().num_workers


@register_func(PREFIX + "device")
def device() -> Device:
    """Return this worker's default device."""
    return get_worker().device


@register_func(PREFIX + "bind_worker_to_cpu_core")
def bind_worker_to_cpu_core(cpu_ids: Sequence[int]) -> None:
    """Bind each worker's process to one core.

    Parameters
    ----------
    cpu_ids : sequence of int
        By worker id, the core.
    """
    info = get_worker()
    if len(cpu_ids) != info.num_workers:
        raise ValueError(
            f"{len(cpu_ids)} core ids were given for {info.num_workers} workers: give one for each"
        )
    core = int(cpu_ids[info.worker_id])
    try:
        os.sched_setaffinity(0, {core})
    except OSError as e:
        raise ValueError(
            f"worker {info.worker_id} cannot be bound to core {core}: {e.strerror}; allowed are "
            f"{sorted(os.sched_getaffinity(0))}"
        ) from None


# What the session uses besides --------------------------------------------------------------------


@register_func(PREFIX + "_import_python_module")
def _import_python_module(name: str) -> None:
    importlib.import_module(name)


@register_func(PREFIX + "_module_get_function")
def _module_get_function(module: Any, name: str) -> Any:
    if hasattr(type(module), "__getitem__"):
        return module[name]
    return getattr(module, name)


@register_func(PREFIX + "_get_item")
def _get_item(value: Any, index: Any) -> Any:
    """Return what a sequence, a mapping or an array has at an index, see `DRef.__getitem__`."""
    return value[index]


@register_func(PREFIX + "_enable_tvm")
def _enable_tvm() -> None:
    """Serve TVM's functions in this process, see `spmd_disco.interop.tvm`."""
    from .interop import tvm

    tvm.enable()


@register_func(PREFIX + "_configure")
def _configure(path: Sequence[str], level: int, structlog_part: bytes | None) -> None:
    """Give a worker the controller's import path and logging."""
    worker = current_worker()
    if worker is None or worker.info.worker_id == 0 or worker.is_thread:
        return
    known = set(sys.path)
    sys.path.extend(entry for entry in path if entry not in known)
    importlib.invalidate_caches()
    log_context.adopt(level, structlog_part)


@register_func(PREFIX + "_init_ccl")
def _init_ccl(name: str) -> None:
    ccl = _ccl()
    if name != ccl.name:
        raise DiscoError(f"worker {get_worker().worker_id} has the CCL {ccl.name!r}, not {name!r}")


#: Arrays of the controller, for worker 0's half of the command that moves them: it is in the same
#: process, and takes them from where they are.
host_arrays: dict[int, np.ndarray[Any, Any]] = {}


@register_func(PREFIX + "_broadcast_array")
def _broadcast_array(host: int, shape: Sequence[int], dtype: Any, dst: Any) -> Any:
    """Broadcast an array of the controller over the world, whatever the groups."""
    if dst is None:
        dst = allocate(shape, dtype)
    _ccl().broadcast_from_worker0(host_arrays.get(host), False, dst)
    return dst


@register_func(PREFIX + "_scatter_array")
def _scatter_array(
    host: int, shape: Sequence[int], dtype: Any, dst: Any, in_each_group: bool
) -> Any:
    """Scatter an array of the controller, of `shape`, over the world or within each group."""
    info = get_worker()
    ccl = _ccl()
    if dst is None:
        dst = allocate(shape[1:], dtype)
    src = host_arrays.get(host)
    if in_each_group:
        # The groups' first workers get it from worker 0.
        if info.worker_id == 0:
            for group in range(1, info.num_groups):
                ccl.send_to_worker(src, group * info.group_size)
        elif info.worker_id % info.group_size == 0:
            src = allocate(shape, dtype)
            ccl.recv_from_worker0(src)
    ccl.scatter_from_worker0(src, in_each_group, dst)
    return dst


@register_func(PREFIX + "_share")
def _share(host: int, shape: Sequence[int], dtype: Any, offer: LoanOffer | None) -> Any:
    """Return the node's one copy of an array of the controller."""
    worker = current_worker()
    assert worker is not None
    memory, ccl, me = worker.memory, worker.ccl, worker.info.worker_id
    if memory is not None and memory.handed is not None:
        return _hand_out(host, memory.handed, ccl, me)
    if memory is None or not memory.available:
        copy = np.empty(shape, dtype)
        ccl.broadcast_from_worker0(host_arrays.get(host), False, copy)
        copy.flags.writeable = False
        return copy
    if me == 0:
        for leader in memory.leaders[1:]:
            ccl.send_to_worker(host_arrays[host], leader)
    lender = memory.node[0]
    if len(memory.node) == 1:
        copy = np.empty(shape, dtype)
        if me == 0:
            copy[...] = host_arrays[host]
        else:
            ccl.recv_from_worker0(copy)
        copy.flags.writeable = False
        return copy
    if lender != 0 and me == lender:
        lent, copy = memory.lend(shape, dtype)
        ccl.recv_from_worker0(copy)
        offer = lent.offer
        for other in memory.node[1:]:
            ccl.send_to_worker(np.array(offer), other)
    elif lender != 0:
        place = np.empty(3, np.int64)
        ccl.recv_from_worker(place, lender)
        offer = (int(place[0]), int(place[1]), int(place[2]))
    assert offer is not None
    return memory.borrow(offer, shape, dtype)


def _hand_out(host: int, handed: dict[int, Any], ccl: CCL, me: int) -> Any:
    """Return the one copy that threads have of an array of the controller."""
    nothing = np.empty(0)
    if me == 0:
        copy = handed[host] = host_arrays[host].copy()
        copy.flags.writeable = False
    try:
        ccl.broadcast_from_worker0(nothing, False, nothing)
        copy = handed[host]
        # All have it.
        ccl.broadcast_from_worker0(nothing, False, nothing)
    finally:
        if me == 0:
            del handed[host]
    return copy


@register_func(PREFIX + "_gather_all")
def _gather_all(value: Any) -> np.ndarray[Any, Any] | None:
    """Gather arrays of equal shape on worker 0."""
    array = np.asarray(viewed(value))
    info = get_worker()
    out = np.empty((info.num_workers, *array.shape), array.dtype) if info.worker_id == 0 else None
    _ccl().gather_to_worker0(array, False, out)
    return out
