"""The data plane's interface: collectives and point-to-point between workers."""

from __future__ import annotations

import operator
from abc import ABC, abstractmethod
from collections.abc import Callable
from enum import IntEnum
from typing import Any

__all__ = ["CCL", "ReduceKind"]


class ReduceKind(IntEnum):
    """How an allreduce combines the workers' elements; TVM's names and values."""

    SUM = 0
    PROD = 1
    MIN = 2
    MAX = 3
    AVG = 4

    # Enum's own is written in Python, and kinds are keys of caches that every operation asks.
    __hash__ = int.__hash__

    @classmethod
    def of(cls, kind: object) -> ReduceKind:
        """Return the kind that `kind` means.

        Parameters
        ----------
        kind : ReduceKind, int, str or sequence of one of them
            The value, the name in any case, or (as TVM passes it) a shape of length 1.

        Raises
        ------
        ValueError
            `kind` is none of these.
        """
        value = kind
        if isinstance(value, str):
            if value.upper() in cls.__members__:
                return cls[value.upper()]
        elif not isinstance(value, bool | bytes):
            if not hasattr(value, "__index__"):
                value = _only_element(value)
                if isinstance(value, str | ReduceKind):
                    return cls.of(value)
            try:
                return cls(operator.index(value))  # type: ignore[arg-type]
            except (TypeError, ValueError):
                pass
        names = ", ".join(f"{k.name.lower()!r} ({k.value})" for k in cls)
        raise ValueError(
            f"{kind!r} is no reduction; allowed are {names}, by name, by number or as a ReduceKind"
        )


def _only_element(kind: object) -> object:
    try:
        (value,) = kind  # type: ignore[misc]
    except (TypeError, ValueError):
        return None
    return value  # type: ignore[has-type]


class CCL(ABC):
    """Collective communication among the workers of one session.

    There is one in each worker's process. An operation's identity is (communicator, command, index
    within the command); the interpreter says which command runs with `begin` and `fail`.

    In all collectives «worker 0» of an in-group operation is the group's first worker, and every
    worker that takes part raises the same ValueError, before anything has moved, when the workers
    did not give the same operation, dtype, shape and reduction. All raise `PeerError` when another
    worker has failed in this command or left it without taking part, TypeError for what is not an
    array, and ValueError for a destination that cannot be written.

    A destination of an operation that raises holds undefined data.
    """

    #: The name by which `init_ccl` knows it.
    name: str

    @abstractmethod
    def allreduce(self, send: Any, kind: object, in_group: bool, recv: Any) -> None:
        """Combine the workers' `send` element by element into every worker's `recv`.

        Parameters
        ----------
        send : array
            The same shape and dtype on all workers.
        kind : ReduceKind, int, str or sequence of one of them
            See `ReduceKind.of`. An average of integers is truncated toward zero.
        in_group : bool
            Among the worker's own group instead of all workers.
        recv : array
            As many elements as `send`, of the same dtype; may be `send` itself.

        Raises
        ------
        TypeError
            The dtype cannot be reduced so, or differs between `send` and `recv`.
        ValueError
            The element counts differ.
        """

    @abstractmethod
    def allgather(self, send: Any, in_group: bool, recv: Any) -> None:
        """Put the workers' `send`, one behind the other, into every worker's `recv`.

        Raises
        ------
        ValueError
            `recv` does not have as many elements as all workers' `send` together.
        """

    @abstractmethod
    def broadcast_from_worker0(self, send: Any, in_group: bool, recv: Any) -> None:
        """Copy `send` of worker 0 into every worker's `recv`; `send` of the others is ignored."""

    @abstractmethod
    def scatter_from_worker0(self, send: Any, in_group: bool, recv: Any) -> None:
        """Cut `send` of worker 0 into equal parts, and put the i-th into worker i's `recv`.

        `send` of the others is ignored.

        Raises
        ------
        ValueError
            On worker 0: the parts are uneven, or of another size than `recv`.
        """

    @abstractmethod
    def gather_to_worker0(self, send: Any, in_group: bool, recv: Any) -> None:
        """Put the workers' `send`, one behind the other, into `recv` of worker 0.

        `recv` of the others is ignored.
        """

    @abstractmethod
    def recv_from_worker0(self, buffer: Any) -> None:
        """Receive what worker 0 sends to this worker; does nothing on worker 0."""

    @abstractmethod
    def send_to_next_group(self, buffer: Any) -> None:
        """Send to the worker at the same place of the next group.

        Raises
        ------
        ValueError
            This worker is in the last group.
        """

    @abstractmethod
    def recv_from_prev_group(self, buffer: Any) -> None:
        """Receive from the worker at the same place of the previous group.

        Raises
        ------
        ValueError
            This worker is in the first group.
        """

    @abstractmethod
    def send_to_worker(self, buffer: Any, receiver_id: int) -> None:
        """Send `buffer` to another worker, without waiting for it to be received.

        Raises
        ------
        ValueError
            `receiver_id` is no other worker's id.
        """

    @abstractmethod
    def recv_from_worker(self, buffer: Any, sender_id: int) -> None:
        """Receive into `buffer` the oldest message from another worker.

        Raises
        ------
        ValueError
            `sender_id` is no other worker's id, or the message has another dtype or element count
            than `buffer` (it is consumed then).
        PeerError
            The sender failed in this command, or left it, and has sent nothing.
        """

    @abstractmethod
    def sync_worker(self) -> None:
        """Wait until what this worker has queued on its device is done."""

    #: Whether it makes progress only when `pump` is called: between commands, too.
    polled = True

    #: Called with the number of each command that is over, where that tells the peers something.
    leave: Callable[[int], object] | None = None

    @abstractmethod
    def begin(self, command: int) -> None:
        """Take note that this worker starts `command`: called for each one, in order."""

    @abstractmethod
    def fail(self, command: int) -> None:
        """Release the peers that wait for this worker in `command`, which has failed here.

        It neither waits nor raises, and doing it twice is harmless.
        """

    @property
    @abstractmethod
    def outstanding(self) -> bool:
        """Whether something is unfinished that `pump` could bring forward."""

    @abstractmethod
    def pump(self, idle: bool) -> None:
        """Bring forward whatever is pending, without waiting.

        Parameters
        ----------
        idle : bool
            True where this worker has left all commands that it has begun, and now waits for
            something else: peers that still wait for it in one of these are told.
        """

    @property
    @abstractmethod
    def waiting(self) -> str | None:
        """What this worker waits for at the moment, as a phrase for reports; else None."""

    @abstractmethod
    def close(self, command: int) -> None:
        """End the data plane together with all workers, in the command that shuts down.

        When it has been interrupted, it can be called again.
        """
