"""Opening, serving and closing sessions inside a program that runs under MPI."""

from __future__ import annotations

import gc
import logging
import os
import threading
import time

import numpy as np
import pytest
from mpi4py import MPI
from session_helpers import on_all

import spmd_disco as di

WORLD = MPI.COMM_WORLD


def test_the_with_block_guards_the_controllers_code():
    ran = []
    with di.MPISession(WORLD) as sess:
        if sess is not None:
            ran.append("controller")
            assert isinstance(sess, di.Session)
            assert sess.num_workers == WORLD.size
            assert (sess.num_groups, sess.group_size) == (1, WORLD.size)
            on_all(sess, 1)
    assert bool(ran) == (WORLD.rank == 0)
    assert WORLD.allreduce(1) == WORLD.size


def test_serve_without_with():
    session = di.MPISession()
    if WORLD.rank == 0:
        on_all(session, 2)
        with pytest.raises(di.DiscoError, match="the controller"):
            session.serve()
        session.shutdown()
    else:
        with pytest.raises(di.DiscoError, match="this is rank"):
            session.call(int)
        session.serve()
        session.serve()


def test_many_sessions_one_after_another():
    for i in range(12):
        with di.MPISession(WORLD) as sess:
            if sess is not None:
                on_all(sess, i)


def test_after_shutdown():
    session = di.MPISession()
    if WORLD.rank:
        session.serve()
        return
    ref = session.call(lambda: np.arange(5))
    array, view = ref.get(), ref.view()
    session.shutdown()
    session.shutdown()
    assert "shut down" in repr(session)
    for use in (
        lambda: session.call(int),
        session.sync,
        ref.get,
        lambda: session.put([1] * WORLD.size),
        lambda: session.empty((1,), "f4"),
        ref.ready,
        lambda: session.get_global_func("runtime.disco.empty"),
        session.__enter__,
    ):
        with pytest.raises(di.SessionClosedError, match="shut down"):
            use()
    np.testing.assert_array_equal(array, np.arange(5))
    np.testing.assert_array_equal(view, np.arange(5))


def test_shutdown_reports_what_nobody_has_observed():
    session = di.MPISession()
    if WORLD.rank:
        session.serve()
        return
    session.call(lambda: 1 / 0)
    with pytest.raises(di.WorkerError, match="ZeroDivisionError"):
        session.shutdown()
    session.shutdown()


def test_an_error_in_the_block_goes_on(capsys):
    def block():
        with di.MPISession(WORLD) as sess:
            if sess is not None:
                sess.call(lambda: 1 / 0)
                raise KeyError("of the program")

    if WORLD.rank:
        block()
        return
    with pytest.raises(KeyError, match="of the program"):
        block()
    assert "ZeroDivisionError" in capsys.readouterr().err


def test_a_second_session_is_refused():
    session = di.MPISession()
    if WORLD.rank:
        session.serve()
    else:
        with pytest.raises(di.DiscoError, match=r"a session is open \(MPISession: \d worker"):
            di.MPISession()
        with pytest.raises(di.DiscoError, match="is open"):
            di.MPISession(MPI.COMM_SELF)
        session.call(lambda: di.MPISession())
        with pytest.raises(di.WorkerError, match="inside a worker function"):
            session.sync()
        on_all(session, 3)
        session.shutdown()
    with di.MPISession(MPI.COMM_SELF) as alone:
        on_all(alone, 1)


def test_a_dropped_session_closes_at_the_next_open():
    session = di.MPISession()
    if WORLD.rank:
        session.serve()
    else:
        on_all(session, 1)
    del session
    gc.collect()
    with di.MPISession(WORLD) as sess:
        if sess is not None:
            on_all(sess, 2)


def test_a_session_on_its_own_rank_beside():
    with di.MPISession(MPI.COMM_SELF) as sess:
        assert sess is not None
        assert sess.num_workers == 1
        assert sess.call(lambda: di.get_worker().comm.size).get() == 1


@pytest.mark.mpi(min_size=2)
def test_sessions_side_by_side():
    half = WORLD.Split(WORLD.rank % 2, WORLD.rank)
    try:
        with di.MPISession(half) as sess:
            if sess is not None:
                mine = sess.put([np.full(3, WORLD.rank + 1.0)] * half.size)
                sess.allreduce(mine, mine)
                np.testing.assert_array_equal(mine.get(), np.full(3, half.size * (WORLD.rank + 1)))
        others = WORLD.allgather(WORLD.rank)
        assert others == list(range(WORLD.size))
    finally:
        half.Free()


@pytest.mark.mpi(min_size=2)
def test_the_other_ranks_go_on():
    part = WORLD.Split(0 if WORLD.rank < 2 else MPI.UNDEFINED, -WORLD.rank)
    if part != MPI.COMM_NULL:
        with di.MPISession(part) as sess:
            if sess is not None:
                # Ranks are those of the communicator, here in reverse.
                ranks = sess.call(lambda: MPI.COMM_WORLD.rank).get_all()
                assert ranks == [1, 0]
        part.Free()
    else:
        with pytest.raises(ValueError, match="COMM_NULL"):
            di.MPISession(part)
    WORLD.barrier()


def test_the_users_communicator_is_left_alone():
    tag = 4242
    request = WORLD.isend(("mine", WORLD.rank), (WORLD.rank + 1) % WORLD.size, tag)
    with di.MPISession(WORLD) as sess:
        if sess is not None:
            on_all(sess, 1)
    assert WORLD.recv(source=(WORLD.rank - 1) % WORLD.size, tag=tag)[0] == "mine"
    request.wait()


