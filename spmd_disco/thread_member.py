"""What a session over threads has: the controller's part, and each worker's thread."""

from __future__ import annotations

import contextlib
import ctypes
import threading
import time
from collections.abc import Sequence
from typing import Any

from .config import seconds, setting
from .device import cpu
from .errors import SessionClosedError
from .lines import keep_lines_whole
from .member import Member
from .no_communicator import InfoWithoutMPI
from .output import ThreadOutput, WorkerOutput
from .protocol import DiscoAction, decode_command
from .transport.doorbell import Doorbell
from .transport.peer_memory import PeerMemory
from .transport.thread_ccl import ThreadCCL
from .transport.thread_channel import ThreadControllerChannel, ThreadWorkerChannel
from .transport.thread_meeting import Threads
from .transport.wait import Waiter

__all__ = ["ThreadMember"]


class _Info(InfoWithoutMPI):
    # What users see.
    __qualname__ = InfoWithoutMPI.__qualname__

    what = "threads of one process (ThreadedSession)"


class _Memory(PeerMemory):
    """Stands for peer memory: threads reach each other's arrays wherever these are."""

    def __init__(self, worker_id: int, num_workers: int, handed: dict[int, Any]) -> None:
        self.handed = handed
        self.worker_id = worker_id
        self.num_workers = num_workers
        self.pool = self.table = None
        self.node = self.leaders = (worker_id,)
        self.why_not = "the workers are threads of one process"
        self._lent = []


class _Part(Member):
    """One worker's part of the session."""

    kind = "ThreadedSession"

    _ccl: ThreadCCL

    def __init__(
        self, shared: Threads, worker_id: int, num_groups: int, timeout: float | None
    ) -> None:
        super().__init__(timeout)
        num_workers = len(shared.world)
        # It has of a node what the waiter uses.
        doorbell: Any = shared.bells[worker_id]
        self._waiter.node = doorbell
        none: Any = None
        self.info = _Info(worker_id, num_workers, num_groups, cpu(), none, none)
        self.memory = _Memory(worker_id, num_workers, shared.handed)
        self._ccl = ThreadCCL(shared, worker_id, num_groups, self._waiter)


class _Thread(_Part):
    """A worker that has a thread of its own: any but worker 0."""

    _channel: ThreadWorkerChannel
    _output: ThreadOutput

    def __init__(
        self, shared: Threads, worker_id: int, num_groups: int, timeout: float | None
    ) -> None:
        super().__init__(shared, worker_id, num_groups, timeout)
        self._output = ThreadOutput(worker_id)
        channel = ThreadWorkerChannel(self._waiter, shared.bells[worker_id], shared.bells[0])
        self.be_worker(channel)
        worker = self.worker
        worker.is_thread = True
        self._ccl.is_cancelled = lambda: worker.number <= worker.interrupted_through
        self._started = threading.Event()
        self._thread = threading.Thread(
            target=self._main, name=f"spmd_disco-worker-{worker_id}", daemon=True
        )

    @property
    def channel(self) -> ThreadWorkerChannel:
        """The worker's end of the control plane."""
        return self._channel

    def start(self) -> None:
        """Start the thread, and return when it serves."""
        self._thread.start()
        self._started.wait()

    def join(self, patience: float) -> None:
        """Wait for the thread to end, so many seconds at most."""
        if self._thread.ident is not None:
            self._thread.join(patience)

    def remove_output(self) -> None:
        """Label what the thread prints no more."""
        self._output.remove()

    def cancel(self, through: int) -> None:
        """Cancel commands up to number `through`; in the controller's thread."""
        worker = self.worker
        worker.interrupted_through = max(worker.interrupted_through, through)
        self._channel.bell.ring()
        if worker.running and not self._ccl.inside:
            # As a signal's handler would, it strikes between two steps of Python code.
            ctypes.pythonapi.PyThreadState_SetAsyncExc(
                ctypes.c_ulong(worker.thread), ctypes.py_object(KeyboardInterrupt)
            )

    # The thread -----------------------------------------------------------------------------------

    def _main(self) -> None:
        # When the controller has given up the session, nobody waits for this thread any more.
        with contextlib.suppress(SessionClosedError):
            self.serve()

    def serve(self) -> None:
        worker, channel = self.worker, self._channel
        message: memoryview | None = None
        self._output.enter()
        self._started.set()
        while not worker.closed:
            try:
                if message is None:
                    message = channel.receive()
                    over = False
                if not over and not worker.step(message):
                    command = decode_command(message)
                    if command.action is DiscoAction.SHUT_DOWN:
                        # Whoever has come so far waits for the others as long as it takes.
                        self._waiter.timeout = None
                    worker.execute(command)
                over = True
                number, size, message = decode_command(message).number, len(message), None
                channel.done(number, size)
            except KeyboardInterrupt as e:
                # It comes a moment after the function that it was for.
                if message is not None and not over:
                    command = decode_command(message)
                    if worker.finished < command.number:
                        worker.abandon(command, e)
                    over = True
        self._end()


