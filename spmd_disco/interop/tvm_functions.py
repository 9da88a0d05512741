"""TVM's global functions by which compiled code reaches a Disco runtime, served by ours.

Each finds its worker by thread, and with none does what was registered before it.
"""

from __future__ import annotations

import logging
import os
import pickle
from collections.abc import Callable
from typing import Any

import tvm_ffi
from tvm_ffi import core

from .. import errors, pickling, registry
from ..errors import DiscoError
from ..log_context import adopt
from ..transport import layout
from ..worker import Worker, current_worker
from . import tvm_values
from .tvm_modules import load_vm_module
from .tvm_values import TENSORS, TVMFunction, array_of, callback, from_tvm, to_tvm

__all__ = ["install"]

PREFIX = "runtime.disco."
#: The CCL's name for TVM, and with that the prefix of its own functions.
CCL_NAME = "mpi"


# Collectives and messages: of compiled code, so nothing is done that need not be ------------------


def _array(value: Any) -> Any:
    """Return a tensor as an array: for those the data plane has the shortest way."""
    return array_of(value) if type(value) in TENSORS else value


def _kind(kind: Any) -> Any:
    """Return a reduction that comes as a shape, as compiled code has it, as a number."""
    return kind[0] if type(kind) is tvm_ffi.Shape and len(kind) == 1 else kind


def _allreduce(worker: Worker, send: Any, kind: Any, in_group: Any, recv: Any) -> None:
    worker.ccl.allreduce(_array(send), _kind(kind), bool(in_group), _array(recv))


def _allgather(worker: Worker, send: Any, in_group: Any, recv: Any) -> None:
    worker.ccl.allgather(_array(send), bool(in_group), _array(recv))


def _broadcast(worker: Worker, send: Any, in_group: Any, recv: Any) -> None:
    worker.ccl.broadcast_from_worker0(_array(send), bool(in_group), _array(recv))


def _scatter(worker: Worker, send: Any, in_group: Any, recv: Any) -> None:
    worker.ccl.scatter_from_worker0(_array(send), bool(in_group), _array(recv))


def _gather(worker: Worker, send: Any, in_group: Any, recv: Any) -> None:
    worker.ccl.gather_to_worker0(_array(send), bool(in_group), _array(recv))


def _recv_from_worker0(worker: Worker, buffer: Any) -> None:
    worker.ccl.recv_from_worker0(_array(buffer))


def _send_to_next_group(worker: Worker, buffer: Any) -> None:
    worker.ccl.send_to_next_group(_array(buffer))


def _recv_from_prev_group(worker: Worker, buffer: Any) -> None:
    worker.ccl.recv_from_prev_group(_array(buffer))


def _send_to_worker(worker: Worker, buffer: Any, receiver_id: int) -> None:
    worker.ccl.send_to_worker(_array(buffer), receiver_id)


def _recv_from_worker(worker: Worker, buffer: Any, sender_id: int) -> None:
    worker.ccl.recv_from_worker(_array(buffer), sender_id)


def _sync_worker(worker: Worker) -> None:
    worker.ccl.sync_worker()


DATA_PLANE: dict[str, Callable[..., Any]] = {
    "allreduce": _allreduce,
    "allgather": _allgather,
    "broadcast_from_worker0": _broadcast,
    "scatter_from_worker0": _scatter,
    "gather_to_worker0": _gather,
    "recv_from_worker0": _recv_from_worker0,
    "send_to_next_group": _send_to_next_group,
    "recv_from_prev_group": _recv_from_prev_group,
    "send_to_worker": _send_to_worker,
    "recv_from_worker": _recv_from_worker,
    "sync_worker": _sync_worker,
}


# What TVM has for the backend of a CCL ------------------------------------------------------------


def _init_ccl(session: Any, device_ids: Any) -> None:
    """Check, on the controller, that the session's data plane is this one."""
    session = from_tvm(session)
    if not callable(getattr(session, "init_ccl", None)):
        raise TypeError(f"init_ccl() is given a session of spmd_disco, not {session!r}")
    session.init_ccl(CCL_NAME, *from_tvm(device_ids))


def _init_ccl_per_worker(worker: Worker, device_ids: Any, unique_id: Any = "") -> None:
    """Do nothing: the data plane is there from the opening of the session on."""


def _next_group(worker: Worker, buffer: Any) -> None:
    """Send from the first group, and receive into `buffer` in the next one."""
    group = worker.info.group_id
    if worker.info.num_groups < 2:
        raise ValueError("the session has one group: this wants num_groups=2 at least")
    if group == 0:
        worker.ccl.send_to_next_group(buffer)
    elif group == 1:
        worker.ccl.recv_from_prev_group(buffer)


def _worker2_to_worker0(worker: Worker, buffer: Any) -> None:
    """Send `buffer` from worker 2, and receive into it on worker 0."""
    info = worker.info
    if info.num_workers < 3:
        raise ValueError(f"the session has {info.num_workers} workers: this wants 3 at least")
    if info.worker_id == 2:
        worker.ccl.send_to_worker(buffer, 0)
    elif info.worker_id == 0:
        worker.ccl.recv_from_worker(buffer, 2)


BACKEND: dict[str, Callable[..., Any]] = {
    "init_ccl_per_worker": _init_ccl_per_worker,
    "test_send_to_next_group_recv_from_prev_group": _next_group,
    "test_worker2_sends_to_worker0": _worker2_to_worker0,
}


# Everything else ----------------------------------------------------------------------------------


