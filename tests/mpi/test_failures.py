"""What becomes of what goes wrong on a worker: never a hang, never a lost traceback."""

from __future__ import annotations

import os
import threading
import time

import numpy as np
import pytest
from session_helpers import on_all

import spmd_disco as di


class CustomError(Exception):
    def __init__(self, code, text):
        super().__init__(text)
        self.code = code


class UnpicklableError(Exception):
    def __init__(self, text):
        super().__init__(text)
        self.lock = threading.Lock()


class UnreadableError(Exception):
    def __str__(self):
        raise RuntimeError("no text")


class CannotBeLoadedError(Exception):
    def __reduce__(self):
        return int, ("not a number",)


def fail_on(which, kind, *args):
    def fail():
        if di.get_worker().worker_id in which:
            raise kind(*args)
        return di.get_worker().worker_id

    return fail


def test_a_failure_is_raised_at_the_sync_point_once(sess):
    last = sess.num_workers - 1
    ref = sess.call(fail_on([last], ValueError, "boom"))
    with pytest.raises(di.WorkerError) as caught:
        sess.sync()
    error = caught.value
    assert f"worker {last} " in str(error)
    assert "boom" in str(error)
    assert "fail_on.<locals>.fail" in str(error)
    assert "test_failures.py" in str(error)
    assert "raise kind(*args)" in str(error)
    assert error.worker_id == last
    (failure,) = error.failures
    assert failure.worker_id == last
    assert failure.type == "ValueError"
    assert failure.message == "boom"
    assert failure.command == ref._command
    assert failure.host
    assert isinstance(error.__cause__, ValueError)
    sess.sync()
    for _ in range(2):
        with pytest.raises(di.WorkerError, match="boom"):
            ref.get(last)
    if last:
        assert ref.get(0) == 0
    sess.sync()
    on_all(sess, 1)


def test_one_error_for_all_failures(sess):
    n = sess.num_workers
    sess.call(fail_on(range(n), ValueError, "first"))
    sess.call(fail_on([n - 1], KeyError, "second"))
    with pytest.raises(di.WorkerError) as caught:
        sess.sync()
    text = str(caught.value)
    assert text.count("first") == 2  # in the first line and in the traceback
    assert all(f"worker {i}" in text for i in range(n))
    assert text.index("first") < text.index("second")
    assert len(caught.value.failures) == n + 1
    on_all(sess, 1)


def test_call_does_not_raise_for_earlier_failures(sess):
    sess.call(fail_on([0], ValueError, "boom"))
    refs = [sess.call(int) for _ in range(3)]
    with pytest.raises(di.WorkerError):
        refs[0].get()
    assert refs[1].get() == 0


@pytest.mark.parametrize(
    ("kind", "args"),
    [
        (SystemExit, (3,)),
        (KeyboardInterrupt, ()),
        (GeneratorExit, ()),
        (StopIteration, ()),
        (MemoryError, ()),
        (CustomError, (3, "custom")),
        (UnpicklableError, ("has a lock",)),
        (UnreadableError, ()),
        (CannotBeLoadedError, ("loads badly",)),
        (RecursionError, ("deep",)),
        (di.DiscoTimeout, ("x",)),
        (UnicodeDecodeError, ("utf-8", b"\xff", 0, 1, "why")),
    ],
    ids=lambda v: v.__name__ if isinstance(v, type) else "",
)
def test_any_exception(sess, kind, args):
    sess.call(fail_on([sess.num_workers - 1], kind, *args))
    with pytest.raises(di.WorkerError) as caught:
        sess.sync()
    assert caught.value.failures[0].type.endswith(kind.__name__)
    assert kind.__name__ in str(caught.value)
    on_all(sess, 1)


