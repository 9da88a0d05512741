"""Ctrl-C, and signal handlers that raise, at any point of what the controller does."""

from __future__ import annotations

import operator
import os
import random
import signal
import time

import numpy as np
import pytest
from session_helpers import on_all

import spmd_disco as di


class AlarmError(BaseException):
    pass


def ring(number, frame):
    raise AlarmError


@pytest.fixture(params=[signal.SIGINT, signal.SIGALRM], ids=lambda s: s.name)
def strike(request):
    """Return a function that makes a signal strike after some seconds, and what it raises."""
    if request.param == signal.SIGALRM:
        previous = signal.signal(signal.SIGALRM, ring)
        yield (lambda after: signal.setitimer(signal.ITIMER_REAL, after)), AlarmError
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
        return

    def interrupt(number, frame):
        os.kill(os.getpid(), signal.SIGINT)

    previous = signal.signal(signal.SIGALRM, interrupt)
    yield (lambda after: signal.setitimer(signal.ITIMER_REAL, after)), KeyboardInterrupt
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, previous)


# Python itself reports, and drops, what strikes in a call-back of a weak reference.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.timeout(110)
def test_interrupts_leave_all_workers_at_the_same_command(sess, strike):
    after, kind = strike
    n = sess.num_workers
    rng = random.Random(3)
    caught = 0

    def reduce(x):
        out = np.empty_like(x)
        di.get_global_func("runtime.disco.allreduce")(x, "sum", False, out)
        return out

    x = sess.put([np.full(4, i + 1.0) for i in range(n)])
    sess.sync()
    for i in range(250):
        refs = []
        try:
            after(rng.uniform(1e-6, 800e-6))
            for k in range(4):
                refs.append(sess.call(operator.add, i, k))
                refs.append(sess.call(reduce, x))
                refs.append(sess.call(lambda y: y * 2, np.arange(50)))
            sess.sync()
            time.sleep(1e-3)
        except kind:
            caught += 1
        except di.WorkerError:
            caught += 1  # it struck in a worker function
            time.sleep(1e-3)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
        del refs
        try:
            sess.sync(timeout=30)
        except di.WorkerError as e:
            failures = e.failures
        else:
            failures = ()
        # Only what the signal itself did, and what follows from it.
        allowed = ("KeyboardInterrupt", "AlarmError", "PeerError", "InheritedFailure")
        assert all(f.type.endswith(allowed) for f in failures), failures
        assert sess.call(operator.add, i, 7).get_all(timeout=30) == [i + 7] * n
        total = sess.call(reduce, x).get_all(timeout=30)
        assert all((t == n * (n + 1) / 2).all() for t in total)
    assert caught > 50
    on_all(sess, 1)


@pytest.mark.processes
def test_ctrl_c_ends_what_the_workers_do(sess):
    last = sess.num_workers - 1

    def long():
        if di.get_worker().worker_id == last:
            time.sleep(60)

    previous = signal.signal(signal.SIGALRM, lambda *_: os.kill(os.getpid(), signal.SIGINT))
    try:
        start = time.monotonic()
        signal.setitimer(signal.ITIMER_REAL, 0.3)
        with pytest.raises(KeyboardInterrupt):  # noqa: PT012
            for _ in range(3):
                ref = sess.call(long)
            sess.sync()
        assert time.monotonic() - start < 5
        sess.sync(timeout=10)
        on_all(sess, 1)
        if last:
            with pytest.raises(di.WorkerError, match="KeyboardInterrupt"):
                ref.get(last)
    finally:
        signal.signal(signal.SIGALRM, previous)


def test_a_worker_function_that_raises_keyboard_interrupt(sess):
    """It is that function's failure, and nobody else's."""

    def f():
        raise KeyboardInterrupt("by itself")

    sess.call(f)
    with pytest.raises(di.WorkerError, match="by itself"):
        sess.sync()
    on_all(sess, 1)
