"""Forked children that run one function of a test each."""

from __future__ import annotations

import contextlib
import os
import signal
import time
import traceback
from collections.abc import Callable, Iterator

__all__ = ["children"]

#: A child that takes longer is killed.
LIMIT = 30.0


@contextlib.contextmanager
def children(*functions: Callable[[], object]) -> Iterator[list[int]]:
    """Run each function in a child of its own, and give their process ids.

    At the end each must have come to its end without an exception, or have been waited for.
    """
    pids = []
    try:
        for function in functions:
            pid = os.fork()
            if pid == 0:
                _run(function)
            pids.append(pid)
        yield pids
        end = time.monotonic() + LIMIT
        for pid in list(pids):
            status = _wait(pid, end)
            pids.remove(pid)
            assert status in (0, None), f"a child ended with status {status}; its stderr tells why"
    finally:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError, ChildProcessError):
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)


def _run(function: Callable[[], object]) -> None:
    status = 1
    try:
        function()
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def _wait(pid: int, end: float) -> int | None:
    while time.monotonic() < end:
        try:
            ended, status = os.waitpid(pid, os.WNOHANG)
        except ChildProcessError:
            return None  # the test has waited for it
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.001)
    raise AssertionError(f"child {pid} has not ended in {LIMIT:g} s")
