"""The one place where a process of a session waits.

Everything that a worker or the controller can wait for (a command, a reply, room in a channel, the
arrival of the peers) goes through `Waiter.until`. MPI's own blocking calls would burn a core for as
long as they wait and answer neither to signals nor to failed peers, so the wait polls: at full
speed with yields for some microseconds, since most waits of a busy session are that short, and then
with sleeps that grow to some milliseconds, which leaves a waiting process at about 1 % of a core.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from typing import TypeVar

from ..config import seconds, setting
from ..errors import DiscoTimeout

__all__ = ["Waiter", "sched_yield"]

T = TypeVar("T")

logger = logging.getLogger("spmd_disco")

#: A poll loop that never yields starves the peers when there are more ranks than cores.
POLLS_PER_YIELD = 8
FIRST_SLEEP = 50e-6
#: From so long a wait on, sleeps may be so long: the longer a wait has lasted, the less its end's
#: latency matters, and each look costs some 30 µs of a core, or more when that is shared.
LONGEST_SLEEPS = ((2.0, 10e-3), (0.2, 5e-3), (0.02, 2e-3), (0.0, 1e-3))
#: A process that waits this long for something other than its peers counts as idle.
IDLE_AFTER = 1e-3

sched_yield = getattr(os, "sched_yield", lambda: time.sleep(0))


class Waiter:
    """Wait for conditions, and keep everything else going meanwhile.

    Parameters
    ----------
    timeout : float or None
        The session's time limit for a single wait, in seconds; None for no limit.
    """

    def __init__(self, timeout: float | None = None) -> None:
        self.timeout = timeout
        self.spin = setting("SPIN_US", 100.0, seconds) * 1e-6
        self.stall = setting("STALL_SECONDS", 60.0, seconds)
        self._hooks: list[Callable[[bool], object]] = []

    def add_hook(self, hook: Callable[[bool], object]) -> None:
        """Call ``hook(idle)`` while a wait lasts; `idle` says that nothing else is being done.

        Hooks make progress on what is pending. They must neither wait nor raise.
        """
        self._hooks.append(hook)

    def remove_hook(self, hook: Callable[[bool], object]) -> None:
        """Take back `add_hook`, if it was called."""
        self._hooks = [h for h in self._hooks if h != hook]

    def until(
        self,
        ready: Callable[[], T | None],
        what: Callable[[], str],
        *,
        timeout: float | None = None,
        idle: bool = False,
        limited: bool = True,
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

        Raises
        ------
        DiscoTimeout
            The time limit has passed.
        """
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
        if timeout is None:
            timeout = self.timeout
        end = start + timeout if limited and timeout is not None else None
        warn_at = start + self.stall if limited and self.stall > 0 else None
        sleep = FIRST_SLEEP
        while True:
            now = time.perf_counter()
            for hook in self._hooks:
                hook(idle and now - start >= IDLE_AFTER)
            value = ready()
            if value:
                return value
            if end is not None and now >= end:
                raise DiscoTimeout(f"after {timeout:g} s still waiting for {what()}")
            if warn_at is not None and now >= warn_at:
                logger.warning("waiting for %s since %.3g s", what(), now - start)
                warn_at = now + 2 * (now - start)
            waited = now - start
            longest = next(limit for since, limit in LONGEST_SLEEPS if waited >= since)
            time.sleep(sleep if end is None else max(0.0, min(sleep, end - now)))
            sleep = min(2 * sleep, longest)
