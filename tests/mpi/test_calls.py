"""What a controller can call, and with what."""

from __future__ import annotations

import collections
import functools
import gc
import importlib
import math
import operator
import signal
import sys
import threading
import time
import types

import ml_dtypes
import numpy as np
import pytest
from session_helpers import on_all

import spmd_disco as di

offset = 0


def who(*args, **kwargs):
    return di.get_worker().worker_id, args, kwargs


class Adder:
    def __init__(self, n):
        self.n = n

    def __call__(self, x):
        return self.n + x

    def add(self, x):
        return self.n + x

    @classmethod
    def make(cls, n):
        return cls(n)


Pair = collections.namedtuple("Pair", "first second")

VALUES = [
    None,
    True,
    False,
    0,
    -1,
    2**63 - 1,
    -(2**63),
    2**63,
    10**40,
    1.5,
    float("inf"),
    1j,
    "",
    "text with ümläuts and \ud800 a lone surrogate",
    "x" * 100_000,
    b"",
    b"\0\1",
    bytearray(b"abc"),
    (),
    (1, (2, (3, "a"))),
    tuple(range(300)),
    [1, [2, None]],
    {"a": [1, {"b": (2,)}]},
    {1, 2},
    Pair(1, "two"),
    slice(1, 2),
    np.float32(1.5),
    np.int64(-3),
    np.dtype("f4"),
    np.dtype(">i8"),
    np.dtype(ml_dtypes.bfloat16),
    np.dtype([("a", "i4"), ("b", "f8")]),
    di.cpu(2),
    int,
    ValueError("x"),
]


@pytest.mark.parametrize("value", VALUES, ids=lambda v: type(v).__name__)
def test_arguments_arrive_as_they_are(sess, value):
    results = sess.call(who, value, key=value).get_all()
    assert [r[0] for r in results] == list(range(sess.num_workers))
    for _, (got,), kwargs in results:
        assert type(got) is type(value)
        for v in (got, kwargs["key"]):
            assert repr(v) == repr(value) if isinstance(value, Exception) else v == value


ARRAYS = [
    np.arange(6.0).reshape(2, 3),
    np.asfortranarray(np.arange(6, dtype="i2").reshape(2, 3)),
    np.arange(20)[::-3],
    np.array(3.5),
    np.empty((0, 4), "f4"),
    np.arange(100_000, dtype="u1"),
    np.ones((1, 2, 2), ml_dtypes.bfloat16),
    np.array(["a", "bcd"]),
    np.array([1, None, "x"], object),
    np.array([(1, 2.0)], [("a", "i4"), ("b", "f8")]),
    np.arange(3, dtype=">i4"),
]


@pytest.mark.parametrize("array", ARRAYS, ids=lambda a: f"{a.dtype}-{a.shape}")
def test_arrays_arrive_as_writable_copies(sess, array):
    def change(x):
        copy = x.copy()
        x[...] = 0
        return copy, x.flags.writeable, x.flags.aligned

    before = array.copy()
    for got, writable, aligned in sess.call(change, array).get_all():
        np.testing.assert_array_equal(got, before)
        assert got.dtype == array.dtype
        assert got.shape == array.shape
        assert writable
        assert aligned
    np.testing.assert_array_equal(array, before)


def test_read_only_arrays_stay_read_only(sess):
    array = np.arange(1000.0)
    array.flags.writeable = False
    assert sess.call(lambda x: x.flags.writeable, array).get_all() == [False] * sess.num_workers


def test_shared_arguments_stay_shared(sess):
    shared = [1]
    assert all(sess.call(operator.is_, shared, shared).get_all())
    cyclic: list = [1]
    cyclic.append(cyclic)
    assert all(sess.call(lambda x: x[1] is x, cyclic).get_all())


def test_worker_0_gets_copies(sess):
    mine = [1, 2]
    ref = sess.call(lambda x: x, mine)
    mine.append(3)
    assert ref.get_all() == [[1, 2]] * sess.num_workers
    ref.get().append(4)
    assert ref.get() == [1, 2]
    ref.view().append(4)
    assert ref.get() == [1, 2, 4]


