"""Who a worker is in a session without MPI, where it has no communicator."""

from __future__ import annotations

from typing import NoReturn

from .errors import DiscoError
from .worker import WorkerInfo

__all__ = ["InfoWithoutMPI"]


class _NoCommunicator:
    """Stands where workers over MPI have a communicator, and says why there is none."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, worker: InfoWithoutMPI | None, owner: type) -> NoReturn:
        if worker is None:
            raise AttributeError(self._name)
        raise DiscoError(
            f"get_worker().{self._name}: this session's workers are {worker.what}; call the "
            'collectives by name, as in di.get_global_func("runtime.disco.allreduce"), or start '
            "the program under mpirun and open an MPISession"
        )

    def __set__(self, worker: WorkerInfo, value: object) -> None:
        """Drop what the dataclass wants to keep."""


class InfoWithoutMPI(WorkerInfo):
    """`WorkerInfo` without communicators."""

    # What users see.
    __qualname__ = WorkerInfo.__qualname__

    #: What its session's workers are.
    what = "processes without MPI (ProcessSession)"

    comm = _NoCommunicator()
    group_comm = _NoCommunicator()

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and vars(self) == vars(other)

    def __hash__(self) -> int:
        return hash(tuple(vars(self).items()))
