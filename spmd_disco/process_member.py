"""What a session without MPI has in one process: of the controller, or of a worker it started."""

from __future__ import annotations

import contextlib
import gc
import logging
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from .config import seconds, setting
from .controller import Controller
from .crowding import here
from .device import cpu
from .errors import DiscoError, SessionClosedError, WorkerDied
from .member import Member
from .no_communicator import InfoWithoutMPI
from .output import WorkerOutput
from .processes import Link, WorkerProcesses
from .protocol import Reply
from .transport.ccl_choice import open_peer_ccl
from .transport.node import NodeAddress, address_of, attach_node, create_node
from .transport.peer_memory import PeerMemory
from .transport.ring_channel import RingControllerChannel, RingWorkerChannel
from .transport.watch import NodeWatcher

if TYPE_CHECKING:
    from collections import deque

    from .native._native import Node
    from .transport.peer_ccl import PeerCCL
    from .transport.wait import Waiter

__all__ = ["ProcessMember", "serve"]

logger = logging.getLogger("spmd_disco")

Exchange = Callable[[Any], Sequence[Any]]


class _Invitation(NamedTuple):
    """What the controller tells a worker's process first."""

    worker_id: int
    num_workers: int
    num_groups: int
    timeout: float | None
    argv: list[str]
    node: NodeAddress


class _Channel(RingControllerChannel):
    """The controller's end of the ring, which passes on what workers have printed before replies.

    Parameters
    ----------
    pass_on : callable
    """

    def __init__(self, node: Node, waiter: Waiter, pass_on: Callable[[], None]) -> None:
        super().__init__(node, waiter)
        self._pass_on = pass_on

    def poll(self) -> deque[tuple[int, memoryview]]:
        queue = super().poll()
        if queue:
            self._pass_on()
        return queue


class _Controller(Controller):
    """A controller whose session ends when a worker's process does."""

    #: What has ended the session, and whether the program has been told.
    death: WorkerDied | None = None
    told = False
    #: Passes on what the workers have printed.
    pass_on: Callable[[], None]

    def check(self) -> None:
        self._raise_death()
        super().check()

    def sync(self, timeout: float | None) -> None:
        super().sync(timeout)
        self._raise_death()
        # It may have been read off the status lines, without any reply.
        self.pass_on()

    def _all_left(self, number: int) -> bool:
        # A worker that has died will not leave anything.
        self._raise_death()
        return super()._all_left(number)

    def wait(self, number: int, workers: Sequence[int], timeout: float | None) -> dict[int, Reply]:
        try:
            return super().wait(number, workers, timeout)
        except SessionClosedError:
            self._raise_death()
            raise

    def _raise_death(self) -> None:
        death = self.death
        if death is not None:
            self.told = True
            # The same one, each time with the traceback of the call that it ends.
            raise death.with_traceback(None) from None


