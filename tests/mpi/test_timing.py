"""The time evaluator. Where numbers are compared, the timer is one that counts calls."""

from __future__ import annotations

import math
import statistics
import sys
import time

import numpy as np
import pytest

import spmd_disco as di
from spmd_disco.timers import CPUTimer

GROUPS = pytest.mark.parametrize("num_groups", [1, 2])


def notes():
    """Return what a test has had this worker note; workers may be threads of one process."""
    of_all = vars(sys.modules["spmd_disco"]).setdefault("_noted_by_a_test", {})
    return of_all.setdefault(di.get_worker().worker_id, [])


def note(value):
    notes().append(value)


def forget():
    notes().clear()


@pytest.fixture(autouse=True)
def _no_notes():
    # Under mpiexec every rank comes here.
    vars(di).pop("_noted_by_a_test", None)
    yield
    vars(di).pop("_noted_by_a_test", None)


class CountingTimer:
    """Takes each call that has been noted for as many nanoseconds as its device says."""

    nanos = 1000

    def __init__(self, device):
        self.device = device

    def start(self):
        self.begin = len(notes())
        note("start")

    def stop(self):
        self.count = len(notes()) - self.begin - 1
        note("stop")

    def sync_and_get_elapsed_nanos(self):
        note("elapsed")
        return self.count * self.nanos * (1 + di.get_worker().worker_id)


@pytest.fixture
def counting():
    """Have a timer that counts calls. The workers get it from the controller."""
    di.register_timer("cpu", CountingTimer)
    yield
    di.register_timer("cpu", CPUTimer)


def called(*args, **kwargs):
    note("call")


# ------------------------------------------------------------------ results


def test_what_is_called_how_often(sess):
    result = sess.time_evaluator(called, number=3, repeat=4, f_preproc=lambda: note("preproc"))()
    expected = ["call"] + (["preproc"] + ["call"] * 3) * 4
    assert sess.call(notes).get_all() == [expected] * sess.num_workers
    assert len(result.workers) == sess.num_workers
    assert result.numbers == (3,) * 4


def test_result(sess):
    n = sess.num_workers
    result = sess.time_evaluator(np.sum, number=2, repeat=5)(sess.broadcast(np.ones(100)))
    for i, times in enumerate(result.workers):
        assert times.worker == i
        assert len(times.results) == 5
        assert all(0 < t < 60 for t in times.results)
        assert times.mean == pytest.approx(np.mean(times.results))
        assert times.median == pytest.approx(np.median(times.results))
        assert (times.min, times.max) == (min(times.results), max(times.results))
        assert times.std == pytest.approx(np.std(times.results), abs=1e-15)
        assert f"worker {i}" in repr(times)
    slowest = np.max([w.results for w in result.workers], axis=0)
    assert list(result.results) == list(slowest)
    assert result.mean == pytest.approx(slowest.mean())
    lines = repr(result).splitlines()
    assert lines[0] == "5 repeats of 2 calls, time for one call:"
    assert lines[1].split() == ["worker", "mean", "median", "min", "max", "std"]
    assert [line.split()[0] for line in lines[2:]] == [*map(str, range(n)), "slowest"]
    assert str(result) == repr(result)


def test_seconds_are_those_of_the_timer(sess, counting):
    result = sess.time_evaluator(called, number=7, repeat=2)()
    for i, times in enumerate(result.workers):
        assert times.results == pytest.approx([1e-6 * (i + 1)] * 2)
        assert times.std == 0
    assert result.max == result.min == pytest.approx(1e-6 * sess.num_workers)
    assert "µs" in repr(result)
    one = ["start", *["call"] * 7, "stop", "elapsed"]
    assert sess.call(notes).get_all() == [["call", *one, *one]] * sess.num_workers


# ------------------------------------------------------------------ more calls


def tried(noted):
    """Return how many calls each measurement had."""
    counts, count = [], None
    for what in noted:
        if what == "start":
            count = 0
        elif what == "stop":
            counts.append(count)
            count = None
        elif count is not None:
            count += 1
    return counts


def expected_numbers(number, call_nanos, least_nanos):
    """TVM's rule, worked out by itself."""
    numbers = [number]
    while number * call_nanos < least_nanos:
        number = int(max(least_nanos / call_nanos + 1, number * 1.618))
        numbers.append(number)
    return numbers


@pytest.mark.parametrize(("number", "ms"), [(1, 0.05), (10, 0.5), (10, 0.001), (3, 0.0301)])
def test_the_number_grows_alike_on_all_workers(sess, counting, number, ms):
    result = sess.time_evaluator(called, number, repeat=3, min_repeat_ms=ms)()
    expected = expected_numbers(number, 1000 * sess.num_workers, ms * 1e6)
    last = expected[-1]
    for noted in sess.call(notes).get_all():
        assert tried(noted) == [*expected, last, last]
    assert result.numbers == (last,) * 3
    assert result.results == pytest.approx([1e-6 * sess.num_workers] * 3)