def test_wrong_arguments():
    size = WORLD.size
    with pytest.raises(ValueError, match=f"{size} workers .* {size + 1} equal groups"):
        di.MPISession(num_groups=size + 1)
    with pytest.raises(ValueError, match="equal groups"):
        di.MPISession(num_groups=0)
    with pytest.raises(TypeError, match="num_groups"):
        di.MPISession(num_groups="2")
    with pytest.raises(ValueError, match="timeout"):
        di.MPISession(timeout=-1)
    with pytest.raises(TypeError, match="intracommunicator"):
        di.MPISession("world")
    with di.MPISession(WORLD) as sess:
        if sess is not None:
            on_all(sess, 1)


@pytest.mark.mpi(min_size=2)
def test_the_ranks_must_agree():
    with pytest.raises(ValueError, match="alike"):
        di.MPISession(timeout=1.0 + WORLD.rank)
    with di.MPISession(WORLD) as sess:
        if sess is not None:
            on_all(sess, 1)


@pytest.mark.mpi(min_size=2)
def test_the_sessions_own_time_limit():
    with di.MPISession(WORLD, timeout=0.2) as sess:
        if sess is not None:
            last = sess.num_workers - 1
            sess.call(lambda: time.sleep(0.6 * (di.get_worker().worker_id == last)))
            with pytest.raises(di.DiscoTimeout, match=r"after 0\.2 s"):
                sess.sync()
            sess.sync(timeout=10)
            on_all(sess, 1)


@pytest.mark.mpi(min_size=2)
def test_a_shutdown_that_runs_out_of_time_can_be_repeated():
    session = di.MPISession()
    if WORLD.rank:
        session.serve()
        return
    last = session.num_workers - 1
    session.call(lambda: time.sleep(0.4 * (di.get_worker().worker_id == last)))
    with pytest.raises(di.DiscoTimeout, match=f"worker {last}"):
        session.shutdown(timeout=0.05)
    on_all(session, 1)
    session.shutdown()


def test_settings_from_the_environment(monkeypatch):
    monkeypatch.setenv("SPMD_DISCO_NUM_GROUPS", str(WORLD.size))
    with di.MPISession(WORLD) as sess:
        if sess is not None:
            assert sess.num_groups == WORLD.size
    with di.MPISession(WORLD, num_groups=1) as sess:
        if sess is not None:
            assert sess.num_groups == 1
    monkeypatch.setenv("SPMD_DISCO_NUM_GROUPS", "many")
    with pytest.raises(ValueError, match="SPMD_DISCO_NUM_GROUPS='many'"):
        di.MPISession(WORLD)


@pytest.mark.communicators
@pytest.mark.parametrize("num_groups", [1, 2])
def test_groups(sess, num_groups):
    n, size = sess.num_workers, sess.group_size
    assert (sess.num_groups, size) == (num_groups, n // num_groups)

    def who():
        w = di.get_worker()
        return (w.group_id, w.group_size, w.group_comm.rank, w.group_comm.allreduce(w.worker_id))

    for i, got in enumerate(sess.call(who).get_all()):
        group = i // size
        members = range(group * size, (group + 1) * size)
        assert got == (group, size, i % size, sum(members))


@pytest.mark.mpi(min_size=2)
def test_context_reaches_the_workers(tmp_path, monkeypatch):
    folder = WORLD.bcast(str(tmp_path))
    with di.MPISession(WORLD) as sess:
        if sess is not None:
            name = "module_of_the_context_test"
            with open(f"{folder}/{name}.py", "w") as f:
                f.write("def f(x): return x + 1\n")
            monkeypatch.syspath_prepend(folder)
            root = logging.getLogger()
            level = root.level
            try:
                root.setLevel(logging.ERROR)
                assert sess.call(f"{name}.f", 1).get_all() == [2] * sess.num_workers
                levels = sess.call(lambda: logging.getLogger().level).get_all()
                assert levels == [logging.ERROR] * sess.num_workers
            finally:
                root.setLevel(level)


def cpu_seconds(pid: int) -> float:
    with open(f"/proc/{pid}/stat") as f:
        fields = f.read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@pytest.mark.mpi(min_size=2)
def test_waiting_workers_use_little_of_a_core(sess):
    pids = sess.call(os.getpid).get_all()[1:]
    time.sleep(0.1)
    before = sum(map(cpu_seconds, pids))
    time.sleep(3)
    used = (sum(map(cpu_seconds, pids)) - before) / len(pids) / 3
    # An idle worker measures around 1 %, and MPI's own waits 100 %.
    assert used < 0.2, f"{used:.1%} of a core"


def test_no_threads_are_left():
    before = {t.name for t in threading.enumerate()}
    with di.MPISession(WORLD) as sess:
        if sess is not None:
            on_all(sess, 1)
    assert {t.name for t in threading.enumerate()} == before


def test_shutdown_by_several_threads_while_others_use_the_session():
    for _ in range(5):
        session = di.MPISession()
        if WORLD.rank:
            session.serve()
            continue
        session.call(time.sleep, 0.01)
        errors: list[BaseException] = []

        def use(call, errors=errors):
            try:
                while True:
                    call()
            except di.SessionClosedError:
                pass
            except BaseException as e:
                errors.append(e)

        ref = session.call(int)
        calls = [session.sync, ref.get, ref.get_all, lambda s=session: s.call(len, "abc")]
        threads = [threading.Thread(target=use, args=(c,)) for c in calls]
        threads += [threading.Thread(target=session.shutdown) for _ in range(3)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        assert not errors


def test_a_dropped_session_after_an_error():
    session = di.MPISession()
    if WORLD.rank:
        session.serve()
    else:
        session.call(lambda: 1 / 0)
        with pytest.raises(di.WorkerError):
            session.sync()
    session = None
    with di.MPISession(WORLD) as sess:
        if sess is not None:
            on_all(sess, 1)