class ProcessMember(Member):
    """What a session without MPI has in one process.

    Parameters
    ----------
    worker_id, num_workers, num_groups : int
    timeout : float or None
    node : Node
        The memory that the processes share.
    """

    kind = "ProcessSession"
    #: Whether this process has had such a session.
    _again: ClassVar[bool] = False

    _peer_ccl: PeerCCL

    def __init__(
        self, worker_id: int, num_workers: int, num_groups: int, timeout: float | None, node: Node
    ) -> None:
        super().__init__(timeout)
        #: Seconds that the workers get to end by themselves.
        self._grace = setting("GRACE", 5.0, seconds)
        #: Whether the workers are being told to end.
        self._closing = False
        self.use_node(node)
        none: Any = None
        self.info = InfoWithoutMPI(worker_id, num_workers, num_groups, cpu(), none, none)
        # The controller labels what the others print.
        self._output = WorkerOutput(worker_id, prefix=None if worker_id == 0 else False)
        self._processes: WorkerProcesses | None = None

    @classmethod
    def start(
        cls, num_workers: int, num_groups: int, timeout: float | None, entrypoint: str | None
    ) -> ProcessMember:
        """Start the workers' processes, and become their controller.

        Raises
        ------
        DiscoError
            A process did not come so far as to open the session.
        OSError
            A process, or the shared memory, cannot be had.
        """
        if cls._again:
            # What the one before has left in cycles holds memory and file descriptors.
            gc.collect()
        ProcessMember._again = True
        node = create_node(num_workers)
        member = cls(0, num_workers, num_groups, timeout, node)
        processes = member._processes = WorkerProcesses(num_workers, entrypoint, member._on_end)
        processes.start()
        try:
            argv = [str(arg) for arg in sys.argv]
            address = address_of(node)
            processes.send(
                {
                    i: _Invitation(i, num_workers, num_groups, timeout, argv, address)
                    for i in range(1, num_workers)
                }
            )
            member._open(processes.exchange)
            node.segment.unlink()
        except BaseException:
            processes.end(0.0)
            raise
        Member.latest = member
        assert member.controller is not None
        member.controller.interrupts.install()
        return member

    def _open(self, exchange: Exchange) -> None:
        """Open the planes, together with all others."""
        assert self._node is not None
        info = self.info
        places = exchange(here())
        if info.worker_id == 0:
            self.warn_of_crowding(places)
        self.memory = PeerMemory(exchange, info.worker_id)
        ccl, why = open_peer_ccl(
            exchange,
            info.worker_id,
            info.num_workers,
            self._waiter,
            num_groups=info.num_groups,
            node=self._node,
            memory=self.memory,
        )
        if ccl is None:
            raise DiscoError(
                "a ProcessSession moves arrays through shared memory, and there is none: "
                f"{why}; under mpirun an MPISession does without"
            )
        self._ccl = self._peer_ccl = ccl
        if self._processes is not None:
            channel = _Channel(self._node, self._waiter, self._processes.pass_on)
            self.be_controller(channel, _Controller)
            self._controller.pass_on = self._processes.pass_on
        else:
            self.be_worker(RingWorkerChannel(self._node, self._waiter))
        self.watch(NodeWatcher(self.worker, self._node))
        # Nobody goes on before all have come so far.
        exchange(None)

    @property
    def _controller(self) -> _Controller:
        assert isinstance(self.controller, _Controller)
        return self.controller

    # The end of a worker --------------------------------------------------------------------------

    def _on_end(self, worker_id: int, pid: int, status: int) -> None:
        """Take note that a worker's process has ended; in the thread that has noticed it."""
        node, controller = self._node, self.controller
        if node is None or not isinstance(controller, _Controller) or controller.death is not None:
            return
        if self._closing and status == 0:
            return  # it has worked off the last command, and said so
        now = node.status(worker_id)
        function, command = (now["function"], now["running"]) if now["running"] else ("", 0)
        controller.death = death = WorkerDied(worker_id, pid, status, function, command)
        controller.closed = True
        logger.error("%s", death)
        # Nobody is to wait for it any more, nor for the others, which have nothing left to do.
        for worker in range(1, self.info.num_workers):
            node.mark_gone(worker)
            self._peer_ccl.bury(worker)
        node.close()
        assert self._processes is not None
        self._processes.kill()

    # Closing --------------------------------------------------------------------------------------

    def shutdown(self, timeout: float | None) -> None:
        if self.ended:
            return
        with contextlib.suppress(WorkerDied):
            super().shutdown(timeout)
        if self.clear_away() and not self._controller.told:
            self._controller.check()

    def _close_all(self) -> None:
        self._closing = True
        super()._close_all()

    def clear_away(self) -> bool:
        if self._controller.death is None:
            return False
        if not self.ended:
            self._uninterrupted(self._abandon)
        return True

    def _abandon(self) -> None:
        """Close here what has been opened with workers that are no more."""
        controller = self._controller
        with controller.lock, controller.polling:
            if not self.ended:
                controller.channel.close()
                self._end()
        controller.interrupts.remove()

    def give_up(self) -> str:
        self._controller.closed = True
        self._grace = 0.0
        self._uninterrupted(self._abandon)
        return "the workers are killed"

    def _free(self) -> None:
        if self._processes is not None:
            self._processes.end(self._grace)


def serve(link: Link) -> None:
    """Serve the session that has started this process, as one of its workers."""
    try:
        invitation: _Invitation = link.receive()
    except EOFError:
        # The controller has given up, for reasons that it tells itself.
        return
    sys.argv[:] = invitation.argv
    member = ProcessMember(
        invitation.worker_id,
        invitation.num_workers,
        invitation.num_groups,
        invitation.timeout,
        attach_node(invitation.node, invitation.worker_id),
    )
    try:
        member._open(link.exchange)
    except (EOFError, BrokenPipeError, DiscoError, ValueError):
        # Likewise; or all have agreed on it, and the program gets it from the controller.
        return
    Member.latest = member
    link.close()
    try:
        member.serve()
    except SessionClosedError:
        # Another worker has died, and the controller has said that it is over.
        return
