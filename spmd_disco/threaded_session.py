"""Sessions whose workers are threads of one process."""

from __future__ import annotations

from .open_session import OpenSession, check_number, close_at_exit, wants_tvm
from .sessions import Session
from .thread_member import ThreadMember

__all__ = ["ThreadedSession"]


class ThreadedSession(OpenSession):
    """A session over threads of this process, as TVM's of this name.

    It needs nothing but Python and NumPy: the session for debuggers, for systems without MPI, and
    for trying things out. Worker 0 is the calling thread. The workers share the process: its
    modules, globals and environment, and the interpreter's lock, so that Python code of theirs does
    not run at the same time, while NumPy's does.

    What is printed by a worker's thread is labelled. Ctrl-C interrupts the workers between two
    steps of Python code, and where they wait for each other; what does not come back then, in a
    ``time.sleep`` for instance, is left behind.

    ``get_worker().comm`` and ``.group_comm`` raise a `DiscoError` here.

    Parameters
    ----------
    num_workers : int
        Worker 0 included.
    num_groups : int, optional
        Into how many equal blocks of consecutive ids the workers are split. Default: the setting
        ``SPMD_DISCO_NUM_GROUPS``, else 1.
    timeout : float, optional
        The limit of a single wait, in seconds. Default: ``SPMD_DISCO_TIMEOUT``, else none.
    tvm : bool, optional
        Whether the workers serve TVM's functions from the start, see `Session.load_vm_module`.
        Default: the setting ``SPMD_DISCO_TVM``, else no.

    Raises
    ------
    ValueError
        `num_workers` is not divisible by `num_groups`, or below 1.
    DiscoError
        A session is open in this process.
    RuntimeError
        The system gives no more threads.
    ImportError
        `tvm` is True, and TVM is not installed.
    """

    def __init__(
        self,
        num_workers: int,
        num_groups: int | None = None,
        *,
        timeout: float | None = None,
        tvm: bool | None = None,
    ) -> None:
        tvm = wants_tvm(tvm)
        num_groups, timeout = check_number(num_workers, num_groups, timeout)
        with self._opening:
            self._make_way()
            close_at_exit()
            self._adopt(ThreadMember.start(num_workers, num_groups, timeout))
        if tvm:
            self._open_tvm()

    def __enter__(self) -> Session:
        self._controller.check()
        return self
