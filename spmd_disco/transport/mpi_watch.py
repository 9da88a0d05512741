"""The watcher of a session over MPI.

Beside what every watcher does (`watch.py`), and with messages of its own where the ranks share no
memory:

* It sees that a worker sits in an MPI call of the user's for a peer that failed in the same
  command, which nothing but the end of the job can release, and ends the job after the grace
  period, with a report.
* On the controller, its polling keeps MPI's progress going while the user's program does other
  things.

It wakes a few times a second, or, where the ranks share memory, while a worker function runs or
another watcher has rung. It needs an MPI that was initialised with full thread support.
"""

from __future__ import annotations

import os
import pickle
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from mpi4py import MPI

from ..config import seconds, setting
from ..errors import Failure
from .mpi_call import mpi_call
from .mpi_channel import TAG_WATCH
from .watch import QUIET_PERIOD, Watcher

if TYPE_CHECKING:
    from ..native._native import Node
    from ..worker import Worker
    from .wait import Waiter

__all__ = ["MPIWatcher"]

PERIOD = 0.1
#: While messages are on their way, the controller's watcher keeps MPI going at this pace.
BUSY_PERIOD = 0.002
#: A worker counts as standing still in an MPI call after so many looks.
STILL_LOOKS = 5
#: A worker that stands still asks so often; an asker not heard of for twice as long has moved on.
ASK_PERIOD = 0.5
#: A ring may come before the message that it is about: so long a watcher looks for that.
ALERT_SECONDS = 2.0


