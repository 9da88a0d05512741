"""Values in registers, and copies between the controller and worker 0."""

from __future__ import annotations

import time

import ml_dtypes
import numpy as np
import pytest

import spmd_disco as di

GROUPS = pytest.mark.parametrize("num_groups", [1, 2])


def test_put_and_get(sess):
    n = sess.num_workers
    values = [{"id": i, "array": np.full(5, i)} for i in range(n)]
    ref = sess.put(values)
    values[0]["array"][:] = 99
    for i in range(n):
        got = ref.get(i)
        assert got["id"] == i
        np.testing.assert_array_equal(got["array"], np.full(5, i))
    assert [v["id"] for v in ref.get_all()] == list(range(n))
    assert ref.debug_get_from_remote(n - 1)["id"] == n - 1
    for bad in (n, -1):
        with pytest.raises(ValueError, match="ids go from 0"):
            ref.get(bad)
    with pytest.raises(TypeError, match="is an int"):
        ref.get("0")


def test_get_hands_out_copies(sess):
    ref = sess.put([np.zeros(3) for _ in range(sess.num_workers)])
    for i in range(sess.num_workers):
        ref.get(i)[:] = 1
    assert all((v == 0).all() for v in ref.get_all())
    assert ref.view() is ref.view()


def test_debug_copy_from(sess):
    n = sess.num_workers
    ref = sess.empty((2, 3), "float32")
    for i in range(n):
        ref.debug_copy_from(i, np.full(6, i, "float32"))
    for i, got in enumerate(ref.get_all()):
        np.testing.assert_array_equal(got, np.full((2, 3), i, "float32"))
    ref.debug_copy_from(n - 1, np.zeros(5, "float32"))
    with pytest.raises(di.WorkerError, match=f"worker {n - 1} .*5 elements"):
        sess.sync()
    ref.debug_copy_from(0, np.zeros(6, "float64"))
    with pytest.raises(di.WorkerError, match=r"worker 0 .*float64"):
        sess.sync()
    np.testing.assert_array_equal(ref.get(n - 1), np.full((2, 3), n - 1, "float32"))
    other = sess.put([None] * n)
    other.debug_copy_from(n - 1, "text")
    assert other.get(n - 1) == "text"


def test_ready(sess):
    ref = sess.call(time.sleep, 0.2)
    if sess.num_workers > 1:
        late = sess.call(
            lambda: time.sleep(0.3 * (di.get_worker().worker_id == di.get_worker().num_workers - 1))
        )
        assert not late.ready()
    sess.sync()
    deadline = time.monotonic() + 5
    while not ref.ready() and time.monotonic() < deadline:
        time.sleep(0.001)
    assert ref.ready()


