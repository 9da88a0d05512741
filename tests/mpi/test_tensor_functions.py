"""The functions on tensors on workers and through DRefs, and the workers' memory pools."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

import spmd_disco as di

MIB = 1 << 20


def where(x):
    """Return in which worker's pool an array lies, or None."""
    from spmd_disco.worker import current_worker

    table = current_worker().memory.table
    place = table and table.locate(x.__array_interface__["data"][0], x.nbytes)
    return place and place[0]


def own_pools(sess):
    threads = isinstance(sess, di.ThreadedSession)
    pooled = di.runtime_enabled("peer") and sess.num_workers > 1 and not threads
    return list(range(sess.num_workers)) if pooled else [None] * sess.num_workers


def mine(shape, dtype="f4"):
    """Return an array with other values on each worker, in ordinary memory."""
    return (
        (np.arange(np.prod(shape)) + 100 * di.get_worker().worker_id).astype(dtype).reshape(shape)
    )


# ------------------------------------------------------------------ through DRefs


@pytest.mark.parametrize("by", ["function", "name", "TVM's name"])
def test_copy_from_to(sess, by):
    function = {
        "function": di.copy_from_to,
        "name": "runtime.disco.copy_from_to",
        "TVM's name": sess.get_global_func("runtime.TVMTensorCopyFromTo"),
    }[by]
    source = sess.call(mine, (3, 4))
    target = sess.empty((12,), "float32")
    again = sess.call(function, source, target)
    for i in range(sess.num_workers):
        expected = [100 * i + j for j in range(12)]
        assert target.get(i).tolist() == expected
        assert again.get(i).tolist() == expected
    # The register that comes back holds the array itself.
    sess.call(np.ndarray.fill, target, 7)
    assert again.get(sess.num_workers - 1).tolist() == [7] * 12


def test_copy_to(sess):
    source = sess.call(mine, (2, 3), "f2")
    copy = sess.call("runtime.disco.copy_to", source, di.cpu())
    for x, y in zip(source.get_all(), copy.get_all(), strict=True):
        assert x.dtype == y.dtype
        assert x.tobytes() == y.tobytes()
    assert sess.call(where, copy).get_all() == own_pools(sess)
    assert sess.call(np.shares_memory, source, copy).get_all() == [False] * sess.num_workers
    transposed = sess.call(lambda x: di.copy_to(x.T, "cpu"), source)
    assert transposed.get(0).tolist() == source.get(0).T.tolist()


def test_create_view(sess):
    source = sess.empty((4, 4), "float32")
    sess.call(np.ndarray.fill, source, 0)
    view = sess.call(di.create_view, source, (2, 2), dtype="uint16", byte_offset=8)
    sess.call(np.ndarray.fill, view, 1)
    for x in source.get_all():
        assert x.view("u2").reshape(-1).tolist() == [0] * 4 + [1] * 4 + [0] * 24
    assert sess.call(where, view).get_all() == own_pools(sess)
    # The view alone keeps the memory.
    del source
    other = sess.empty((4, 4), "float32")
    sess.call(np.ndarray.fill, other, 9)
    assert view.get(sess.num_workers - 1).tolist() == [[1, 1], [1, 1]]


def test_bytes(sess):
    source = sess.call(mine, (2, 2), ml_dtypes.bfloat16)
    data = sess.call(di.copy_to_bytes, source)
    arrays = source.get_all()
    assert data.get_all() == [x.tobytes() for x in arrays]
    target = sess.empty((2, 2), "bfloat16")
    sess.call("runtime.disco.copy_from_bytes", target, data)
    assert [x.tolist() for x in target.get_all()] == [x.tolist() for x in arrays]
    sess.call(di.copy_from_bytes, target, bytes(8))
    assert all(not x.astype(float).any() for x in target.get_all())


