"""Programs with a ThreadedSession: what it prints, how it is interrupted, and how it ends."""

from __future__ import annotations

import os
import re
import signal
import sys
import time

import pytest

START = """\
import contextlib, gc, os, sys, threading, time
import numpy as np
import spmd_disco as di

def ident(*_):
    return di.get_worker().worker_id

"""


@pytest.fixture
def threaded_app(app):
    def write(text: str) -> str:
        return app(START + text)

    return write


def test_neither_mpi_nor_the_native_module_is_needed(plain, threaded_app):
    threaded_app(
        """
with di.ThreadedSession(3) as sess:
    print(sess, sess.call(os.getpid).get_all() == [os.getpid()] * 3)
    rows = sess.scatter(np.arange(6.0).reshape(3, 2))
    total = sess.empty((2,), "float64")
    sess.allreduce(rows, total, "avg")
    print(*total.get(2))
    try:
        sess.call(lambda: di.get_worker().comm).get()
    except di.WorkerError as e:
        print("threads of one process" in str(e))
print("mpi4py" in sys.modules, threading.active_count())
"""
    )
    for native in "1", "0":
        ended = plain("app.py", env={"SPMD_DISCO_NATIVE": native})
        assert (ended.status, ended.err) == (0, "")
        assert ended.lines == ["<ThreadedSession: 3 workers> True", "2.0 3.0", "True", "False 1"]


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_output(plain, threaded_app, unbuffered):
    threaded_app(
        """
def talk():
    for i in range(20):
        print("line", i, "of", "a", "worker")
    print("rest", end="")
before = sys.stdout, sys.stderr
with di.ThreadedSession(3) as sess:
    for _ in range(30):
        sess.call(talk)
        for i in range(20):
            print("line", i, "of", "the", "program")
    sess.call(lambda: print("error", file=sys.stderr))
print(before == (sys.stdout, sys.stderr))
"""
    )
    ended = plain("app.py", env={"PYTHONUNBUFFERED": unbuffered})
    *lines, restored = ended.lines
    labelled = r"\[worker [012]\] (line \d+ of a worker|rest)"
    whole = re.compile(rf"({labelled}|line \d+ of the program)")
    assert [line for line in lines if not whole.fullmatch(line)] == []
    assert (len(lines), restored) == (30 * (21 * 3 + 20), "True")
    assert sorted(ended.err.splitlines()) == [f"[worker {i}] error" for i in range(3)]


@pytest.mark.parametrize(
    ("work", "left_behind"),
    [
        ("while True: pass", False),
        ("di.get_global_func('runtime.disco.allreduce')(np.ones(2), 0, False, np.ones(2))", False),
        ("di.get_global_func('runtime.disco.recv_from_worker')(np.ones(2), 0)", False),
        ("time.sleep(60)", True),
    ],
    ids=["Python code", "collective", "message", "C code"],
)
def test_ctrl_c(start, threaded_app, work, left_behind):
    threaded_app(
        f"""
there = threading.Event()
di.register_func("mine.there", there.set)
def work():
    if ident():
        di.get_global_func("mine.there")()
        {work}
    else:
        time.sleep(60)
def report():
    there.wait()
    time.sleep(0.1)
    print("ready", flush=True)
threading.Thread(target=report).start()
with di.ThreadedSession(2) as sess:
    sess.call(work)
"""
    )
    job = start(1, "app.py", command=[sys.executable])
    job.wait_for("ready")
    started = time.monotonic()
    os.killpg(job.process.pid, signal.SIGINT)
    ended = job.wait()
    assert ended.status in (130, -signal.SIGINT)
    assert time.monotonic() - started < 10
    assert "KeyboardInterrupt" in ended.err
    assert ("left behind" in ended.err) == left_behind


def test_the_session_is_closed_at_the_end(plain, threaded_app):
    threaded_app(
        """
sess = di.ThreadedSession(2)
sess.call(lambda: ident() and 1 / 0)
"""
    )
    ended = plain("app.py")
    assert ended.status == 1
    assert "ZeroDivisionError" in ended.err
    assert "failures that nobody has observed" in ended.err


def test_many_sessions_leave_nothing(plain, threaded_app):
    threaded_app(
        """
def opened(i):
    with di.ThreadedSession(3) as sess:
        assert sess.call(lambda: ident() + i).get_all() == [i, i + 1, i + 2]
opened(0)
files, threads = os.listdir("/proc/self/fd"), threading.active_count()
for i in range(30):
    opened(i)
gc.collect()
from spmd_disco.worker import Worker
left = [o for o in gc.get_objects() if isinstance(o, Worker)]
print(len(os.listdir("/proc/self/fd")) - len(files), threading.active_count() - threads, len(left))
"""
    )
    ended = plain("app.py")
    assert (ended.out, ended.err) == ("0 0 0\n", "")


def test_functions_registered_by_the_program_are_everyones(plain, threaded_app):
    threaded_app(
        """
calls = []
@di.register_func("mine.note")
def note(x):
    calls.append(x)
with di.ThreadedSession(3) as sess:
    sess.call("mine.note", 5)
    sess.sync()
    print(di.get_global_func("mine.note") is note)
"""
    )
    assert plain("app.py").out == "True\n"


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ("0", "num_workers=0: a whole number from 1 is allowed"),
        ("2.0", "num_workers is an int, not 2.0"),
        ("3, 2", "3 workers cannot be split into 2 equal groups: num_groups must divide 3"),
        ("2, timeout=-1", "timeout=-1: give a number of seconds above 0, or None"),
    ],
)
def test_wrong_arguments(plain, threaded_app, arguments, text):
    threaded_app(
        f"""
try:
    di.ThreadedSession({arguments})
except (TypeError, ValueError) as e:
    print(e)
"""
    )
    assert plain("app.py").out == f"{text}\n"
