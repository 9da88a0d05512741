"""Arrays in peer memory, and what the workers of a node share, in real sessions."""

from __future__ import annotations

import ctypes
import gc
import logging
import os
import pathlib
import resource
import sys

import ml_dtypes
import numpy as np
import pytest
from mpi4py import MPI

import spmd_disco as di
from spmd_disco import native
from spmd_disco.transport import peer_memory
from spmd_disco.transport.peer_memory import PeerMemory

pytestmark = pytest.mark.skipif(
    not native.available(), reason=f"the native module is {native.why_not}"
)

COMM = MPI.COMM_WORLD
MIB = 1 << 20


def memory_here():
    from spmd_disco.worker import current_worker

    return current_worker().memory


def where(x):
    """Return in which worker's pool an array lies, and at which offset; None if in none."""
    table = memory_here().table
    return table and table.locate(x.__array_interface__["data"][0], x.nbytes)


def owners(sess, dref):
    return [place and place[0] for place in sess.call(where, dref).get_all()]


def own_pools(sess):
    # A single worker has no peers, and ordinary memory.
    return list(range(sess.num_workers)) if sess.num_workers > 1 else [None]


def used(sess):
    return sess.call(lambda: memory_here().pool and memory_here().pool.used).get_all()


def keep(x):
    """Hold an array in the process, whatever becomes of the session."""
    sys.modules["spmd_disco"]._kept_by_a_test = x


def kept():
    return vars(di).pop("_kept_by_a_test")


# ------------------------------------------------------------------ allocation


@pytest.mark.processes
def test_what_lies_in_the_pool(sess):
    n = sess.num_workers
    pools = own_pools(sess)
    assert owners(sess, sess.empty((3, 4), "float32")) == pools
    assert owners(sess, sess.call("runtime.disco.empty", (3,), "int8")) == pools
    assert owners(sess, sess.call(di.empty, 5)) == pools
    assert owners(sess, sess.call(lambda: di.empty_like(np.zeros((2, 2)))[1:])) == pools
    assert owners(sess, sess.broadcast(np.arange(10))) == pools
    assert owners(sess, sess.scatter(np.ones((n, 2)))) == pools
    assert owners(sess, sess.call(np.empty, 5)) == [None] * n


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        ((), "float32"),
        ((0,), "float64"),
        ((2, 0, 3), "int8"),
        (7, "bfloat16"),
        ((2, 3), "float8_e5m2"),
        ((np.int64(3),), np.complex128),
        ((3,), [("a", "i2"), ("b", "f8")]),
        ((300, 300), ">f8"),
    ],
)
def test_empty(sess, shape, dtype):
    def make(shape, dtype):
        a = di.empty(shape, dtype)
        a[...] = np.zeros((), a.dtype)
        b = di.empty_like(a)
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        assert a.flags.c_contiguous
        assert a.flags.writeable
        in_pool = where(a) is not None
        assert not in_pool or a.__array_interface__["data"][0] % 64 == 0
        return a

    for got in sess.call(make, shape, dtype).get_all():
        assert got.dtype == di.tensor.array_dtype(dtype)
        assert got.shape == (shape if isinstance(shape, tuple) else (shape,))
        assert got.tobytes() == bytes(got.nbytes)


@pytest.mark.parametrize(
    ("shape", "dtype", "device", "error", "text"),
    [
        ((2,), object, None, "TypeError", "object cannot move"),
        ((2,), [("a", "O")], None, "TypeError", "cannot move"),
        ((2,), "no such", None, "TypeError", "names no dtype"),
        ((-1,), "f4", None, "ValueError", "negative dimension"),
        ((-2, -3), "f4", None, "ValueError", "negative dimension"),
        (("x",), "f4", None, "TypeError", ""),
        ((2,), "f4", "cuda", "ValueError", "no device cuda:0"),
        ((2,), "f4", "tpu", "ValueError", "device 'tpu' is unknown"),
    ],
)
def test_empty_refuses(sess, shape, dtype, device, error, text):
    sess.call(di.empty, shape, dtype, device)
    with pytest.raises(di.WorkerError) as caught:
        sess.sync()
    for failure in caught.value.failures:
        assert failure.type == error
        assert text in failure.message


def test_empty_elsewhere():
    with pytest.raises(di.DiscoError, match=r"numpy\.empty"):
        di.empty((2,))
    with pytest.raises(di.DiscoError, match="no current worker"):
        di.empty_like(np.zeros(3))