def test_errors_come_from_the_workers(sess):
    source, target = sess.empty((3,), "f4"), sess.empty((4,), "f4")
    sess.call(di.copy_from_to, source, target)
    with pytest.raises(di.WorkerError, match="src has 12 bytes") as info:
        sess.sync()
    assert {f.worker_id for f in info.value.failures} == set(range(sess.num_workers))
    sess.call(di.create_view, source, (4,))
    with pytest.raises(di.WorkerError, match="must lie in the array"):
        sess.sync()
    sess.call(di.copy_to, source, "vulkan")
    with pytest.raises(di.WorkerError, match="has no device vulkan:0, only cpu:0"):
        sess.sync()


def test_a_dref_is_no_array(sess):
    dref = sess.empty((3,), "f4")
    with pytest.raises(TypeError, match=r"sess\.call\(di\.copy_from_to, …\)"):
        di.copy_from_to(dref, np.zeros(3, "f4"))


def test_memory_scopes(sess):
    a = sess.empty((2,), "f4", None, False, True, "global")
    b = sess.call("runtime.TVMTensorAllocWithScope", (2,), "float32", di.cpu(), "global")
    assert [x.shape for x in a.get_all() + b.get_all()] == [(2,)] * 2 * sess.num_workers
    with pytest.raises(ValueError, match="no memory scope 'texture'"):
        sess.empty((2,), "f4", mem_scope="texture")
    sess.call(di.empty, 2, "f4", mem_scope="texture")
    with pytest.raises(di.WorkerError, match="no memory scope 'texture'"):
        sess.sync()


# ------------------------------------------------------------------ memory pools


def test_memory_info(sess):
    sess.trim_memory()
    before = sess.memory_info()
    array = sess.empty((MIB,), "float32")
    during = sess.memory_info()
    assert [w.worker for w in during] == list(range(sess.num_workers))
    assert {str(w.device) for w in during} == {"cpu:0"}
    assert all(w.host for w in during)
    pooled = own_pools(sess)[0] is not None
    for was, now in zip(before, during, strict=True):
        assert now.used - was.used == (4 * MIB if pooled else 0)
        assert now.reserved >= now.used
        assert now.peak >= now.used
        assert now.cap >= now.reserved
        assert bool(now.why_not) is not pooled
    del array
    after = sess.memory_info()
    assert [w.used for w in after] == [w.used for w in before]
    assert all(w.peak >= 4 * MIB for w in after) is pooled
    given_back = sess.trim_memory()
    trimmed = sess.memory_info(di.cpu())
    for now, then, gone in zip(after, trimmed, given_back, strict=True):
        assert now.reserved - then.reserved == gone
        assert (gone >= 4 * MIB) is pooled


def test_the_table_of_memory(sess):
    lines = repr(sess.memory_info()).splitlines()
    assert lines[0].split() == ["worker", "host", "device", "used", "reserved", "peak", "cap"]
    for i, line in enumerate(lines[1 : sess.num_workers + 1]):
        assert line.split()[0] == str(i)
    if own_pools(sess)[0] is None:
        assert "no pool, and arrays in ordinary memory, as " in lines[-1]
    else:
        assert len(lines) == sess.num_workers + 1


def test_the_pool_in_a_worker_function(sess):
    def take_and_drop():
        pool = di.memory_pool()
        before = pool.used
        x = di.empty(MIB, "u1")
        most = pool.used - before
        del x
        gone = pool.trim()
        return most, pool.used - before, gone >= most, pool.peak >= most, repr(pool)

    pooled = own_pools(sess)[0] is not None
    for most, left, trimmed, peaked, text in sess.call(take_and_drop).get_all():
        assert most == (MIB if pooled else 0)
        assert left == 0
        assert trimmed
        assert peaked
        assert "Pool of cpu:0: " in text


def test_devices_without_a_pool(sess):
    with pytest.raises(di.WorkerError, match="has no memory pool on vulkan:0, only on cpu:0"):
        sess.memory_info("vulkan")
    with pytest.raises(ValueError, match="'abacus' is unknown"):
        sess.memory_info("abacus")
    assert len(sess.memory_info()) == sess.num_workers
