"""The session whose workers are local processes that it starts, without any MPI."""

from __future__ import annotations

import os

from . import native
from .config import setting
from .errors import DiscoError
from .open_session import OpenSession, check_number, close_at_exit, wants_tvm
from .sessions import Session

__all__ = ["ProcessSession", "default_num_workers"]


def default_num_workers() -> int:
    """Return how many workers a session has that does not say: as many as this process has cores.

    Raises
    ------
    ValueError
        ``SPMD_DISCO_NUM_WORKERS`` is no number from 1.
    """

    def parse(text: str) -> int:
        number = int(text)
        if number < 1:
            raise ValueError("a whole number from 1 is allowed")
        return number

    return setting("NUM_WORKERS", None, parse) or len(os.sched_getaffinity(0))


class ProcessSession(OpenSession):
    """A session over processes of this node, which it starts. There is no MPI.

    Worker 0 is the calling process: a script, a notebook, a test. The workers have the program's
    environment, folder and import path; what they print comes out of the program's `sys.stdout`
    and `sys.stderr`. They end when the session is shut down, and when the program ends, however it
    does. If one of them ends, the session is over: the pending call, or the next one, raises
    `WorkerDied`, and another session can be opened.

    ``get_worker().comm`` and ``.group_comm`` raise a `DiscoError` here.

    Parameters
    ----------
    num_workers : int, optional
        Worker 0 included. Default: ``SPMD_DISCO_NUM_WORKERS``, else as many as there are cores for
        this process.
    num_groups : int, optional
        Into how many equal blocks of consecutive ids the workers are split. Default: the setting
        ``SPMD_DISCO_NUM_GROUPS``, else 1.
    entrypoint : str, optional
        A module that each worker's process runs (as ``python -m`` does) in place of ours. When it
        has set up what it wants, it calls ``spmd_disco.worker_process.main()``.
    timeout : float, optional
        The limit of a single wait, in seconds. Default: ``SPMD_DISCO_TIMEOUT``, else none.
    tvm : bool, optional
        Whether all workers serve TVM's functions from the start, see `Session.load_vm_module`.
        Default: the setting ``SPMD_DISCO_TVM``, else no.

    Raises
    ------
    ValueError
        `num_workers` is not divisible by `num_groups`, or below 1.
    DiscoError
        A session is open in this process, there is no native module, or a worker's process ended
        before the session was open.
    OSError
        A process, or the memory that all share, cannot be had.
    ImportError
        `tvm` is True, and TVM is not installed.
    """

    def __init__(
        self,
        num_workers: int | None = None,
        num_groups: int | None = None,
        entrypoint: str | None = None,
        *,
        timeout: float | None = None,
        tvm: bool | None = None,
    ) -> None:
        tvm = wants_tvm(tvm)
        num_workers = default_num_workers() if num_workers is None else num_workers
        num_groups, timeout = check_number(num_workers, num_groups, timeout)
        if entrypoint is not None and not isinstance(entrypoint, str):
            raise TypeError(f"entrypoint is the name of a module, not {entrypoint!r}")
        if not native.available():
            raise DiscoError(
                f"a ProcessSession needs the native module, which is {native.why_not}; start the "
                "program with «mpirun -n N python -m spmd_disco» and open an MPISession instead"
            )
        with self._opening:
            self._make_way()
            close_at_exit()
            from .process_member import ProcessMember

            self._adopt(ProcessMember.start(num_workers, num_groups, timeout, entrypoint))
        if tvm:
            self._open_tvm()

    def __enter__(self) -> Session:
        self._controller.check()
        return self
