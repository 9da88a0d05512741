"""The session that fits where the program runs."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

from . import lobby
from .ranks import rank

if TYPE_CHECKING:
    from .sessions import Session

__all__ = ["session"]


def session(
    num_workers: int | None = None,
    num_groups: int | None = None,
    *,
    timeout: float | None = None,
    tvm: bool | None = None,
) -> Session:
    """Open the session kind that fits where the program runs.

    In an MPI job, or under ``python -m spmd_disco`` in one, that is an `MPISession` over all ranks;
    elsewhere a `ProcessSession`, which starts its workers on this machine.

    Parameters
    ----------
    num_workers : int, optional
        Default: in an MPI job as many as there are ranks, else what `ProcessSession` says.
    num_groups : int, optional
        Into how many groups the workers are split; default 1.
    timeout : float, optional
        The limit of a single wait, in seconds; default none.
    tvm : bool, optional
        Whether the workers serve TVM's functions from the start; default no.

    Raises
    ------
    ValueError
        The MPI job has another number of ranks than `num_workers`; or see the session kinds.
    DiscoError, OSError, ImportError
        See the session kinds.
    """
    if not _in_mpi_job():
        from .process_session import ProcessSession

        return ProcessSession(num_workers, num_groups, timeout=timeout, tvm=tvm)
    from mpi4py import MPI

    from .mpi_session import MPISession

    ranks = MPI.COMM_WORLD.size if not MPI.Is_finalized() else None
    if num_workers is not None and ranks == 1 and lobby.current() is not None:
        raise ValueError(
            f"num_workers={num_workers}, but this program has been started on one rank: start it "
            f"as «python -m spmd_disco -n {num_workers} …», or «mpirun -n {num_workers} python -m "
            "spmd_disco …», or as «python …»"
        )
    if num_workers is not None and ranks not in (None, num_workers):
        raise ValueError(
            f"num_workers={num_workers}, but this MPI job has {ranks} ranks, and each is a worker: "
            "start as many, or leave num_workers out"
        )
    return MPISession(num_groups=num_groups, timeout=timeout, tvm=tvm)


def _in_mpi_job() -> bool:
    if lobby.current() is not None or rank(os.environ) is not None:
        return True
    # A launcher that says nothing in the environment, and a program that uses MPI itself.
    MPI = sys.modules.get("mpi4py.MPI")
    return MPI is not None and bool(
        MPI.Is_initialized() and not MPI.Is_finalized() and MPI.COMM_WORLD.size > 1
    )
