"""How long a function takes on the workers, by the algorithm of TVM's time evaluator."""

from __future__ import annotations

import math
import operator
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from . import cupy_support, registry
from .benchmark import BenchmarkResult
from .device import Device
from .dref import DRef
from .protocol import DiscoAction
from .registry import register_func
from .session_part import SessionPart
from .timers import CPUTimer, Timer, registered_timers
from .transport.ccl import ReduceKind
from .worker import Worker, current_worker

__all__ = ["TimingMethods"]

#: By how much more calls a repeat that was too short is tried again at least; TVM's number.
GROWTH = 1.618


# On the controller --------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Options:
    """The numbers of `Session.time_evaluator`, checked."""

    number: int
    repeat: int
    min_repeat_ms: float
    limit_zero_time_iterations: int
    cooldown_interval_ms: float
    repeats_to_cooldown: int
    cache_flush_bytes: int

    #: What they are at least.
    LEAST = {  # noqa: RUF012
        "number": 1,
        "repeat": 1,
        "min_repeat_ms": 0,
        "limit_zero_time_iterations": 0,
        "cooldown_interval_ms": 0,
        "repeats_to_cooldown": 1,
        "cache_flush_bytes": 0,
    }

    def __post_init__(self) -> None:
        for name, least in self.LEAST.items():
            value = getattr(self, name)
            if name.endswith("_ms"):
                number: float = _real(name, value)
            else:
                number = _integer(name, value)
            if not least <= number < math.inf:
                raise ValueError(f"{name} is {value!r}; it must be {least} or more")
            object.__setattr__(self, name, number)


def _integer(name: str, value: Any) -> int:
    if not isinstance(value, bool | np.bool_):
        try:
            return operator.index(value)
        except TypeError:
            pass
    raise TypeError(f"{name} is a whole number, not {value!r}")


def _real(name: str, value: Any) -> float:
    if not isinstance(value, bool | np.bool_ | str | bytes):
        try:
            return float(value)
        except OverflowError:
            return math.inf
        except TypeError:
            pass
    raise TypeError(f"{name} is a number, not {value!r}")


class TimingMethods(SessionPart):
    """What a session measures."""

    def time_evaluator(
        self,
        func: Any,
        number: int = 10,
        repeat: int = 1,
        min_repeat_ms: float = 0,
        limit_zero_time_iterations: int = 100,
        cooldown_interval_ms: float = 0,
        repeats_to_cooldown: int = 1,
        cache_flush_bytes: int = 0,
        f_preproc: Any = None,
    ) -> Callable[..., BenchmarkResult]:
        """Return a function that measures how long `func` takes on the workers.

        As TVM's ``Module.time_evaluator``, on all workers at the same time: these begin each repeat
        together, and make equally many calls, so that `func` may have collectives in it. What is
        measured is the calls on the workers, not the way of a command to them.

        `func` is called 1 + `number` × `repeat` times, all with the same arguments. The first call
        does not count. Errors in it come as with `call`.

        Parameters
        ----------
        func : callable, str or DRef
            What `call` takes.
        number : int
            The calls of one repeat, whose mean is its result.
        repeat : int
            How often that is done.
        min_repeat_ms : float
            How long a repeat is to take at least on the slowest worker, in milliseconds. One that
            is shorter is thrown away and made again with more calls, and so on; the repeats after
            it begin with as many.
        limit_zero_time_iterations : int
            After how many attempts of a repeat with a time of exactly 0 that is its result.
        cooldown_interval_ms : float
            For how long the workers sleep between repeats, in milliseconds.
        repeats_to_cooldown : int
            After how many repeats, each time.
        cache_flush_bytes : int
            How many bytes each worker copies from one array to another before it measures, so that
            the caches hold other data.
        f_preproc : callable, str or DRef, optional
            What to call before each repeat, with the arguments of `func`; its time does not count.

        Returns
        -------
        callable
            ``evaluator(*args, **kwargs)`` takes the arguments of `func`, DRefs also in containers,
            and returns a `BenchmarkResult`. It is a sync point, see `sync`. It raises TypeError
            when an argument cannot be pickled.

        Raises
        ------
        TypeError, ValueError
            A number is out of range; or see `call`.
        """
        options = _Options(
            number,
            repeat,
            min_repeat_ms,
            limit_zero_time_iterations,
            cooldown_interval_ms,
            repeats_to_cooldown,
            cache_flush_bytes,
        )
        f_preproc = None if isinstance(f_preproc, str) and not f_preproc else f_preproc
        self._controller.check()
        for function in (func, f_preproc):
            if function is not None or function is func:
                self._check_function(function)

        def evaluator(*args: Any, **kwargs: Any) -> BenchmarkResult:
            # The arguments alone, so that an error names one by its place among them.
            self._encoder.arguments(args, kwargs)
            timers = {
                name: self._register_of(factory) for name, factory in registered_timers().items()
            }
            prepare = None if f_preproc is None else self._register_of(f_preproc)
            measured = self._call(
                "runtime.disco._time",
                (self._register_of(func), prepare, vars(options), timers, args, kwargs),
                {},
            ).get_all()
            return BenchmarkResult.of([times for times, _ in measured], measured[0][1])

        return evaluator

    def _check_function(self, func: Any) -> None:
        """Refuse what `call` cannot call."""
        if isinstance(func, DRef):
            self._encoder.own(func)
        elif isinstance(func, str):
            registry.resolve(func)
        elif not callable(func):
            self._encoder.reference(func)  # raises, and says what can be called

    def _register_of(self, func: Any) -> DRef:
        """Put a function into a register: what `call` takes, in the way that it goes there."""
        controller = self._controller
        controller.check()
        with controller.lock:
            self._share_context()
            reference, code = self._encoder.reference(func)
            register = controller.new_register()
            number = controller.submit(
                DiscoAction.GET_GLOBAL_FUNC, [reference], register=register, code=code
            )
        return DRef(register, self, number)  # type: ignore[arg-type]