def test_the_cause_is_the_original_exception(sess):
    sess.call(fail_on([sess.num_workers - 1], CustomError, 7, "custom"))
    # An exception whose __init__ does not take what it was pickled with has no cause, but a text.
    with pytest.raises(di.WorkerError, match="CustomError: custom"):
        sess.sync()
    sess.call(fail_on([sess.num_workers - 1], OSError, 2, "no such thing", "name"))
    with pytest.raises(di.WorkerError) as caught:
        sess.sync()
    assert isinstance(caught.value.__cause__, FileNotFoundError)
    assert caught.value.__cause__.filename == "name"


def test_very_long_messages_are_cut(sess):
    sess.call(fail_on([sess.num_workers - 1], ValueError, "x" * 10_000_000))
    with pytest.raises(di.WorkerError) as caught:
        sess.sync()
    assert len(str(caught.value)) < 200_000
    assert "left out" in caught.value.failures[0].message
    on_all(sess, 1)


def test_results_that_cannot_be_pickled(sess):
    ref = sess.call(threading.Lock)
    sess.sync()
    for i in range(sess.num_workers):
        with pytest.raises(di.WorkerError, match=f"worker {i} .*pickle"):
            ref.get(i)
    assert sess.call(lambda lock: lock.locked(), ref).get_all() == [False] * sess.num_workers
    generator = sess.call(lambda: (i for i in range(3)))
    with pytest.raises(di.WorkerError, match="of type generator, cannot be pickled") as caught:
        generator.get(sess.num_workers - 1)
    assert "Traceback" not in str(caught.value)
    sess.sync()


def test_what_is_not_a_function(sess):
    ref = sess.put([100] * sess.num_workers)
    sess.call(ref, 1)
    with pytest.raises(di.WorkerError, match=f"in register {ref.reg_id}, .*100 is not callable"):
        sess.sync()
    with pytest.raises(TypeError, match="session cannot be sent"):
        sess.call(lambda: sess.sync())


class _LoadsBadly:
    def __setstate__(self, state):
        raise RuntimeError("does not load")

    def __getstate__(self):
        return {"x": 1}


def test_arguments_that_fail_to_unpickle(sess):
    sess.call(lambda x: x, _LoadsBadly())
    with pytest.raises(di.WorkerError, match="does not load"):
        sess.sync()
    on_all(sess, 1)


def test_failed_registers(sess):
    last = sess.num_workers - 1
    ref = sess.call(fail_on([last], ValueError, "boom"))
    ran = sess.call(lambda: [])
    after = sess.call(lambda x, log: log.append(1), ref, ran)
    nested = sess.call(lambda x, log: log.append(1), [(ref,)], ran)
    with pytest.raises(di.WorkerError) as caught:
        sess.sync()
    text = str(caught.value)
    assert "as a consequence: worker" in text
    assert [f.consequence for f in caught.value.failures] == [False, True, True]
    assert [len(v) for v in ran.get_all()] == [2] * last + [0]
    for inherited in (after, nested):
        with pytest.raises(di.WorkerError, match="boom"):
            inherited.get(last)
    sess.call(ref)
    with pytest.raises(di.WorkerError):
        sess.sync()
    on_all(sess, 1)


def test_more_failures_than_are_kept(sess):
    for _ in range(200):
        sess.call(fail_on([0], ValueError, "boom"))
    with pytest.raises(di.WorkerError, match="136 more"):
        sess.sync()
    sess.sync()


allreduce = "runtime.disco.allreduce"


def reduce_after(which, error):
    def f(x):
        if di.get_worker().worker_id in which:
            raise error
        out = np.empty_like(x)
        di.get_global_func(allreduce)(x, "sum", False, out)
        return out

    return f


@pytest.mark.mpi(min_size=2)
def test_peers_of_a_failed_worker_are_released(sess):
    n = sess.num_workers
    x = sess.put([np.ones(5) for _ in range(n)])
    for bad in (0, n - 1):
        for _ in range(3):
            start = time.monotonic()
            ref = sess.call(reduce_after([bad], ValueError("boom")), x)
            with pytest.raises(di.WorkerError) as caught:
                sess.sync(timeout=20)
            assert time.monotonic() - start < 5
            error = caught.value
            assert error.worker_id == bad
            assert {f.worker_id for f in error.failures} == set(range(n))
            assert "as a consequence" in str(error)
            for i in set(range(n)) - {bad}:
                with pytest.raises(di.WorkerError, match="PeerError"):
                    ref.get(i)
            good = sess.call(reduce_after([], None), x)
            assert all((v == n).all() for v in good.get_all())