@pytest.mark.parametrize("limit", [0, 1, 5])
def test_times_of_zero_are_limited(sess, counting, limit):
    class Zero(CountingTimer):
        nanos = 0

    di.register_timer(1, Zero)
    result = sess.time_evaluator(
        called, 2, 2, min_repeat_ms=1000, limit_zero_time_iterations=limit
    )()
    assert result.results == (0.0, 0.0)
    assert sess.call(notes).get(0).count("start") == 2 * max(limit, 1)


def test_a_minimum_by_the_clock(sess):
    result = sess.time_evaluator(time.sleep, number=1, repeat=2, min_repeat_ms=5)(1e-4)
    assert all(t * n >= 0.005 for t, n in zip(result.results, result.numbers, strict=True))
    assert result.numbers[1] >= result.numbers[0] > 1


@GROUPS
def test_collectives_meet_whatever_the_number_becomes(sess, num_groups):
    def reduce(x, y):
        di.get_global_func("runtime.disco.allreduce")(x, "sum", True, y)
        if di.get_worker().worker_id == 0:
            time.sleep(1e-4)  # so that the workers' own times would give other numbers
        di.get_global_func("runtime.disco.allreduce")(x, "sum", False, y)

    x, y = sess.empty((10,), "f4"), sess.empty((10,), "f4")
    sess.call(np.ndarray.fill, x, 1)
    evaluator = sess.time_evaluator(reduce, number=1, repeat=3, min_repeat_ms=3)
    assert all(t > 0 for t in evaluator(x, y).results)
    assert y.get(sess.num_workers - 1).tolist() == [sess.num_workers] * 10
    sess.sync()


def test_workers_begin_together(sess):
    def late():
        if di.get_worker().worker_id == 0:
            time.sleep(0.05)

    def stamp():
        note(time.monotonic())

    # All are on one machine, with one clock.
    sess.time_evaluator(stamp, number=1, repeat=3, f_preproc=late)()
    stamps = np.array(sess.call(notes).get_all())  # worker, call
    starts = stamps[:, 1:]
    assert (starts.min(axis=0)[1:] - starts.max(axis=0)[:-1] > 0).all()


# ------------------------------------------------------------------ between repeats


@pytest.mark.processes  # for its sleep to be replaced
@pytest.mark.parametrize(("every", "naps"), [(1, [1, 2, 3, 4]), (2, [2, 4]), (5, [])])
def test_cool_down(sess, every, naps):
    def watch():
        """Note sleeps from now on, on this worker."""
        real = time.sleep

        def sleep(seconds):
            if seconds == 0.0015:  # others are of waits, also outside of worker functions
                note(f"sleep {seconds}")
            real(seconds)

        time.sleep = sleep
        time._real_sleep = real

    def unwatch():
        time.sleep = time._real_sleep
        del time._real_sleep

    sess.call(watch)
    sess.time_evaluator(
        called, 1, 5, cooldown_interval_ms=1.5, repeats_to_cooldown=every,
        f_preproc=lambda: note("preproc"),
    )()  # fmt: skip
    sess.call(unwatch)
    expected = ["call"]
    for repeat in range(5):
        expected += ["sleep 0.0015"] * (repeat in naps) + ["preproc", "call"]
    assert sess.call(notes).get_all() == [expected] * sess.num_workers


def test_flushing_the_cache(sess):
    result = sess.time_evaluator(called, 1, 2, cache_flush_bytes=(1 << 20) + 1)()
    assert len(result.results) == 2
    assert sess.call(notes).get(0) == ["call"] * 3


# ------------------------------------------------------------------ functions and arguments


def test_whatever_call_takes(sess):
    x = sess.put([np.full(3, i) for i in range(sess.num_workers)])
    di.register_func("test_timing.noting", called, override=True)
    functions = [
        called,
        lambda *args: note(args),
        np.sum,
        "numpy.sum",
        "test_timing.noting",
        sess.get_global_func("test_timing.noting"),
        sess.call(lambda: np.sum),
    ]
    for function in functions:
        assert len(sess.time_evaluator(function, 1)(x).workers) == sess.num_workers


def test_arguments(sess):
    def check(a, pair, *, named):
        me = di.get_worker().worker_id
        assert (a, pair[1][0], named["key"]) == (1, me, me)
        note("call")

    own = sess.call("runtime.disco.worker_rank")
    evaluator = sess.time_evaluator(check, number=2, f_preproc=check)
    evaluator(1, (0, [own]), named={"key": own})
    evaluator(1, (0, [own]), named={"key": own})
    assert sess.call(notes).get_all() == [["call"] * 8] * sess.num_workers


def test_present_values_of_globals_count(sess):
    value = [1]

    def noting():
        note(value[0])

    evaluator = sess.time_evaluator(noting, number=1)
    evaluator()
    value[0] = 2
    evaluator()
    assert sess.call(notes).get_all() == [[1, 1, 2, 2]] * sess.num_workers


