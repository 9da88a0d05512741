"""Sessions of a program under ``python -m spmd_disco``, and how they end with it."""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.timeout(180)

START = """\
import atexit, os, signal, sys, threading, time
import spmd_disco as di

def ident(*_):
    return di.get_worker().worker_id

def fail_on_2():
    if di.get_worker().worker_id == 2:
        raise ValueError("two is bad")
"""

STUCK = """\

def stuck():
    \"\"\"Take no notice of interrupts on worker 1.\"\"\"
    if di.get_worker().worker_id == 1:
        end = time.monotonic() + 60
        while time.monotonic() < end:
            try:
                open("stuck", "w").close()
                time.sleep(60)
            except KeyboardInterrupt:
                pass

sess = di.MPISession()
sess.call(stuck)
while not os.path.exists("stuck"):
    time.sleep(0.01)
"""


@pytest.fixture
def session_app(app):
    def write(text: str) -> str:
        return app(START + text)

    return write


def test_sessions_one_after_another(run, session_app):
    session_app(
        """
for groups in (1, 2, 4, 1):
    with di.MPISession(num_groups=groups) as sess:
        print(sess.num_groups, sess.group_size, sess.call(ident).get_all())
sess = di.session(num_groups=2)
print(sess.num_groups, sess.call(ident).get_all())
sess.shutdown()
sess = di.MPISession()
print(sess.num_groups)
"""
    )
    ended = run(4, "--num-groups", "4", "app.py")
    ids = "[0, 1, 2, 3]"
    expected = [f"{n} {4 // n} {ids}" for n in (1, 2, 4, 1)] + [f"2 {ids}", "4"]
    assert (ended.status, ended.lines, ended.err) == (0, expected, "")


def test_constructor_that_fails_then_a_good_one(run, session_app):
    session_app(
        """
for bad in (dict(num_groups=2), dict(num_groups=0), dict(num_groups="x"), dict(timeout=-1)):
    try:
        di.MPISession(**bad)
    except (ValueError, TypeError) as e:
        print(type(e).__name__)
with di.MPISession() as sess:
    print(sess.call(ident).get_all())
    try:
        di.MPISession()
    except di.DiscoError as e:
        print("second refused")
    print(sess.call(ident).get_all())
"""
    )
    ended = run(3, "app.py")
    ids = "[0, 1, 2]"
    names = ["ValueError", "ValueError", "TypeError", "ValueError"]
    assert (ended.lines, ended.err) == ([*names, ids, "second refused", ids], "")
    assert ended.status == 0


def test_one_rank(alone, run, session_app):
    session_app("print(di.MPISession().call(ident).get_all())")
    assert alone("app.py") == run(1, "app.py")
    assert alone("app.py").lines == ["[0]"]


def test_workers_find_argv_and_path(run, session_app):
    session_app(
        """
sys.path.insert(1, "/some/where")
def look():
    return sys.argv, sys.path, sys.modules["__main__"].__name__
sess = di.MPISession()
values = sess.call(look).get_all()
print(all(value == values[0] for value in values), values[0][0][1:])
"""
    )
    assert run(3, "app.py", "-x", "y").lines == ["True ['-x', 'y']"]
    assert run(3, "-m", "app", "-x", "y").lines == ["True ['-x', 'y']"]


def test_end_of_program_with_an_open_session(run, session_app):
    """Threads and exit callbacks use the session, in the order of a plain program's end."""
    session_app(
        """
def later():
    time.sleep(0.3)
    print("thread", sess.call(ident).get_all())

atexit.register(lambda: print("last", sess.call(ident).get_all()))
sess = di.MPISession()
atexit.register(lambda: print("first", sess.call(ident).get_all()))
threading.Thread(target=later).start()
sess.call(time.sleep, 0.5)
print("end")
sys.exit(3)
"""
    )
    ended = run(3, "app.py")
    ids = "[0, 1, 2]"
    expected = ["end", f"thread {ids}", f"first {ids}", f"last {ids}"]
    assert (ended.status, ended.lines, ended.err) == (3, expected, "")


@pytest.mark.parametrize("ending", ["pass", "sys.exit(0)", "MPI.Finalize()", "del sess"])
def test_failure_that_nobody_observed(ending, run, session_app):
    session_app(f"from mpi4py import MPI\nsess = di.MPISession()\nsess.call(fail_on_2)\n{ending}\n")
    ended = run(4, "app.py")
    assert ended.status == 1
    assert ended.out == ""
    assert ended.err.startswith("spmd_disco: ")
    assert "worker 2" in ended.err
    assert ended.err.count("ValueError: two is bad") in (1, 2)
    assert ended.err.count("Traceback") == 1


def test_unobserved_failure_keeps_the_programs_own_status(run, session_app):
    session_app("sess = di.MPISession()\nsess.call(fail_on_2)\nsys.exit(9)\n")
    ended = run(3, "app.py")
    assert ended.status == 9
    assert "two is bad" in ended.err


def test_observed_failure_is_the_programs_affair(run, session_app):
    session_app(
        """
sess = di.MPISession()
sess.call(fail_on_2)
try:
    sess.sync()
except di.WorkerError as e:
    print(e.worker_id)
"""
    )
    ended = run(3, "app.py")
    assert (ended.status, ended.lines, ended.err) == (0, ["2"], "")


