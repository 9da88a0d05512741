"""The one session that is open in a process: its handle, and how it ends if the program forgets.

A program may drop the handle, raise, call `sys.exit` or simply come to its end: the session is shut
down all the same, and failures that nobody has asked about are told.
"""

from __future__ import annotations

import atexit
import gc
import os
import sys
import threading
import weakref
from types import TracebackType
from typing import ClassVar

from . import lobby
from .config import flag, seconds, setting
from .errors import DiscoError, DiscoTimeout, WorkerDied, WorkerError
from .interrupt import INTERRUPTED, PATIENCE_AFTER_INTERRUPT, uninterrupted
from .member import Member
from .sessions import Session
from .worker import current_worker

__all__ = [
    "OpenSession",
    "check_groups",
    "check_number",
    "close_at_exit",
    "close_dropped_session",
    "close_finally",
    "close_open_session",
    "end_with_failure",
    "started_locally",
    "wants_tvm",
]

#: The program's handle to the session that was opened last; the program may drop it.
_handle: weakref.ref[OpenSession] | None = None
#: What failed in sessions that were dropped and closed without anybody to tell.
_unobserved: list[WorkerError | WorkerDied] = []


class OpenSession(Session):
    """A session that is opened by being constructed, one at a time in a process."""

    _member: Member
    #: Threads that open sessions at the same time take turns.
    _opening: ClassVar[threading.RLock] = threading.RLock()

    @staticmethod
    def _make_way() -> None:
        """Check that a session can be opened here now, and close one that has been dropped.

        Raises
        ------
        DiscoError
            One is open, or this is a worker function.
        """
        global _handle
        if current_worker() is not None:
            raise DiscoError("a session cannot be opened inside a worker function")
        if Member.latest is not None and not Member.latest.ended:
            # What the program has dropped may still hang in a cycle, of an exception for instance.
            # In another thread, as an interrupt in a call-back of the collector would be lost.
            uninterrupted(gc.collect)
        close_dropped_session()
        latest = Member.latest
        if latest is not None and not latest.ended and not latest.clear_away():
            raise DiscoError(
                f"a session is open ({latest.describe()}): shut it down before you open another"
            )
        _handle = None

    def _adopt(self, member: Member) -> None:
        """Become the handle to what has been opened."""
        global _handle
        self._member = member
        if member.controller is not None:
            self._drive(member.controller)
        _handle = weakref.ref(self)

    def _open_tvm(self) -> None:
        """Have TVM's functions served before anything else; without that, there is no session."""
        try:
            self._enable_tvm()
        except BaseException:
            self._member.shutdown(None)
            raise

    def shutdown(self, timeout: float | None = None) -> None:
        self._member.shutdown(timeout)

    def __enter__(self) -> Session | None:
        self._controller.check()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        member = self._member
        if member.controller is None or member.ended:
            return
        if error is not None and member.controller.is_forked():
            return  # the child ends as it wants to; the session is its parent's
        if error is None:
            member.shutdown(None)
            return
        interrupted = isinstance(error, KeyboardInterrupt)
        if interrupted:
            member.interrupt()
        try:
            try:
                member.shutdown(
                    PATIENCE_AFTER_INTERRUPT if interrupted else setting("GRACE", 5.0, seconds)
                )
            except DiscoTimeout:
                if interrupted:
                    raise
                member.interrupt()
                member.shutdown(PATIENCE_AFTER_INTERRUPT)
        except DiscoTimeout as e:
            # Python cannot interrupt code in C, and a function may catch what interrupts it.
            what = member.give_up() or "the session stays open"
            print(f"spmd_disco: {e}, and {what}", file=sys.stderr, flush=True)
        except (WorkerError, WorkerDied) as e:
            if e is not error:
                # The block's own error goes on; this one must not be lost beside it.
                print(f"spmd_disco: also, when {self!r} ended: {e}", file=sys.stderr)

    def __repr__(self) -> str:
        return f"<{self._member.describe()}>"


def check_groups(num_workers: int, num_groups: int, timeout: float | None) -> None:
    """Check what all session kinds are given.

    Raises
    ------
    TypeError, ValueError
    """
    if not isinstance(num_groups, int) or isinstance(num_groups, bool):
        raise TypeError(f"num_groups is an int, not {num_groups!r}")
    if num_groups < 1 or num_workers % num_groups:
        raise ValueError(
            f"{num_workers} workers cannot be split into {num_groups} equal groups: num_groups "
            f"must divide {num_workers}"
        )
    if timeout is not None and not timeout > 0:
        raise ValueError(f"timeout={timeout!r}: give a number of seconds above 0, or None")