# ------------------------------------------------------------------ errors


@GROUPS
@pytest.mark.parametrize("when", [1, 2, 4, 7])
def test_a_worker_that_fails_releases_the_others(sess, num_groups, when):
    def fails():
        note("call")
        if di.get_worker().worker_id == di.get_worker().num_workers - 1 and len(notes()) == when:
            raise ArithmeticError(f"at call {when}")

    evaluator = sess.time_evaluator(fails, number=2, repeat=3, min_repeat_ms=1e-6)
    with pytest.raises(di.WorkerError, match=f"at call {when}") as info:
        evaluator()
    first = info.value.failures[0]
    assert first.type == "ArithmeticError"
    assert first.worker_id == sess.num_workers - 1
    assert "fails" in first.function
    assert all(f.consequence for f in info.value.failures[1:])
    # The session works.
    sess.call(forget)
    assert len(sess.time_evaluator(called, 1)().workers) == sess.num_workers


def test_a_preparation_that_fails_has_its_own_name(sess):
    def prepare():
        raise KeyError("not ready")

    with pytest.raises(di.WorkerError, match="not ready") as info:
        sess.time_evaluator(called, f_preproc=prepare)()
    assert "prepare" in info.value.failures[0].function


def test_a_timer_that_fails(sess, counting):
    class Backwards(CountingTimer):
        nanos = -1

    di.register_timer("cpu", Backwards)
    with pytest.raises(di.WorkerError, match="less than nothing"):
        sess.time_evaluator(called)()
    sess.sync()


WRONG = [
    ({"number": 0}, ValueError, "number is 0; it must be 1 or more"),
    ({"number": -3}, ValueError, "number is -3"),
    ({"number": 1.5}, TypeError, "number is a whole number, not 1.5"),
    ({"number": True}, TypeError, "number is a whole number, not True"),
    ({"repeat": 0}, ValueError, "repeat is 0; it must be 1 or more"),
    ({"repeat": "3"}, TypeError, "repeat is a whole number, not '3'"),
    ({"min_repeat_ms": -1}, ValueError, "min_repeat_ms is -1; it must be 0 or more"),
    ({"min_repeat_ms": math.nan}, ValueError, "min_repeat_ms is nan"),
    ({"min_repeat_ms": math.inf}, ValueError, "min_repeat_ms is inf"),
    ({"min_repeat_ms": "1"}, TypeError, "min_repeat_ms is a number, not '1'"),
    ({"limit_zero_time_iterations": -1}, ValueError, "limit_zero_time_iterations is -1"),
    ({"cooldown_interval_ms": -0.5}, ValueError, "cooldown_interval_ms is -0.5"),
    ({"repeats_to_cooldown": 0}, ValueError, "repeats_to_cooldown is 0; it must be 1 or more"),
    ({"cache_flush_bytes": -1}, ValueError, "cache_flush_bytes is -1"),
    ({"cache_flush_bytes": None}, TypeError, "cache_flush_bytes is a whole number, not None"),
    ({"f_preproc": 3}, TypeError, "3 cannot be called"),
    ({"f_preproc": "nowhere.at_all"}, ValueError, "nowhere.at_all"),
]


def test_wrong_arguments(sess):
    for options, kind, text in WRONG:
        with pytest.raises(kind) as info:
            sess.time_evaluator(called, **options)
        assert text in str(info.value)
    for func, kind in [(None, TypeError), (5, TypeError), ("nowhere.at_all", ValueError)]:
        with pytest.raises(kind):
            sess.time_evaluator(func)
    with pytest.raises(TypeError, match=r"argument 1 .*generator"):
        sess.time_evaluator(called)(1, (i for i in ()))
    assert sess.call(notes).get_all() == [[]] * sess.num_workers


def test_statistics_of_one_repeat():
    result = di.BenchmarkResult.of([[2.0], [0.5]], [1])
    assert result.mean == result.median == result.min == result.max == 2.0
    assert result.std == 0
    assert repr(result).splitlines()[0] == "1 repeat of 1 call, time for one call:"
    assert statistics.fmean(result.workers[1].results) == 0.5
    text = repr(di.BenchmarkResult.of([[0.25, 3e-8], [1e-6, 2e-5]], [4, 9]))
    assert text.splitlines()[0] == "2 repeats of 4 to 9 calls, time for one call:"
    assert "30.0 ns" in text
    assert "250.000 ms" in text


def test_registering_timers():
    with pytest.raises(ValueError, match="'abacus' is unknown"):
        di.register_timer("abacus", CPUTimer)
    with pytest.raises(TypeError, match="must be callable"):
        di.register_timer("ext_dev", 3)

    @di.register_timer("ext_dev")
    class Timer(CPUTimer):
        pass

    assert di.get_global_func("profiling.timer.ext_dev") is Timer
    assert isinstance(Timer(di.Device.of("ext_dev")), di.Timer)