def test_uncaught_worker_error(run, session_app):
    session_app("sess = di.MPISession()\nsess.call(fail_on_2)\nsess.sync()\n")
    ended = run(3, "app.py")
    assert ended.status == 1
    assert "WorkerError: worker 2 " in ended.err
    assert ended.err.count("WorkerError") == 1


def test_exception_while_a_worker_is_busy(run, session_app):
    """What is under way is cancelled."""
    session_app(
        """
def busy():
    if di.get_worker().worker_id == 1:
        time.sleep(60)
sess = di.MPISession()
sess.call(busy)
raise RuntimeError("over")
"""
    )
    start = time.monotonic()
    ended = run(3, "app.py")
    assert ended.status == 1
    assert ended.err.count("Traceback") == 1
    assert ended.err.endswith("RuntimeError: over\n")
    assert time.monotonic() - start < 20


def test_exception_while_a_worker_cannot_be_interrupted(run, session_app):
    session_app(STUCK + "raise RuntimeError('over')\n")
    start = time.monotonic()
    ended = run(3, "app.py", env={"SPMD_DISCO_GRACE": "1"})
    assert ended.status == 1
    assert "RuntimeError: over" in ended.err
    line = re.search(r"^spmd_disco: the job is aborted: .*$", ended.err, re.MULTILINE)
    assert line, ended.err
    assert "worker 1" in line.group()
    assert time.monotonic() - start < 20


INTERRUPTS = {
    "the program sleeps": "time.sleep(60)",
    "the program waits for a worker": (
        "sess.call(lambda: di.get_worker().worker_id == 1 and time.sleep(60)); sess.sync()"
    ),
    "worker 0 sleeps": "sess.call(time.sleep, 60)",
    "no session": "sess.shutdown(); time.sleep(60)",
    "in a callback at exit": "atexit.register(time.sleep, 60); sys.exit()",
    "closing": "sess.call(lambda: di.get_worker().worker_id == 1 and time.sleep(60))",
}


@pytest.mark.parametrize("where", INTERRUPTS)
def test_interrupt(where, mpi, start, session_app, tmp_path):
    session_app(
        f"sess = di.MPISession()\nopen('pid', 'w').write(str(os.getpid()))\n"
        f"print('ready', flush=True)\n{INTERRUPTS[where]}\n"
    )
    job = start(3, "app.py")
    job.wait_for("ready")
    time.sleep(0.5)
    begun = time.monotonic()
    if mpi == "mpich":
        job.process.send_signal(signal.SIGINT)  # Hydra sends it to all ranks
    else:
        # Open MPI answers SIGINT by ending the job itself: so what reaches rank 0 alone.
        os.kill(int((tmp_path / "pid").read_text()), signal.SIGINT)
    ended = job.wait()
    assert time.monotonic() - begun < 10
    if where == "in a callback at exit":
        assert "Exception ignored in atexit callback" in ended.err
    elif where != "closing":
        assert ended.err.count("Traceback (most recent call last)") == 1, ended.err
        assert ended.err.rstrip().endswith("KeyboardInterrupt")
    assert ended.status == (0 if where == "in a callback at exit" else 130)


def test_second_interrupt_aborts(start, session_app, tmp_path):
    session_app(
        STUCK
        + """
def at_exit():
    print("exiting", flush=True)
    time.sleep(60)
atexit.register(at_exit)
open("pid", "w").write(str(os.getpid()))
print("ready", flush=True)
sess.sync()
"""
    )
    job = start(3, "app.py")
    job.wait_for("ready")
    pid = int((tmp_path / "pid").read_text())
    os.kill(pid, signal.SIGINT)
    job.wait_for("exiting")
    os.kill(pid, signal.SIGINT)
    begun = time.monotonic()
    ended = job.wait()
    assert time.monotonic() - begun < 10
    assert ended.status == 130


def test_interrupt_of_a_program_by_itself(run, session_app):
    session_app("os.kill(os.getpid(), signal.SIGINT)\ntime.sleep(60)\n")
    ended = run(3, "app.py")
    assert ended.status == 130
    assert ended.err.count("Traceback") == 1
    assert ended.err.rstrip().endswith("KeyboardInterrupt")


def test_mpi_finalized_with_an_open_session(run, session_app):
    session_app(
        """
from mpi4py import MPI
sess = di.MPISession()
value = sess.call(ident)
print(value.get_all())
MPI.Finalize()
print("finalized")
try:
    sess.call(ident)
except di.SessionClosedError:
    print("closed")
try:
    di.MPISession()
except di.DiscoError:
    print("no more")
sys.exit(4)
"""
    )
    ended = run(3, "app.py")
    expected = ["[0, 1, 2]", "finalized", "closed", "no more"]
    assert (ended.status, ended.lines, ended.err) == (4, expected, "")


