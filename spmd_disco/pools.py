"""Pools of memory that arrays come from: one for each device of a worker."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from . import cupy_support
from .device import Device
from .errors import DiscoError
from .registry import register_func
from .session_part import SessionPart
from .worker import Worker, current_worker

if TYPE_CHECKING:
    from .transport.peer_memory import PeerMemory

__all__ = ["MemoryInfo", "MemoryMethods", "MemoryPool", "WorkerMemory", "memory_pool"]


class MemoryPool(ABC):
    """The pool that a worker's arrays on one device come from; what `memory_pool` returns.

    All numbers are in bytes, and those of the moment. Where there is no pool, arrays come from
    ordinary memory: then they are 0, and `why_not` says why.
    """

    device: Device

    @property
    @abstractmethod
    def used(self) -> int:
        """What is in blocks, each a little larger than the array in it."""

    @property
    @abstractmethod
    def reserved(self) -> int:
        """What the pool has from the system: what is in blocks, and what is kept for new ones."""

    @property
    @abstractmethod
    def peak(self) -> int | None:
        """The most that was ever in blocks; None on GPUs, where CuPy does not count it."""

    @property
    @abstractmethod
    def cap(self) -> int:
        """How much it takes from the system at most."""

    @property
    def why_not(self) -> str:
        """Why there is no pool; empty where there is one."""
        return ""

    @abstractmethod
    def trim(self) -> int:
        """Give what is not in blocks back to the system; return how many bytes that was."""

    def __repr__(self) -> str:
        if self.why_not:
            return f"<{type(self).__name__} of {self.device}: none, as {self.why_not}>"
        return (
            f"<{type(self).__name__} of {self.device}: {_size(self.used)} used, "
            f"{_size(self.reserved)} of {_size(self.cap)} reserved>"
        )


class PeerPool(MemoryPool):
    """A worker's own part of the peer memory.

    Also the runtime itself takes blocks from it, to stage arrays and for what is shared.
    """

    def __init__(self, device: Device, memory: PeerMemory | None) -> None:
        self.device = device
        self._memory = memory

    def _read(self, name: str) -> int:
        pool = self._memory and self._memory.pool
        return 0 if pool is None else int(getattr(pool, name))

    @property
    def used(self) -> int:
        return self._read("used")

    @property
    def reserved(self) -> int:
        return self._read("reserved")

    @property
    def peak(self) -> int:
        return self._read("peak")

    @property
    def cap(self) -> int:
        return self._read("cap")

    @property
    def why_not(self) -> str:
        if self._memory is None:
            return "the session has no peer memory"
        if self._memory.pool is None:
            return self._memory.why_not or (
                "the worker is alone on its node" if self._memory.available else "it is closed"
            )
        return ""

    def trim(self) -> int:
        if self._memory is None or self._memory.pool is None:
            return 0
        self._memory.take_back()
        return self._memory.pool.trim()


class CuPyPool(MemoryPool):
    """CuPy's default pool on one GPU."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self._pool = cupy_support.default_pool()

    def _ask(self, name: str) -> int:
        # CuPy's pool has a part for each GPU, and answers for the current one.
        import cupy

        with cupy.cuda.Device(self.device.index):
            return int(getattr(self._pool, name)())

    @property
    def used(self) -> int:
        return self._ask("used_bytes")

    @property
    def reserved(self) -> int:
        return self._ask("total_bytes")

    @property
    def peak(self) -> None:
        return None

    @property
    def cap(self) -> int:
        return self._ask("get_limit") or cupy_support.total_memory(self.device)

    def trim(self) -> int:
        import cupy

        before = self.reserved
        with cupy.cuda.Device(self.device.index):
            self._pool.free_all_blocks()
        return before - self.reserved


def memory_pool(device: Device | str | None = None) -> MemoryPool:
    """Return the pool that arrays on a device come from, for use in worker functions.

    Parameters
    ----------
    device : Device, optional
        Default: the worker's own. On the CPU that is the worker's part of the peer memory, and on
        a GPU CuPy's default pool.

    Raises
    ------
    ValueError
        There is no such device here, or it has no pool.
    DiscoError
        The calling thread runs no worker function.
    """
    worker = current_worker()
    if worker is None:
        raise DiscoError(
            "there is no current worker here: memory_pool() works in a function that a session "
            "calls on its workers, in the thread that runs it; the controller has "
            "sess.memory_info()"
        )
    return _pool_of(worker, worker.info.device if device is None else Device.of(device))


