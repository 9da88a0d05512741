"""The controller's API: TVM's names and meaning, and what Python users expect beside."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, NoReturn

import numpy as np

from . import log_context, native, registry
from .array_methods import ArrayMethods
from .calls import CallEncoder, encode_plain
from .controller import Controller
from .dref import DPackedFunc, DRef
from .loading.load_params import ParamMethods
from .pools import MemoryMethods
from .protocol import DiscoAction
from .timing import TimingMethods
from .vm_modules import ModuleMethods
from .worker import Failed

__all__ = ["Session"]


class Session(ArrayMethods, MemoryMethods, TimingMethods, ParamMethods, ModuleMethods):
    """The controller's session: one program that drives all workers.

    Commands go to all workers in one order. `call` and what is built on it return at once; worker
    0's half has run by then, the others' may not have. What fails on a worker is raised as
    `WorkerError` at the next sync point (`sync`, `get`, `gather`, `copy_from_worker_0`,
    `shutdown`, …).

    Any thread may use a session; worker functions may not.
    """

    #: The import path and the logging that the workers have been told of.
    _context: tuple[list[str], log_context.LogContext] = ([], (-1, None, None))

    #: Set by the session kinds, on the controller.
    _controller: Controller
    _encoder: CallEncoder

    def _drive(self, controller: Controller) -> None:
        self._controller = controller
        self._encoder = CallEncoder(controller)
        controller._set_known(self._encoder.known, controller.codes)

    @property
    def num_workers(self) -> int:
        """The number of workers."""
        return self._controller.num_workers

    @property
    def num_groups(self) -> int:
        """The number of groups."""
        return self._controller.worker.info.num_groups

    @property
    def group_size(self) -> int:
        """The number of workers in each group."""
        return self._controller.worker.info.group_size

    def shutdown(self, timeout: float | None = None) -> None:
        """End the session: all commands are worked off first. A second call does nothing.

        Parameters
        ----------
        timeout : float, optional
            Seconds to wait for the workers; the default is the session's limit.

        Raises
        ------
        WorkerError
            Failures that have not been reported yet. The session is closed all the same.
        DiscoTimeout
            Not all workers came in time. The session is still open, and can be shut down later.
        """
        raise NotImplementedError

    # Calls ----------------------------------------------------------------------------------------

    def call(self, func: Any, /, *args: Any, **kwargs: Any) -> DRef:
        """Call a function on all workers.

        Parameters
        ----------
        func : callable, str or DRef
            A Python callable, by reference if the workers can import it and by value otherwise
            (functions of the program itself, lambdas, closures); the name of a global function; a
            dotted path such as ``"numpy.matmul"``; or a register that holds a callable.
        *args, **kwargs
            Each worker gets copies of its own. A `DRef`, also inside tuples, lists and dicts,
            stands for the worker's own value of the register.

        Returns
        -------
        DRef
            The register that takes what the function returns on each worker.

        Raises
        ------
        TypeError
            An argument or the function cannot be pickled; nothing has been sent.
        ValueError
            A DRef of another session; or nothing has the name `func`.
        SessionClosedError, DiscoError
            The session cannot be used here, see `Session`.
        """
        return self._call(func, args, kwargs)

    def call_packed(self, func: Any, *args: Any) -> DRef:
        """Call a function on all workers, as TVM's method of this name does. See `call`."""
        return self._call(func, args, {})

    def _call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DRef:
        controller = self._controller
        controller.check()
        with controller.lock:
            self._share_context()
            reference, code = self._encoder.reference(func)
            parts, flags, local = self._encoder.arguments(args, kwargs)
            register = controller.new_register()
            number = controller.submit(
                DiscoAction.CALL_PACKED,
                [reference, *parts],
                flags=flags,
                register=register,
                code=code,
                local=local,
            )
        return DRef(register, self, number)

    def get_global_func(self, name: str) -> DPackedFunc:
        """Return the global function `name` of the workers.

        Parameters
        ----------
        name : str
            A registered name; for one that the program registered, its function is sent along.

        Raises
        ------
        ValueError
            No function of that name is registered here, in worker 0's process.
        """
        if not isinstance(name, str):
            raise TypeError(f"the name of a global function is a str, not {name!r}")
        controller = self._controller
        controller.check()
        registry.get_global_func(name)
        with controller.lock:
            reference, code = self._encoder.reference(name)
            register = controller.new_register()
            number = controller.submit(
                DiscoAction.GET_GLOBAL_FUNC, [reference], register=register, code=code
            )
        return DPackedFunc(DRef(register, self, number), self)

    def import_python_module(self, module_name: str) -> None:
        """Import a module on each worker, for instance for the functions that it registers.

        Raises
        ------
        ImportError
            Worker 0 cannot import it; nothing has been sent.
        """
        self._controller.check()
        importlib.import_module(module_name)
        self._cached_func("runtime.disco._import_python_module")(module_name)

    def _cached_func(self, name: str) -> Callable[..., DRef]:
        """Return a function that calls a global function of ours by name."""
        return lambda *args: self._call(name, args, {})

    def _share_context(self) -> None:
        """Tell the workers of a changed import path or logging, before they need them."""
        log = log_context.current()
        if (sys.path, log) != self._context:
            # Set first: the call below comes by here, too.
            self._context = (list(sys.path), log)
            level, structlog_part = log[0], log_context.encode(log)
            self._call("runtime.disco._configure", (list(sys.path), level, structlog_part), {})
            self._controller._set_context(tuple(sys.path), log[0])

    # Waiting --------------------------------------------------------------------------------------

    def sync(self, timeout: float | None = None) -> None:
        """Wait until all workers have worked off all commands so far.

        Parameters
        ----------
        timeout : float, optional
            Seconds; the default is the session's limit.

        Raises
        ------
        WorkerError
            Commands failed since the last sync point.
        DiscoTimeout
            Not all workers came in time; the session goes on.
        """
        self._controller.sync(timeout)

    def _sync_all(self) -> None:
        """Wait for all workers, as TVM's method does."""
        self.sync()

    def _sync_worker(self, worker_id: int) -> None:
        """Wait for one worker, as TVM's method does."""
        self._check_worker(worker_id)
        self._controller.ask(DiscoAction.SYNC_WORKER, target=worker_id)

    def sync_worker_0(self) -> None:
        """Wait for worker 0, as TVM's method does."""
        self._sync_worker(0)

    def _check_worker(self, worker_id: int) -> None:
        if not isinstance(worker_id, int | np.integer) or isinstance(worker_id, bool):
            raise TypeError(f"a worker id is an int, not {worker_id!r}")
        if not 0 <= worker_id < self.num_workers:
            raise ValueError(
                f"worker {worker_id} does not exist: ids go from 0 to {self.num_workers - 1}"
            )

    def _is_ready(self, command: int) -> bool:
        controller = self._controller
        controller.check()
        controller._pump(False)
        return all(number >= command for number in controller.channel.executed())

    # Registers ------------------------------------------------------------------------------------

    def _get(self, dref: DRef, worker_id: int, timeout: float | None) -> Any:
        self._encoder.own(dref)
        self._check_worker(worker_id)
        values = self._controller.ask(
            DiscoAction.DEBUG_GET_FROM_REMOTE,
            target=int(worker_id),
            register=dref.reg_id,
            timeout=timeout,
        )
        return values[int(worker_id)]

    def _get_all(self, dref: DRef, timeout: float | None) -> list[Any]:
        self._encoder.own(dref)
        values = self._controller.ask(
            DiscoAction.DEBUG_GET_FROM_REMOTE, register=dref.reg_id, timeout=timeout
        )
        return [values[i] for i in range(self.num_workers)]

    def _view(self, dref: DRef) -> Any:
        self._encoder.own(dref)
        self._controller.check()
        worker = self._controller.worker
        value = worker.registers.get(dref.reg_id)
        if type(value) is Failed or dref.reg_id not in worker.registers:
            self._get(dref, 0, None)  # raises what there is to say
        return value

    def _set(self, dref: DRef, worker_id: int, value: Any, *, copy_into: bool) -> None:
        self._encoder.own(dref)
        self._check_worker(worker_id)
        parts, flags = encode_plain(value, "the value")
        self._controller.submit(
            DiscoAction.DEBUG_SET_REGISTER,
            [b"\1" if copy_into else b"\0", *parts],
            flags=flags,
            target=int(worker_id),
            register=dref.reg_id,
        )

    def put(self, values: Sequence[Any]) -> DRef:
        """Give each worker a value of its own.

        Parameters
        ----------
        values : sequence
            One value for each worker, by worker id. They are copied, worker 0's too.

        Returns
        -------
        DRef

        Raises
        ------
        ValueError
            There are not as many values as workers.
        TypeError
            A value cannot be pickled; nothing has been sent.
        """
        values = list(values)
        if len(values) != self.num_workers:
            raise ValueError(
                f"put() got {len(values)} values for {self.num_workers} workers: give one for each"
            )
        encoded = [encode_plain(v, f"the value for worker {i}") for i, v in enumerate(values)]
        controller = self._controller
        controller.check()
        with controller.lock:
            register = controller.new_register()
            for worker_id, (parts, flags) in enumerate(encoded):
                number = controller.submit(
                    DiscoAction.DEBUG_SET_REGISTER,
                    [b"\0", *parts],
                    flags=flags,
                    target=worker_id,
                    register=register,
                )
        return DRef(register, self, number)

    # Context --------------------------------------------------------------------------------------

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise TypeError(
            "the session cannot be sent to workers or used in their functions: commands come from "
            "the controller alone"
        )

    def __enter__(self) -> Session | None:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        raise NotImplementedError


if native.core is not None:
    # The native module takes the usual calls itself, and hands all others to these methods.
    Session.call = native.core.FastCall(Session.call)  # type: ignore[method-assign]
    Session.call_packed = native.core.FastCall(Session.call_packed)  # type: ignore[method-assign]