def test_kinds_of_functions(sess):
    n = sess.num_workers
    closed_over = 5

    def closure(x):
        return x + closed_over

    assert sess.call("numpy.add", 1, 2).get_all() == [3] * n
    assert sess.call(np.add, 1, 2).get_all() == [3] * n
    assert sess.call(np.linalg.norm, [3.0, 4.0]).get_all() == [5.0] * n
    assert sess.call("os.path.join", "a", "b").get_all() == ["a/b"] * n
    assert sess.call(operator.itemgetter(1), [1, 2]).get_all() == [2] * n
    assert sess.call(len, "abc").get_all() == [3] * n
    assert sess.call(lambda x: -x, 1).get_all() == [-1] * n
    assert sess.call(closure, 1).get_all() == [6] * n
    assert sess.call(functools.partial(pow, 2), 5).get_all() == [32] * n
    assert sess.call(Adder(2), 3).get_all() == [5] * n
    assert sess.call(Adder(2).add, 3).get_all() == [5] * n
    assert [a.n for a in sess.call(Adder.make, 3).get_all()] == [3] * n
    assert sess.call(sess.call(lambda: abs), -2).get_all() == [2] * n
    assert sess.call(dict, a=1, func=2, self=3).get() == {"a": 1, "func": 2, "self": 3}


def test_a_changed_global_counts(sess):
    module = types.ModuleType("__main__")
    exec("offset = 1\ndef f(x): return x + offset", module.__dict__)
    f = module.f
    assert sess.call(f, 1).get_all() == [2] * sess.num_workers
    module.offset = 10
    assert sess.call(f, 1).get_all() == [11] * sess.num_workers


@pytest.mark.processes
def test_what_an_import_path_means_may_change(sess, tmp_path):
    n = sess.num_workers
    (tmp_path / "changing_module.py").write_text("def f(x):\n    return x + 1\n")

    def prepare(folder):
        if folder not in sys.path:
            sys.path.append(folder)

    def replace(code):
        exec(code, vars(sys.modules["changing_module"]))

    def replace_module():
        old = sys.modules["changing_module"]
        new = types.ModuleType("changing_module")
        new.__spec__ = old.__spec__
        sys.modules["changing_module"] = new
        exec("def f(x): return x + 3", vars(new))

    def remove():
        sys.path[:] = [entry for entry in sys.path if not entry.endswith(tmp_path.name)]
        del sys.modules["changing_module"]

    sess.call(prepare, str(tmp_path)).get_all()
    try:
        first = sess.call(importlib.import_module, "changing_module").view().f
        for _ in range(3):  # looked up, and then remembered
            assert sess.call("changing_module.f", 1).get_all() == [2] * n
            assert sess.call(first, 1).get_all() == [2] * n
        sess.call(replace, "def f(x): return x + 2").get_all()
        for _ in range(3):
            assert sess.call("changing_module.f", 1).get_all() == [3] * n
        sess.call(replace_module).get_all()
        for _ in range(3):
            assert sess.call("changing_module.f", 1).get_all() == [4] * n
            # The function itself has no name any more, and goes by value.
            assert sess.call(first, 1).get_all() == [2] * n
        sess.call(replace, "f = 5").get_all()
        for _ in range(2):
            with pytest.raises(TypeError, match="not callable"):
                sess.call("changing_module.f", 1)
        on_all(sess, 0)
    finally:
        sess.call(remove).get_all()


def test_a_registered_name_goes_before_an_import_path(sess):
    n = sess.num_workers
    for _ in range(3):
        assert sess.call("math.erfc", 0.0).get_all() == [1.0] * n
    di.register_func("math.erfc", lambda x: "registered", override=True)
    for _ in range(3):
        assert sess.call("math.erfc", 0.0).get_all() == ["registered"] * n
    di.register_func("math.erfc", math.erfc, override=True)
    for _ in range(3):
        assert sess.call("math.erfc", 0.0).get_all() == [1.0] * n


def test_more_functions_than_are_remembered(sess):
    def make(i):
        return lambda: i

    functions = [make(i) for i in range(600)]
    for _ in range(2):
        refs = [sess.call(f) for f in functions]
        assert [r.get(sess.num_workers - 1) for r in refs[::50]] == list(range(0, 600, 50))


def test_drefs_stand_for_the_workers_values(sess):
    n = sess.num_workers
    ref = sess.put([10 * i for i in range(n)])
    other = sess.put([f"w{i}" for i in range(n)])
    big = np.arange(1000)
    got = sess.call(
        who, ref, [ref, (other, {"k": ref})], Pair(ref, [1]), key={"a": [other]}, big=big
    )
    for i, (worker, args, kwargs) in enumerate(got.get_all()):
        assert worker == i
        assert args == (10 * i, [10 * i, (f"w{i}", {"k": 10 * i})], Pair(10 * i, [1]))
        assert type(args[2]) is Pair
        assert kwargs["key"] == {"a": [f"w{i}"]}
        np.testing.assert_array_equal(kwargs["big"], big)