def check_number(
    num_workers: int, num_groups: int | None, timeout: float | None
) -> tuple[int, float | None]:
    """Check what sessions that start their workers are given; return it with the defaults.

    Raises
    ------
    TypeError, ValueError
    """
    num_groups = setting("NUM_GROUPS", 1, int) if num_groups is None else num_groups
    timeout = setting("TIMEOUT", None, seconds) if timeout is None else timeout
    if not isinstance(num_workers, int) or isinstance(num_workers, bool):
        raise TypeError(f"num_workers is an int, not {num_workers!r}")
    if num_workers < 1:
        raise ValueError(f"num_workers={num_workers}: a whole number from 1 is allowed")
    check_groups(num_workers, num_groups, timeout)
    return num_groups, timeout


def wants_tvm(tvm: bool | None) -> bool:
    """Return whether a session is to serve TVM's functions, of which it says `tvm`.

    Raises
    ------
    TypeError, ValueError
        It, or the setting in the environment, is no bool.
    """
    if tvm is None:
        return flag("TVM", False)
    if not isinstance(tvm, bool):
        raise TypeError(f"tvm is a bool or None, not {tvm!r}")
    return tvm


def close_dropped_session() -> None:
    """Shut down the open session if the program has dropped its handle."""
    member = Member.latest
    if member is None or member.ended or (_handle is not None and _handle() is not None):
        return
    if member.controller is None:
        member.serve()
        return
    try:
        member.shutdown(None)
    except (WorkerError, WorkerDied) as e:
        _unobserved.append(e)


def close_open_session(
    *, interrupt: bool = False, patience: float | None = None
) -> WorkerError | WorkerDied | None:
    """Shut down whatever session is open in this process, at the end of the program.

    Parameters
    ----------
    interrupt : bool
        Whether to cancel what the workers are doing.
    patience : float, optional
        Seconds to wait for the workers; None waits as long as it takes.

    Returns
    -------
    WorkerError, WorkerDied or None
        The failures that nobody has observed.

    Raises
    ------
    DiscoTimeout
        Not all workers came in time; the session is still open.
    """
    member = Member.latest
    if member is not None and not member.ended:
        if member.controller is None:
            member.serve()
        else:
            if interrupt:
                member.interrupt()
            try:
                member.shutdown(patience)
            except (WorkerError, WorkerDied) as e:
                _unobserved.append(e)
    if not _unobserved:
        return None
    errors = list(_unobserved)
    _unobserved.clear()
    died = [error for error in errors if isinstance(error, WorkerDied)]
    if len(errors) == 1 or died:
        return died[-1] if died else errors[0]
    failed = [error for error in errors if isinstance(error, WorkerError)]
    return WorkerError(
        [failure for error in failed for failure in error.failures],
        sum(error.dropped for error in failed),
    )


# The end of the process ---------------------------------------------------------------------------

#: Whether there were failures that nobody has observed, so that the exit status is to be 1.
_failed = False
_owner = 0
_started_locally = False


def started_locally(value: bool | None = None) -> bool:
    """Return whether ``python -m spmd_disco -n`` runs the program, once that has been said.

    The launcher then reports what is unobserved at the end: it asks `close_open_session`.
    """
    global _started_locally
    if value is not None:
        _started_locally = value
    return _started_locally


def close_at_exit() -> None:
    """See to it that the session that is open at the end of this process is shut down."""
    global _owner
    if _owner != os.getpid():
        _owner = os.getpid()
        atexit.register(_at_exit)


def _at_exit() -> None:
    if os.getpid() == _owner:
        close_finally()
        end_with_failure()


def close_finally() -> None:
    """Shut the open session down, and tell what nobody has observed."""
    global _failed
    # What has ended the program, if an exception has.
    ending = getattr(sys, "last_type", None)
    interrupted = ending is not None and issubclass(ending, KeyboardInterrupt)
    patience = None if ending is None else setting("GRACE", 5.0, seconds)
    try:
        error = close_open_session(
            interrupt=interrupted, patience=PATIENCE_AFTER_INTERRUPT if interrupted else patience
        )
    except DiscoTimeout as e:
        _give_up(e)
        return
    if error is None:
        return
    if _started_locally or lobby.current() is not None:
        _unobserved.append(error)  # the launcher reports, and sees to the exit status
        return
    print(f"spmd_disco: failures that nobody has observed: {error}", file=sys.stderr, flush=True)
    _failed = True


def _give_up(why: DiscoTimeout) -> None:
    """End a program that an exception has ended, and whose workers do not come back."""
    member = Member.latest
    end = "" if member is None else member.give_up()
    print(f"spmd_disco: {why}, and {end or 'the job is aborted'}", file=sys.stderr, flush=True)
    if not end:
        sys.modules["mpi4py.MPI"].COMM_WORLD.Abort(INTERRUPTED)


def end_with_failure() -> None:
    """End the process with status 1, which an exit handler can do in no other way, if it failed."""
    if not _failed:
        return
    sys.stdout.flush()
    MPI = sys.modules.get("mpi4py.MPI")
    if MPI is not None and MPI.Is_initialized() and not MPI.Is_finalized():
        MPI.Finalize()
    os._exit(1)