class MPIWatcher(Watcher):
    """Watch over one rank of a session.

    Parameters
    ----------
    comm : mpi4py.MPI.Intracomm
        The control communicator.
    worker : Worker
        This rank's worker.
    busy : callable
        Whether sends of this rank wait for MPI's progress.
    node : Node or None
        The memory that the ranks share.
    """

    def __init__(
        self, comm: MPI.Intracomm, worker: Worker, busy: Callable[[], bool], node: Node | None
    ) -> None:
        super().__init__(worker, node)
        self._comm = comm
        self._busy = busy
        self._grace = setting("GRACE", 5.0, seconds)
        self._token: tuple[Any, int] | None = None
        self._looks = 0
        self._asked = 0.0
        self._requests: list[MPI.Request] = []
        self._status = MPI.Status()
        self._sending = threading.Lock()
        # On the controller: who waits, since when that is known to be in vain, when last heard of.
        self._askers: dict[int, dict[str, Any]] = {}
        self._polled = 0.0

    @staticmethod
    def available() -> bool:
        """Whether MPI lets a thread of ours call it."""
        return bool(MPI.Query_thread() == MPI.THREAD_MULTIPLE)

    def stop(self, waiter: Waiter) -> None:
        """Stop the thread. Collective: no message of ours may be left for a later session.

        MPI may give the communicator that such a session makes the context of this one.
        """
        super().stop(waiter)
        status = MPI.Status()

        def swallow(request: MPI.Request) -> bool:
            while self._comm.Iprobe(MPI.ANY_SOURCE, TAG_WATCH, status):
                data = bytearray(status.Get_count(MPI.BYTE))
                self._comm.Recv(data, status.Get_source(), TAG_WATCH)
            return request.Test()

        # These were sent synchronously: what is complete has been received.
        for request in self._requests:
            waiter.until(partial(swallow, request), lambda: "the other ranks to stop watching")
        barrier = self._comm.Ibarrier()
        waiter.until(partial(swallow, barrier), lambda: "the other ranks to stop watching")

    def interrupt(self) -> None:
        """On the controller: cancel the commands so far on all other workers."""
        through = self._worker.number
        if self._node is not None:
            self._node.interrupt(through)
            return
        for rank in range(1, self._comm.size):
            self._send(rank, ("interrupt", through))

    def _send(self, rank: int, message: tuple[Any, ...]) -> None:
        data = pickle.dumps(message)
        with self._sending:
            self._requests = [r for r in self._requests if not r.Test()]
            self._requests.append(self._comm.Issend(data, rank, TAG_WATCH))
        node = self._node
        if node is not None:
            node.ring_watchers()

    # The thread -----------------------------------------------------------------------------------

    def _run(self) -> None:
        node = self._node
        alert_until = 0.0
        while not self._stop.is_set():
            if node is None:
                if self._stop.wait(BUSY_PERIOD if self._busy() else PERIOD):
                    return
            else:
                self._heed(node)
                if self._quiet(alert_until):
                    if not self._sleep(node, QUIET_PERIOD):
                        continue
                    alert_until = time.monotonic() + ALERT_SECONDS
                elif self._sleep(node, PERIOD):
                    alert_until = time.monotonic() + ALERT_SECONDS
                self._heed(node)
            self._take_messages()
            self._look()
            if self._askers:
                self._judge()

    def _quiet(self, alert_until: float) -> bool:
        """Whether there is nothing to look at before the watchers' doorbell rings."""
        return not (
            self._worker.running
            or self._askers
            or self._requests
            or time.monotonic() < alert_until
            or self._busy()
        )

    def _take_messages(self) -> None:
        status = self._status
        while self._comm.Iprobe(MPI.ANY_SOURCE, TAG_WATCH, status):
            data = bytearray(status.Get_count(MPI.BYTE))
            source = status.Get_source()
            self._comm.Recv(data, source, TAG_WATCH)
            kind, *rest = pickle.loads(data)
            getattr(self, f"_on_{kind}")(source, *rest)
        with self._sending:
            self._requests = [r for r in self._requests if not r.Test()]

    def _look(self) -> None:
        """See whether this rank's worker stands still in an MPI call."""
        worker = self._worker
        found = mpi_call(worker.thread) if worker.running else None
        if found is None:
            self._token = None
            return
        place, where = found
        token = (place, worker.number)
        if token != self._token:
            self._token, self._looks = token, 0
        self._looks += 1
        now = time.monotonic()
        if self._looks >= STILL_LOOKS and now - self._asked >= ASK_PERIOD:
            self._asked = now
            message = (worker.number, hash(token), where, os.getpid(), worker.host)
            if self._comm.rank == 0:
                self._on_waits(0, *message)
            else:
                self._send(0, ("waits", *message))

    # Messages -------------------------------------------------------------------------------------

    def _on_interrupt(self, source: int, through: int) -> None:
        self._cancel(through)

    def _on_waits(
        self, source: int, number: int, token: int, where: str, pid: int, host: str
    ) -> None:
        known = self._askers.get(source)
        if known is None or known["token"] != token:
            known = {"number": number, "token": token, "since": None, "failures": {}}
            known |= {"where": where, "pid": pid, "host": host}
            self._askers[source] = known
        known["heard"] = time.monotonic()

    def _on_failed_in(self, source: int, numbers: list[int]) -> None:
        failures = self._failures_in(numbers)
        if failures:
            self._send(0, ("failures", failures))

    def _failures_in(self, numbers: list[int]) -> list[Failure]:
        recent = dict(self._worker.recent_failures)
        return [recent[number] for number in numbers if number in recent]

    def _on_failures(self, source: int, failures: list[Failure]) -> None:
        for failure in failures:
            for asker in self._askers.values():
                if asker["number"] == failure.command:
                    asker["failures"][source] = failure
                    asker["since"] = asker["since"] or time.monotonic()

    def _judge(self) -> None:
        """On the controller: find out who waits in vain, and end the job when it has for long."""
        now = time.monotonic()
        for source, asker in list(self._askers.items()):
            if now - asker["heard"] > 3 * ASK_PERIOD:
                del self._askers[source]
            elif asker["since"] is not None and now - asker["since"] >= self._grace:
                self._end_the_job()
        if now - self._polled >= ASK_PERIOD:
            self._polled = now
            numbers = sorted({asker["number"] for asker in self._askers.values()})
            self._on_failures(0, self._failures_in(numbers))
            for rank in range(1, self._comm.size):
                self._send(rank, ("failed_in", numbers))

    def _end_the_job(self) -> None:
        lines = [f"spmd_disco: the job ends, after {self._grace:g} s (SPMD_DISCO_GRACE) of this:"]
        shown: set[tuple[int, int]] = set()
        for source, asker in sorted(self._askers.items()):
            if not asker["failures"]:
                continue
            peers = ", ".join(f"worker {i}" for i in sorted(asker["failures"]))
            lines.append(
                f"worker {source} ({asker['host']}, pid {asker['pid']}) waits in {asker['where']}, "
                f"in command {asker['number']}, for {peers}, where that command failed"
            )
            for failure in asker["failures"].values():
                key = (failure.worker_id, failure.command)
                if key not in shown and len(shown) < 4:
                    shown.add(key)
                    lines.append(f"worker {failure.worker_id} in {failure.function}:")
                    lines.append(failure.traceback.rstrip("\n"))
        sys.stdout.flush()
        # Past any replacement of sys.stderr, which may belong to a worker function.
        os.write(2, ("\n".join(lines) + "\n").encode("utf-8", "replace"))
        # The launcher may drop what it has not passed on by then.
        time.sleep(0.2)
        self._comm.Abort(1)