def test_drefs_are_passed_by_reference(sess):
    ref = sess.call(lambda: [])
    sess.call(list.append, ref, 1)
    sess.call(lambda pair: pair[0].append(2), (ref,))
    assert ref.get_all() == [[1, 2]] * sess.num_workers


def test_drefs_in_the_wrong_places(sess):
    ref = sess.put(list(range(sess.num_workers)))

    class Holder:
        pass

    holder = Holder()
    holder.ref = ref
    sess.call(int)  # brings the context along, too
    before = sess._controller.channel.published
    with pytest.raises(TypeError, match=r"pass it as an argument"):
        sess.call(lambda: ref)
    with pytest.raises(TypeError, match=r"argument 1 .*pass it as an argument"):
        sess.call(who, 1, holder)
    misuses = [bool, iter, len, list, int, float, np.asarray, operator.neg]
    misuses += [lambda x: x + 1, lambda x: 2 * x, lambda x: x @ x, lambda x: x < 3, lambda x: x**2]
    for misuse in misuses:
        with pytest.raises(TypeError, match=r"a DRef .*\.get\("):
            misuse(ref)
    assert sess._controller.channel.published == before


def test_what_cannot_be_sent_is_refused_at_the_call(sess):
    sess.call(int)  # brings the context along, too
    before = sess._controller.channel.published
    lock = threading.Lock()
    with pytest.raises(TypeError, match=r"argument 1 \(of type lock\) cannot be pickled"):
        sess.call(who, 1, lock)
    with pytest.raises(TypeError, match=r"argument 'key' \(of type list\) cannot be pickled"):
        sess.call(who, 1, key=[lock])
    with pytest.raises(TypeError, match=r"function .* cannot be pickled"):
        sess.call(lambda: lock)
    with pytest.raises(TypeError, match=r"value for worker 0 .* cannot be pickled"):
        sess.put([lock] * sess.num_workers)
    with pytest.raises(TypeError, match="cannot be called"):
        sess.call(3)
    with pytest.raises(ValueError, match=r"no\.such"):
        sess.call("no.such.function")
    with pytest.raises(ValueError, match="nope"):
        sess.call("nope")
    with pytest.raises(ValueError, match="has no attribute"):
        sess.call("numpy.nope")
    with pytest.raises(ValueError, match="nope"):
        sess.get_global_func("nope")
    with pytest.raises(ImportError):
        sess.import_python_module("no_such_module")
    with pytest.raises(TypeError, match="not callable"):
        sess.call("numpy.pi")
    with pytest.raises(ValueError, match=r"0 values for \d+ workers"):
        sess.put([])
    assert sess._controller.channel.published == before
    sess.sync()


def test_registered_functions(sess):
    n = sess.num_workers

    @di.register_func("tests.twice", override=True)
    def twice(x):
        return 2 * x

    assert sess.call("tests.twice", 4).get_all() == [8] * n
    func = sess.get_global_func("tests.twice")
    assert isinstance(func, di.DPackedFunc)
    assert func(5).get_all() == [10] * n
    assert sess.call_packed(func, 6).get_all() == [12] * n
    # From then on worker functions find it, too.
    assert sess.call(lambda: di.get_global_func("tests.twice")(7)).get_all() == [14] * n

    @di.register_func("tests.twice", override=True)
    def thrice(x):
        return 3 * x

    assert sess.call("tests.twice", 4).get_all() == [12] * n
    assert func(5).get_all() == [10] * n


@pytest.mark.processes  # it takes a module out of each
def test_import_python_module(sess):
    sess.call(lambda: sys.modules.pop("colorsys", None))
    sess.import_python_module("colorsys")
    assert all(sess.call(lambda: "colorsys" in sys.modules).get_all())


def test_modules(sess):
    module = di.DModule(sess.call("importlib.import_module", "math"), sess)
    assert module["sqrt"](4.0).get_all() == [2.0] * sess.num_workers
    table = di.DModule(sess.call(lambda: {"neg": operator.neg}), sess)
    assert table["neg"](4.0).get_all() == [-4.0] * sess.num_workers


