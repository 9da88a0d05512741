"""Programs that run under MPI by themselves, with plain ``python``, and open sessions."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

MPIEXEC = Path(sys.executable).parent / "mpiexec"


@pytest.fixture
def embedded(start):
    """Run ``mpiexec -n RANKS python ARGS…``."""

    def embedded(ranks, *args, **options):
        command = [str(MPIEXEC), "-n", str(ranks), sys.executable]
        return start(ranks, *args, command=command, **options).wait()

    return embedded


def test_importing_does_not_initialise_mpi(plain, app):
    program = app("""
        import spmd_disco, sys
        print("mpi4py.MPI" in sys.modules, "cupy" in sys.modules)
    """)
    assert plain(program).lines == ["False False"]


@pytest.mark.parametrize("ranks", [1, 3])
def test_a_session_in_the_middle(ranks, embedded, app):
    program = app("""
        import sys
        from mpi4py import MPI
        import spmd_disco as di
        comm = MPI.COMM_WORLD
        total = comm.allreduce(comm.rank)
        with di.MPISession(comm) as sess:
            if sess is not None:
                def f(x):
                    return x + di.get_worker().worker_id
                print(sess.call(f, 1).get_all())
                sess.call(print, "hello")
        sys.stdout.write(f"rank {comm.rank} goes on {comm.allreduce(1)}\\n")
    """)
    ended = embedded(ranks, program)
    assert ended.status == 0, ended
    assert ended.err == ""
    wanted = [str([1 + i for i in range(ranks)])]
    wanted += [f"[worker {i}] hello" for i in range(ranks)]
    wanted += [f"rank {i} goes on {ranks}" for i in range(ranks)]
    assert sorted(ended.lines) == sorted(wanted)


@pytest.mark.parametrize("how", ["", "MPI.Finalize()", "del sess", "del sess; MPI.Finalize()"])
def test_a_session_that_is_never_shut_down(how, embedded, app):
    program = app(f"""
        from mpi4py import MPI
        import spmd_disco as di
        sess = di.MPISession()
        if MPI.COMM_WORLD.rank == 0:
            ref = sess.call(int)
            print(ref.get_all())
            {how or "pass"}
        else:
            sess.serve()
    """)
    ended = embedded(3, program)
    assert (ended.status, ended.lines, ended.err) == (0, ["[0, 0, 0]"], "")


def test_ranks_that_forget_to_serve(embedded, app):
    program = app("""
        from mpi4py import MPI
        import spmd_disco as di
        sess = di.MPISession()
        if MPI.COMM_WORLD.rank == 0:
            print(sess.call(int).get_all())
            sess.shutdown()
    """)
    ended = embedded(2, program)
    assert (ended.status, ended.lines, ended.err) == (0, ["[0, 0]"], "")


def test_mpi_initialised_by_the_program_without_threads(embedded, app):
    program = app("""
        import sys
        import mpi4py
        mpi4py.rc.initialize = False
        mpi4py.rc.finalize = False
        from mpi4py import MPI
        MPI.Init()
        import spmd_disco as di
        with di.MPISession() as sess:
            if sess is not None:
                print(sess.call(int).get_all())
        MPI.Finalize()
        try:
            di.MPISession()
        except di.DiscoError as e:
            sys.stdout.write(f"{e}\\n")
    """)
    ended = embedded(2, program)
    assert (ended.status, ended.err) == (0, "")
    text = "MPI has been finalized: no session can be opened any more"
    assert sorted(ended.lines) == sorted(["[0, 0]", text, text])


def test_failures_that_nobody_has_observed(embedded, app):
    program = app("""
        from mpi4py import MPI
        import spmd_disco as di
        sess = di.MPISession()
        if MPI.COMM_WORLD.rank == 0:
            sess.call(lambda: 1 / 0)
        else:
            sess.serve()
    """)
    ended = embedded(2, program)
    assert ended.status == 1
    assert ended.err.count("division by zero") == 2
    assert "worker 0, worker 1" in ended.err


def test_an_error_on_the_controller(embedded, app):
    program = app("""
        import sys
        from mpi4py import MPI
        import spmd_disco as di
        with di.MPISession() as sess:
            if sess is not None:
                sess.call(int)
                sys.exit(3)
    """)
    assert embedded(3, program).status == 3


def test_a_session_on_part_of_the_ranks(embedded, app):
    program = app("""
        import sys
        from mpi4py import MPI
        import spmd_disco as di
        world = MPI.COMM_WORLD
        part = world.Split(world.rank % 2, world.rank)
        if world.rank % 2 == 0:
            with di.MPISession(part) as sess:
                if sess is not None:
                    print(sess.call(lambda: MPI.COMM_WORLD.rank).get_all())
        else:
            part.barrier()
        sys.stdout.write(f"{world.allreduce(1)}\\n")
    """)
    ended = embedded(4, program)
    assert (ended.status, ended.err) == (0, "")
    assert sorted(ended.lines) == ["4", "4", "4", "4", "[0, 2]"]


def test_failures_that_nobody_has_observed_before_finalize(embedded, app):
    program = app("""
        from mpi4py import MPI
        import spmd_disco as di
        sess = di.MPISession()
        if MPI.COMM_WORLD.rank == 0:
            sess.call(lambda: 1 / 0)
        MPI.Finalize()
    """)
    ended = embedded(2, program)
    assert ended.status == 1
    assert "worker 0, worker 1" in ended.err
