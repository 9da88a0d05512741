"""Sessions: the controller's API, with TVM's names and meaning, and what Python users expect beside."""

from __future__ import annotations

import hashlib
import importlib
import logging
import sys
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from . import pickling, registry
from .device import Device
from .dref import DPackedFunc, DRef
from .protocol import (
    DIGEST_SIZE,
    DiscoAction,
    FunctionKind,
    Part,
    RegisterRef,
    encode_arguments,
    encode_function,
    encode_value,
    replace_containers,
)
from .transport.ccl import ReduceKind
from .worker import Failed, copy_array

if TYPE_CHECKING:
    from .controller import Controller

__all__ = ["Session"]


class Session:
    """The controller's session: one program that drives all workers.

    Commands go to all workers in one order. `call` and what is built on it return at once; worker
    0's half has run by then, the others' may not have. What fails on a worker is raised as
    `WorkerError` at the next sync point (`sync`, `get`, `gather`, `copy_from_worker_0`,
    `shutdown`, …).

    Any thread may use a session; worker functions may not.
    """

    #: Set by the session kinds. On ranks that are not the controller there is none.
    _controller: Controller

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

    @property
    def _dead(self) -> deque[int]:
        return self._controller.dead

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
            Not all workers came in time. The session is closed all the same.
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
            reference, code = self._reference(func)
            parts, flags = self._encode(args, kwargs)
            register = next(controller.registers)
            number = controller.submit(
                DiscoAction.CALL_PACKED,
                [reference, *parts],
                flags=flags,
                register=register,
                code=code,
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
            reference, code = self._reference(name)
            register = next(controller.registers)
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
        """Tell the workers of a changed import path or logging level, before they need them."""
        context = (sys.path, logging.root.level)
        if context != self._context:
            # Set first: the call below comes by here, too.
            self._context = (list(sys.path), logging.root.level)
            self._call("runtime.disco._configure", self._context, {})

    _context: tuple[list[str], int] = ([], -1)

    # Encoding -------------------------------------------------------------------------------------

    def _reference(self, func: Any) -> tuple[bytes, tuple[bytes, bytes] | None]:
        """Encode which function to call; also return the code that goes along, if any does."""
        if isinstance(func, DRef):
            self._own(func)
            return encode_function(FunctionKind.REGISTER, func.reg_id), None
        if isinstance(func, str):
            function = registry.get_global_func(func, allow_missing=True)
            if function is None:
                registry.resolve(func)
                return encode_function(FunctionKind.IMPORT, func), None
            name = encode_function(FunctionKind.GLOBAL, func)
            if (getattr(function, "__module__", None) or "").startswith("spmd_disco."):
                return name + encode_function(FunctionKind.NONE, None), None
            definition, code = self._reference(function)
            return name + definition, code
        if not callable(func):
            raise TypeError(
                f"{func!r} cannot be called: give a callable, the name of a global function, a "
                "dotted path or a DRef"
            )
        path = registry.importable(func)
        if path is not None:
            return encode_function(FunctionKind.IMPORT, path), None
        return self._by_value(func)

    def _by_value(self, func: Any) -> tuple[bytes, tuple[bytes, bytes] | None]:
        # Pickled anew each time, so that a global that has changed since counts.
        try:
            code = pickling.dumps(func)
        except Exception as e:
            raise TypeError(f"the function {func!r} cannot be pickled: {e}") from e
        digest = hashlib.blake2b(code, digest_size=DIGEST_SIZE).digest()
        if digest in self._controller.codes:
            reference = encode_function(FunctionKind.KNOWN, digest)
        else:
            reference = encode_function(FunctionKind.CODE, digest, code)
        return reference, (digest, code)

    def _own(self, dref: DRef) -> None:
        if dref.session is not self:
            raise ValueError(f"{dref!r} belongs to another session than {self!r}")

    def _substitute(self, value: Any) -> Any:
        if isinstance(value, DRef):
            self._own(value)
            return RegisterRef(value.reg_id)
        return value

    def _encode(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Part], int]:
        """Encode the arguments of a call, with references in the place of DRefs."""
        plain = [self._substitute(arg) for arg in args]
        named = {key: self._substitute(arg) for key, arg in kwargs.items()}
        try:
            return encode_arguments(plain, named)
        except MemoryError:
            raise
        except Exception:
            # Most likely a DRef in a container. Those are looked for only now: a walk through
            # every large list would cost more than its pickle.
            memo: dict[int, Any] = {}
            plain, named = replace_containers([plain, named], self._substitute, memo)
        try:
            return encode_arguments(plain, named)
        except MemoryError:
            raise
        except Exception as e:
            raise self._unpicklable(plain, named, e) from e

    @staticmethod
    def _unpicklable(plain: list[Any], named: dict[str, Any], error: Exception) -> TypeError:
        """Name the argument that cannot be pickled."""
        for name, value in [*enumerate(plain), *named.items()]:
            try:
                encode_value(value)
            except Exception as e:
                which = f"argument {name}" if isinstance(name, int) else f"the argument {name!r}"
                return TypeError(
                    f"{which} (of type {type(value).__name__}) cannot be pickled: {e}"
                )
        return TypeError(f"the arguments cannot be pickled: {error}")

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
        self._controller.ask(DiscoAction.SYNC_WORKER, timeout=timeout)

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
        self._own(dref)
        self._check_worker(worker_id)
        values = self._controller.ask(
            DiscoAction.DEBUG_GET_FROM_REMOTE,
            target=int(worker_id),
            register=dref.reg_id,
            timeout=timeout,
        )
        return values[int(worker_id)]

    def _get_all(self, dref: DRef, timeout: float | None) -> list[Any]:
        self._own(dref)
        values = self._controller.ask(
            DiscoAction.DEBUG_GET_FROM_REMOTE, register=dref.reg_id, timeout=timeout
        )
        return [values[i] for i in range(self.num_workers)]

    def _view(self, dref: DRef) -> Any:
        self._own(dref)
        self._controller.check()
        worker = self._controller.worker
        value = worker.registers.get(dref.reg_id)
        if type(value) is Failed or dref.reg_id not in worker.registers:
            self._get(dref, 0, None)  # raises what there is to say
        return value

    def _set(self, dref: DRef, worker_id: int, value: Any, *, copy_into: bool) -> None:
        self._own(dref)
        self._check_worker(worker_id)
        parts, flags = self._encode_plain(value, "the value")
        self._controller.submit(
            DiscoAction.DEBUG_SET_REGISTER,
            [b"\1" if copy_into else b"\0", *parts],
            flags=flags,
            target=int(worker_id),
            register=dref.reg_id,
        )

    @staticmethod
    def _encode_plain(value: Any, name: str) -> tuple[list[Part], int]:
        try:
            return encode_value(value)
        except MemoryError:
            raise
        except Exception as e:
            raise TypeError(
                f"{name} (of type {type(value).__name__}) cannot be pickled: {e}"
            ) from e

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
        encoded = [self._encode_plain(v, f"the value for worker {i}") for i, v in enumerate(values)]
        controller = self._controller
        controller.check()
        with controller.lock:
            register = next(controller.registers)
            for worker_id, (parts, flags) in enumerate(encoded):
                number = controller.submit(
                    DiscoAction.DEBUG_SET_REGISTER,
                    [b"\0", *parts],
                    flags=flags,
                    target=worker_id,
                    register=register,
                )
        return DRef(register, self, number)

    # Arrays ---------------------------------------------------------------------------------------

    def empty(
        self,
        shape: Sequence[int] | int,
        dtype: Any,
        device: Device | str | None = None,
        worker0_only: bool = False,
        in_group: bool = True,
    ) -> DRef:
        """Create an uninitialised array on all workers.

        Parameters
        ----------
        shape : tuple of int
        dtype : dtype_like
            A NumPy dtype or its name; ``"bfloat16"``, ``"float8_e4m3fn"`` and the like, too.
        device : Device, optional
            Default: each worker's own.
        worker0_only : bool
            Whether only worker 0 gets an array; the others get None.
        in_group : bool
            With `worker0_only`: whether the first worker of each group counts as a worker 0.

        Raises
        ------
        TypeError, ValueError
            Not a shape, a dtype or a device.
        """
        if isinstance(shape, int | np.integer):
            shape = (int(shape),)
        shape = tuple(int(n) for n in shape)
        if any(n < 0 for n in shape):
            raise ValueError(f"the shape {shape} has a negative dimension")
        device = None if device is None else Device.of(device)
        return self._call(
            "runtime.disco.empty",
            (shape, array_dtype(dtype), device, bool(worker0_only), bool(in_group)),
            {},
        )

    def copy_from_worker_0(self, host_array: np.ndarray[Any, Any], remote_array: DRef) -> None:
        """Copy worker 0's array of a register into `host_array`. A sync point of worker 0.

        Parameters
        ----------
        host_array : ndarray
            Of the same element count and dtype, in any shape; it is overwritten.
        remote_array : DRef

        Raises
        ------
        ValueError
            The element counts or dtypes differ, or `host_array` is read-only.
        WorkerError
            See `DRef.get`.
        """
        if not isinstance(host_array, np.ndarray):
            raise TypeError(f"the host array is a NumPy array, not {host_array!r}")
        if not host_array.flags.writeable:
            raise ValueError("the host array is read-only")
        self._own(remote_array)
        self._controller.ask(DiscoAction.SYNC_WORKER, target=0)
        value = self._view(remote_array)
        if not isinstance(value, np.ndarray):
            raise TypeError(f"{remote_array!r} holds {value!r} on worker 0, not an array")
        copy_array(host_array, value, "the host array")

    def copy_to_worker_0(self, host_array: Any, remote_array: DRef | None = None) -> DRef:
        """Copy `host_array` to worker 0.

        Parameters
        ----------
        host_array : array_like
        remote_array : DRef, optional
            A register that holds an array of the same element count and dtype on worker 0. Default:
            a new one of the same shape.

        Returns
        -------
        DRef
            `remote_array`, or the new register, which holds None on the other workers.

        Raises
        ------
        ValueError, TypeError
            The arrays do not fit; nothing has been sent.
        """
        array = host(host_array)
        if remote_array is None:
            remote_array = self.empty(array.shape, array.dtype, None, True, False)
        else:
            self._own(remote_array)
            self._check_destination(remote_array, array)
        parts, flags = self._encode_plain(array, "the host array")
        self._controller.submit(
            DiscoAction.COPY_TO_WORKER0,
            parts,
            flags=flags,
            target=0,
            register=remote_array.reg_id,
        )
        return remote_array

    def _check_destination(self, dref: DRef, array: np.ndarray[Any, Any]) -> None:
        """Refuse at once what worker 0, which is in this process, is known to refuse."""
        target = self._controller.worker.registers.get(dref.reg_id)
        if isinstance(target, np.ndarray) and (
            target.size != array.size or target.dtype != array.dtype
        ):
            raise ValueError(
                f"{dref!r} holds an array of shape {target.shape} and {target.dtype} on worker 0, "
                f"which cannot take one of shape {array.shape} and {array.dtype}"
            )

    def init_ccl(self, ccl: str, *device_ids: int) -> None:
        """Choose the data plane, as TVM's method of this name does.

        Parameters
        ----------
        ccl : str
            ``"mpi"``.
        *device_ids : int
            Accepted, and without meaning on CPUs.

        Raises
        ------
        ValueError
            There is no such data plane.
        """
        if ccl != "mpi":
            raise ValueError(f"the CCL {ccl!r} is not available; allowed is 'mpi'")
        self._call("runtime.disco._init_ccl", (ccl,), {})

    def broadcast(self, src: Any, dst: DRef | None = None, in_group: bool = True) -> DRef:
        """Copy an array of the controller to all workers.

        Parameters
        ----------
        src : array_like
        dst : DRef, optional
            Arrays of the same element count and dtype. Default: new ones of the same shape.
        in_group : bool
            Accepted as in TVM; every worker of every group gets `src` in either case.

        Returns
        -------
        DRef
            `dst`, or the new register.
        """
        array = host(src)
        if dst is None:
            dst = self.empty(array.shape, array.dtype)
        self._call("runtime.disco._broadcast_array", (self.copy_to_worker_0(array), dst), {})
        return dst

    def broadcast_from_worker0(self, src: DRef, dst: DRef, in_group: bool = True) -> DRef:
        """Copy worker 0's array (in_group: that of each group's first worker) to the others.

        Parameters
        ----------
        src, dst : DRef
            Arrays of equal element count and dtype; `src` is needed on the sender alone.

        Returns
        -------
        DRef
            `dst`.
        """
        self._call("runtime.disco.broadcast_from_worker0", (src, bool(in_group), dst), {})
        return dst

    def scatter(self, src: Any, dst: DRef | None = None, in_group: bool = True) -> DRef:
        """Split an array of the controller along its first dimension, one part for each receiver.

        Parameters
        ----------
        src : array_like
            ``src.shape[0]`` equals the number of receivers: all workers, or with `in_group` and
            several groups the group's size; each group then gets the same parts.
        dst : DRef, optional
            Arrays of the part's element count and dtype. Default: new ones of shape
            ``src.shape[1:]``.

        Returns
        -------
        DRef
            `dst`, or the new register.

        Raises
        ------
        ValueError
            The first dimension is another.
        """
        array = host(src)
        receivers = self.group_size if in_group else self.num_workers
        if array.ndim == 0 or array.shape[0] != receivers:
            raise ValueError(
                f"scatter() got an array of shape {array.shape}: its first dimension must be "
                f"{receivers}, the number of receiving workers"
                + (" in each group" if receivers != self.num_workers else "")
            )
        if dst is None:
            dst = self.empty(array.shape[1:], array.dtype)
        remote = self.copy_to_worker_0(array)
        if receivers == self.num_workers:
            self.scatter_from_worker0(remote, dst, in_group)
        else:
            self._call(
                "runtime.disco._scatter_to_groups", (remote, array.shape, array.dtype, dst), {}
            )
        return dst

    def scatter_from_worker0(self, from_array: DRef, to_array: DRef, in_group: bool = True) -> None:
        """Split worker 0's array (in_group: that of each group's first worker) among the workers.

        Parameters
        ----------
        from_array : DRef
            Its element count is that of `to_array` times the number of receivers.
        to_array : DRef
        """
        self._call("runtime.disco.scatter_from_worker0", (from_array, bool(in_group), to_array), {})

    def gather_to_worker0(self, from_array: DRef, to_array: DRef, in_group: bool = True) -> None:
        """Gather the workers' arrays on worker 0 (in_group: on each group's first worker).

        Parameters
        ----------
        from_array : DRef
        to_array : DRef
            Its element count is that of `from_array` times the number of senders; needed on the
            receiver alone.
        """
        self._call("runtime.disco.gather_to_worker0", (from_array, bool(in_group), to_array), {})

    def allreduce(self, src: DRef, dst: DRef, op: str = "sum", in_group: bool = True) -> DRef:
        """Reduce the workers' arrays elementwise, with the result on all of them.

        Parameters
        ----------
        src, dst : DRef
            Arrays of equal element count and dtype; they may be the same.
        op : str
            ``"sum"``, ``"prod"``, ``"min"``, ``"max"`` or ``"avg"``.
        in_group : bool
            Within each group instead of over all workers.

        Returns
        -------
        DRef
            `dst`.

        Raises
        ------
        ValueError
            There is no such `op`.
        """
        kind = int(ReduceKind.of(op))
        self._call("runtime.disco.allreduce", (src, kind, bool(in_group), dst), {})
        return dst

    def allgather(self, src: DRef, dst: DRef, in_group: bool = True) -> DRef:
        """Gather the workers' arrays, with the result on all of them.

        Parameters
        ----------
        src : DRef
        dst : DRef
            Its element count is that of `src` times the number of workers that take part.
        in_group : bool
            Within each group instead of over all workers.

        Returns
        -------
        DRef
            `dst`.
        """
        self._call("runtime.disco.allgather", (src, bool(in_group), dst), {})
        return dst

    def gather(self, dref: DRef) -> np.ndarray[Any, Any]:
        """Return the workers' arrays in one host array. A sync point.

        Parameters
        ----------
        dref : DRef
            Arrays, or numbers, of equal shape and dtype on all workers.

        Returns
        -------
        ndarray
            Of shape ``(num_workers, *shape)``, the caller's own.

        Raises
        ------
        WorkerError
            The shapes or dtypes differ, or an earlier command failed.
        """
        self._own(dref)
        gathered = self._call("runtime.disco._gather_all", (dref,), {})
        self.sync()
        result: np.ndarray[Any, Any] = self._view(gathered)
        return result

    # Context --------------------------------------------------------------------------------------

    def __enter__(self) -> Session | None:
        return self

    def __exit__(self, kind: type[BaseException] | None, *exc: object) -> None:
        raise NotImplementedError


def array_dtype(dtype: Any) -> np.dtype[Any]:
    """Return the dtype that `dtype` names; also the names that ml_dtypes gives.

    Raises
    ------
    TypeError
        Nothing has that name.
    """
    try:
        return np.dtype(dtype)
    except TypeError:
        import ml_dtypes

        extended = getattr(ml_dtypes, dtype, None) if isinstance(dtype, str) else None
        if extended is None:
            raise TypeError(f"{dtype!r} names no dtype") from None
        return np.dtype(extended)


def host(array: Any) -> np.ndarray[Any, Any]:
    """Return `array` as a NumPy array of plain values.

    Raises
    ------
    TypeError
        It is a DRef, or its elements are Python objects.
    """
    result = np.asarray(array)
    if result.dtype.hasobject:
        raise TypeError(f"an array of {result.dtype} cannot move between workers")
    return result

