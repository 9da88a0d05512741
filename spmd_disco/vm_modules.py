"""The session's methods for modules that TVM has compiled."""

from __future__ import annotations

import os

from .device import Device
from .dref import DModule
from .session_part import SessionPart
from .worker import current_worker

__all__ = ["ModuleMethods"]


class ModuleMethods(SessionPart):
    """What a session does with compiled modules."""

    #: Whether the workers serve TVM's functions.
    _has_tvm = False

    def load_vm_module(self, path: str, device: Device | str | None = None) -> DModule:
        """Load a library that TVM has compiled, as TVM's method of this name does.

        A Relax library gets a virtual machine on each worker; a library without one has its
        functions as they are. Collectives in it are those of this session. Each library is opened
        once in a process, and the same file gives the same module; a file that has been written
        anew is opened anew.

        The first time, TVM is imported on all workers, unless the session was opened with
        ``tvm=True``.

        Parameters
        ----------
        path : str or path-like
            The library, on every worker.
        device : Device, optional
            What the virtual machine runs on. Default: each worker's own.

        Returns
        -------
        DModule
            ``module["main"](*drefs)`` calls a function.

        Raises
        ------
        ImportError
            TVM is not installed here; nothing has been sent.
        FileNotFoundError
            There is no such file here, for worker 0; nothing has been sent.
        TypeError, ValueError
            Not a path or a device.
        """
        path = os.path.abspath(os.fspath(path))
        device = None if device is None else Device.of(device)
        self._controller.check()
        self._enable_tvm()
        if not os.path.exists(path):
            raise FileNotFoundError(2, "there is no such compiled library", path)
        dref = self._call("runtime.disco.load_vm_module", (path, device), {})
        return DModule(dref, self)  # type: ignore[arg-type]

    def _enable_tvm(self) -> None:
        """Have TVM's functions served on all workers.

        Raises
        ------
        ImportError
            TVM is not installed here; nothing has been sent.
        WorkerError
            It cannot be imported on all workers.
        """
        if self._has_tvm or current_worker() is not None:
            return
        from .interop import tvm

        tvm.check()
        self._call("runtime.disco._enable_tvm", (), {})
        self.sync()
        self._has_tvm = True
