"""Compiled libraries: opened once, with a virtual machine of its own for each worker."""

from __future__ import annotations

import os
import platform
import shutil
import tempfile
import threading
import weakref
from typing import Any

import tvm_ffi

from ..device import Device
from ..errors import DiscoError
from ..worker import Worker, current_worker
from .tvm_values import TVMModule

__all__ = ["load_vm_module"]

#: What a library is known by: its real path, and what changes when it is written anew.
_Identity = tuple[str, int, int]

#: TVM's allocator that keeps what is freed, as its own loader asks for.
POOLED = 2
CPU = 1

_loading = threading.Lock()
#: Libraries stay open as long as the process: objects that their code has made need it.
_libraries: dict[_Identity, Any] = {}
#: By worker, the modules that it has.
_opened: weakref.WeakKeyDictionary[Worker, dict[tuple[_Identity, Device], TVMModule]] = (
    weakref.WeakKeyDictionary()
)


def load_vm_module(path: str, device: Any = None) -> TVMModule:
    """Return the module in a compiled library: its virtual machine, where it has one.

    Parameters
    ----------
    path : str
        The same library gives the same module on a worker, as long as the file does not change.
    device : Device, optional
        What the virtual machine runs on. Default: the worker's own.

    Raises
    ------
    FileNotFoundError
        There is no such file on this worker.
    DiscoError
        It cannot be loaded, or its virtual machine not started; the text says why.
    """
    worker = current_worker()
    if worker is None:
        raise DiscoError(
            "there is no current worker here: load_vm_module() is called on the workers of a "
            "session, by sess.load_vm_module()"
        )
    device = worker.info.device if device is None else Device.of(device)
    identity = _identify(path, worker)
    modules = _opened.setdefault(worker, {})
    module = modules.get((identity, device))
    if module is None:
        module = modules[identity, device] = _start(_library(identity, worker), path, device)
    return module


def _where(worker: Worker) -> str:
    return f"worker {worker.info.worker_id} ({worker.host})"


def _identify(path: str, worker: Worker) -> _Identity:
    real = os.path.realpath(path)
    try:
        status = os.stat(real)
    except OSError as e:
        raise type(e)(
            e.errno,
            f"{_where(worker)} cannot find the compiled library: {e.strerror}; all workers need it "
            "under the same path",
            path,
        ) from None
    return real, status.st_mtime_ns, status.st_size


def _library(identity: _Identity, worker: Worker) -> Any:
    path = identity[0]
    with _loading:
        library = _libraries.get(identity)
        if library is None:
            try:
                if any(known[0] == path for known in _libraries):
                    library = _load_anew(path)
                else:
                    library = tvm_ffi.load_module(path)
            except Exception as e:
                raise DiscoError(
                    f"{_where(worker)} cannot load {path}: it must be a library that TVM has "
                    f"compiled for a machine like this one, {platform.machine()}: {e}"
                ) from e
            _libraries[identity] = library
    return library


def _load_anew(path: str) -> Any:
    """Load a library that has been written anew since it was loaded.

    The system would give the old one again for the same path, or what has become of its memory.
    """
    with tempfile.TemporaryDirectory(prefix="spmd_disco-") as folder:
        return tvm_ffi.load_module(shutil.copy(path, folder))


def _start(library: Any, path: str, device: Device) -> TVMModule:
    name = os.path.basename(path)
    try:
        executable = library.get_function("vm_load_executable", True)
    except AttributeError:
        return TVMModule(library, name)  # functions alone, without a virtual machine
    try:
        machine = executable()
        machine["vm_initialization"](device.type, device.index, POOLED, CPU, 0, POOLED)
    except Exception as e:
        raise DiscoError(f"the virtual machine of {path} does not start on {device}: {e}") from e
    return TVMModule(machine, name)
