"""Run a function in several processes of this node, without MPI."""

from __future__ import annotations

import contextlib
import os
import pickle
import selectors
import signal
import socket
import struct
import time
import traceback
import warnings
from collections.abc import Callable
from typing import Any

__all__ = ["Worker", "run_forked"]

CRASHES = {signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGFPE, signal.SIGILL}
_LENGTH = struct.Struct("<Q")


def _send(to: socket.socket, value: Any) -> None:
    data = pickle.dumps(value)
    to.sendall(_LENGTH.pack(len(data)) + data)


def _receive(source: socket.socket) -> Any:
    def exactly(size: int) -> bytes:
        parts = []
        while size:
            part = source.recv(size)
            if not part:
                raise EOFError
            parts.append(part)
            size -= len(part)
        return b"".join(parts)

    return pickle.loads(exactly(_LENGTH.unpack(exactly(_LENGTH.size))[0]))


class Worker:
    """What a process knows of itself and the others."""

    def __init__(self, number: int, size: int, parent: socket.socket) -> None:
        self.number = number
        self.size = size
        self._parent = parent

    def exchange(self, value: Any) -> list[Any]:
        """Return what all workers gave."""
        _send(self._parent, ("exchange", value))
        values: list[Any] = _receive(self._parent)
        return values


def run_forked(
    size: int,
    function: Callable[[Worker], Any],
    *,
    limit: float = 60,
    may_die: bool = False,
    may_hang: bool = False,
) -> list[Any]:
    """Return what `function` returns in each of `size` processes; raise what is raised there.

    With `may_die` a process that ends without a result gives None, and with `may_hang` one that has
    not ended after so many seconds. None may crash.
    """
    pids: list[int] = []
    ends: list[socket.socket] = []
    for number in range(size):
        ours, theirs = socket.socketpair()
        with warnings.catch_warnings():
            # Of a thread that some other test has left; the child uses none.
            warnings.simplefilter("ignore", DeprecationWarning)
            pid = os.fork()
        if pid == 0:
            try:
                for end in [ours, *ends]:
                    end.close()
                _child(function, Worker(number, size, theirs), theirs)
            finally:
                os._exit(0)
        theirs.close()
        pids.append(pid)
        ends.append(ours)
    crashes = []
    try:
        results = _serve(ends, limit, may_die, may_hang)
    finally:
        for number, (pid, end) in enumerate(zip(pids, ends, strict=True)):
            end.close()
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            status = os.waitpid(pid, 0)[1]
            if os.WIFSIGNALED(status) and os.WTERMSIG(status) in CRASHES:
                crashes.append(f"worker {number}: {signal.Signals(os.WTERMSIG(status)).name}")
    assert not crashes, ", ".join(crashes)
    return results


def _child(function: Callable[[Worker], Any], worker: Worker, parent: socket.socket) -> None:
    try:
        answer = ("done", function(worker))
    except BaseException:
        answer = ("failed", traceback.format_exc())
    _send(parent, answer)


def _serve(ends: list[socket.socket], limit: float, may_die: bool, may_hang: bool) -> list[Any]:
    results: dict[int, Any] = {}
    waiting: dict[int, Any] = {}
    deadline = time.monotonic() + limit
    with selectors.DefaultSelector() as selector:
        for number, end in enumerate(ends):
            selector.register(end, selectors.EVENT_READ, number)
        while len(results) < len(ends):
            events = selector.select(max(0.0, deadline - time.monotonic()))
            if not events and may_hang:
                break
            if not events:
                missing = sorted(set(range(len(ends))) - set(results))
                raise AssertionError(f"after {limit:g} s workers {missing} have not ended")
            for key, _ in events:
                number = key.data
                try:
                    what, value = _receive(ends[number])
                except (EOFError, ConnectionError):
                    if not may_die:
                        raise AssertionError(f"worker {number} has died") from None
                    what, value = "done", None
                if what == "failed":
                    raise AssertionError(f"worker {number}:\n{value}")
                if what == "done":
                    results[number] = value
                    selector.unregister(ends[number])
                else:
                    waiting[number] = value
            if len(waiting) == len(ends):
                values = [waiting[number] for number in range(len(ends))]
                waiting.clear()
                for end in ends:
                    _send(end, values)
    return [results.get(number) for number in range(len(ends))]