def test_large_messages_both_ways(sess):
    rng = np.random.default_rng(0)
    for size in (65_530, 65_536, 70_000, 33 * 2**20):
        data = rng.integers(0, 255, size, np.uint8)
        for got in sess.call(lambda x: x, data).get_all():
            np.testing.assert_array_equal(got, data)
    text = "x" * 3_000_000
    assert sess.call(len, text).get_all() == [len(text)] * sess.num_workers


def test_many_commands_to_a_slow_worker_are_bounded(sess):
    last = sess.num_workers - 1
    order = sess.call(lambda: [])
    sess.call(lambda: time.sleep(0.3 * (di.get_worker().worker_id == last)))
    for i in range(6000):
        sess.call_packed("_operator.iadd" if i % 2 else operator.iadd, order, [i])
    assert order.get_all() == [list(range(6000))] * sess.num_workers


def test_large_arguments_to_a_slow_worker_are_bounded(sess):
    last = sess.num_workers - 1
    sess.call(lambda: time.sleep(0.3 * (di.get_worker().worker_id == last)))
    block = np.zeros(20 * 2**20, np.uint8)
    refs = [sess.call(lambda x: x.nbytes, block) for _ in range(8)]
    assert [r.get(last) for r in refs] == [block.nbytes] * 8


def registers_of_all(sess):
    return sess.call(lambda: len(di.worker.current_worker().registers)).get_all()


def test_registers_are_freed(sess):
    keep = sess.call(int)
    first = registers_of_all(sess)
    for _ in range(200):
        sess.call(int)
    refs = [sess.call(int) for _ in range(50)]
    del refs
    cycle = [sess.call(int)]
    cycle.append(cycle)
    del cycle
    gc.collect()
    sess.call(int)
    assert max(registers_of_all(sess)) <= max(first) + 3
    assert keep.get() == 0