@pytest.mark.processes
def test_the_default_cap(sess):
    pools = sess.call(lambda: memory_here().pool and memory_here().pool.cap).get_all()
    for cap in pools[1:]:
        assert 0.7 * pools[0] < cap * sess.num_workers < 1.4 * pools[0]


def test_memory_is_reused(sess):
    before = used(sess)
    for _ in range(20):
        sess.empty((MIB,), "int8")
    sess.sync()
    assert used(sess) == before
    reserved = sess.call(lambda: memory_here().pool and memory_here().pool.reserved).get_all()
    assert all(r is None or r < 8 * MIB for r in reserved)


@pytest.mark.processes
def test_peers_read_and_write_each_other(sess):
    n = sess.num_workers
    if n == 1:
        pytest.skip("a single worker has no peers")
    arrays = sess.call(lambda: di.empty(1000, np.int64))
    sess.call(lambda x: x.fill(di.get_worker().worker_id), arrays)
    places = sess.call(where, arrays).get_all()
    sess.sync()

    def read(places):
        table = memory_here().table
        return [
            np.frombuffer(ctypes.string_at(table.address(*place, 8000), 8000), np.int64).sum()
            for place in places
        ]

    assert sess.call(read, places).get_all() == [[1000 * i for i in range(n)]] * n

    def write(places):
        me = di.get_worker().worker_id
        address = memory_here().table.address(*places[(me + 1) % len(places)], 8)
        ctypes.c_int64.from_address(address).value = -me

    sess.call(write, places)
    sess.sync()
    assert [int(a[0]) for a in arrays.get_all()] == [-((i - 1) % n) for i in range(n)]


