"""The worker processes of a local session, and the thread that looks after them.

The thread starts the processes, passes on what they print, and notices at once when one ends. What
a worker prints is labelled here and not by the worker, so that this covers C code and subprocesses,
too; and it goes to the controller's `sys.stdout` and `sys.stderr`, which a notebook replaces.
"""

from __future__ import annotations

import codecs
import contextlib
import logging
import os
import pickle
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from .config import flag
from .errors import DiscoError
from .interrupt import uninterrupted
from .lines import LabelledLines, keep_lines_whole, write_between_lines
from .output import stream_behind
from .ranks import without_rank

__all__ = ["Link", "WorkerProcesses"]

logger = logging.getLogger("spmd_disco")

#: Runs in a worker. All of the import path comes first, as the controller has it: Python's own
#: would begin with the current folder, in which anything may lie.
_CODE = """\
import sys
sys.path[:] = {path!r}
import runpy
runpy.run_module({module!r}, run_name="__main__", alter_sys=True)
"""
_MAIN = "spmd_disco.worker_process"
#: Where no file descriptor stands for a process, it is looked at so often.
PERIOD = 0.2
#: Seconds that the workers get to open the session with the controller.
PATIENCE = 60.0
#: Seconds for a worker's output to be passed on before the program goes on.
LONGEST_WAIT_FOR_OUTPUT = 1.0


class Link:
    """One end of a connection between the controller and a worker, for pickled objects.

    Parameters
    ----------
    sock : socket.socket
    """

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock

    def send(self, value: Any) -> None:
        """Send one object. What it takes is small, and the other side receives."""
        data = pickle.dumps(value)
        self.sock.sendall(struct.pack("=Q", len(data)) + data)

    def receive(self) -> Any:
        """Wait for the next object.

        Raises
        ------
        EOFError
            The other side has closed its end, or has ended.
        """
        (size,) = struct.unpack("=Q", self._read(8))
        return pickle.loads(self._read(size))

    def _read(self, size: int) -> bytearray:
        data = bytearray(size)
        view = memoryview(data)
        while view:
            try:
                got = self.sock.recv_into(view)
            except ConnectionResetError:
                got = 0
            if not got:
                raise EOFError("the other side of the connection has ended")
            view = view[got:]
        return data

    def exchange(self, value: Any) -> list[Any]:
        """On a worker: give `value`, and return what all workers have given, by worker."""
        self.send(value)
        values: list[Any] = self.receive()
        return values

    def close(self) -> None:
        """Close this end."""
        self.sock.close()


class _Output:
    """One of a worker's two streams.

    Parameters
    ----------
    fd : int
        Where it can be read.
    name : str
        "stdout" or "stderr".
    label : str
    """

    def __init__(self, fd: int, name: str, label: str) -> None:
        self.fd = fd
        self._name = name
        self._lines = LabelledLines(label)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        os.set_blocking(fd, False)

    def pass_on(self) -> bool:
        """Pass on what can be read now; say if there may be more one day."""
        while True:
            try:
                data = os.read(self.fd, 1 << 16)
            except BlockingIOError:
                return True
            if not data:
                return False
            self._write(self._lines.add(self._decoder.decode(data)))

    def end(self) -> None:
        """Pass on a partial line, and close."""
        self._write(self._lines.add(self._decoder.decode(b"", True)) + self._lines.end())
        os.close(self.fd)

    def _write(self, text: str) -> None:
        # The stream of this moment: programs replace it.
        target = stream_behind(getattr(sys, self._name, None))
        if text and target is not None:
            try:
                write_between_lines(target, text)
            except (OSError, ValueError) as e:
                # The stream is closed, or cannot encode the text.
                logger.warning("output of a worker is lost: %s", e)


class _Process:
    """One worker's process, as the controller sees it."""

    def __init__(
        self, worker_id: int, popen: subprocess.Popen[bytes], link: Link, outputs: list[_Output]
    ) -> None:
        self.worker_id = worker_id
        self.popen = popen
        self.link = link
        self.outputs = outputs
        self.pidfd: int | None = None
        # Only with Linux 5.3 and later; the thread looks from time to time elsewhere.
        with contextlib.suppress(OSError, AttributeError):
            self.pidfd = os.pidfd_open(popen.pid)