def test_calls_and_drops_in_many_threads(sess):
    n = sess.num_workers
    errors = []

    def work(k):
        try:
            for i in range(60):
                ref = sess.call(operator.mul, k, i)
                if i % 20 == 0:
                    assert ref.get_all() == [k * i] * n
        except BaseException as e:
            errors.append(e)

    threads = [threading.Thread(target=work, args=(k,)) for k in range(6)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not errors
    sess.call(int)
    assert max(registers_of_all(sess)) < 20


def test_handles_die_in_other_threads(sess):
    refs = [sess.call(int) for _ in range(300)]
    before = max(registers_of_all(sess))

    def drop():
        refs.clear()
        gc.collect()

    thread = threading.Thread(target=drop)
    thread.start()
    for _ in range(100):
        sess.call(int)
    thread.join()
    sess.call(int)
    assert max(registers_of_all(sess)) <= before - 290


@pytest.mark.communicators
def test_who_a_worker_is(sess):
    def info():
        w = di.get_worker()
        return (
            (w.worker_id, w.num_workers, w.group_id, w.group_size, w.num_groups),
            str(w.device),
            (w.comm.rank, w.comm.size, w.group_comm.rank, w.group_comm.size),
            w.comm.allreduce(w.worker_id),
        )

    n = sess.num_workers
    for i, got in enumerate(sess.call(info).get_all()):
        assert got == ((i, n, 0, n, 1), "cpu:0", (i, n, i, n), n * (n - 1) // 2)


def test_there_is_no_worker_elsewhere(sess):
    with pytest.raises(di.DiscoError, match="no current worker"):
        di.get_worker()
    with pytest.raises(di.DiscoError, match="no current worker"):
        di.get_global_func("runtime.disco.worker_rank")()

    def in_thread():
        raised = []

        def look():
            try:
                di.get_worker()
            except di.DiscoError as e:
                raised.append(str(e))

        thread = threading.Thread(target=look)
        thread.start()
        thread.join()
        return len(raised)

    assert sess.call(in_thread).get_all() == [1] * sess.num_workers


def test_builtin_functions(sess):
    n = sess.num_workers
    assert sess.call("runtime.disco.worker_id").get_all() == [(i,) for i in range(n)]
    assert sess.call("runtime.disco.worker_rank").get_all() == list(range(n))
    assert sess.call("runtime.disco.world_size").get_all() == [n] * n
    assert sess.call("runtime.disco.device").get_all() == [di.cpu()] * n
    sess.call("runtime.disco.sync_worker")
    cores = sess.call("os.sched_getaffinity", 0)
    wanted = sess.put([[min(c)] * n for c in cores.get_all()])
    sess.call("runtime.disco.bind_worker_to_cpu_core", wanted)
    assert [len(c) for c in sess.call("os.sched_getaffinity", 0).get_all()] == [1] * n
    sess.call("os.sched_setaffinity", 0, cores)
    sess.sync()
    sess.call("runtime.disco.bind_worker_to_cpu_core", (0,) * (n + 1))
    with pytest.raises(di.WorkerError, match="core ids were given"):
        sess.sync()


def test_the_session_inside_a_worker_function(sess):
    di._test_session = sess

    def use():
        session = getattr(di, "_test_session", None)
        if session is not None:
            session.call(int)

    try:
        sess.call(use)
        with pytest.raises(di.WorkerError, match="inside a worker function"):
            sess.sync()
    finally:
        del di._test_session
    on_all(sess, 1)


def test_output_of_the_controller_is_left_alone(sess, capsys):
    sess.call(print, "from a worker")
    print("from the controller")
    sess.sync()
    out = capsys.readouterr().out.splitlines()
    assert "from the controller" in out
    assert "[worker 0] from a worker" in out


def test_threads_that_publish_large_arguments_and_wait(sess):
    """Everything that is lent to MPI stays so until MPI is done with it."""
    errors = []
    end = time.monotonic() + 2

    def check(array, value):
        assert (array == value).all(), (value, np.unique(array)[:5])

    def publish():
        k = 0
        while time.monotonic() < end:
            k += 1
            sess.call(check, np.full(100_000, k % 251, np.uint8), k % 251)
            if k % 10 == 0:
                sess.sync()

    def run(function):
        try:
            function()
        except BaseException as e:
            errors.append(e)

    def wait():
        while time.monotonic() < end:
            sess.sync()

    work = [publish, publish, wait, wait]
    threads = [threading.Thread(target=run, args=(f,)) for f in work]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not errors
    sess.sync()


def test_the_session_in_a_signal_handler(sess):
    """It works between commands, and is refused in the middle of one; the order stays."""
    log = sess.call(list)
    append = sess.call(lambda: list.append)
    refused = []

    def handler(number, frame):
        try:
            sess.call(append, log, "handler")
        except di.DiscoError as e:
            refused.append(str(e))

    previous = signal.signal(signal.SIGALRM, handler)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
        for k in range(2000):
            sess.call(append, log, k)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
    logs = log.get_all()
    assert all(entry == logs[0] for entry in logs)
    assert [k for k in logs[0] if k != "handler"] == list(range(2000))
    assert all("middle of one of its own commands" in text or "worker" in text for text in refused)


def test_big_endian_arrays_of_any_layout(sess):
    array = np.arange(20, dtype=">i4")
    for view in (array[::2], array[::-1], np.broadcast_to(array[:1], (3,)), array):
        for got in sess.call(lambda x: x, view).get_all():
            assert got.dtype == view.dtype
            np.testing.assert_array_equal(got, view)
        np.testing.assert_array_equal(sess.broadcast(view).get(sess.num_workers - 1), view)


def test_functions_by_value_are_forgotten_by_size(sess):
    n = sess.num_workers
    for i in range(12):
        block = np.full(2**20, i, np.uint8)
        big = np.zeros(10 * 2**20, np.uint8)
        assert sess.call(lambda b=block, g=big: int(b[0]) + g.size).get_all() == [i + big.size] * n
    assert sum(map(len, sess._controller.codes.values())) < 64 * 2**20


def test_cached_functions_of_the_program(sess):
    module = types.ModuleType("__main__")
    source = "import functools\n@functools.lru_cache\ndef f(x): return x + 1\n"
    exec(source, module.__dict__)
    assert sess.call(module.f, 1).get_all() == [2] * sess.num_workers


def test_classes_of_the_program_come_back_as_they_are(sess):
    module = types.ModuleType("__main__")
    source = """
import dataclasses

@dataclasses.dataclass(slots=True)
class Slotted:
    x: int

class Config:
    value = 1
    seen = []
"""
    exec(source, module.__dict__)
    last = sess.num_workers - 1
    slotted = sess.call(lambda s: s, module.Slotted(3)).get(last)
    assert type(slotted) is module.Slotted
    assert slotted.x == 3
    assert module.Slotted(4).x == 4
    ref = sess.call(lambda c: c, module.Config())
    sess.sync()
    module.Config.value = 7
    module.Config.seen.append(1)
    assert type(ref.get(last)) is module.Config
    assert module.Config.value == 7
    assert module.Config.seen == [1]
