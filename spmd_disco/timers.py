"""Timers: how long something takes on a device, by the device's own clock."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Protocol, TypeVar, runtime_checkable

from .device import NAMES, Device
from .registry import get_global_func, register_func

__all__ = ["CPUTimer", "Timer", "register_timer", "registered_timers"]

#: What TVM calls the functions that make timers, with the name of the device type behind it.
PREFIX = "profiling.timer."

F = TypeVar("F", bound=Callable[[Device], Any])


@runtime_checkable
class Timer(Protocol):
    """Measures one stretch of time on a device, as TVM's timers do."""

    def start(self) -> None:
        """Begin. What the device has been given to do before does not count."""

    def stop(self) -> None:
        """End. What the device has been given to do since `start` counts; need not wait for it."""

    def sync_and_get_elapsed_nanos(self) -> int:
        """Wait for the device, and return the nanoseconds in between."""


def register_timer(device_type: str | int, factory: F | None = None) -> F | Callable[[F], F]:
    """Have `Session.time_evaluator` use timers of your own on a type of device.

    The function is registered by the name that TVM has for it, ``profiling.timer.`` and the name of
    the device type, in the place of the one that is there.

    Parameters
    ----------
    device_type : str or int
        ``"cpu"``, ``"cuda"`` or another of DLPack's types.
    factory : callable, optional
        ``factory(device)`` returns a new `Timer`, on the worker that has the device. Without it, a
        decorator is returned.

    Returns
    -------
    callable
        The function, or the decorator.

    Raises
    ------
    ValueError
        There is no such type of device.
    TypeError
        `factory` is not callable.
    """
    device = Device.of(device_type if isinstance(device_type, str) else (device_type, 0))

    def register(function: F) -> F:
        return register_func(PREFIX + device.name, function, override=True)

    return register if factory is None else register(factory)


def registered_timers() -> dict[str, Callable[[Device], Timer]]:
    """Return by the names of device types what makes timers for them."""
    found = {name: get_global_func(PREFIX + name, allow_missing=True) for name in NAMES.values()}
    return {name: factory for name, factory in found.items() if factory is not None}


@register_func(PREFIX + "cpu")
class CPUTimer:
    """The system's monotonic clock."""

    def __init__(self, device: Device) -> None:
        self._begin = self._end = 0

    def start(self) -> None:
        self._begin = time.perf_counter_ns()

    def stop(self) -> None:
        self._end = time.perf_counter_ns()

    def sync_and_get_elapsed_nanos(self) -> int:
        return self._end - self._begin


@register_func(PREFIX + "cuda")
class CUDATimer:
    """Two CUDA events on the current stream, by CuPy. It has not run on a GPU so far."""

    def __init__(self, device: Device) -> None:
        import cupy

        self._cupy = cupy
        self._device = cupy.cuda.Device(device.index)
        with self._device:
            self._begin, self._end = cupy.cuda.Event(), cupy.cuda.Event()

    def start(self) -> None:
        with self._device:
            self._begin.record()

    def stop(self) -> None:
        with self._device:
            self._end.record()

    def sync_and_get_elapsed_nanos(self) -> int:
        self._end.synchronize()
        milliseconds: float = self._cupy.cuda.get_elapsed_time(self._begin, self._end)
        return round(milliseconds * 1e6)
