"""The session over the ranks of an MPI communicator."""

from __future__ import annotations

import atexit
import gc
import os
import sys
import weakref
from types import TracebackType
from typing import TYPE_CHECKING, Any

from . import lobby
from .config import seconds, setting
from .errors import DiscoError, WorkerError
from .interrupt import uninterrupted
from .rank import Rank
from .sessions import Session
from .worker import current_worker

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["MPISession", "close_open_session"]

#: The program's handle to the session that was opened last; the program may drop it.
_handle: weakref.ref[MPISession] | None = None
#: What failed in sessions that were dropped and closed without anybody to tell.
_unobserved: list[WorkerError] = []


class MPISession(Session):
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

    Raises
    ------
    ValueError
        The number of workers is not divisible by `num_groups`, or the ranks disagree; on all ranks.
    DiscoError
        A session is open on this rank, or MPI has been finalized.
    """

    def __init__(
        self,
        comm: MPI.Intracomm | None = None,
        *,
        num_groups: int | None = None,
        timeout: float | None = None,
    ) -> None:
        global _handle
        num_groups = setting("NUM_GROUPS", 1, int) if num_groups is None else num_groups
        timeout = setting("TIMEOUT", None, seconds) if timeout is None else timeout
        if current_worker() is not None:
            raise DiscoError("a session cannot be opened inside a worker function")
        if Rank.latest is not None and not Rank.latest.ended:
            # What the program has dropped may still hang in a cycle, of an exception for instance.
            # In another thread, as an interrupt in a call-back of the collector would be lost.
            uninterrupted(gc.collect)
        close_dropped_session()
        if Rank.latest is not None and not Rank.latest.ended:
            raise DiscoError(
                f"a session is open on these ranks ({Rank.latest.describe()}): shut it down before "
                "you open another"
            )
        from mpi4py import MPI

        if MPI.Is_finalized():
            raise DiscoError("MPI has been finalized: no session can be opened any more")
        comm = _communicator(comm)
        _check(comm.size, num_groups, timeout)
        hook_finalize()
        _handle = None
        self._rank = Rank.open(comm, num_groups, timeout, lobby.current())
        if self._rank.controller is not None:
            self._drive(self._rank.controller)
        _handle = weakref.ref(self)

    def __getattr__(self, name: str) -> Any:
        # Called for what is not there, such as the controller on the other ranks.
        rank = self.__dict__.get("_rank")
        if name in Session.__annotations__ and rank is not None:
            raise DiscoError(
                f"this is rank {rank.worker.info.worker_id} of {self!r}, which the controller on "
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
        if self._rank.controller is not None:
            raise DiscoError(f"this is the controller of {self!r}: the other ranks serve it")
        self._rank.serve()

    def shutdown(self, timeout: float | None = None) -> None:
        self._rank.shutdown(timeout)

    def __enter__(self) -> MPISession | None:
        if self._rank.controller is None:
            self._rank.serve()
            return None
        self._rank.controller.check()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        rank = self._rank
        if rank.controller is None or rank.controller.closed:
            return
        if error is None:
            rank.shutdown(None)
            return
        if isinstance(error, KeyboardInterrupt):
            rank.interrupt()
        try:
            rank.shutdown(None)
        except WorkerError as e:
            # The block's own error goes on; this one must not be lost beside it.
            print(f"spmd_disco: also, when {self!r} ended: {e}", file=sys.stderr)

    def __repr__(self) -> str:
        return f"<{self._rank.describe()}>"


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


def _check(size: int, num_groups: int, timeout: float | None) -> None:
    if not isinstance(num_groups, int) or isinstance(num_groups, bool):
        raise TypeError(f"num_groups is an int, not {num_groups!r}")
    if num_groups < 1 or size % num_groups:
        raise ValueError(
            f"{size} workers cannot be split into {num_groups} equal groups: num_groups must "
            f"divide {size}"
        )
    if timeout is not None and not timeout > 0:
        raise ValueError(f"timeout={timeout!r}: give a number of seconds above 0, or None")


def close_dropped_session() -> None:
    """Shut down the open session if the program has dropped its handle."""
    rank = Rank.latest
    if rank is None or rank.ended or (_handle is not None and _handle() is not None):
        return
    if rank.controller is None:
        rank.serve()
        return
    try:
        rank.shutdown(None)
    except WorkerError as e:
        _unobserved.append(e)


def close_open_session(
    *, interrupt: bool = False, patience: float | None = None
) -> WorkerError | None:
    """Shut down whatever session is open in this process, at the end of the program.

    Parameters
    ----------
    interrupt : bool
        Whether to cancel what the workers are doing.
    patience : float, optional
        Seconds to wait for the workers; None waits as long as it takes.

    Returns
    -------
    WorkerError or None
        The failures that nobody has observed.

    Raises
    ------
    DiscoTimeout
        Not all workers came in time; the session is still open.
    """
    rank = Rank.latest
    if rank is not None and not rank.ended:
        if rank.controller is None:
            rank.serve()
        else:
            if interrupt:
                rank.interrupt()
            try:
                rank.shutdown(patience)
            except WorkerError as e:
                _unobserved.append(e)
    if not _unobserved:
        return None
    errors = list(_unobserved)
    _unobserved.clear()
    if len(errors) == 1:
        return errors[0]
    return WorkerError(
        [failure for error in errors for failure in error.failures],
        sum(error.dropped for error in errors),
    )


# The end of the process ---------------------------------------------------------------------------

_keyval: int | None = None
#: Whether there were failures that nobody has observed, so that the exit status is to be 1.
_failed = False
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
        _close_finally()


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
    _close_finally()
    if _failed:
        _exit_with_failure()


def _close_finally() -> None:
    global _failed
    error = close_open_session()
    if error is None:
        return
    if lobby.current() is not None:
        _unobserved.append(error)  # the launcher reports, and sees to the exit status
        return
    print(f"spmd_disco: failures that nobody has observed: {error}", file=sys.stderr, flush=True)
    _failed = True


def _exit_with_failure() -> None:
    """End the process with status 1, which an exit handler can do in no other way."""
    from mpi4py import MPI

    sys.stdout.flush()
    if not MPI.Is_finalized():
        MPI.Finalize()
    os._exit(1)
