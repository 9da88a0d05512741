"""TVM's Disco API over our sessions: a drop-in for ``tvm.runtime.disco``.

    import spmd_disco.interop.tvm_disco as di

or, for code whose import line is to stay as it is,

    import spmd_disco.interop.tvm_disco

    spmd_disco.interop.tvm_disco.install()
    from tvm.runtime import disco as di

Importing it needs TVM. From then on TVM's global functions of Disco are there in this process.
Names, arguments and meaning are those of TVM's module; what comes to the controller are TVM's
values: tensors, shapes, numbers and strings. A failure on a worker raises `WorkerError` at the next
sync point, where TVM would end the process.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

from .. import mpi_session, process_session, threaded_session
from .. import sessions as ours
from ..dref import DModule, DPackedFunc, DRef
from ..member import Member
from . import tvm as bridge

bridge.enable()

from .tvm_values import from_tvm, to_tvm  # noqa: E402  (TVM must be imported first)

__all__ = [
    "DModule",
    "DPackedFunc",
    "DRef",
    "MPISession",
    "ProcessSession",
    "REDUCE_OPS",
    "Session",
    "SocketSession",
    "ThreadedSession",
    "install",
]

# Where TVM says nothing, neither do these: compiled code has threads of TVM's own.
Member.warned = True

#: TVM's own module, in whose place `install` puts this one; None in a TVM that has none.
ORIGINAL = sys.modules.get("tvm.runtime.disco")

#: Reductions by name, with TVM's numbers.
REDUCE_OPS = {"sum": 0, "prod": 1, "min": 2, "max": 3, "avg": 4}

#: What TVM's users may ask `init_ccl` for.
BACKENDS = ("nccl", "rccl", "mpi")


class Session(ours.Session):
    """A session whose controller gives and takes TVM's values. See `spmd_disco.Session`."""

    def _get(self, dref: DRef, worker_id: int, timeout: float | None) -> Any:
        return to_tvm(super()._get(dref, worker_id, timeout))

    def _get_all(self, dref: DRef, timeout: float | None) -> list[Any]:
        return [to_tvm(value) for value in super()._get_all(dref, timeout)]

    def _set(self, dref: DRef, worker_id: int, value: Any, *, copy_into: bool) -> None:
        super()._set(dref, worker_id, from_tvm(value), copy_into=copy_into)

    def _get_cached_method(self, name: str) -> Callable[..., DRef]:
        """Return a global function of the workers, as TVM's method of this name does."""
        methods: dict[str, Callable[..., DRef]] = self.__dict__.setdefault("_methods", {})
        if name not in methods:
            methods[name] = self.get_global_func(name)
        return methods[name]

    def empty(
        self,
        shape: Sequence[int] | int,
        dtype: Any,
        device: Any = None,
        worker0_only: bool = False,
        in_group: bool = True,
        mem_scope: str | None = None,
    ) -> DRef:
        return super().empty(
            from_tvm(shape), from_tvm(dtype), device, worker0_only, in_group, mem_scope
        )

    def copy_from_worker_0(self, host_array: Any, remote_array: DRef) -> None:
        super().copy_from_worker_0(from_tvm(host_array), remote_array)

    def copy_to_worker_0(self, host_array: Any, remote_array: DRef | None = None) -> DRef:
        return super().copy_to_worker_0(from_tvm(host_array), remote_array)

    def broadcast(self, src: Any, dst: DRef | None = None, in_group: bool = True) -> DRef:
        return super().broadcast(from_tvm(src), dst, in_group)

    def scatter(self, src: Any, dst: DRef | None = None, in_group: bool = True) -> DRef:
        return super().scatter(from_tvm(src), dst, in_group)

    def share(self, array: Any) -> DRef:
        return super().share(from_tvm(array))

    def init_ccl(self, ccl: str, *device_ids: int) -> None:
        """Accept TVM's backends, each of which stands for the data plane that the session has.

        Parameters
        ----------
        ccl : str
            ``"nccl"``, ``"rccl"`` or ``"mpi"``.
        *device_ids : int
            Accepted, and without meaning on CPUs.

        Raises
        ------
        ValueError
            Another backend.
        """
        if ccl not in BACKENDS:
            raise ValueError(f"the CCL {ccl!r} is unknown: allowed are {', '.join(BACKENDS)}")
        super().init_ccl("mpi")


class ThreadedSession(Session, threaded_session.ThreadedSession):
    """A session over threads of this process. See `spmd_disco.ThreadedSession`.

    Parameters
    ----------
    num_workers : int
    num_groups : int
    """

    def __init__(self, num_workers: int, num_groups: int = 1) -> None:
        super().__init__(num_workers, num_groups, tvm=True)


class ProcessSession(Session, process_session.ProcessSession):
    """A session over processes of this machine. See `spmd_disco.ProcessSession`.

    Parameters
    ----------
    num_workers : int
    num_groups : int
    entrypoint : str
        A module that all workers import, worker 0 in this process included, for the functions that
        it registers. They are started by our own code, whatever it would do as a program.
    """

    def __init__(
        self, num_workers: int, num_groups: int = 1, entrypoint: str = "tvm.exec.disco_worker"
    ) -> None:
        super().__init__(num_workers, num_groups, tvm=True)
        try:
            self.import_python_module(entrypoint)
        except BaseException:
            self.shutdown()
            raise


class MPISession(Session, mpi_session.MPISession):
    """A session over the ranks of an MPI communicator. See `spmd_disco.MPISession`.

    Parameters
    ----------
    comm : mpi4py.MPI.Intracomm, optional
    num_groups : int
    """

    def __init__(self, comm: Any = None, num_groups: int = 1) -> None:
        super().__init__(comm, num_groups=num_groups, tvm=True)


class SocketSession(Session):
    """What TVM has for several hosts. Here MPI is that."""

    def __init__(
        self, num_nodes: int, num_workers_per_node: int, num_groups: int, host: str, port: int
    ) -> None:
        raise NotImplementedError(
            "there is no SocketSession here: to run over hosts, start the program as «mpirun -n "
            f"{num_nodes * num_workers_per_node} python -m spmd_disco app.py» or the same by srun "
            "in a Slurm job, and open an MPISession"
        )


def install() -> None:
    """Have ``from tvm.runtime import disco`` give this module in this process.

    Worker functions that import it get it, too, once their process has called this.
    """
    import tvm.runtime

    this = sys.modules[__name__]
    tvm.runtime.disco = this
    for name in ("tvm.runtime.disco", "tvm.runtime.disco.session"):
        sys.modules[name] = this
