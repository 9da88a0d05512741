"""What a session has in one process: the planes, and the worker or the controller.

How a process comes by them is the subclasses' affair: over MPI (`rank.py`), or as a process that
the controller has started (`process_member.py`).
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, ClassVar

from .config import flag
from .controller import Controller, check_timeout
from .crowding import Place, crowding
from .errors import DiscoError, SessionClosedError
from .interrupt import WorkerInterrupts, uninterrupted
from .output import WorkerOutput
from .protocol import DiscoAction, Reply, decode_command, encode_reply
from .transport.wait import Waiter
from .worker import Worker, WorkerInfo

if TYPE_CHECKING:
    from .native._native import Node
    from .transport.ccl import CCL
    from .transport.channel import ControllerChannel, WorkerChannel
    from .transport.peer_memory import PeerMemory
    from .transport.watch import Watcher

__all__ = ["Member"]


class Member:
    """What a session has in one process; it outlives the handle, which a program may just drop.

    Subclasses set all that is declared here and has no value, and then call `be_controller` or
    `be_worker`.

    Parameters
    ----------
    timeout : float or None
        The session's limit of a single wait.
    """

    #: What was opened last in this process; no more than one is open at a time. It is set as soon
    #: as all have opened, so that one whose opening was interrupted then can be closed.
    latest: ClassVar[Member | None] = None
    #: Whether this process has said that there are more threads than cores.
    warned: ClassVar[bool] = False
    #: What texts call such a session.
    kind: ClassVar[str]

    info: WorkerInfo
    memory: PeerMemory
    _ccl: CCL
    _output: WorkerOutput
    _channel: WorkerChannel
    worker: Worker

    def __init__(self, timeout: float | None) -> None:
        self._waiter = Waiter(timeout)
        self._node: Node | None = None
        self._watcher: Watcher | None = None
        self.controller: Controller | None = None
        self.served = False
        #: Whether the session is over in this process.
        self.ended = False

    # Opening --------------------------------------------------------------------------------------

    def use_node(self, node: Node) -> None:
        """Wait at the doorbell in the memory that the processes share from here on."""
        node.spin = self._waiter.spin
        self._waiter.node = self._node = node

    @staticmethod
    def warn_of_crowding(places: Sequence[Place]) -> None:
        """Warn once, on the controller, if there are more BLAS threads than cores."""
        warning = crowding(places)
        if warning is not None and not Member.warned and flag("CROWDING_WARNING", True):
            Member.warned = True
            # By way of the log, and not as a Python warning: where those are errors, it would be
            # one in this process alone.
            logging.getLogger("spmd_disco").warning("%s", warning)

    def be_controller(
        self, channel: ControllerChannel, make: type[Controller] = Controller
    ) -> Controller:
        """Become the controller, and worker 0."""
        # The controller pumps the data plane under its lock.
        self._waiter.remove_hook(self._ccl.pump)
        self.controller = make(
            channel, self._make_worker, self._waiter, self._output, self.describe
        )
        self.worker = self.controller.worker
        self._waiter.add_hook(self._outstanding)
        return self.controller

    def be_worker(self, channel: WorkerChannel) -> None:
        """Become one of the other workers."""
        self._channel = channel
        self._waiter.add_hook(self._outstanding)
        self._waiter.add_hook(self._ccl.pump)
        self.worker = self._make_worker(lambda reply: channel.reply(encode_reply(reply)))

    def _outstanding(self, idle: bool) -> bool:
        """Whether the data plane has something pending of which no doorbell tells."""
        return self._ccl.outstanding

    def _make_worker(self, reply: Callable[[Reply], None]) -> Worker:
        # On worker 0 the output's own leave() ends a command.
        after = self._output.end_command if self.info.worker_id else None
        worker = Worker(self.info, self._ccl, reply, after)
        worker.memory = self.memory
        worker.set_node(self._node)
        return worker

    def watch(self, watcher: Watcher | None) -> None:
        """Start a watcher over this process."""
        self._watcher = watcher
        if watcher is not None:
            watcher.start()
        if self.controller is not None:
            self.controller.watcher = watcher

    def describe(self) -> str:
        """Return how texts call the session."""
        info = self.info
        groups = f" in {info.num_groups} groups" if info.num_groups > 1 else ""
        closed = " (shut down)" if self.controller is not None and self.controller.closed else ""
        workers = f"{info.num_workers} worker{'s' if info.num_workers > 1 else ''}"
        return f"{self.kind}: {workers}{groups}{closed}"

    # Serving --------------------------------------------------------------------------------------

    def serve(self) -> None:
        """Work off commands until the one that shuts down."""
        if self.served:
            return
        self.served = True
        worker, channel, ccl, node = self.worker, self._channel, self._ccl, self._node
        with self._serving():
            while not worker.closed:
                if channel.drain(worker, once=ccl.polled):
                    if ccl.outstanding:
                        ccl.pump(False)
                    continue
                message = channel.receive()
                if node is not None and node.interrupted_through > worker.interrupted_through:
                    # The watcher may be a moment later.
                    worker.interrupted_through = node.interrupted_through
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
        del node
        channel.close()
        self._end()

    @contextlib.contextmanager
    def _serving(self) -> Iterator[None]:
        """Have what worker functions print and what interrupts them in place."""
        worker = self.worker
        interrupts = WorkerInterrupts(
            lambda: worker.running and worker.number <= worker.interrupted_through
        )
        level = logging.getLogger().level
        interrupts.install()
        self._output.enter()
        try:
            yield
        finally:
            self._output.leave()
            interrupts.remove()
            logging.getLogger().setLevel(level)

    # Closing --------------------------------------------------------------------------------------

    def interrupt(self) -> None:
        """Cancel what the other workers have been told to do so far."""
        if self._watcher is not None:
            self._watcher.interrupt()

    def give_up(self) -> str:
        """End the session by force, where that can be done.

        Returns
        -------
        str
            What has become of the workers; empty where it could not be done.
        """
        return ""

    def shutdown(self, timeout: float | None) -> None:
        """On the controller: work everything off, then close everywhere."""
        controller = self.controller
        if controller is None:
            raise DiscoError("the controller, on rank 0, shuts a session down")
        if controller.closed:
            return
        check_timeout(timeout)
        everyone = range(self.info.num_workers)
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

    def clear_away(self) -> bool:
        """Close here what is left of a session that has come to its end by itself.

        Returns
        -------
        bool
            Whether it is one.
        """
        return False

    def _close_all(self) -> None:
        """Close everywhere. All workers have nothing else to do, so it is a matter of moments."""
        controller = self.controller
        assert controller is not None
        self._waiter.timeout = None
        with controller.lock:
            if controller.closed:
                return
            number = controller.submit(DiscoAction.SHUT_DOWN)
            replies = controller.wait(number, range(self.info.num_workers), None).values()
            controller.add_failures(replies)
            # Threads that wait for something poll under this lock, and see that it is over.
            with controller.polling:
                controller.closed = True
                controller.channel.close()
                self._end()

    @staticmethod
    def _uninterrupted(function: Callable[[], None]) -> None:
        """Run what must not be left half done."""
        uninterrupted(function)

    def _end(self) -> None:
        self.ended = True
        if Member.latest is self:
            Member.latest = None
        if self._watcher is not None:
            self._watcher.stop(self._waiter)
        self._waiter.close()
        self._node = None
        self.worker.set_node(None)
        if self.controller is not None:
            self.controller._set_ring(None, None)
        self.memory.close()
        self._free()

    def _free(self) -> None:
        """Give back what else this process has of the session."""
