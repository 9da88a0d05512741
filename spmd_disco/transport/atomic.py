"""Do several things as one, as far as signals can tell.

A Python signal handler runs between two bytecodes of the main thread, never inside a call of a
function that is written in C. Ctrl-C, a time limit set with `signal.alarm`, or any handler that
raises may thus strike between «posted to MPI» and «remembered that it is posted». So both happen
within a single call of C code here: an iterator made of C objects only (`map`, `zip`, `partial`),
consumed by a method written in C (`list.extend`, `deque.extend`).

What is passed in must itself be implemented in C all the way down: mpi4py's methods, NumPy's ufuncs
and slot methods. NumPy's *functions* (`np.copyto`) are not all: some go through a dispatcher that
is written in Python.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from functools import partial
from typing import Any

__all__ = ["Step", "post", "run", "try_lock"]

Step = partial[Any]

#: ``operator.call`` for partials; that one is only in Python 3.11 and later.
_apply = partial.__call__


def run(steps: Sequence[Step], done: list[Any]) -> None:
    """Call all `steps`; `done` is empty before and has a result for each afterwards.

    No signal handler of Python's runs in between, so `done` tells whether they have been called.
    """
    done.extend(map(_apply, steps))


def post(
    steps: Sequence[Step],
    buffers: Sequence[object],
    sink: deque[tuple[Any, Any]],
    last: Step | None = None,
) -> None:
    """Call `steps` and add (result, buffer) to `sink` for each, then call `last`.

    Either all of that has been done or nothing when a signal handler of Python's runs. `last` adds
    nothing to `sink`: `zip` asks `map` for one more result, which calls `last`, before it sees that
    there are no more buffers.
    """
    calls = steps if last is None else (*steps, last)
    sink.extend(zip(map(_apply, calls), buffers))  # noqa: B905 (the lengths differ by intent)


def try_lock(lock: Any, got: list[bool]) -> None:
    """Acquire `lock` if that needs no wait, and add to `got`, which is empty, whether it was.

    ``if lock.acquire(blocking=False): try: …`` leaves it locked for good where a signal's handler
    raises in between. Call this within the ``try`` whose ``finally`` looks at `got`.
    """
    got.extend(map(lock.acquire, (False,)))
