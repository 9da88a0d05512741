"""What a session over MPI has on one rank: communicators, planes, and the worker or controller."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

from ._version import __version__
from .crowding import here
from .device import cpu
from .interrupt import uninterrupted
from .member import Member
from .output import WorkerOutput
from .transport.peer_memory import PeerMemory
from .worker import WorkerInfo

if TYPE_CHECKING:
    from mpi4py import MPI

    from .lobby import Lobby
    from .transport.ccl import CCL

__all__ = ["Rank"]


class Rank(Member):
    """What a session has on one rank.

    Parameters
    ----------
    comm : mpi4py.MPI.Intracomm
    num_groups : int
    timeout : float or None
    """

    kind = "MPISession"

    def __init__(self, comm: MPI.Intracomm, num_groups: int, timeout: float | None) -> None:
        super().__init__(timeout)
        self._comms: list[MPI.Intracomm] = []
        self._control = self._duplicate(comm)
        self._agree(num_groups, timeout)
        self._open_node()
        self.memory = self._open_memory()
        data, user = self._duplicate(comm), self._duplicate(comm)
        group, user_group = data, user
        if num_groups > 1:
            color = comm.rank // (comm.size // num_groups)
            group, user_group = self._split(data, color), self._split(user, color)
        self._ccl = self._open_ccl(data, group, num_groups)
        self.info = WorkerInfo(
            worker_id=comm.rank,
            num_workers=comm.size,
            num_groups=num_groups,
            device=cpu(),
            comm=user,
            group_comm=user_group,
        )
        self._output = WorkerOutput(comm.rank)
        #: Whether MPI still works on messages of the control plane.
        self._busy: Callable[[], bool] = lambda: False
        if comm.rank == 0:
            self._open_controller()
        else:
            self._open_worker()
        self._open_watcher()

    @classmethod
    def open(
        cls, comm: MPI.Intracomm, num_groups: int, timeout: float | None, place: Lobby | None
    ) -> Rank:
        """Open a session on this rank; under the launcher, the controller calls the others in.

        They come at once then, and would be left alone by an interrupt in the middle. Elsewhere
        they may never come, and the wait for them must end at an interrupt.
        """
        opened: list[Rank] = []

        def open_here() -> None:
            if place is not None and place.is_controller and comm.size > 1:
                place.open(num_groups=num_groups, timeout=timeout)
            opened.append(cls(comm, num_groups, timeout))
            Member.latest = opened[0]

        if place is None or not place.is_controller or comm.size == 1:
            open_here()
        else:
            cls._uninterrupted(open_here)
        rank = opened[0]
        if rank.controller is not None:
            rank.controller.interrupts.install()
        return rank

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
        if self._control.rank == 0:
            self.warn_of_crowding(places)
        if any(other != given[0] for other in given):
            self._free()
            ranks = ", ".join(f"rank {i}: {value}" for i, value in enumerate(given[:8]))
            raise ValueError(
                f"all ranks must open a session alike; num_groups, timeout and version are: {ranks}"
            )

    def _open_memory(self) -> PeerMemory:
        try:
            return PeerMemory(self._control.allgather, self._control.rank)
        except ValueError:
            self._free()
            raise

    def _open_node(self) -> None:
        """Share memory with the other ranks for the control plane, if they are all on one node."""
        from .transport.node import open_node

        try:
            node, why = open_node(self._control)
        except BaseException:
            self._free()
            raise
        if node is None:
            logging.getLogger("spmd_disco").debug("MPI carries the commands: %s", why)
        else:
            self.use_node(node)

    def _open_ccl(self, data: MPI.Intracomm, group: MPI.Intracomm, num_groups: int) -> CCL:
        from .transport.ccl_choice import open_peer_ccl

        try:
            ccl, why = open_peer_ccl(
                self._control.allgather,
                data.rank,
                data.size,
                self._waiter,
                num_groups=num_groups,
                node=self._node,
                memory=self.memory,
            )
        except BaseException:
            self._free()
            raise
        if ccl is not None:
            return ccl
        from .transport.mpi_ccl import MPICCL

        logging.getLogger("spmd_disco").debug("MPI moves the arrays: %s", why)
        return MPICCL(data, group, self._waiter, num_groups=num_groups)

    def _open_controller(self) -> None:
        if self._node is not None:
            from .transport.ring_channel import RingControllerChannel

            self.be_controller(RingControllerChannel(self._node, self._waiter))
        else:
            from .transport.mpi_channel import MPIControllerChannel

            channel = MPIControllerChannel(self._control, self._waiter)
            self.be_controller(channel)
            self._busy = channel.busy

    def _open_worker(self) -> None:
        if self._node is not None:
            from .transport.ring_channel import RingWorkerChannel

            self.be_worker(RingWorkerChannel(self._node, self._waiter))
        else:
            from .transport.mpi_channel import MPIWorkerChannel

            self.be_worker(MPIWorkerChannel(self._control, self._waiter))

    def _open_watcher(self) -> None:
        from .transport.mpi_watch import MPIWatcher
        from .transport.watch import NodeWatcher

        if self.info.num_workers > 1 and MPIWatcher.available():
            self.watch(MPIWatcher(self._control, self.worker, self._busy, self._node))
        elif self._node is not None:
            self.watch(NodeWatcher(self.worker, self._node))

    # Closing --------------------------------------------------------------------------------------

    @staticmethod
    def _uninterrupted(function: Callable[[], None]) -> None:
        """Run what must not be left half done, if MPI lets another thread do it."""
        from mpi4py import MPI

        if MPI.Query_thread() >= MPI.THREAD_SERIALIZED:
            uninterrupted(function)
        else:
            function()

    def _free(self) -> None:
        for comm in reversed(self._comms):
            comm.Free()
        self._comms.clear()