def test_forked_child_leaves_the_session_alone(run, session_app):
    session_app(
        """
sess = di.MPISession()
value = sess.call(ident)
pid = os.fork()
if pid == 0:
    del value
    sys.exit(7)
print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
print(value.get_all())
"""
    )
    # Since 3.12 Python warns of threads in a process that forks: a session has some.
    ended = run(3, "app.py", env={"PYTHONWARNINGS": "ignore::DeprecationWarning"})
    assert (ended.status, ended.lines, ended.err) == (0, ["7", "[0, 1, 2]"], "")


def test_idle_ranks_use_little_cpu(run, session_app):
    session_app(
        """
def cpu(pid):
    fields = open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
with di.MPISession() as sess:
    pids = sess.call(os.getpid).get_all()[1:]
time.sleep(0.5)
before = [cpu(pid) for pid in pids]
time.sleep(3)
print(max(cpu(pid) - b for pid, b in zip(pids, before)) / 3)
"""
    )
    assert float(run(3, "app.py").out) < 0.05


# Output of worker functions -----------------------------------------------------------------------

CHATTER = """
import random
def chatter(lines):
    rank = di.get_worker().worker_id
    random.seed(rank)
    for i in range(lines):
        stream = random.choice((sys.stdout, sys.stderr)) if both else sys.stdout
        print(f"<{rank} {i}", "x" * random.randrange(300), f"{i} {rank}>", file=stream)
        if i % 500 == 0:
            print("\\n".join(f"<{rank} {i} y {i} {rank}>" for _ in range(100)))
both = bool(sys.argv[1:])
sess = di.MPISession()
sess.call(chatter, 2000)
"""


@pytest.mark.parametrize("args", [[], ["both"]])
def test_lines_of_several_workers_do_not_mix(args, run, session_app):
    session_app(CHATTER)
    ended = run(4, "app.py", *args)
    assert ended.status == 0
    for text in (ended.out, ended.err):
        bad = [
            line
            for line in text.splitlines()
            if not re.fullmatch(r"\[worker (\d)\] <\1 (\d+) (x*|y) \2 \1>", line)
        ]
        assert not bad, bad[:3]
    assert len(ended.lines) + len(ended.err.splitlines()) == 4 * (2000 + 4 * 100)


@pytest.mark.parametrize("how", ["option", "environment"])
def test_no_prefix(how, run, session_app):
    session_app("di.MPISession().call(lambda: print('line', di.get_worker().worker_id))")
    args = ["--no-prefix", "app.py"] if how == "option" else ["app.py"]
    ended = run(3, *args, env={"SPMD_DISCO_PREFIX": "0"} if how == "environment" else {})
    assert sorted(ended.lines) == ["line 0", "line 1", "line 2"]


def test_partial_lines_end_with_their_command(run, session_app):
    session_app(
        """
def talk():
    print("out", end="")
    sys.stderr.write("err")
sess = di.MPISession()
sess.call(talk)
sess.call(talk)
print("controller")
"""
    )
    ended = run(3, "app.py")
    assert ended.lines.count("controller") == 1
    expected = sorted(f"[worker {i}] {{}}" for i in (0, 0, 1, 1, 2, 2))
    assert sorted(set(ended.lines) - {"controller"}) == [e.format("out") for e in expected[::2]]
    assert sorted(ended.err.splitlines()) == [e.format("err") for e in expected]


def test_controllers_output_is_never_touched(run, session_app):
    session_app(
        """
before = sys.stdout
sess = di.MPISession()
def talk():
    print("worker")
    return type(sys.stdout).__name__
kinds = sess.call(talk).get_all()
assert sys.stdout is before, sys.stdout
print("a", end="")
sess.call(ident)
print("b")
print(kinds)
"""
    )
    ended = run(2, "app.py")
    assert next(line for line in ended.lines if "worker" not in line) == "ab"
    assert sorted(line for line in ended.lines if "worker" in line) == [
        "[worker 0] worker",
        "[worker 1] worker",
    ]


def test_nothing_of_the_job_is_left(run, session_app, tmp_path):
    session_app(
        """
def note():
    open(f"pid{di.get_worker().worker_id}", "w").write(str(os.getpid()))
di.MPISession().call(note)
"""
    )
    assert run(3, "app.py").status == 0
    for i in range(3):
        assert not Path(f"/proc/{(tmp_path / f'pid{i}').read_text()}").exists()


@pytest.mark.parametrize("finalize", [[], ["finalize"]])
def test_rank_that_does_not_leave_its_session(finalize, run, session_app):
    """Not to be provoked by a program: so the lobby of rank 2 is kept from hearing the end."""
    session_app(
        """
from mpi4py import MPI
from spmd_disco import lobby
lobby.LIMIT_OF_LEAVING = 1.0

def deafen():
    if di.get_worker().worker_id == 2:
        lobby.current()._receive = lambda: time.sleep(60)

with di.MPISession() as sess:
    sess.call(deafen)
if sys.argv[1:]:
    MPI.Finalize()
"""
    )
    ended = run(3, "app.py", *finalize)
    assert ended.status != 0  # 1, but Open MPI's mpiexec has crashed in the middle of an abort
    line = "spmd_disco: the job is aborted: after 1 s still waiting for rank 2 to leave its session"
    assert ended.err.count(line) == 1