def _converted(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return one of our functions for a worker that TVM calls, with TVM's values."""

    def call(worker: Worker, *args: Any) -> Any:
        return to_tvm(function(*map(from_tvm, args)))

    return call


def _configure_structlog(pickled_config: bytes, parent_pid: int) -> None:
    """Take over the logging of the process `parent_pid`, as TVM's function of this name does."""
    if os.getpid() == parent_pid:
        return
    config, formatter, level = pickle.loads(pickled_config)
    adopt(logging.WARNING if level is None else level, pickle.dumps((config, formatter)))


def _get_function(module: Any, name: str, query_imports: bool = False) -> Any:
    """Return a module's function, as ``ffi.ModuleGetFunction``."""
    return from_tvm(module).get_function(name, bool(query_imports))


#: Under our own name on both sides; the functions are found when the bridge is installed.
SAME = (
    "empty",
    "worker_id",
    "worker_rank",
    "world_size",
    "device",
    "bind_worker_to_cpu_core",
    "_import_python_module",
    "ShardLoader",
    "ShardLoaderLoad",
    "ShardLoaderLoadAll",
    "ShardLoaderLoadPresharded",
    "ShardLoaderLoadAllPresharded",
    "ShardLoaderLoadParamOnWorker0",
)
#: Those that only the bridge has.
MORE: dict[str, Callable[..., Any]] = {
    PREFIX + "load_vm_module": load_vm_module,
    PREFIX + "_configure_structlog": _configure_structlog,
}


def _no_worker(name: str) -> Callable[..., Any]:
    def refuse(*args: Any) -> Any:
        raise DiscoError(
            f"there is no current worker here: {name} works in a function that a session calls on "
            "its workers, in the thread that runs it"
        )

    return refuse


def _serve(name: str, ours: Callable[..., Any]) -> None:
    """Register a function for the worker of the calling thread in TVM."""
    original = tvm_ffi.get_global_func(name, allow_missing=True) or _no_worker(name)
    find = current_worker

    def serve(*args: Any) -> Any:
        worker = find()
        return original(*args) if worker is None else ours(worker, *args)

    tvm_ffi.register_global_func(name, serve, override=True)


def _of_worker(name: str, ours: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that takes a worker as one for callers in our own runtime."""

    def call(*args: Any) -> Any:
        worker = current_worker()
        return _no_worker(name)() if worker is None else ours(worker, *args)

    # As failures name the functions of our own.
    call.__module__, call.__qualname__ = "spmd_disco.builtin", name.removeprefix(PREFIX)
    return call


# Our runtime's side -------------------------------------------------------------------------------


def _find(name: str) -> TVMFunction | None:
    """Return TVM's global function of a name that our registry does not know."""
    raw = tvm_ffi.get_global_func(name, allow_missing=True)
    return None if raw is None else TVMFunction(raw, name)


_published: dict[str, Any] = {}


def _publish(name: str, function: Callable[..., Any], override: bool) -> None:
    """Have one of our global functions be seen from TVM."""
    if _published.get(name) is function:
        return
    taken = tvm_ffi.get_global_func(name, allow_missing=True) is not None
    if taken and not override and name not in _published:
        raise ValueError(f"TVM has a global function {name!r} already; use override=True")
    tvm_ffi.register_global_func(name, callback(function), override=True)
    _published[name] = function


#: Types of errors that keep their type on their way through compiled code.
ERRORS: tuple[type[BaseException], ...] = (
    errors.DiscoError,
    errors.DiscoTimeout,
    errors.InheritedFailure,
    errors.PeerError,
    errors.SessionClosedError,
    ArithmeticError,
    BufferError,
    FileNotFoundError,
    FloatingPointError,
    ImportError,
    KeyboardInterrupt,
    LookupError,
    ModuleNotFoundError,
    NotImplementedError,
    OSError,
    OverflowError,
    PermissionError,
    TimeoutError,
    ZeroDivisionError,
)


def install() -> None:
    """Put the bridge in place; for `spmd_disco.interop.tvm.enable`, once in a process."""
    for kind in ERRORS:
        if kind not in core.ERROR_TYPE_TO_NAME and kind.__name__ not in core.ERROR_NAME_TO_TYPE:
            tvm_ffi.register_error(kind.__name__, kind)
    for name in SAME:
        _serve(PREFIX + name, _converted(registry.get_global_func(PREFIX + name)))
    for name, function in MORE.items():
        registry.register_func(name, function, override=True)
        _serve(name, _converted(function))
    for name, ours in DATA_PLANE.items():
        _serve(PREFIX + name, ours)
    for name, ours in (DATA_PLANE | BACKEND).items():
        full = f"{PREFIX}{CCL_NAME}.{name}"
        registry.register_func(full, _of_worker(full, ours), override=True)
        _serve(full, ours)
    tvm_ffi.register_global_func(f"{PREFIX}{CCL_NAME}.init_ccl", _init_ccl, override=True)
    tvm_ffi.register_global_func(PREFIX + "compiled_ccl", lambda: CCL_NAME, override=True)
    registry.register_func(PREFIX + "compiled_ccl", lambda: CCL_NAME, override=True)
    # In TVM the original is right for its own modules; here a module stands for one.
    registry.register_func("ffi.ModuleGetFunction", _get_function, override=True)

    for tensor in tvm_values.TENSORS:
        layout.views[tensor] = tvm_values.array_of
    for kind in tvm_values.PICKLED:
        pickling.reducers[kind] = tvm_values.reduce
    registry.connect(_find, _publish)
