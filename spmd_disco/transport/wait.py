"""The one place where a process of a session waits.

Everything that a worker or the controller can wait for (a command, a reply, room in a channel, the
arrival of the peers) goes through `Waiter.until`. MPI's own blocking calls would burn a core for as
long as they wait and answer neither to signals nor to failed peers, so the wait polls: at full
speed with yields for some microseconds, since most waits of a busy session are that short, and then
with sleeps that grow to some milliseconds, which leaves a waiting process at about 1 % of a core.

Where the processes of a node share memory, what comes about there rings the doorbell of those whom
it concerns. A wait for such a thing polls the doorbell, and then sleeps until it rings, which costs
nothing and ends at once. It looks at everything every 50 ms all the same, more often while
something of MPI's is pending, and less often on a worker that nothing is asked of.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from ..config import seconds, setting
from ..errors import DiscoTimeout

if TYPE_CHECKING:
    from ..native._native import Node

__all__ = ["Waiter", "sched_yield"]

T = TypeVar("T")

logger = logging.getLogger("spmd_disco")

#: A poll loop that never yields starves the peers when there are more ranks than cores.
POLLS_PER_YIELD = 8
FIRST_SLEEP = 50e-6
#: From so long a wait on, sleeps may be so long: the longer a wait has lasted, the less its end's
#: latency matters, and each look costs some 30 µs of a core, or more when that is shared.
LONGEST_SLEEPS = ((2.0, 10e-3), (0.2, 5e-3), (0.02, 2e-3), (0.0, 1e-3))
#: The longest sleep at the doorbell: signals and time limits are looked at that often. Also the
#: longest sleep there while something of MPI's is pending, once that has lasted for a second.
LONGEST_REST = 50e-3
#: The same for waits that no time limit ends, once they have lasted for a second.
LONGEST_IDLE_REST = 200e-3
#: A process that waits this long for something other than its peers counts as idle.
IDLE_AFTER = 1e-3

sched_yield = getattr(os, "sched_yield", lambda: time.sleep(0))


class Waiter:
    """Wait for conditions, and keep everything else going meanwhile.

    Parameters
    ----------
    timeout : float or None
        The session's time limit for a single wait, in seconds; None for no limit.

    Attributes
    ----------
    node : Node or None
        Where this process has its doorbell.
    """

    def __init__(self, timeout: float | None = None) -> None:
        self.timeout = timeout
        self.node: Node | None = None
        self.spin = setting("SPIN_US", 100.0, seconds) * 1e-6
        self.stall = setting("STALL_SECONDS", 60.0, seconds)
        self._hooks: list[Callable[[bool], object]] = []

    def add_hook(self, hook: Callable[[bool], object]) -> None:
        """Call ``hook(idle)`` while a wait lasts; `idle` says that nothing else is being done.

        Hooks make progress on what is pending. They must neither wait nor raise. One that returns
        true has something pending that no doorbell will tell of, so it is called again soon.
        """
        self._hooks.append(hook)

    def remove_hook(self, hook: Callable[[bool], object]) -> None:
        """Take back `add_hook`, if it was called."""
        self._hooks = [h for h in self._hooks if h != hook]

    def close(self) -> None:
        """Let go of the hooks, and of the memory with the doorbell."""
        self._hooks = []
        self.node = None

    def until(
        self,
        ready: Callable[[], T | None],
        what: Callable[[], str],
        *,
        timeout: float | None = None,
        idle: bool = False,
        limited: bool = True,
        rung: bool | None = None,
        spin: bool = True,
    ) -> T:
        """Poll `ready` until it returns something true, and return that.

        Parameters
        ----------
        ready : callable
            The condition: cheap, and free of waits.
        what : callable
            Gives what is waited for, as it stands in «still waiting for …».
        timeout : float or None
            Seconds; None for the session's own limit.
        idle : bool
            True where the process has nothing else to do: it waits for a command or a reply, and
            has no operation of its own under way.
        limited : bool
            False for a wait that no time limit ends (a worker's wait for its next command).
        rung : bool, optional
            Whether all that can make `ready` true rings the doorbell, where there is one. Default:
            `idle`.
        spin : bool
            False where the doorbell need not be polled at first.

        Raises
        ------
        DiscoTimeout
            The time limit has passed.
        """
        if self.node is not None and (idle if rung is None else rung):
            return self._until_rung(self.node, ready, what, timeout, idle, limited, spin)
        value = ready()
        if value:
            return value
        start = time.perf_counter()
        spin_end = start + self.spin
        polls = 0
        while True:
            value = ready()
            if value:
                return value
            polls += 1
            if polls % POLLS_PER_YIELD == 0:
                sched_yield()
                if time.perf_counter() >= spin_end:
                    break
        limits = _Limits(self, start, timeout, limited, what)
        sleep = FIRST_SLEEP
        while True:
            now = time.perf_counter()
            for hook in self._hooks:
                hook(idle and now - start >= IDLE_AFTER)
            value = ready()
            if value:
                return value
            left = limits.check(now)
            time.sleep(max(0.0, min(sleep, left)))
            sleep = min(2 * sleep, _longest_sleep(now - start))

    def _until_rung(
        self,
        node: Node,
        ready: Callable[[], T | None],
        what: Callable[[], str],
        timeout: float | None,
        idle: bool,
        limited: bool,
        spin: bool,
    ) -> T:
        start = time.perf_counter()
        limits: _Limits | None = None
        sleep = FIRST_SLEEP
        try:
            node.begin_wait()
            # Whatever rings keeps the polling up for as long again, as more may come soon.
            spin_end = start + self.spin if spin else start
            while True:
                seen = node.bell
                value = ready()
                if value:
                    return value
                now = time.perf_counter()
                if now < spin_end:
                    node.wait(seen, spin_end - now)
                    continue
                resting = now - start >= IDLE_AFTER
                pending = False
                for hook in self._hooks:
                    if hook(idle and resting):
                        pending = True
                value = ready()
                if value:
                    return value
                if limits is None:
                    limits = _Limits(self, start, timeout, limited, what)
                left = limits.check(now)
                if pending:
                    rest = sleep
                    longest = LONGEST_REST if now - start >= 1 else _longest_sleep(now - start)
                    sleep = min(2 * sleep, longest)
                else:
                    # Those who are idle say so soon.
                    rest = LONGEST_REST if resting else IDLE_AFTER
                    if not limited and now - start >= 1:
                        rest = LONGEST_IDLE_REST
                if node.sleep(seen, min(rest, left)):
                    spin_end = time.perf_counter() + self.spin
        finally:
            node.end_wait()


class _Limits:
    """How long a wait may last, and when it is reported."""

    def __init__(
        self,
        waiter: Waiter,
        start: float,
        timeout: float | None,
        limited: bool,
        what: Callable[[], str],
    ) -> None:
        self._start = start
        self._timeout = waiter.timeout if timeout is None else timeout
        self._limited = limited and self._timeout is not None
        self._warn_after = waiter.stall if limited and waiter.stall > 0 else float("inf")
        self._what = what

    def check(self, now: float) -> float:
        """Return the seconds that are left.

        Raises
        ------
        DiscoTimeout
            None are.
        """
        waited = now - self._start
        left = float("inf")
        if self._limited:
            assert self._timeout is not None
            left = self._timeout - waited
            if left <= 0:
                raise DiscoTimeout(f"after {self._timeout:g} s still waiting for {self._what()}")
        if waited >= self._warn_after:
            logger.warning("waiting for %s since %.3g s", self._what(), waited)
            self._warn_after = 3 * waited
        return left


def _longest_sleep(waited: float) -> float:
    return next(limit for since, limit in LONGEST_SLEEPS if waited >= since)