# On the workers -----------------------------------------------------------------------------------


@register_func("runtime.disco._time")
def _time(
    func: Callable[..., Any],
    prepare: Callable[..., Any] | None,
    options: Mapping[str, Any],
    timers: Mapping[str, Callable[[Device], Timer]],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> tuple[list[float], list[int]]:
    """Measure on this worker; return the seconds and the number of calls of each repeat."""
    worker = current_worker()
    assert worker is not None
    for function in (func, prepare):
        if function is not None and not callable(function):
            raise TypeError(f"{function!r} is not callable")
    evaluation = _Evaluation(worker, lambda: func(*args, **kwargs), timers, _Options(**options))
    if prepare is None:
        before_each = None
    else:

        def before_each() -> None:
            # What fails has the name of this.
            worker.function = prepare
            prepare(*args, **kwargs)
            worker.function = func

    worker.function = func
    return evaluation.run(before_each)


class _Evaluation:
    """One worker's part of a measurement."""

    def __init__(
        self,
        worker: Worker,
        call: Callable[[], Any],
        timers: Mapping[str, Callable[[Device], Timer]],
        options: _Options,
    ) -> None:
        self.worker = worker
        self.call = call
        self.device = worker.info.device
        self.new_timer = timers.get(self.device.name, CPUTimer)
        #: Whether the clock is the host's, for want of one of the device.
        self._borrowed = self.device.name not in timers
        self.options = options
        self.number = options.number
        self._cell = np.zeros(1)
        self._flushed = self._arrays_to_flush()

    def run(self, prepare: Callable[[], Any] | None) -> tuple[list[float], list[int]]:
        o = self.options
        seconds, numbers = [], []
        self.call()
        for done in range(o.repeat):
            # Before what follows it, and not behind the last one, where nothing has to cool down.
            if done and o.cooldown_interval_ms and done % o.repeats_to_cooldown == 0:
                time.sleep(o.cooldown_interval_ms / 1e3)
            if prepare is not None:
                prepare()
            seconds.append(self._repeat() / 1e9 / self.number)
            numbers.append(self.number)
        return seconds, numbers

    def _repeat(self) -> int:
        """Measure one repeat, if need be with more calls; return its nanoseconds."""
        o = self.options
        least = o.min_repeat_ms * 1e6
        zeros = 0
        while True:
            nanos = self._measure()
            if not least:
                return nanos
            # All have to make equally many calls, or collectives in them would not meet.
            slowest = self._agree(nanos)
            zeros += slowest == 0
            if slowest >= least or zeros >= o.limit_zero_time_iterations:
                return nanos
            if slowest > 0:
                wanted = least / (slowest / self.number) + 1
                self.number = int(max(wanted, self.number * GROWTH))

    def _measure(self) -> int:
        self._flush()
        self._sync()
        self._agree(0.0)  # all are here, and begin together
        call, number = self.call, self.number
        timer = self.new_timer(self.device)
        timer.start()
        for _ in range(number):
            call()
        if self._borrowed:
            self._sync()
        timer.stop()
        nanos = operator.index(timer.sync_and_get_elapsed_nanos())
        if nanos < 0:
            raise ValueError(f"the timer of {self.device} measured {nanos} ns: less than nothing")
        return nanos

    def _sync(self) -> None:
        self.worker.ccl.sync_worker()

    def _agree(self, value: float) -> float:
        """Return the largest value of all workers, when all have come."""
        if self.worker.info.num_workers > 1:
            self._cell[0] = value
            self.worker.ccl.allreduce(self._cell, ReduceKind.MAX, False, self._cell)
            value = float(self._cell[0])
        return value

    def _arrays_to_flush(self) -> list[Any]:
        count = -(-self.options.cache_flush_bytes // 4)
        if not count:
            return []
        if self.device.name == "cuda":
            dtype = np.dtype(np.int32)
            return [cupy_support.empty(count, dtype, self.device) for _ in range(2)]
        # Written once, as pages that nobody has touched are all one page of zeros.
        return [np.ones(count, np.int32) for _ in range(2)]

    def _flush(self) -> None:
        if self._flushed:
            self._flushed[0][...] = self._flushed[1]