@GROUPS
def test_empty(sess, num_groups):
    n = sess.num_workers
    for shape, dtype in [((2, 3), "float32"), ((), "int8"), ((0,), "f8"), (4, np.int16)]:
        for got in sess.empty(shape, dtype).get_all():
            assert got.dtype == dtype
            assert got.shape == (shape if isinstance(shape, tuple) else (shape,))
    for name in ("bfloat16", "float8_e4m3fn", "float8_e5m2"):
        assert sess.empty((2,), name).get().dtype == getattr(ml_dtypes, name)
    firsts = [v is not None for v in sess.empty((1,), "f4", worker0_only=True).get_all()]
    assert firsts == [i % (n // num_groups) == 0 for i in range(n)]
    only = sess.empty((1,), "f4", None, True, False).get_all()
    assert [v is not None for v in only] == [i == 0 for i in range(n)]
    assert sess.empty((1,), "f4", "cpu").get() is not None
    with pytest.raises(TypeError, match="names no dtype"):
        sess.empty((1,), "no_such")
    with pytest.raises(ValueError, match="negative"):
        sess.empty((-1,), "f4")
    with pytest.raises(ValueError, match="device"):
        sess.empty((1,), "f4", "abacus")
    sess.empty((1,), "f4", "cuda:0")
    with pytest.raises(di.WorkerError, match="no device cuda:0"):
        sess.sync()


def test_copies_to_and_from_worker_0(sess):
    array = np.arange(6, dtype="f4").reshape(2, 3)
    ref = sess.copy_to_worker_0(array)
    assert [v is None for v in ref.get_all()] == [i > 0 for i in range(sess.num_workers)]
    out = np.zeros((3, 2), "f4")
    sess.copy_from_worker_0(out, ref)
    np.testing.assert_array_equal(out, array.reshape(3, 2))
    # Strided on both sides, in another shape.
    target = np.zeros((6, 2), "f4")
    sess.copy_from_worker_0(target[::1, 1], ref)
    np.testing.assert_array_equal(target[:, 1], array.ravel())
    assert sess.copy_to_worker_0(array[::-1, ::-1], ref) is ref
    np.testing.assert_array_equal(ref.get(), array[::-1, ::-1])
    with pytest.raises(ValueError, match="float64"):
        sess.copy_to_worker_0(array.astype("f8"), ref)
    with pytest.raises(ValueError, match="cannot take"):
        sess.copy_to_worker_0(np.zeros(5, "f4"), ref)
    with pytest.raises(ValueError, match="float64"):
        sess.copy_from_worker_0(np.zeros((2, 3)), ref)
    with pytest.raises(ValueError, match="cannot take"):
        sess.copy_from_worker_0(np.zeros(5, "f4"), ref)
    out.flags.writeable = False
    with pytest.raises(ValueError, match="read-only"):
        sess.copy_from_worker_0(out, ref)
    with pytest.raises(TypeError, match="NumPy array"):
        sess.copy_from_worker_0([0.0], ref)
    with pytest.raises(TypeError, match="object"):
        sess.copy_to_worker_0(np.array([None]))
    sess.sync()


@GROUPS
def test_broadcast(sess, num_groups):
    src = np.arange(12, dtype="f4").reshape(3, 4)[:, ::-1]
    for got in sess.broadcast(src).get_all():
        np.testing.assert_array_equal(got, src)
        assert got.flags.writeable
    dst = sess.empty((12,), "f4")
    assert sess.broadcast(src, dst) is dst
    assert sess.broadcast(src, dst, in_group=False) is dst
    np.testing.assert_array_equal(dst.get(sess.num_workers - 1), src.ravel())
    sess.call(np.ndarray.fill, dst, 0)
    assert not dst.get_all()[0].any()
    sess.broadcast([1, 2, 3])
    sess.broadcast(np.zeros(3), dst)
    with pytest.raises(di.WorkerError):
        sess.sync()


@GROUPS
def test_scatter(sess, num_groups):
    n, size = sess.num_workers, sess.group_size
    everyone = np.arange(n * 6.0).reshape(n, 2, 3)
    got = sess.scatter(everyone, in_group=False).get_all()
    for i in range(n):
        np.testing.assert_array_equal(got[i], everyone[i])
    group = np.arange(size * 6.0).reshape(size, 6)
    dst = sess.empty((3, 2), "float64")
    assert sess.scatter(group, dst) is dst
    for i, part in enumerate(dst.get_all()):
        np.testing.assert_array_equal(part, group[i % size].reshape(3, 2))
    with pytest.raises(ValueError, match=f"must be {n}"):
        sess.scatter(np.zeros((n + 1, 2)), in_group=False)
    with pytest.raises(ValueError, match=f"must be {size}"):
        sess.scatter(np.zeros(()))


@GROUPS
def test_collectives_of_the_session(sess, num_groups):
    n, size = sess.num_workers, sess.group_size
    data = [np.arange(4, dtype="f4").reshape(2, 2) + 10 * i for i in range(n)]
    src = sess.put(data)

    def members(i, in_group):
        first = i // size * size
        return data[first : first + size] if in_group else data

    for in_group in (True, False):
        count = size if in_group else n
        for op, function in [
            ("sum", np.sum),
            ("prod", np.prod),
            ("min", np.min),
            ("max", np.max),
            ("avg", np.mean),
        ]:
            dst = sess.empty((2, 2), "f4")
            assert sess.allreduce(src, dst, op, in_group) is dst
            for i, got in enumerate(dst.get_all()):
                np.testing.assert_allclose(got, function(members(i, in_group), axis=0), rtol=1e-6)
        dst = sess.empty((count, 4), "f4")
        assert sess.allgather(src, dst, in_group) is dst
        for i, got in enumerate(dst.get_all()):
            np.testing.assert_array_equal(got, np.reshape(members(i, in_group), (count, 4)))
        dst = sess.empty((count * 4,), "f4", None, True, in_group)
        sess.gather_to_worker0(src, dst, in_group)
        np.testing.assert_array_equal(dst.get(0), np.ravel(members(0, in_group)))
        back = sess.empty((2, 2), "f4")
        sess.scatter_from_worker0(dst, back, in_group)
        for i, got in enumerate(back.get_all()):
            np.testing.assert_array_equal(got, data[i])
        assert sess.broadcast_from_worker0(src, back, in_group) is back
        for i, got in enumerate(back.get_all()):
            np.testing.assert_array_equal(got, members(i, in_group)[0])
    with pytest.raises(ValueError, match="sum"):
        sess.allreduce(src, src, "median")
    array = np.zeros(2)
    for misuse in (
        lambda: sess.allreduce(array, src),
        lambda: sess.allgather(src, array),
        lambda: sess.broadcast_from_worker0(array, src),
        lambda: sess.scatter_from_worker0(src, array),
        lambda: sess.gather_to_worker0(array, src),
        lambda: sess.broadcast(array, array),
        lambda: sess.copy_to_worker_0(array, array),
        lambda: sess.gather(array),
    ):
        with pytest.raises(TypeError, match="must be a DRef, not ndarray"):
            misuse()
    sess.sync()


@GROUPS
def test_messages_between_groups(sess, num_groups):
    n, size = sess.num_workers, sess.group_size
    buffer = sess.put([np.full(3, i) for i in range(n)])

    def shift(x):
        w = di.get_worker()
        if w.group_id < w.num_groups - 1:
            di.get_global_func("runtime.disco.send_to_next_group")(x)
        if w.group_id > 0:
            di.get_global_func("runtime.disco.recv_from_prev_group")(x)

    sess.call(shift, buffer)
    for i, got in enumerate(buffer.get_all()):
        assert got[0] == (i - size if i >= size else i)
    sess.call("runtime.disco.send_to_next_group", buffer)
    with pytest.raises(di.WorkerError, match="group"):
        sess.sync()
    sess.call("runtime.disco.recv_from_prev_group", buffer)
    with pytest.raises(di.WorkerError, match="group"):
        sess.sync()


def test_receive_from_worker_0_in_a_later_command(sess):
    n = sess.num_workers

    def send():
        w = di.get_worker()
        if w.worker_id == 0:
            for i in range(1, w.num_workers):
                di.get_global_func("runtime.disco.send_to_worker")(np.full(3, 7.0 + i), i)

    sess.call(send)
    buffer = sess.put([np.zeros(3) for _ in range(n)])
    sess.call("runtime.disco.recv_from_worker0", buffer)
    assert [v[0] for v in buffer.get_all()] == [0.0] + [7.0 + i for i in range(1, n)]


def test_gather(sess):
    n = sess.num_workers
    got = sess.gather(sess.put([np.full((2, 3), i, "i2") for i in range(n)]))
    assert got.shape == (n, 2, 3)
    assert got.dtype == "i2"
    np.testing.assert_array_equal(got[:, 0, 0], np.arange(n))
    assert got.flags.owndata
    np.testing.assert_array_equal(sess.gather(sess.put([1.5] * n)), [1.5] * n)
    if n > 1:
        uneven = sess.put([np.zeros(i + 1) for i in range(n)])
        with pytest.raises(di.WorkerError):
            sess.gather(uneven)
        sess.sync()


def test_reprs(sess):
    ref = sess.call(int)
    assert repr(ref) == f"<DRef: register {ref.reg_id} of {sess!r}>"
    assert f"{sess.num_workers} worker" in repr(sess)
    assert "DPackedFunc" in repr(sess.get_global_func("runtime.disco.empty"))


def test_init_ccl(sess):
    name = sess._controller.worker.ccl.name
    sess.init_ccl(name)
    sess.init_ccl(name, *range(sess.num_workers))
    sess.init_ccl("mpi")  # for which shared memory stands in on one node
    sess.sync()
    with pytest.raises(ValueError, match="carrier-pigeon"):
        sess.init_ccl("carrier-pigeon")
