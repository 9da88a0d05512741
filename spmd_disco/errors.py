"""The errors of a session, and the record of a failure that travels to the controller."""

from __future__ import annotations

import signal as signals
from collections.abc import Sequence
from dataclasses import dataclass, field

__all__ = [
    "DiscoError",
    "DiscoTimeout",
    "Failure",
    "InheritedFailure",
    "PeerError",
    "SessionClosedError",
    "WorkerDied",
    "WorkerError",
]

#: Tracebacks shown in full in the text of one `WorkerError`.
MAX_TRACEBACKS = 4
#: Worker ids shown for one failure that several workers share.
MAX_IDS = 16


class DiscoError(RuntimeError):
    """Base of everything that goes wrong in a session, as opposed to a wrong argument."""


class SessionClosedError(DiscoError):
    """The session has been shut down."""


class WorkerDied(DiscoError):
    """A worker's process has ended, and with it the session; a new one can be opened.

    Parameters
    ----------
    worker_id : int
        The worker.
    pid : int
        The number of its process.
    status : int
        The exit status of the process, or the negative number of the signal that killed it.
    function : str
        What it was running; empty if that was nothing.
    command : int
        The number of the command in the session's stream; 0 if there was none.

    Attributes
    ----------
    worker_id, pid : int
    function : str
    command : int
    signal : int or None
        The signal that killed it.
    exit_status : int or None
        The status that it ended with by itself.
    """

    def __init__(
        self, worker_id: int, pid: int, status: int, function: str = "", command: int = 0
    ) -> None:
        self.worker_id = worker_id
        self.pid = pid
        self.function = function
        self.command = command
        self.signal = -status if status < 0 else None
        self.exit_status = None if status < 0 else status
        self._status = status
        if self.signal is None:
            how = f"ended with exit status {status}"
        else:
            known = self.signal in signals.valid_signals()
            name = signals.Signals(self.signal).name if known else f"signal {self.signal}"
            how = f"was killed by {name}"
        where = f" in {function}, command {command}" if command else " while it waited for commands"
        super().__init__(
            f"worker {worker_id} (pid {pid}) {how}{where}: the session is over, open a new one"
        )

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.worker_id, self.pid, self._status, self.function, self.command)


class DiscoTimeout(DiscoError, TimeoutError):
    """A wait took longer than its time limit; the session can still be used."""


class PeerError(DiscoError):
    """A worker waited for a peer that failed, or that left the command without taking part."""


class InheritedFailure(DiscoError):
    """A command was not run because it takes a register whose own command failed."""


@dataclass(frozen=True)
class Failure:
    """One command that failed on one worker.

    Parameters
    ----------
    worker_id : int
        The worker.
    host : str
        The name of the worker's host.
    function : str
        What the command called.
    command : int
        The number of the command in the session's stream.
    type : str
        The exception's type, with its module unless that is ``builtins``.
    message : str
        The exception's text, cut when very long.
    traceback : str
        The formatted traceback, cut when very long.
    consequence : bool
        True for a failure that only follows from another one (`PeerError`, `InheritedFailure`).
    pickled : bytes or None
        The exception itself, where it can be pickled and is not large.
    """

    worker_id: int
    host: str
    function: str
    command: int
    type: str
    message: str
    traceback: str = field(repr=False)
    consequence: bool = False
    pickled: bytes | None = field(default=None, repr=False, compare=False)


def _ids(workers: Sequence[int]) -> str:
    shown = ", ".join(f"worker {i}" for i in workers[:MAX_IDS])
    rest = len(workers) - MAX_IDS
    return f"{shown} and {rest} more" if rest > 0 else shown


class WorkerError(DiscoError):
    """One or more commands failed on one or more workers.

    Raised on the controller at a sync point, once for each failure. The original exception of the
    first failure is ``__cause__`` where it can be unpickled.

    Parameters
    ----------
    failures : sequence of Failure
        All of them, the first cause first.
    dropped : int
        How many more failed than `failures` holds.

    Attributes
    ----------
    failures : tuple of Failure
    worker_id : int
        The worker of the first failure.
    """

    def __init__(self, failures: Sequence[Failure], dropped: int = 0) -> None:
        self.failures = tuple(sorted(failures, key=lambda f: (f.consequence, f.command)))
        self.dropped = dropped
        self.worker_id = self.failures[0].worker_id
        super().__init__(_describe(self.failures, dropped))

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.failures, self.dropped)


def _describe(failures: Sequence[Failure], dropped: int) -> str:
    """Say each distinct failure once, with the workers that it happened on."""
    causes = [f for f in failures if not f.consequence]
    consequences = [f for f in failures if f.consequence]
    groups: dict[tuple[str, str, str], list[Failure]] = {}
    for f in causes or consequences:
        groups.setdefault((f.function, f.type, f.message), []).append(f)
    parts: list[str] = []
    for n, ((function, kind, message), same) in enumerate(groups.items()):
        ids = list(dict.fromkeys(f.worker_id for f in same))
        hosts = list(dict.fromkeys(f.host for f in same))
        where = hosts[0] if len(hosts) == 1 else f"{len(hosts)} hosts"
        shown = same[0].traceback if n < MAX_TRACEBACKS and not same[0].consequence else ""
        # A traceback ends with all of the message; a line of it here serves.
        said = message.split("\n", 1)[0][:500] if shown else message[:5000]
        commands = list(dict.fromkeys(f.command for f in same))
        which = f"command {commands[0]}"
        if len(commands) > 1:
            which += f" and {len(commands) - 1} more"
        text = f"{_ids(ids)} ({where}) in {function}, {which}: {kind}: {said}"
        if shown:
            text += "\n" + shown.rstrip("\n")
        parts.append(text)
    if causes and consequences:
        ids = list(dict.fromkeys(f.worker_id for f in consequences))
        times = "" if len(consequences) == len(ids) else f" ({len(consequences)} commands)"
        parts.append(f"as a consequence: {_ids(ids)}{times}")
    if dropped:
        parts.append(f"and {dropped} more failures that were not kept")
    return "\n".join(parts)
