"""What a measurement on the workers has found."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from .pools import table

__all__ = ["BenchmarkResult", "WorkerTimes"]


@dataclass(frozen=True, repr=False)
class Times:
    """Durations of the calls of a function, in seconds.

    Attributes
    ----------
    results : tuple of float
        One for each repeat: the mean duration of its calls.
    """

    results: tuple[float, ...]

    @property
    def mean(self) -> float:
        """The mean of the repeats, in seconds."""
        return statistics.fmean(self.results)

    @property
    def median(self) -> float:
        """The median of the repeats, in seconds."""
        return statistics.median(self.results)

    @property
    def min(self) -> float:
        """The shortest of the repeats, in seconds."""
        return min(self.results)

    @property
    def max(self) -> float:
        """The longest of the repeats, in seconds."""
        return max(self.results)

    @property
    def std(self) -> float:
        """The standard deviation of the repeats (of all, not of a sample), in seconds."""
        return statistics.pstdev(self.results)

    def _cells(self) -> list[float]:
        return [self.mean, self.median, self.min, self.max, self.std]


@dataclass(frozen=True, repr=False)
class WorkerTimes(Times):
    """The durations on one worker.

    Attributes
    ----------
    results : tuple of float
        One for each repeat, in seconds: the mean duration of its calls.
    worker : int
    """

    worker: int

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of worker {self.worker}: mean {_seconds(self.mean)}>"


@dataclass(frozen=True, repr=False)
class BenchmarkResult(Times):
    """What `Session.time_evaluator` measured. It prints as a table.

    Its own numbers are those of the slowest worker in each repeat: a repeat is over when all
    workers are done.

    Attributes
    ----------
    results : tuple of float
        One for each repeat, in seconds: the mean duration of its calls on the worker where that
        was longest.
    workers : tuple of WorkerTimes
        By worker id.
    numbers : tuple of int
        How many calls each repeat had, the same on all workers.
    """

    workers: tuple[WorkerTimes, ...] = field(default=())
    numbers: tuple[int, ...] = field(default=())

    @classmethod
    def of(cls, times: Sequence[Sequence[float]], numbers: Sequence[int]) -> BenchmarkResult:
        """Return the result of what each worker measured in each repeat."""
        slowest = tuple(map(max, zip(*times, strict=True)))
        workers = tuple(WorkerTimes(tuple(mine), i) for i, mine in enumerate(times))
        return cls(slowest, workers, tuple(numbers))

    def __repr__(self) -> str:
        rows: list[list[Any]] = [["worker", "mean", "median", "min", "max", "std"]]
        rows += [[str(w.worker), *map(_seconds, w._cells())] for w in self.workers]
        rows.append(["slowest", *map(_seconds, self._cells())])
        few, many = min(self.numbers), max(self.numbers)
        calls = f"{few}" if few == many else f"{few} to {many}"
        repeats = len(self.results)
        title = (
            f"{repeats} repeat{'s' * (repeats != 1)} of {calls} call{'s' * (many != 1)}, time for "
            "one call:"
        )
        return "\n".join([title, *table(rows)])

    __str__ = __repr__


def _seconds(value: float) -> str:
    for factor, unit in ((1.0, "s"), (1e3, "ms"), (1e6, "µs")):
        if value * factor >= 1:
            return f"{value * factor:.3f} {unit}"
    return f"{value * 1e9:.1f} ns"
