"""What the data planes for NumPy arrays have in common: the arguments, checked before anything."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

from ..errors import SessionClosedError
from .arguments import check_parts, destination, elements, source_array
from .ccl import CCL, ReduceKind
from .layout import Array, copy_into, host_array
from .reduce import Reduction, reduction

__all__ = ["HostCCL"]


class HostCCL(CCL):
    """The collectives and messages up to the point where all that can raise has been checked.

    Subclasses do them on arrays that fit together. Operations with a single member never get there.

    Parameters
    ----------
    worker_id, num_workers, num_groups : int
        Groups are equal blocks of consecutive workers.
    """

    def __init__(self, worker_id: int, num_workers: int, num_groups: int) -> None:
        self.worker_id = worker_id
        self.num_workers = num_workers
        self.num_groups = num_groups
        self.group_size = num_workers // num_groups
        self._closed = False

    # Who takes part -------------------------------------------------------------------------------

    def _size(self, in_group: bool) -> int:
        if self._closed:
            raise SessionClosedError("the session has been shut down, and its collectives with it")
        return self.group_size if in_group else self.num_workers

    def _first(self, in_group: bool) -> bool:
        return (self.worker_id % self.group_size if in_group else self.worker_id) == 0

    # Collectives ----------------------------------------------------------------------------------

    def allreduce(self, send: Any, kind: object, in_group: bool, recv: Any) -> None:
        size = self._size(in_group)
        send = host_array(send, "send")
        recv = destination(recv, "recv", send.dtype)
        if type(kind) is not ReduceKind:
            kind = ReduceKind.of(kind)
        how = reduction(send.dtype, kind)
        if send.size != recv.size:
            raise ValueError(
                f"allreduce: send has {elements(send)} and recv {elements(recv)}; they must be "
                "as many"
            )
        if size == 1:
            copy_into(recv, send)
            return
        self._allreduce(in_group, kind, how, send, recv)

    def allgather(self, send: Any, in_group: bool, recv: Any) -> None:
        size = self._size(in_group)
        send = host_array(send, "send")
        recv = destination(recv, "recv", send.dtype)
        check_parts("allgather", "recv", recv, size, send, "every worker's send")
        if size == 1:
            copy_into(recv, send)
            return
        self._allgather(in_group, send, recv)

    def broadcast_from_worker0(self, send: Any, in_group: bool, recv: Any) -> None:
        size = self._size(in_group)
        recv = destination(recv, "recv")
        if self._first(in_group):
            send = source_array(send, "broadcast_from_worker0", recv)
            if send.size != recv.size:
                raise ValueError(
                    f"broadcast_from_worker0: send has {elements(send)} and recv "
                    f"{elements(recv)}; they must be as many"
                )
            if size == 1:
                copy_into(recv, send)
                return
        else:
            send = None
        self._broadcast(in_group, send, recv)

    def scatter_from_worker0(self, send: Any, in_group: bool, recv: Any) -> None:
        size = self._size(in_group)
        recv = destination(recv, "recv")
        if self._first(in_group):
            send = source_array(send, "scatter_from_worker0", recv)
            check_parts("scatter_from_worker0", "send", send, size, recv, "recv")
            if size == 1:
                copy_into(recv, send)
                return
        else:
            send = None
        self._scatter(in_group, send, recv)

    def gather_to_worker0(self, send: Any, in_group: bool, recv: Any) -> None:
        size = self._size(in_group)
        send = host_array(send, "send")
        if self._first(in_group):
            recv = destination(recv, "recv", send.dtype)
            check_parts("gather_to_worker0", "recv", recv, size, send, "send")
            if size == 1:
                copy_into(recv, send)
                return
        else:
            recv = None
        self._gather(in_group, send, recv)

    @abstractmethod
    def _allreduce(
        self, in_group: bool, kind: ReduceKind, how: Reduction, send: Array, recv: Array
    ) -> None: ...

    @abstractmethod
    def _allgather(self, in_group: bool, send: Array, recv: Array) -> None: ...

    @abstractmethod
    def _broadcast(self, in_group: bool, send: Array | None, recv: Array) -> None:
        """`send` is None on all but the first member; so for `_scatter`."""

    @abstractmethod
    def _scatter(self, in_group: bool, send: Array | None, recv: Array) -> None: ...

    @abstractmethod
    def _gather(self, in_group: bool, send: Array, recv: Array | None) -> None:
        """`recv` is None on all but the first member."""

    # Point to point -------------------------------------------------------------------------------

    def _other(self, worker: Any, what: str) -> int:
        """Return `worker` as the id of another worker."""
        if isinstance(worker, bool) or not hasattr(worker, "__index__"):
            raise TypeError(f"{what} must be an integer, not {worker!r}")
        number = int(worker.__index__())
        if not 0 <= number < self.num_workers:
            raise ValueError(
                f"{what} is {number}; allowed are the ids of the workers, 0 to "
                f"{self.num_workers - 1}"
            )
        if number == self.worker_id:
            raise ValueError(
                f"{what} is {number}, this worker itself; allowed are the ids of the others"
            )
        return number

    def send_to_worker(self, buffer: Any, receiver_id: int) -> None:
        self._size(False)
        receiver = self._other(receiver_id, "receiver_id")
        self._send(host_array(buffer, "buffer"), receiver)

    def recv_from_worker(self, buffer: Any, sender_id: int) -> None:
        self._size(False)
        sender = self._other(sender_id, "sender_id")
        self._receive(destination(buffer, "buffer"), sender, "recv_from_worker")

    def recv_from_worker0(self, buffer: Any) -> None:
        self._size(False)
        if self.worker_id != 0:
            self._receive(destination(buffer, "buffer"), 0, "recv_from_worker0")

    def send_to_next_group(self, buffer: Any) -> None:
        self._size(False)
        receiver = self.worker_id + self.group_size
        if receiver >= self.num_workers:
            raise ValueError(
                f"send_to_next_group: worker {self.worker_id} is in the last of "
                f"{self.num_groups} groups, which has no next one; allowed in all groups before it"
            )
        self._send(host_array(buffer, "buffer"), receiver)

    def recv_from_prev_group(self, buffer: Any) -> None:
        self._size(False)
        sender = self.worker_id - self.group_size
        if sender < 0:
            raise ValueError(
                f"recv_from_prev_group: worker {self.worker_id} is in the first of "
                f"{self.num_groups} groups, which has no previous one; allowed in all groups "
                "after it"
            )
        self._receive(destination(buffer, "buffer"), sender, "recv_from_prev_group")

    @abstractmethod
    def _send(self, buffer: Array, worker: int) -> None:
        """Send to another worker."""

    @abstractmethod
    def _receive(self, buffer: Array, worker: int, name: str) -> None:
        """Receive from another worker; `name` is what the operation is called."""

    def sync_worker(self) -> None:
        # Nothing is queued: every operation on the host is done when it returns.
        return