def _pool_of(worker: Worker, device: Device) -> MemoryPool:
    if device.name == "cpu":
        return PeerPool(device, worker.memory)
    if device.name == "cuda" and device.index < cupy_support.device_count():
        return CuPyPool(device)
    raise ValueError(
        f"worker {worker.info.worker_id} has no memory pool on {device}, only on "
        f"{worker.info.device}"
    )


@dataclass(frozen=True)
class WorkerMemory:
    """One worker's memory pool on one device.

    Attributes
    ----------
    worker : int
    host : str
    device : Device
    used, reserved, peak, cap : int
        In bytes, see `MemoryPool`.
    why_not : str
        Why there is no pool; empty where there is one.
    """

    worker: int
    host: str
    device: Device
    used: int
    reserved: int
    peak: int | None
    cap: int
    why_not: str = ""


class MemoryInfo(tuple[WorkerMemory, ...]):
    """The memory pools of all workers, by worker id; printed as a table."""

    __slots__ = ()

    def __repr__(self) -> str:
        rows = [["worker", "host", "device", "used", "reserved", "peak", "cap"]]
        for w in self:
            numbers: Sequence[int | None] = (w.used, w.reserved, w.peak, w.cap)
            if w.why_not:
                numbers = (None,) * 4
            rows.append([str(w.worker), w.host, str(w.device), *map(_size, numbers)])
        lines = table(rows, left=(1, 2))
        for reason in dict.fromkeys(w.why_not for w in self if w.why_not):
            who = [str(w.worker) for w in self if w.why_not == reason]
            lines.append(
                f"worker{'s' * (len(who) > 1)} {', '.join(who)}: no pool, and arrays in ordinary "
                f"memory, as {reason}"
            )
        return "\n".join(lines)

    __str__ = __repr__


class MemoryMethods(SessionPart):
    """What a session says of its workers' memory."""

    def memory_info(self, device: Device | str | None = None) -> MemoryInfo:
        """Return how much memory the workers' pools have. A sync point.

        Parameters
        ----------
        device : Device, optional
            Default: each worker's own.

        Returns
        -------
        MemoryInfo
            A `WorkerMemory` for each worker; it prints as a table.

        Raises
        ------
        WorkerError
            A worker has no such device; or see `DRef.get`.
        """
        device = None if device is None else Device.of(device)
        rows = self._call("runtime.disco._memory_info", (device,), {}).get_all()
        return MemoryInfo(WorkerMemory(*row) for row in rows)

    def trim_memory(self, device: Device | str | None = None) -> list[int]:
        """Have the workers' pools give free memory back to the system. A sync point.

        Parameters
        ----------
        device : Device, optional
            Default: each worker's own.

        Returns
        -------
        list of int
            By worker id, the bytes given back.
        """
        device = None if device is None else Device.of(device)
        return self._call("runtime.disco._trim_memory", (device,), {}).get_all()


@register_func("runtime.disco._memory_info")
def _memory_info(device: Device | None) -> tuple[Any, ...]:
    worker = current_worker()
    pool = memory_pool(device)
    assert worker is not None
    numbers = pool.used, pool.reserved, pool.peak, pool.cap
    return worker.info.worker_id, worker.host, pool.device, *numbers, pool.why_not


@register_func("runtime.disco._trim_memory")
def _trim_memory(device: Device | None) -> int:
    return memory_pool(device).trim()


def table(rows: Sequence[Sequence[str]], left: Sequence[int] = ()) -> list[str]:
    """Return the lines of a table; columns in `left` begin at the left, the others end aligned."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if i in left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def _size(nbytes: int | None) -> str:
    if nbytes is None:
        return "–"
    value, unit = float(nbytes), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if value < 1024:
            break
        value, unit = value / 1024, larger
    return f"{nbytes} B" if unit == "B" else f"{value:.1f} {unit}"
