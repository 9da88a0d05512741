"""A worker that waits in an MPI call of the user's for a peer that failed: the job ends."""

from __future__ import annotations

import time

import pytest

APP = """
import sys, time
import spmd_disco as di
from mpi4py import MPI

how, bad = sys.argv[1], int(sys.argv[2])

def f():
    w = di.get_worker()
    if w.worker_id == bad:
        raise ValueError("boom")
    if how == "world":
        MPI.COMM_WORLD.Barrier()
    elif how == "comm":
        di.get_worker().comm.allreduce(1)
    elif how == "recv":
        w.comm.recv(source=bad)
    elif how == "wait":
        w.comm.irecv(source=bad).wait()
    elif how == "compute":
        end = time.monotonic() + 2.5
        while time.monotonic() < end:
            pass
    elif how == "sleep":
        time.sleep(2.5)

sess = di.MPISession()
sess.call(f)
try:
    sess.sync()
except di.WorkerError as e:
    print("caught", e.worker_id)
"""


@pytest.mark.parametrize("bad", [0, 1])
@pytest.mark.parametrize("how", ["world", "comm", "recv", "wait"])
def test_the_job_ends_with_one_report(how, bad, run, app):
    start = time.monotonic()
    ended = run(3, app(APP), how, str(bad), env={"SPMD_DISCO_GRACE": "1"})
    assert time.monotonic() - start < 20
    assert ended.status != 0
    assert ended.err.count("SPMD_DISCO_GRACE") == 1
    assert ended.err.count("ValueError: boom") == 1
    assert f"for worker {bad}, where that command failed" in ended.err
    assert "app.py" in ended.err
    assert "caught" not in ended.out


@pytest.mark.parametrize("how", ["compute", "sleep"])
def test_a_worker_that_is_busy_otherwise_is_left_alone(how, run, app):
    ended = run(3, app(APP), how, "1", env={"SPMD_DISCO_GRACE": "0.5"})
    assert (ended.status, ended.lines) == (0, ["caught 1"]), ended
