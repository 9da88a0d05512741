"""What a session over MPI has on one rank: communicators, planes, and the worker or controller."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, ClassVar

from ._version import __version__
from .config import flag
from .controller import Controller, check_timeout
from .crowding import crowding, here
from .device import cpu
from .errors import DiscoError, SessionClosedError
from .interrupt import WorkerInterrupts, uninterrupted
from .output import WorkerOutput
from .protocol import DiscoAction, Reply, decode_command, encode_reply
from .transport.wait import Waiter
from .worker import Worker, WorkerInfo

if TYPE_CHECKING:
    from mpi4py import MPI

    from .lobby import Lobby

__all__ = ["Rank"]


class Rank:
    """What a session has on one rank; it outlives the handle, which a program may just drop.

    Parameters
    ----------
    comm : mpi4py.MPI.Intracomm
    num_groups : int
    timeout : float or None
    """

    #: What was opened last in this process; no more than one is open at a time. It is set as soon
    #: as all ranks have opened, so that one whose opening was interrupted then can be closed.
    latest: ClassVar[Rank | None] = None
    #: Whether this process has said that there are more threads than cores.
    warned: ClassVar[bool] = False

    def __init__(self, comm: MPI.Intracomm, num_groups: int, timeout: float | None) -> None:
        self._waiter = Waiter(timeout)
        self._comms: list[MPI.Intracomm] = []
        self._control = self._duplicate(comm)
        self._agree(num_groups, timeout)
        data, user = self._duplicate(comm), self._duplicate(comm)
        group, user_group = data, user
        if num_groups > 1:
            color = comm.rank // (comm.size // num_groups)
            group, user_group = self._split(data, color), self._split(user, color)
        from .transport.mpi_ccl import MPICCL

        self._ccl = MPICCL(data, group, self._waiter, num_groups=num_groups)
        self._info = WorkerInfo(
            worker_id=comm.rank,
            num_workers=comm.size,
            num_groups=num_groups,
            device=cpu(),
            comm=user,
            group_comm=user_group,
        )
        self._output = WorkerOutput(comm.rank)
        self.controller: Controller | None = None
        self.served = False
        #: Whether the session is over on this rank.
        self.ended = False
        if comm.rank == 0:
            self._be_controller()
        else:
            self._be_worker()
        self._watch()

    @classmethod
    def open(
        cls, comm: MPI.Intracomm, num_groups: int, timeout: float | None, place: Lobby | None
    ) -> Rank:
        """Open a session on this rank; under the launcher, the controller calls the others in.

        They come at once then, and would be left alone by an interrupt in the middle. Elsewhere
        they may never come, and the wait for them must end at an interrupt.
        """
        if place is None or not place.is_controller or comm.size == 1:
            cls.latest = cls(comm, num_groups, timeout)
        else:

            def call_in_and_open() -> None:
                place.open(num_groups=num_groups, timeout=timeout)
                cls.latest = cls(comm, num_groups, timeout)

            cls._uninterrupted(call_in_and_open)
        assert cls.latest is not None
        if cls.latest.controller is not None:
            cls.latest.controller.interrupts.install()
        return cls.latest

    # Opening --------------------------------------------------------------------------------------

    def _duplicate(self, comm: MPI.Intracomm) -> MPI.Intracomm:
        # Not Dup(), which would wait in MPI for ranks that come late, or never.
        new, request = comm.Idup()
        self._waiter.until(request.Test, lambda: "all ranks to open the session", limited=False)
        return self._first_use(new)

    def _split(self, comm: MPI.Intracomm, color: int) -> MPI.Intracomm:
        new = comm.Split(color, comm.rank)
        assert isinstance(new, type(comm))
        return self._first_use(new)

    def _first_use(self, comm: MPI.Intracomm) -> MPI.Intracomm:
        self._comms.append(comm)
        # mpi4py's first pickled reduction on a communicator duplicates it while it holds the GIL,
        # and may deadlock once there are threads (mpi4py issue 784).
        comm.allreduce(0)
        return comm

    def _agree(self, num_groups: int, timeout: float | None) -> None:
        mine = (num_groups, timeout, __version__)
        given, places = zip(*self._control.allgather((mine, here())), strict=True)
        warning = crowding(places) if self._control.rank == 0 else None
        if warning is not None and not Rank.warned and flag("CROWDING_WARNING", True):
            Rank.warned = True
            # By way of the log, and not as a Python warning: where those are errors, it would be
            # one on this rank alone.
            logging.getLogger("spmd_disco").warning("%s", warning)
        if any(other != given[0] for other in given):
            self._free()
            ranks = ", ".join(f"rank {i}: {value}" for i, value in enumerate(given[:8]))
            raise ValueError(
                f"all ranks must open a session alike; num_groups, timeout and version are: {ranks}"
            )

    def _be_controller(self) -> None:
        from .transport.mpi_channel import MPIControllerChannel

        # The controller pumps the data plane under its lock.
        self._waiter.remove_hook(self._ccl.pump)
        channel = MPIControllerChannel(self._control, self._waiter)
        self.controller = Controller(
            channel, self._make_worker, self._waiter, self._output, self.describe
        )
        self.worker = self.controller.worker
        self._busy: Callable[[], bool] = channel.busy

    def _be_worker(self) -> None:
        from .transport.mpi_channel import MPIWorkerChannel

        self._channel = MPIWorkerChannel(self._control, self._waiter)
        self._waiter.add_hook(self._ccl.pump)
        self.worker = self._make_worker(lambda reply: self._channel.reply(encode_reply(reply)))
        self._busy = lambda: False

    def _make_worker(self, reply: Callable[[Reply], None]) -> Worker:
        # On worker 0 the output's own leave() ends a command.
        after = self._output.end_command if self._info.worker_id else None
        return Worker(self._info, self._ccl, reply, after)

    def _watch(self) -> None:
        from .transport.watch import Watcher

        self._watcher = None
        if self._info.num_workers > 1 and Watcher.available():
            self._watcher = Watcher(self._control, self.worker, self._busy)
            self._watcher.start()
        if self.controller is not None:
            self.controller.watcher = self._watcher

    def describe(self) -> str:
        """Return how texts call the session."""
        info = self._info
        groups = f" in {info.num_groups} groups" if info.num_groups > 1 else ""
        closed = " (shut down)" if self.controller is not None and self.controller.closed else ""
        workers = f"{info.num_workers} worker{'s' if info.num_workers > 1 else ''}"
        return f"MPISession: {workers}{groups}{closed}"

    # Serving --------------------------------------------------------------------------------------

    def serve(self) -> None:
        """Work off commands until the one that shuts down."""
        if self.served:
            return
        self.served = True
        worker, channel, ccl = self.worker, self._channel, self._ccl
        interrupts = WorkerInterrupts(
            lambda: worker.running and worker.number <= worker.interrupted_through
        )
        level = logging.getLogger().level
        interrupts.install()
        self._output.enter()
        try:
            while not worker.closed:
                message = channel.receive()
                if worker.step(message):
                    channel.done(worker.number, len(message))
                    if ccl.outstanding:
                        ccl.pump(False)
                    continue
                command = decode_command(message)
                if command.action is DiscoAction.SHUT_DOWN:
                    # Whoever has come so far waits for the others as long as it takes.
                    self._waiter.timeout = None
                worker.execute(command)
                channel.done(command.number, len(message))
                if ccl.outstanding:
                    ccl.pump(False)
        finally:
            self._output.leave()
            interrupts.remove()
            logging.getLogger().setLevel(level)
        channel.close()
        self._end()

    # Closing --------------------------------------------------------------------------------------

    def interrupt(self) -> None:
        """Cancel what the other workers have been told to do so far."""
        if self._watcher is not None:
            self._watcher.interrupt()

    def shutdown(self, timeout: float | None) -> None:
        """On the controller: work everything off, then close on all ranks."""
        controller = self.controller
        if controller is None:
            raise DiscoError("the controller, on rank 0, shuts a session down")
        if controller.closed:
            return
        check_timeout(timeout)
        everyone = range(self._info.num_workers)
        # A time-out or an interrupt strikes in here, while the session is whole.
        try:
            number = controller.submit(DiscoAction.SYNC_WORKER)
            replies = controller.wait(number, everyone, timeout).values()
        except SessionClosedError:
            return  # by another thread
        controller.add_failures(replies)
        try:
            self._uninterrupted(self._close_all)
        finally:
            if self.ended:
                controller.interrupts.remove()
        error = controller.take_failures(())
        try:
            if error is not None:
                raise error
        finally:
            del error  # no cycle with this frame

    def _close_all(self) -> None:
        """Close on all ranks. All workers have nothing else to do, so it is a matter of moments."""
        controller = self.controller
        assert controller is not None
        self._waiter.timeout = None
        with controller.lock:
            if controller.closed:
                return
            number = controller.submit(DiscoAction.SHUT_DOWN)
            replies = controller.wait(number, range(self._info.num_workers), None).values()
            controller.add_failures(replies)
            # Threads that wait for something poll under this lock, and see that it is over.
            with controller.polling:
                controller.closed = True
                controller.channel.close()
                self._end()

    @staticmethod
    def _uninterrupted(function: Callable[[], None]) -> None:
        """Run what must not be left half done, if MPI lets another thread do it."""
        from mpi4py import MPI

        if MPI.Query_thread() >= MPI.THREAD_SERIALIZED:
            uninterrupted(function)
        else:
            function()

    def _end(self) -> None:
        self.ended = True
        if self._watcher is not None:
            self._watcher.stop(self._waiter)
        self._free()

    def _free(self) -> None:
        for comm in reversed(self._comms):
            comm.Free()
        self._comms.clear()