@pytest.mark.mpi(min_size=2)
def test_a_failed_register_in_a_collective(sess):
    n = sess.num_workers
    x = sess.call(fail_on([n - 1], ValueError, "boom"))
    y = sess.empty((1,), "f8")
    sess.call(lambda x, y: di.get_global_func(allreduce)(y, "sum", False, y), x, y)
    with pytest.raises(di.WorkerError, match="boom") as caught:
        sess.sync(timeout=20)
    assert {f.worker_id for f in caught.value.failures} == set(range(n))
    on_all(sess, 1)


@pytest.mark.mpi(min_size=2)
def test_a_worker_that_leaves_without_taking_part(sess):
    n = sess.num_workers

    def some(x, missing):
        if di.get_worker().worker_id != missing:
            di.get_global_func(allreduce)(x, "sum", False, x)

    x = sess.put([np.ones(2) for _ in range(n)])
    for missing in (0, n - 1):
        sess.call(some, x, missing)
        with pytest.raises(di.WorkerError, match="PeerError"):
            sess.sync(timeout=20)
    sess.call(some, x, -1)
    assert all((v == n).all() for v in x.get_all())


@pytest.mark.mpi(min_size=2)
def test_get_reports_the_cause_not_the_consequence(sess):
    n = sess.num_workers
    x = sess.put([np.ones(2) for _ in range(n)])
    ref = sess.call(reduce_after([n - 1], ValueError("boom")), x)
    with pytest.raises(di.WorkerError) as caught:
        ref.get(0, timeout=20)
    assert caught.value.worker_id == n - 1
    assert "boom" in str(caught.value)
    sess.sync()


@pytest.mark.mpi(min_size=2)
def test_unequal_operations(sess):
    n = sess.num_workers

    def run(kind):
        w = di.get_worker()
        odd = w.worker_id == w.num_workers - 1
        x = np.ones(3 if odd and kind == "shape" else 2, "f4" if odd and kind == "dtype" else "f8")
        if odd and kind == "operation":
            di.get_global_func("runtime.disco.allgather")(x, False, np.empty(2 * n))
        else:
            op = "max" if odd and kind == "kind" else "sum"
            di.get_global_func(allreduce)(x, op, False, np.empty_like(x))

    for kind in ("shape", "dtype", "kind", "operation"):
        sess.call(run, kind)
        with pytest.raises(di.WorkerError, match="ValueError") as caught:
            sess.sync(timeout=20)
        assert {f.worker_id for f in caught.value.failures} == set(range(n))
        assert len({f.message for f in caught.value.failures}) == 1
    on_all(sess, 1)


@pytest.mark.mpi(min_size=2)
def test_receive_from_a_failed_peer(sess):
    n = sess.num_workers

    def f():
        w = di.get_worker()
        if w.worker_id == 0:
            di.get_global_func("runtime.disco.recv_from_worker")(np.empty(2), w.num_workers - 1)
        elif w.worker_id == w.num_workers - 1:
            raise ValueError("boom")

    sess.call(f)
    with pytest.raises(di.WorkerError, match="boom") as caught:
        sess.sync(timeout=20)
    assert {f.worker_id for f in caught.value.failures} == {0, n - 1}
    on_all(sess, 1)


