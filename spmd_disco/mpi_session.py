"""The session over the ranks of an MPI communicator."""

from __future__ import annotations

import atexit
import os
from typing import TYPE_CHECKING, Any

from . import lobby
from .config import seconds, setting
from .errors import DiscoError
from .open_session import (
    OpenSession,
    check_groups,
    close_finally,
    end_with_failure,
    started_locally,
    wants_tvm,
)
from .rank import Rank
from .sessions import Session

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["MPISession", "hook_finalize"]


class MPISession(OpenSession):
    """A session over all ranks of a communicator; rank i is worker i, rank 0 the controller.

    Collective over `comm`. On rank 0 it is the controller's `Session`. On any other rank, entering
    the ``with`` block, or `serve`, runs the worker until the controller shuts down, and the ``as``
    target is None, as with ``mpi4py.futures.MPICommExecutor``:

        with MPISession(comm) as sess:
            if sess is not None:
                ...

    Under ``python -m spmd_disco`` the other ranks serve already, and rank 0 alone comes by here.

    Parameters
    ----------
    comm : mpi4py.MPI.Intracomm, optional
        Default: COMM_WORLD. It is duplicated, and not touched again.
    num_groups : int, optional
        Into how many equal blocks of consecutive ids the workers are split. Default: the setting
        ``SPMD_DISCO_NUM_GROUPS``, else 1.
    timeout : float, optional
        The limit of a single wait, in seconds. Default: ``SPMD_DISCO_TIMEOUT``, else none.
    tvm : bool, optional
        Whether all workers serve TVM's functions from the start, see `Session.load_vm_module`; what
        the controller says counts. Default: the setting ``SPMD_DISCO_TVM``, else no.

    Raises
    ------
    ValueError
        The number of workers is not divisible by `num_groups`, or the ranks disagree; on all ranks.
    DiscoError
        A session is open on this rank, or MPI has been finalized.
    ImportError
        `tvm` is True, and TVM is not installed.
    """

    def __init__(
        self,
        comm: MPI.Intracomm | None = None,
        *,
        num_groups: int | None = None,
        timeout: float | None = None,
        tvm: bool | None = None,
    ) -> None:
        tvm = wants_tvm(tvm)
        num_groups = setting("NUM_GROUPS", 1, int) if num_groups is None else num_groups
        timeout = setting("TIMEOUT", None, seconds) if timeout is None else timeout
        if started_locally():
            raise DiscoError(
                "«python -m spmd_disco -n» starts workers without MPI: open the session with "
                "di.session() or ProcessSession, or start the job with mpirun and without -n"
            )
        with self._opening:
            self._make_way()
            from mpi4py import MPI

            if MPI.Is_finalized():
                raise DiscoError("MPI has been finalized: no session can be opened any more")
            comm = _communicator(comm)
            check_groups(comm.size, num_groups, timeout)
            hook_finalize()
            self._adopt(Rank.open(comm, num_groups, timeout, lobby.current()))
        if tvm and self._member.controller is not None:
            self._open_tvm()

    def __getattr__(self, name: str) -> Any:
        # Called for what is not there, such as the controller on the other ranks.
        member = self.__dict__.get("_member")
        if name in Session.__annotations__ and member is not None:
            raise DiscoError(
                f"this is rank {member.worker.info.worker_id} of {self!r}, which the controller on "
                "rank 0 drives: call serve() here, or use «with» and «if sess is not None:»"
            )
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def serve(self) -> None:
        """Run the worker of this rank until the controller shuts down. Not for rank 0.

        Raises
        ------
        DiscoError
            On rank 0.
        """
        if self._member.controller is not None:
            raise DiscoError(f"this is the controller of {self!r}: the other ranks serve it")
        self._member.serve()

    def __enter__(self) -> Session | None:
        if self._member.controller is None:
            self._member.serve()
            return None
        return super().__enter__()


def _communicator(comm: MPI.Intracomm | None) -> MPI.Intracomm:
    """Return the communicator to open a session on."""
    from mpi4py import MPI

    if comm is None:
        return MPI.COMM_WORLD
    if not isinstance(comm, MPI.Intracomm):
        raise TypeError(f"a session opens on an intracommunicator of mpi4py, not on {comm!r}")
    if comm == MPI.COMM_NULL:
        raise ValueError("a session opens on a communicator, not on COMM_NULL")
    alike = MPI.Comm.Compare(comm, MPI.COMM_WORLD) in (MPI.IDENT, MPI.CONGRUENT)
    if lobby.current() is not None and comm.size > 1 and not alike:
        raise DiscoError(
            "under «python -m spmd_disco» a session opens on COMM_WORLD, since the other ranks "
            "serve it; start the program with «mpirun python app.py» to open sessions on others"
        )
    return comm


# The end of the process ---------------------------------------------------------------------------

_keyval: int | None = None
_owner = 0


def hook_finalize() -> None:
    """See to it that an open session ends before MPI does, whoever finalizes it."""
    global _keyval, _owner
    if _keyval is not None:
        return
    from mpi4py import MPI

    _owner = os.getpid()
    _keyval = MPI.Comm.Create_keyval(delete_fn=_at_finalize)
    # The attributes of COMM_SELF are the first that MPI_Finalize deletes.
    MPI.COMM_SELF.Set_attr(_keyval, True)
    atexit.register(_at_exit)


def _at_finalize(comm: MPI.Comm, keyval: int, value: object) -> None:
    global _keyval
    if _keyval is not None:
        _keyval = None
        close_finally()


def _at_exit() -> None:
    # The call-back does not work in an interpreter that is coming to its end.
    global _keyval
    if os.getpid() != _owner:
        return
    if _keyval is not None:
        from mpi4py import MPI

        keyval, _keyval = _keyval, None
        MPI.COMM_SELF.Delete_attr(keyval)
        MPI.Comm.Free_keyval(keyval)
    close_finally()
    end_with_failure()