class _Interrupter:
    """Stands where other sessions have a watcher: threads see all by themselves."""

    def __init__(self, member: ThreadMember) -> None:
        self._member = member

    def start(self) -> None:
        """Do nothing: there is nothing to watch."""

    def stop(self, waiter: Waiter) -> None:
        """Do nothing: there is nothing to watch."""

    def interrupt(self) -> None:
        """Cancel the commands so far on all other workers."""
        self._member.cancel()


class ThreadMember(_Part):
    """The controller's part of the session, with the other workers' threads.

    Parameters
    ----------
    num_workers, num_groups : int
    timeout : float or None
    """

    def __init__(self, num_workers: int, num_groups: int, timeout: float | None) -> None:
        shared = Threads(num_workers, num_groups, [Doorbell() for _ in range(num_workers)])
        super().__init__(shared, 0, num_groups, timeout)
        #: Seconds that the threads get to end.
        self._grace = setting("GRACE", 5.0, seconds)
        self._output = WorkerOutput(0)
        self._streams = contextlib.ExitStack()
        self._threads = [_Thread(shared, i, num_groups, timeout) for i in range(1, num_workers)]

    @classmethod
    def start(cls, num_workers: int, num_groups: int, timeout: float | None) -> ThreadMember:
        """Start the workers' threads, and become their controller.

        Raises
        ------
        RuntimeError
            The system gives no more threads.
        """
        member = cls(num_workers, num_groups, timeout)
        try:
            member._open()
        except BaseException:
            member._abandon()
            raise
        Member.latest = member
        assert member.controller is not None
        member.controller.interrupts.install()
        return member

    def _open(self) -> None:
        self._streams.push(keep_lines_whole())
        for thread in self._threads:
            thread.start()
        channels: Sequence[ThreadWorkerChannel] = [thread.channel for thread in self._threads]
        self.be_controller(ThreadControllerChannel(channels, self._waiter))
        interrupter: Any = _Interrupter(self)
        self.watch(interrupter)

    def cancel(self) -> None:
        """Cancel the commands so far on all other workers."""
        for thread in self._threads:
            thread.cancel(self.worker.number)

    # Closing --------------------------------------------------------------------------------------

    def _abandon(self) -> None:
        for thread in self._threads:
            thread.channel.give_up()
        self._grace = 0.0
        if self.controller is None:
            self._free()
        else:
            self.controller.closed = True
            self._end()
            self.controller.interrupts.remove()

    def give_up(self) -> str:
        self._uninterrupted(self._abandon)
        return "their threads are left behind, as Python cannot end a thread by force"

    def _free(self) -> None:
        end = time.monotonic() + self._grace
        for thread in self._threads:
            thread.join(max(0.0, end - time.monotonic()))
        for thread in reversed(self._threads):
            thread.remove_output()
        self._streams.close()