def test_out_of_memory(monkeypatch):
    monkeypatch.setenv("SPMD_DISCO_PEER_POOL", "1M")
    with di.MPISession(COMM) as sess:
        if sess is None or sess.num_workers == 1:
            return
        fits = sess.empty((MIB // 2,), "int8")
        sess.empty((MIB,), "int8")
        with pytest.raises(di.WorkerError, match=f"{MIB} bytes of peer memory .* {MIB} bytes"):
            sess.sync()
        with pytest.raises(MemoryError, match="SPMD_DISCO_PEER_POOL"):
            sess.share(np.zeros(MIB))
        del fits
        sess.empty((MIB,), "int8")
        sess.sync()


def test_a_forked_child(sess):
    def fork():
        mine = di.empty(10)
        mine[:] = 1
        pid = os.fork()
        if pid == 0:
            try:
                in_ordinary_memory = memory_here().pool is None
                try:
                    di.empty(10)
                except RuntimeError as e:
                    refused = "forked" in str(e)
                else:
                    refused = in_ordinary_memory
                os._exit(0 if refused and mine.sum() == 10 else 3)
            finally:
                os._exit(4)
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), mine

    assert all(status == 0 and mine.sum() == 10 for status, mine in sess.call(fork).get_all())


# ------------------------------------------------------------------ sharing


@pytest.mark.parametrize(
    "array",
    [
        np.arange(24.0).reshape(4, 6),
        np.float32(2.5),
        np.empty((0, 3)),
        np.asfortranarray(np.arange(12).reshape(3, 4)),
        np.arange(20)[::-3],
        np.arange(5).astype(ml_dtypes.bfloat16),
        np.zeros(3, [("a", "i4"), ("b", "S3")]),
        [[1, 2], [3, 4]],
        np.arange(300_000),
    ],
    ids=lambda a: f"{np.asarray(a).dtype}{np.shape(a)}",
)
def test_share(sess, array):
    shared = sess.share(array)
    want = np.asarray(array)
    for got in shared.get_all():
        assert (got.dtype, got.shape) == (want.dtype, want.shape)
        assert got.tobytes() == want.tobytes()
    assert not any(sess.call(lambda x: x.flags.writeable, shared).get_all())
    if sess.num_workers > 1:
        addresses = sess.call(lambda x: x.ctypes.data, shared).get_all()
        (place,) = set(sess.call(where, shared).get_all())
        if isinstance(sess, di.ThreadedSession):
            assert len(set(addresses)) == 1
        else:
            assert place[0] == 0
    sess.call(lambda x: x.__setitem__(..., 0), shared)
    with pytest.raises(di.WorkerError, match="read-only"):
        sess.sync()


def test_share_is_a_copy(sess):
    array = np.arange(10)
    shared = sess.share(array)
    array[:] = 0
    assert all(got.sum() == 45 for got in shared.get_all())
    with pytest.raises(TypeError, match="object"):
        sess.share(np.array([None]))


@pytest.mark.processes
def test_shared_memory_is_freed_with_its_last_reader(sess):
    memory = sess._controller.worker.memory
    last = sess.num_workers - 1
    array = np.ones(MIB)

    def lent():
        sess.call(abs, 0)  # which tells of what has been dropped
        sess.sync()
        memory.take_back()
        return len(memory._lent)

    shared = sess.share(array)
    assert lent() == (last > 0)
    # A view that the last worker holds is enough.
    sess.call(lambda x: keep(x[5:]) if di.get_worker().worker_id == last else None, shared)
    del shared
    assert lent() == (last > 0)
    assert (
        sess.call(lambda: kept().sum() if di.get_worker().worker_id == last else 0).get(last)
        == MIB - 5
    )
    assert lent() == 0
    # And what was dropped before the workers came to it.
    for _ in range(20):
        sess.share(array)
    assert lent() == 0
    if last:
        assert memory.pool.peak <= 22 * 8 * MIB


def test_a_loan_that_a_worker_never_took(sess):
    memory = sess._controller.worker.memory
    if memory.pool is None:
        pytest.skip("a single worker lends nothing")
    lent, array = memory.lend((10,), np.dtype("f8"))
    array[:] = 1
    n = sess.num_workers
    assert memory.take_back([100] * n) == 0  # not known yet which command offers it
    lent.command = 50
    borrowed = memory.borrow(lent.offer, (10,), np.dtype("f8"))
    assert borrowed.sum() == 10
    assert memory.take_back([100] * n) == 0
    del borrowed
    assert memory.take_back() == 0
    assert memory.take_back([100] * (n - 1) + [49]) == 0
    assert memory.take_back([100] * n) == 1


# ------------------------------------------------------------------ after the session


def test_arrays_outlive_the_session():
    with di.MPISession(COMM) as sess:
        if sess is not None:
            mine = sess.call(lambda: di.empty(1000))
            sess.call(lambda x: x.fill(di.get_worker().worker_id), mine)
            shared = sess.share(np.arange(1000))
            sess.call(lambda x, y: keep((x[::2], y[1:])), mine, shared)
            del mine, shared
    COMM.Barrier()
    own, shared = kept()
    assert (own == COMM.rank).all()
    own += 1
    assert shared.sum() == 499_500
    if COMM.rank == 0:
        # The lender's own goes; the others read on.
        del shared
        gc.collect()
    COMM.Barrier()
    if COMM.rank > 0:
        assert shared.sum() == 499_500
        del shared
    assert own.sum() == 500 * (COMM.rank + 1)
    COMM.Barrier()
    # The next session finds out that nobody has it any more.
    del own
    with di.MPISession(COMM):
        pass
    assert not peer_memory._kept


def test_nothing_is_left_of_many_sessions():
    def left():
        gc.collect()
        maps = pathlib.Path("/proc/self/maps").read_text()
        fds = os.listdir("/proc/self/fd")
        return len(fds), maps.count("spmd_disco_pool")

    counts = []
    for _ in range(20):
        with di.MPISession(COMM) as sess:
            if sess is not None:
                sess.share(np.ones(1000))
                sess.empty((1000,), "f4")
        sess = None
        counts.append(left())
    assert counts[-1] == counts[3]
    assert counts[-1][1] == 0


# ------------------------------------------------------------------ where it cannot be had


def everything_works(sess):
    """Check what uses peer memory where there is some."""
    n = sess.num_workers
    array = np.arange(12.0).reshape(3, 4)
    shared = sess.share(array)
    assert not any(sess.call(lambda x: x.flags.writeable, shared).get_all())
    for got in (*shared.get_all(), *sess.broadcast(array).get_all()):
        np.testing.assert_array_equal(got, array)
    dst = sess.empty((12,), "f8")
    assert sess.broadcast(array, dst) is dst
    np.testing.assert_array_equal(sess.gather(dst), [array.ravel()] * n)
    parts = np.arange(2 * n).reshape(n, 2)
    np.testing.assert_array_equal(sess.gather(sess.scatter(parts, in_group=False)), parts)
    total = sess.allreduce(dst, sess.call(di.empty_like, dst))
    np.testing.assert_array_equal(total.get(n - 1), array.ravel() * n)


def test_switched_off(monkeypatch):
    monkeypatch.setenv("SPMD_DISCO_PEER_POOL", "0")
    with di.MPISession(COMM) as sess:
        if sess is not None:
            memory = sess._controller.worker.memory
            assert not memory.available
            assert "SPMD_DISCO_PEER_POOL" in memory.why_not
            everything_works(sess)
            assert owners(sess, sess.empty((2,), "f4")) == [None] * sess.num_workers


def test_a_setting_that_cannot_be_understood(monkeypatch):
    # On one rank alone: all refuse.
    if COMM.rank == COMM.size - 1:
        monkeypatch.setenv("SPMD_DISCO_PEER_POOL", "much")
    with pytest.raises(ValueError, match=f"worker {COMM.size - 1}: SPMD_DISCO_PEER_POOL='much'"):
        di.MPISession(COMM)
    monkeypatch.delenv("SPMD_DISCO_PEER_POOL", raising=False)
    with di.MPISession(COMM) as sess:
        if sess is not None:
            sess.sync()


def test_one_worker_that_cannot(monkeypatch, caplog):
    monkeypatch.setattr(PeerMemory, "warned", False)
    last = COMM.size - 1
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    with caplog.at_level(logging.WARNING, "spmd_disco"):
        if COMM.rank == last:
            resource.setrlimit(resource.RLIMIT_FSIZE, (MIB, limits[1]))
        try:
            session = di.MPISession(COMM)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        with session as sess:
            if sess is not None:
                assert not sess._controller.worker.memory.available
                everything_works(sess)
        with di.MPISession(COMM):
            pass
    texts = [
        r.getMessage() for r in caplog.records if "peer memory cannot be had" in r.getMessage()
    ]
    assert len(texts) == (COMM.size > 1 and COMM.rank == 0)
    for text in texts:
        assert f"worker {last}: no pool" in text
        assert "File too large" in text
        assert "SPMD_DISCO_PEER_POOL=0" in text


@pytest.mark.parametrize("node_size", [1, 2])
def test_several_nodes(monkeypatch, node_size):
    # Ranks that take each other for being on other nodes.
    node = COMM.rank // node_size
    monkeypatch.setattr(peer_memory, "node_identity", lambda: f"node {node}")
    with di.MPISession(COMM) as sess:
        if sess is None or sess.num_workers == 1:
            return
        n = sess.num_workers
        ids = [tuple(i for i in range(n) if i // node_size == j // node_size) for j in range(n)]
        assert sess.call(lambda: memory_here().node).get_all() == ids
        leaders = tuple(range(0, n, node_size))
        assert sess.call(lambda: memory_here().leaders).get_all() == [leaders] * n
        everything_works(sess)
        alone = [len(on_node) == 1 for on_node in ids]
        mine = owners(sess, sess.empty((2,), "f4"))
        assert mine == [None if alone[i] else i for i in range(n)]
        shared = sess.share(np.arange(100_000))
        assert all(got.sum() == 4_999_950_000 for got in shared.get_all())
        assert owners(sess, shared) == [
            None if alone[i] else i // node_size * node_size for i in range(n)
        ]
        del shared
        sess.sync()


@pytest.mark.parametrize("num_groups", [2])
def test_scatter_to_groups(sess, num_groups):
    size = sess.group_size
    parts = np.arange(3 * size).reshape(size, 3)
    np.testing.assert_array_equal(sess.gather(sess.scatter(parts)), [*parts, *parts])
    dst = sess.empty((3,), parts.dtype)
    sess.scatter(parts, dst)
    np.testing.assert_array_equal(sess.gather(dst), [*parts, *parts])


@pytest.mark.parametrize("num_groups", [1, 2])
@pytest.mark.parametrize("source", ["pool", "ordinary", "in place"])
def test_broadcast_of_more_than_the_caches_hold(sess, num_groups, source):
    """The workers share out the pieces, and that again and again with other moves in between."""
    size = 24 * MIB + 7

    def run(round_):
        me = di.get_worker()
        allreduce, broadcast = (
            di.get_global_func(f"runtime.disco.{name}")
            for name in ("allreduce", "broadcast_from_worker0")
        )
        for in_group in (True, False):
            first = me.worker_id // me.group_size * me.group_size if in_group else 0
            into = di.empty(size, np.uint8)
            into[:] = 255
            array = None
            if me.worker_id == first or source == "in place":
                array = into if source == "in place" else np.empty(size, np.uint8)
                if source == "pool":
                    array = di.empty(size, np.uint8)
                array[:] = np.arange(size, dtype=np.uint32) + first + round_
            broadcast(array, in_group, into)
            expected = (np.arange(size, dtype=np.uint32) + first + round_).astype(np.uint8)
            assert np.array_equal(into, expected)
            small = di.empty(MIB, np.float32)
            small[:] = me.worker_id
            allreduce(small, 0, in_group, small)
            ids = range(first, first + me.group_size) if in_group else range(me.num_workers)
            assert np.all(small == sum(ids))

    for round_ in range(3):
        sess.call(run, round_)
    sess.sync()
