"""The array methods of a session: TVM's names, argument order and meaning."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from .builtin import host_arrays
from .calls import encode_plain
from .copying import copy_array
from .device import Device
from .dref import DRef
from .protocol import DiscoAction
from .session_part import SessionPart
from .tensor import array_dtype, check_scope
from .transport.ccl import ReduceKind
from .transport.layout import viewed

__all__ = ["ArrayMethods"]


class ArrayMethods(SessionPart):
    """What a session does with arrays. All of it is calls of the workers' own functions."""

    def empty(
        self,
        shape: Sequence[int] | int,
        dtype: Any,
        device: Device | str | None = None,
        worker0_only: bool = False,
        in_group: bool = True,
        mem_scope: str | None = None,
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
        mem_scope : str, optional
            As in TVM; of its scopes there is ``"global"``, which is the default.

        Raises
        ------
        TypeError, ValueError
            Not a shape, a dtype, a device or a scope.
        """
        check_scope(mem_scope)
        if isinstance(shape, int | np.integer):
            shape = (int(shape),)
        shape = tuple(int(n) for n in shape)
        if any(n < 0 for n in shape):
            raise ValueError(f"the shape {shape} has a negative dimension")
        device = None if device is None else Device.of(device)
        return self._call(
            "runtime.disco.empty",
            (shape, array_dtype(dtype), device, bool(worker0_only), bool(in_group), mem_scope),
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
        _need_drefs(remote_array=remote_array)
        self._encoder.own(remote_array)
        self._controller.ask(DiscoAction.SYNC_WORKER, target=0)
        value = viewed(self._view(remote_array))
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
            _need_drefs(remote_array=remote_array)
            self._encoder.own(remote_array)
            self._check_destination(remote_array, array)
        parts, flags = encode_plain(array, "the host array")
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
            ``"mpi"``, or ``"peer"`` where the session goes by shared memory. Which of the two it is
            was settled when the session was opened (see ``SPMD_DISCO_CCL``); as shared memory
            stands in for MPI on one node, ``"mpi"`` is right there, too.
        *device_ids : int
            Accepted, and without meaning on CPUs.

        Raises
        ------
        ValueError
            The session has another data plane.
        """
        mine = self._controller.worker.ccl.name
        if ccl not in (mine, "mpi"):
            raise ValueError(
                f"the CCL {ccl!r} is not available: this session has been opened with {mine!r}; "
                "SPMD_DISCO_CCL=mpi or SPMD_DISCO_CCL=peer in the environment chooses another"
            )
        self._call("runtime.disco._init_ccl", (mine,), {})

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
        if dst is not None:
            _need_drefs(dst=dst)
        new = self._call_with_host(
            "runtime.disco._broadcast_array", array, (array.shape, array.dtype, dst)
        )
        return new if dst is None else dst

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
        _need_drefs(src=src, dst=dst)
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
                + (
                    f" in each group; with in_group=False it is {self.num_workers}"
                    if receivers != self.num_workers
                    else ""
                )
            )
        if dst is not None:
            _need_drefs(dst=dst)
        new = self._call_with_host(
            "runtime.disco._scatter_array",
            array,
            (array.shape, array.dtype, dst, receivers != self.num_workers),
        )
        return new if dst is None else dst

    def share(self, array: Any) -> DRef:
        """Give all workers one read-only copy of an array of the controller, one on each node.

        For what is large and does not change, such as weights: the workers of a node read the same
        memory. It is freed when no register, and nothing else on any worker, holds it any more.
        Without peer memory each worker gets a copy of its own.

        Parameters
        ----------
        array : array_like

        Returns
        -------
        DRef
            Its arrays cannot be written.

        Raises
        ------
        MemoryError
            There is not so much peer memory; nothing has been sent.
        """
        array = host(array)
        controller = self._controller
        memory = controller.worker.memory
        controller.check()
        with controller.lock:
            place = array.shape, array.dtype
            if memory is None or memory.pool is None:
                return self._call_with_host("runtime.disco._share", array, (*place, None))
            memory.take_back([controller.worker.finished, *controller.channel.executed()])
            lent, copy = memory.lend(*place)
            try:
                copy[...] = array
                return self._call_with_host("runtime.disco._share", array, (*place, lent.offer))
            finally:
                # Whatever has been sent: a worker that has left this command has taken the loan by
                # now, or never will.
                lent.command = controller.channel.published

    def _call_with_host(self, function: str, array: np.ndarray[Any, Any], args: Any) -> DRef:
        """Call one of the workers' own functions with an array that worker 0 takes as it is."""
        key = next(_keys)
        host_arrays[key] = array
        try:
            return self._call(function, (key, *args), {})
        finally:
            del host_arrays[key]

    def scatter_from_worker0(self, from_array: DRef, to_array: DRef, in_group: bool = True) -> None:
        """Split worker 0's array (in_group: that of each group's first worker) among the workers.

        Parameters
        ----------
        from_array : DRef
            Its element count is that of `to_array` times the number of receivers.
        to_array : DRef
        """
        _need_drefs(from_array=from_array, to_array=to_array)
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
        _need_drefs(from_array=from_array, to_array=to_array)
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
        _need_drefs(src=src, dst=dst)
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
        _need_drefs(src=src, dst=dst)
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
        _need_drefs(dref=dref)
        self._encoder.own(dref)
        gathered = self._call("runtime.disco._gather_all", (dref,), {})
        self.sync()
        result: np.ndarray[Any, Any] = self._view(gathered)
        return result


#: Names for arrays that worker 0 takes from the controller.
_keys = itertools.count()


def _need_drefs(**arguments: object) -> None:
    """Refuse arrays where registers are wanted: the workers would work on copies of them."""
    for name, value in arguments.items():
        if not isinstance(value, DRef):
            raise TypeError(
                f"{name} must be a DRef, not {type(value).__name__}: an array gets to the workers "
                "with broadcast(), scatter(), put() or copy_to_worker_0()"
            )


def host(array: Any) -> np.ndarray[Any, Any]:
    """Return `array` as a NumPy array of plain values.

    Raises
    ------
    TypeError
        It is a DRef, or its elements are Python objects.
    """
    result: np.ndarray[Any, Any] = np.asarray(array)
    if result.dtype.hasobject:
        raise TypeError(f"an array of {result.dtype} cannot move between workers")
    return result