@pytest.mark.mpi(min_size=2)
def test_time_limits(sess):
    last = sess.num_workers - 1
    ref = sess.call(lambda: time.sleep(0.5 * (di.get_worker().worker_id == last)))
    with pytest.raises(di.DiscoTimeout, match=f"worker {last}"):
        sess.sync(timeout=0.05)
    with pytest.raises(di.DiscoTimeout):
        ref.get(last, timeout=0.01)
    with pytest.raises(TimeoutError):
        ref.get_all(timeout=0.01)
    sess.call(fail_on([last], ValueError, "boom"))
    with pytest.raises(di.DiscoTimeout):
        sess.sync(timeout=0.01)
    time.sleep(1)
    with pytest.raises(di.WorkerError, match="boom"):
        sess.sync()
    on_all(sess, 1)


def test_a_forked_child(sess):
    ref = sess.call(int)
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            sess.call(int)
        except di.DiscoError as e:
            status = 0 if "forked" in str(e) else 2
        del ref
        os._exit(status)
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    assert ref.get() == 0
    on_all(sess, 1)


def test_random_programs(sess):
    """Failures before, between and after collectives: always an end, always the right values."""
    n = sess.num_workers
    rng = np.random.default_rng(7)

    def run(plan):
        w = di.get_worker()
        steps = plan[w.worker_id]
        total = []
        for step in steps:
            if step == "fail":
                raise ValueError("planned")
            x = np.full(3, w.worker_id + 1.0)
            di.get_global_func(allreduce)(x, "sum", False, x)
            total.append(x[0])
        return total

    expected = n * (n + 1) / 2
    pending = 0
    for _ in range(300):
        count = int(rng.integers(0, 4))
        plan = [["reduce"] * count for _ in range(n)]
        bad = rng.random() < 0.4
        if bad:
            worker = int(rng.integers(n))
            at = int(rng.integers(0, count + 1))
            plan[worker] = [*plan[worker][:at], "fail"]
        pending += bad
        ref = sess.call(run, plan)
        if not bad and rng.random() < 0.3:
            if pending:
                with pytest.raises(di.WorkerError, match="planned"):
                    sess.sync(timeout=30)
                pending = 0
            assert ref.get_all(timeout=30) == [[expected] * count] * n
    if pending:
        with pytest.raises(di.WorkerError):
            sess.sync(timeout=30)


class TextExits(Exception):
    def __str__(self):
        raise SystemExit(3)


class ReduceExits(Exception):
    def __reduce__(self):
        raise SystemExit(3)


class OddStr(str):
    def __reduce__(self):
        raise RuntimeError


class TextIsOdd(Exception):
    def __str__(self):
        return OddStr("hello")


class LoadExits(Exception):
    def __reduce__(self):
        return LoadExits, (), {"a": 1}

    def __setstate__(self, state):
        raise SystemExit(5)


class ValueExits:
    def __reduce__(self):
        raise SystemExit(4)


class OddCallable:
    def __call__(self):
        raise ValueError("called")

    def __getattr__(self, name):
        if name == "__qualname__":
            raise KeyError(name)
        raise AttributeError(name)


@pytest.mark.parametrize("kind", [TextExits, ReduceExits, TextIsOdd, LoadExits])
def test_hostile_exceptions(sess, kind):
    sess.call(fail_on([sess.num_workers - 1], kind))
    with pytest.raises(di.WorkerError, match=kind.__name__):
        sess.sync(timeout=20)
    on_all(sess, 1)


def test_hostile_values_and_functions(sess):
    value = sess.call(ValueExits)
    for i in range(sess.num_workers):
        with pytest.raises(di.WorkerError, match="ValueExits, cannot be pickled"):
            value.get(i, timeout=20)
    function = sess.call(OddCallable)
    sess.call(function)
    with pytest.raises(di.WorkerError, match="called"):
        sess.sync(timeout=20)
    on_all(sess, 1)


@pytest.mark.parametrize("timeout", [-1, float("nan"), "5", True])
def test_wrong_timeouts(sess, timeout):
    ref = sess.call(int)
    before = sess._controller.channel.published
    for use in (sess.sync, sess.shutdown, lambda t: ref.get(0, t), lambda t: ref.get_all(t)):
        with pytest.raises((TypeError, ValueError), match="timeout"):
            use(timeout)
    assert sess._controller.channel.published == before
