"""What carries commands and replies, the ring where the ranks share memory, else MPI."""

from __future__ import annotations

import gc
import os
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from mpi4py import MPI
from session_helpers import on_all

import spmd_disco as di
from spmd_disco import native
from spmd_disco.member import Member
from spmd_disco.transport.node import channel_setting

WORLD = MPI.COMM_WORLD


def mappings() -> int:
    """Return how many pieces of shared memory of ours are mapped."""
    return Path("/proc/self/maps").read_text().count("memfd:spmd_disco")


@pytest.mark.processes
def test_the_ring_is_used_where_it_can_be(sess):
    def has_node() -> bool:
        return Member.latest._node is not None

    wanted = sess.num_workers > 1 and native.available() and channel_setting() != "mpi"
    wanted |= isinstance(sess, di.ProcessSession)
    # On each rank by itself.
    assert sess.call(has_node).get_all() == [wanted] * sess.num_workers


def test_sessions_leave_nothing_behind():
    counts = []
    for i in range(20):
        with di.MPISession(WORLD) as sess:
            if sess is not None:
                on_all(sess, i)
                sess.call(len, bytes(2_000_000))
                sess.call(bytes, 300_000).get(sess.num_workers - 1)
        del sess
        gc.collect()
        counts.append((len(os.listdir("/proc/self/fd")), mappings(), threading.active_count()))
    assert counts[-1] == counts[2]
    assert counts[-1][1] == 0


@pytest.mark.parametrize("size", [1, 60_000, 70_000, 262_000, 263_000, 5_000_000, 70_000_000])
def test_messages_of_all_sizes(sess, size):
    data = np.arange(size, dtype=np.uint8)
    expected = int(data.sum(dtype=np.int64))
    sums = sess.call(lambda a: int(a.sum(dtype=np.int64)), data)
    back = sess.call(lambda n: np.arange(n, dtype=np.uint8), size)
    assert sums.get_all() == [expected] * sess.num_workers
    for worker in (0, sess.num_workers - 1):
        assert np.array_equal(back.get(worker), data)


def test_arrays_in_commands_are_aligned_and_writable(sess):
    def where(a: np.ndarray) -> tuple[int, bool]:
        return a.ctypes.data % 64, a.flags.writeable

    for size in (100_000, 1_000_000):
        got = sess.call(where, np.zeros(size)).get_all()
        assert [writable for _, writable in got] == [True] * sess.num_workers
        assert {offset for offset, _ in got[1:]} <= {0}


def test_many_commands_wait_for_a_slow_worker(sess):
    def nap() -> None:
        if di.get_worker().worker_id == sess_size - 1:
            time.sleep(0.3)

    sess_size = sess.num_workers
    sess.call(nap)
    kept = [sess.call(abs, -i) for i in range(20_000)]
    assert kept[-1].get_all() == [19_999] * sess.num_workers
    assert kept[12_345].get(sess.num_workers - 1) == 12_345


def test_many_large_commands_wait_for_a_slow_worker(sess):
    def nap() -> None:
        if di.get_worker().worker_id > 0:
            time.sleep(0.3)

    sess.call(nap)
    kept = [sess.call(lambda a: int(a[0]), np.full(400_000, i)) for i in range(60)]
    assert [ref.get(sess.num_workers - 1) for ref in kept] == list(range(60))


def test_replies_of_all_workers_at_once(sess):
    big = sess.call(lambda: np.full(700_000, di.get_worker().worker_id))
    for worker, value in enumerate(big.get_all()):
        assert value.shape == (700_000,)
        assert (value == worker).all()


def test_threads_ask_at_the_same_time(sess):
    refs = [sess.call(pow, i, 2) for i in range(8)]
    errors = []

    def ask(i: int) -> None:
        try:
            for _ in range(50):
                assert refs[i].get(i % sess.num_workers) == i * i
        except BaseException as e:
            errors.append(e)

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
