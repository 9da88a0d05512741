"""Where the other ranks wait under ``python -m spmd_disco``, between the program's sessions."""

from __future__ import annotations

import os
import pickle
import sys
import time
from collections.abc import Callable
from functools import partial
from itertools import repeat
from typing import TYPE_CHECKING, Any

from .errors import DiscoError, DiscoTimeout
from .transport.wait import Waiter

if TYPE_CHECKING:
    # Imported where it is used: `current` is asked before MPI is initialised, too.
    from mpi4py import MPI

__all__ = ["Lobby", "current", "install"]

_TAG = 1
_TAG_GONE = 2
#: Seconds that the other ranks get to leave, once their last session is over.
LIMIT_OF_LEAVING = 30.0

_current: Lobby | None = None


def current() -> Lobby | None:
    """Return the lobby of this process, or None where ``python -m spmd_disco`` did not start it."""
    return _current


def install(lobby: Lobby) -> None:
    """Make `lobby` the one that `current` returns."""
    global _current
    _current = lobby


class Lobby:
    """Tells the other ranks when the program opens a session, and when to go home. Collective.

    Parameters
    ----------
    world : mpi4py.MPI.Comm
        All ranks of the job. A duplicate is used, so that the program's own messages cannot be
        mistaken for the lobby's.

    Attributes
    ----------
    comm : mpi4py.MPI.Intracomm
        The duplicate.
    is_controller : bool
        True on rank 0, which runs the program.
    """

    def __init__(self, world: MPI.Intracomm) -> None:
        from mpi4py import MPI

        self._mpi = MPI
        self.comm = world.Dup()
        # mpi4py's first pickled collective on a communicator may deadlock once there are threads.
        self.comm.allreduce(0)
        self.is_controller = self.comm.rank == 0
        self._pid = os.getpid()
        self._requests: list[MPI.Request] = []
        self._waiter = Waiter()
        self._closed = False
        self._keyval = MPI.KEYVAL_INVALID
        if self.is_controller:
            # MPI_Finalize begins by deleting the attributes of COMM_SELF, with MPI still working:
            # a program that finalizes MPI itself sends the other ranks home by that.
            self._keyval = MPI.Comm.Create_keyval(delete_fn=self._on_finalize)
            MPI.COMM_SELF.Set_attr(self._keyval, None)

    def open(self, **options: Any) -> None:
        """Have all other ranks construct ``MPISession(None, **options)`` and serve it.

        Only for rank 0. It reaches all ranks or none: an interrupt cannot come in between.

        Raises
        ------
        DiscoError
            The other ranks have been sent home.
        TypeError, pickle.PicklingError
            An option cannot be pickled; nothing has been sent then.
        """
        if self._closed:
            raise DiscoError("the other ranks have been sent home: no session can be opened now")
        self._send(pickle.dumps(([str(arg) for arg in sys.argv], list(sys.path), options)))

    def close(self) -> None:
        """Send the other ranks home. Only for rank 0; harmless when it has been done.

        Raises
        ------
        DiscoTimeout
            Some do not leave: they are stuck in a session, and MPI could not be finalized.
        """
        if self._closed or not self.is_controller or os.getpid() != self._pid:
            return
        self._closed = True
        self._send(pickle.dumps(None))
        self._complete()
        missing = set(range(1, self.comm.size))

        def all_gone() -> bool:
            for rank in tuple(missing):
                if self.comm.Iprobe(rank, _TAG_GONE):
                    self.comm.Recv([bytearray(), self._mpi.BYTE], rank, _TAG_GONE)
                    missing.discard(rank)
            return not missing

        self._waiter.until(
            all_gone,
            lambda: f"{', '.join(f'rank {rank}' for rank in sorted(missing))} to leave its session",
            timeout=LIMIT_OF_LEAVING,
            idle=True,
        )
        if self._keyval != self._mpi.KEYVAL_INVALID:
            # Nothing must call back into Python when MPI ends together with the interpreter.
            keyval, self._keyval = self._keyval, self._mpi.KEYVAL_INVALID
            self._mpi.COMM_SELF.Delete_attr(keyval)
            self._mpi.Comm.Free_keyval(keyval)

    def _on_finalize(self, comm: MPI.Comm, keyval: int, value: object) -> None:
        if self._closed:
            return
        self._keyval = self._mpi.KEYVAL_INVALID
        try:
            self.close()
        except DiscoTimeout as e:
            # Nothing can be raised through MPI_Finalize, which would wait for those ranks for ever.
            print(f"spmd_disco: the job is aborted: {e}", file=sys.stderr, flush=True)
            # The launcher may drop what it has not passed on by then.
            time.sleep(0.2)
            self._mpi.COMM_WORLD.Abort(1)

    def _send(self, message: bytes) -> None:
        self._complete()
        others = range(1, self.comm.size)
        # One call of C code for all the sends: a signal's handler runs before or after it.
        sends = map(self.comm.Isend, repeat(message), others, repeat(_TAG))
        self._requests.extend(sends)

    def _complete(self) -> None:
        if self._requests:
            self._waiter.until(
                partial(self._mpi.Request.Testall, self._requests),
                lambda: "the other ranks to hear of a session",
                limited=False,
            )
            self._requests.clear()

    def serve(self, serve_session: Callable[..., None]) -> None:
        """Serve the program's sessions until it sends this rank home. For all ranks but 0.

        Parameters
        ----------
        serve_session : callable
            Called with the options that the controller opens a session with; serves it to its end.
        """
        while True:
            message = self._receive()
            if message is None:
                self.comm.Send([b"", self._mpi.BYTE], 0, _TAG_GONE)
                return
            argv, path, options = message
            # The program may have changed both: worker functions find what it has set up.
            sys.argv[:] = argv
            sys.path[:] = path
            serve_session(**options)

    def _receive(self) -> Any:
        """Wait for a message from rank 0, without MPI's own waits: those would burn a core."""
        status = self._mpi.Status()
        self._waiter.until(
            partial(self.comm.Iprobe, 0, _TAG, status),
            lambda: "a session",
            idle=True,
            limited=False,
        )
        message = bytearray(status.Get_count(self._mpi.BYTE))
        self.comm.Recv([message, self._mpi.BYTE], source=0, tag=_TAG)
        return pickle.loads(message)
