"""The watcher: a thread of every process of a session that looks after what the others cannot see.

It tells a worker of the controller's interrupt while the worker's own thread runs user code. Where
the processes share memory, it sleeps at a doorbell there until something is up, and costs nothing.
`mpi_watch.py` has the watcher of sessions over MPI, which does more.
"""

from __future__ import annotations

import signal
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..native._native import Node
    from ..worker import Worker
    from .wait import Waiter

__all__ = ["NodeWatcher", "Watcher"]

#: Seconds between two looks where nobody rings.
QUIET_PERIOD = 0.5


class Watcher:
    """Watch over one process of a session.

    Parameters
    ----------
    worker : Worker
        The worker in this process.
    node : Node or None
        The memory that it shares with the others.
    """

    def __init__(self, worker: Worker, node: Node | None) -> None:
        self._worker = worker
        self._node = node
        self._bell = 0 if node is None else node.watch_bell
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._main, name="spmd_disco-watcher", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self, waiter: Waiter) -> None:
        """Stop the thread. Collective."""
        self._stop.set()
        if self._node is not None:
            self._node.ring_watchers()
        if self._thread.is_alive():
            self._thread.join()
        self._node = None

    def interrupt(self) -> None:
        """On the controller: cancel the commands so far on all other workers."""
        raise NotImplementedError

    def _main(self) -> None:
        # Signals are for the main thread.
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        self._run()

    def _run(self) -> None:
        raise NotImplementedError

    def _sleep(self, node: Node, period: float) -> bool:
        """Sleep until the watchers' doorbell rings, `period` at most; say whether it has."""
        seen, self._bell = self._bell, node.wait_watch(self._bell, period)
        return self._bell != seen

    def _heed(self, node: Node) -> None:
        """See whether the controller has cancelled commands. Its own half it cancels itself."""
        through = node.interrupted_through
        if node.me != 0 and through > self._worker.interrupted_through:
            self._cancel(through)
            node.note_interrupt(through)

    def _cancel(self, through: int) -> None:
        """Cancel commands of this worker, up to number `through`."""
        worker = self._worker
        worker.interrupted_through = max(worker.interrupted_through, through)
        if worker.running:
            # A real signal, so that a sleep or a read ends, too. The handler that the worker has
            # installed looks at what has just been set.
            signal.pthread_kill(worker.thread, signal.SIGINT)


class NodeWatcher(Watcher):
    """Watch over one process of a session whose processes share memory."""

    _node: Node

    def __init__(self, worker: Worker, node: Node) -> None:
        super().__init__(worker, node)

    def interrupt(self) -> None:
        self._node.interrupt(self._worker.number)

    def _run(self) -> None:
        node = self._node
        while not self._stop.is_set():
            self._heed(node)
            self._sleep(node, QUIET_PERIOD)