class WorkerProcesses:
    """The processes of workers 1 and up.

    Parameters
    ----------
    num_workers : int
        Worker 0 included, which is the calling process.
    entrypoint : str or None
        A module that is run in each process in place of ours, and calls
        `spmd_disco.worker_process.main` when it has set up what it wants.
    on_end : callable
        Called as ``on_end(worker_id, pid, status)`` when a process has ended unasked, by the thread
        that looks after them; `status` is its exit status, or the negative number of the signal
        that killed it.

    Raises
    ------
    OSError
        A process cannot be started.
    """

    def __init__(
        self,
        num_workers: int,
        entrypoint: str | None,
        on_end: Callable[[int, int, int], None],
    ) -> None:
        self._num_workers = num_workers
        self._entrypoint = entrypoint or _MAIN
        self._on_end = on_end
        self._label = flag("PREFIX", True)
        self._processes: list[_Process] = []
        self._alive: dict[int, _Process] = {}
        self._wanted = True
        self._error: BaseException | None = None
        self._started = threading.Event()
        self._passed_on = threading.Event()
        self._passing_on = threading.Lock()
        self._pid = os.getpid()
        self._streams = contextlib.ExitStack()
        self._wake, self._waker = os.pipe()
        os.set_blocking(self._wake, False)
        #: What the controller's own thread looks at for output that is still to be passed on.
        self._outputs = select.poll()
        # One thread for all: where the kernel tells a worker of its parent's end, it tells it of
        # the end of the thread that has started it.
        self._thread = threading.Thread(target=self._run, name="spmd_disco-workers", daemon=True)

    # For the controller ---------------------------------------------------------------------------

    def start(self) -> None:
        """Start the processes; when this fails or is interrupted, none is left."""
        try:
            self._streams.push(keep_lines_whole())
            self._thread.start()
            self._started.wait()
            if self._error is not None:
                raise self._error
        except BaseException:
            self.end(0.0)
            raise

    @property
    def pids(self) -> dict[int, int]:
        """The process ids of the workers."""
        return {process.worker_id: process.popen.pid for process in self._processes}

    def send(self, values: Mapping[int, Any]) -> None:
        """Send each worker a value, by worker."""
        for process in self._processes:
            # A worker that has ended is reported where it is waited for.
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                process.link.send(values[process.worker_id])

    def exchange(self, value: Any) -> list[Any]:
        """Give worker 0's `value`, and return what all workers have given, by worker.

        Raises
        ------
        DiscoError
            A worker ended before, or did not come.
        """
        values = [value]
        end = time.monotonic() + PATIENCE
        for process in self._processes:
            poll = select.poll()
            poll.register(process.link.sock, select.POLLIN)
            while not poll.poll(100):
                if time.monotonic() > end:
                    raise DiscoError(
                        f"worker {process.worker_id} (pid {process.popen.pid}) has not come to "
                        f"open the session within {PATIENCE:g} s"
                    )
            try:
                values.append(process.link.receive())
            except EOFError:
                # Its last words are on their way.
                self._ended(process)
                raise DiscoError(
                    f"worker {process.worker_id} (pid {process.popen.pid}) ended before the "
                    "session was open: see what it has printed"
                ) from None
        self.send(dict.fromkeys(range(self._num_workers), values))
        return values

    def _ended(self, process: _Process) -> None:
        end = time.monotonic() + LONGEST_WAIT_FOR_OUTPUT
        while process.worker_id in self._alive and time.monotonic() < end:
            time.sleep(0.005)

    def pass_on(self) -> None:
        """See to it that what the workers have printed so far is passed on."""
        with self._passing_on:
            if self._outputs.poll(0) and threading.current_thread() is not self._thread:
                self._passed_on.clear()
                self._notify()
                self._passed_on.wait(LONGEST_WAIT_FOR_OUTPUT)

    def end(self, patience: float) -> None:
        """Let the workers end by themselves for so many seconds, and kill those that do not."""
        if os.getpid() != self._pid:
            return  # a forked child: they are its parent's
        uninterrupted(lambda: self._end(patience))

    def _end(self, patience: float) -> None:
        self._wanted = False
        if self._thread.ident is not None:
            self._notify()
            if patience > 0:
                self._thread.join(patience)
            while self._thread.is_alive():
                # It may be starting one at this moment.
                self.kill()
                self._thread.join(0.05)
        for process in self._processes:
            process.link.close()
        for fd in (self._wake, self._waker):
            with contextlib.suppress(OSError):
                os.close(fd)
        self._wake = self._waker = -1
        self._streams.close()

    def kill(self) -> None:
        """Kill the processes that are left, each with its group: with what it has started."""
        for process in list(self._alive.values()):
            # Reaped by this object alone, so the number is still this process's.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.popen.pid, signal.SIGKILL)

    def _notify(self) -> None:
        os.write(self._waker, b"x")

    # The thread -----------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            for worker_id in range(1, self._num_workers):
                if self._wanted:
                    self._start_one(worker_id)
        except BaseException as e:
            self._error = e
            self.kill()
        # Signals are for the main thread; not before, as the processes inherit what is blocked.
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        self._started.set()
        poll = select.poll()
        poll.register(self._wake, select.POLLIN)
        outputs = {o.fd: o for process in self._processes for o in process.outputs}
        for fd in outputs:
            poll.register(fd, select.POLLIN)
            self._outputs.register(fd, select.POLLIN)
        for process in self._processes:
            if process.pidfd is not None:
                poll.register(process.pidfd, select.POLLIN)
        blind = any(process.pidfd is None for process in self._processes)
        while self._alive:
            ready = [fd for fd, _ in poll.poll(PERIOD * 1000 if blind else None)]
            for fd in ready:
                if fd in outputs and not outputs[fd].pass_on():
                    # The worker has closed it, and lives on.
                    poll.unregister(fd)
                    self._outputs.unregister(fd)
            if self._wake in ready:
                os.read(self._wake, 4096)
                self._passed_on.set()
            for process in list(self._alive.values()):
                if process.popen.poll() is not None:
                    for output in process.outputs:
                        with contextlib.suppress(KeyError):
                            poll.unregister(output.fd)
                            self._outputs.unregister(output.fd)
                    if process.pidfd is not None:
                        poll.unregister(process.pidfd)
                    self._bury(process)
        self._passed_on.set()

    def _start_one(self, worker_id: int) -> None:
        ours, theirs = socket.socketpair()
        reads, writes = zip(*(os.pipe() for _ in range(2)), strict=True)
        try:
            path = [entry for entry in sys.path if isinstance(entry, str)]
            flags: Callable[[], list[str]] = getattr(  # noqa: B009
                subprocess, "_args_from_interpreter_flags"
            )
            popen = subprocess.Popen(
                [
                    *(sys.executable, *flags()),
                    *("-c", _CODE.format(path=path, module=self._entrypoint)),
                    *(str(theirs.fileno()), str(os.getpid())),
                ],
                stdin=subprocess.DEVNULL,
                stdout=writes[0],
                stderr=writes[1],
                pass_fds=[theirs.fileno()],
                env=without_rank(os.environ),
                # The terminal's signals are for the controller.
                start_new_session=True,
            )
        except BaseException:
            ours.close()
            for fd in reads:
                os.close(fd)
            raise
        finally:
            theirs.close()
            for fd in writes:
                os.close(fd)
        label = f"[worker {worker_id}] " if self._label else ""
        outputs = [_Output(reads[0], "stdout", label), _Output(reads[1], "stderr", label)]
        process = _Process(worker_id, popen, Link(ours), outputs)
        self._processes.append(process)
        self._alive[worker_id] = process

    def _bury(self, process: _Process) -> None:
        """Take note of the end of a process."""
        for output in process.outputs:
            output.pass_on()
            output.end()
        if process.pidfd is not None:
            os.close(process.pidfd)
        del self._alive[process.worker_id]
        if self._wanted:
            self._on_end(process.worker_id, process.popen.pid, process.popen.returncode)
