"""Sessions without MPI: ``python app.py``, ``python -m spmd_disco -n N``, and how they end."""

from __future__ import annotations

import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.timeout(180)

START = """\
import os, signal, sys, threading, time
import spmd_disco as di

def ident(*_):
    return di.get_worker().worker_id

def die(how):
    if di.get_worker().worker_id == 1:
        if how == "exit":
            os._exit(3)
        os.kill(os.getpid(), getattr(signal, how))
    time.sleep(60)

"""


@pytest.fixture
def local_app(app):
    def write(text: str) -> str:
        return app(START + text)

    return write


def gone(pid: int) -> bool:
    """Whether a process has ended (it may still have to be waited for)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def wait_until_gone(pids: list[int], limit: float = 2.0) -> None:
    end = time.monotonic() + limit
    while not all(gone(pid) for pid in pids):
        assert time.monotonic() < end, [pid for pid in pids if not gone(pid)]
        time.sleep(0.01)


# The program --------------------------------------------------------------------------------------


def test_program_without_a_launcher(plain, local_app):
    local_app(
        """
with di.session(3) as sess:
    assert isinstance(sess, di.ProcessSession)
    pids = sess.call(os.getpid).get_all()
    print(sess.call(ident).get_all(), len(set(pids)), pids[0] == os.getpid(), sess)
    # The program's own arguments and folder; no standard input; nothing of MPI.
    print(sess.call(lambda: (sys.argv[1:], sys.stdin.read() if ident() else "")).get_all())
    print(sess.call(lambda: "mpi4py" in sys.modules).get_all())
    print(os.getcwd() == sess.call(os.getcwd).get(2))
"""
    )
    ended = plain("app.py", "a", "b")
    assert (ended.status, ended.err) == (0, "")
    assert ended.lines == [
        "[0, 1, 2] 3 True <ProcessSession: 3 workers>",
        "[(['a', 'b'], ''), (['a', 'b'], ''), (['a', 'b'], '')]",
        "[False, False, False]",
        "True",
    ]


@pytest.mark.parametrize(
    "args", [("app.py", "x"), ("-m", "app", "x"), ("-c", "exec(open('app.py').read())", "x")]
)
def test_launcher_with_a_number(alone, local_app, args):
    local_app("print(di.session().call(lambda: (ident(), sys.argv[1])).get_all())")
    ended = alone("-n", "4", *args)
    assert (ended.status, ended.err) == (0, "")
    assert ended.lines == ["[(0, 'x'), (1, 'x'), (2, 'x'), (3, 'x')]"]


@pytest.mark.parametrize(
    ("end", "status"),
    [("", 0), ("sys.exit(7)", 7), ("1 / 0", 1), ("sess.call(int, 'x')", 1)],
)
def test_exit_status(plain, alone, local_app, end, status):
    local_app(f"sess = di.session(2)\nsess.call(ident).get()\n{end}\n")
    for ended in (plain("app.py"), alone("-n", "2", "app.py")):
        assert ended.status == status, ended
        assert ("Error" in ended.err) == (status == 1)


def test_groups_and_the_number_of_workers(alone, app):
    app("import spmd_disco as di\ns = di.session()\nprint(s.num_workers, s.num_groups)\n")
    assert alone("-n4", "--num-groups=2", "app.py").lines == ["4 2"]
    ended = alone("-n", "3", "--num-groups", "2", "app.py")
    assert ended.status == 1
    assert "3 workers cannot be split into 2 equal groups" in ended.err


@pytest.mark.parametrize("number", ["0", "x", "-1", "2.5"])
def test_bad_number(alone, number):
    ended = alone("-n", number, "app.py")
    assert ended.status == 2
    assert ended.err == f"spmd_disco: -n {number}: a whole number from 1 is allowed\n"


def test_number_in_an_mpi_job(run):
    ended = run(2, "-n", "2", "-c", "print('never')")
    assert ended.status
    assert ended.out == ""
    assert ended.err.count("-n 2 starts workers without MPI, but this process is a rank") == 1


def test_mpi_session_under_a_number(alone):
    ended = alone("-n", "2", "-c", "import spmd_disco as di; di.MPISession()")
    assert ended.status == 1
    assert "starts workers without MPI: open the session with di.session()" in ended.err


def test_other_number_than_ranks(run):
    ended = run(2, "-c", "import spmd_disco as di; di.session(3)")
    assert ended.status == 1
    assert "num_workers=3, but this MPI job has 2 ranks" in ended.err


def test_no_communicators(plain, local_app):
    local_app(
        """
with di.session(2) as sess:
    for name in ("comm", "group_comm"):
        try:
            sess.call(lambda: getattr(di.get_worker(), name)).get(1)
        except di.WorkerError as e:
            print(type(e.__cause__).__name__, str(e.__cause__)[:40])
    print(sess.call(di.get_worker).get(1) == sess.call(di.get_worker).get(1))
"""
    )
    assert plain("app.py").lines == [
        "DiscoError get_worker().comm: this session's worker",
        "DiscoError get_worker().group_comm: this session's ",
        "True",
    ]


# What workers print -------------------------------------------------------------------------------


def test_output(plain, local_app):
    local_app(
        """
import contextlib, io
def say(text):
    print(text, ident())
    print("partial", end="")
    os.write(2, b"from C\\n")
    os.system("echo from a shell")
with di.session(2) as sess:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        sess.call(lambda: ident() and say("ä"))
        sess.sync()
        sess.call(lambda: ident() and sys.stderr.write("\\rbar\\r\\n")).get(1)
    print(out.getvalue().splitlines(), err.getvalue().splitlines())
    sess.call(lambda: ident() and print("last words"))
"""
    )
    ended = plain("app.py")
    lines = ["[worker 1] ä 1", "[worker 1] from a shell", "[worker 1] partial"]
    errors = ["[worker 1] from C", "", "[worker 1] bar"]
    assert ended.lines == [f"{lines} {errors}", "[worker 1] last words"]


def test_output_without_prefix(alone, local_app):
    local_app("di.session().call(lambda: print(ident())).get_all()")
    ended = alone("-n", "3", "--no-prefix", "app.py")
    assert sorted(ended.lines) == ["0", "1", "2"]


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_lines_of_the_program_and_of_workers_stay_whole(plain, local_app, unbuffered):
    local_app(
        """
def talk():
    for i in range(20):
        print("line", i, "of", "a", "worker")
before = sys.stdout.line_buffering, sys.stdout.write_through
with di.session(3) as sess:
    for _ in range(50):
        sess.call(talk)
        for i in range(20):
            print("line", i, "of", "the", "program")
print(before == (sys.stdout.line_buffering, sys.stdout.write_through))
"""
    )
    ended = plain("app.py", env={"PYTHONUNBUFFERED": unbuffered})
    *lines, restored = ended.lines
    whole = re.compile(r"(\[worker [012]\] line \d+ of a worker|line \d+ of the program)")
    assert [line for line in lines if not whole.fullmatch(line)] == []
    assert (len(lines), restored) == (50 * 20 * 4, "True")


# Ends ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("how", "text"),
    [
        ("exit", "ended with exit status 3 in die, command"),
        ("SIGKILL", "was killed by SIGKILL in die, command"),
        ("SIGSEGV", "was killed by SIGSEGV in die, command"),
    ],
)
def test_a_worker_dies(plain, local_app, how, text):
    local_app(
        f"""
sess = di.session(3)
others = sess.call(os.getpid).get_all()[1:]
print(*others)
try:
    # Worker 0 does not wait in it.
    sess.call(lambda how: ident() and die(how), {how!r}).get(2)
except di.WorkerDied as e:
    print(e.worker_id, e.pid == others[0], e.signal, e.exit_status)
for use in (lambda: sess.call(ident), sess.sync):
    try:
        use()
    except di.WorkerDied as e:
        print(e.worker_id)
sess.shutdown()
print(di.session(2).call(ident).get_all())
"""
    )
    ended = plain("app.py")
    assert ended.status == 0, ended
    assert text.replace("in die", "in <lambda>") in ended.err
    pids, death, *rest = ended.lines
    number = "None 3" if how == "exit" else f"{int(getattr(signal, how))} None"
    assert death == f"1 True {number}"
    assert rest == ["1", "1", "[0, 1]"]
    wait_until_gone([int(pid) for pid in pids.split()])


def test_a_worker_dies_while_nothing_is_asked(start, local_app):
    local_app(
        """
sess = di.session(2)
print(sess.call(os.getpid).get(1), flush=True)
time.sleep(5)
"""
    )
    job = start(1, "app.py", command=[sys.executable])
    job.wait_for("\n")
    pid = int(job.out.read_text())
    os.kill(pid, signal.SIGKILL)
    end = time.monotonic() + 2
    while f"worker 1 (pid {pid}) was killed by SIGKILL while it waited" not in job.err.read_text():
        assert time.monotonic() < end, job.err.read_text()
        time.sleep(0.01)
    # Nobody asked any more, and success it was not.
    assert job.wait().status == 1


def test_collective_with_the_dead(plain, local_app):
    local_app(
        """
import numpy as np
sess = di.session(3)
array = sess.empty((4,), "float32")
sess.call(lambda: ident() == 1 and os.kill(os.getpid(), signal.SIGKILL))
sess.allreduce(array, array)
try:
    sess.sync()
except di.WorkerDied as e:
    print(e.worker_id)
"""
    )
    ended = plain("app.py")
    assert (ended.status, ended.out) == (0, "1\n"), ended


WITH_EVERYTHING = """
sess = di.session(3)

def busy():
    if ident() == 1:
        child = os.spawnlp(os.P_NOWAIT, "sleep", "sleep", "60")
        with open("child", "w") as f:
            f.write(str(child))
        # All in C, without giving back the lock of the interpreter.
        sum(range(10**12))

print(*sess.call(os.getpid).get_all(), flush=True)
sess.call(busy)
while not os.path.exists("child") or not open("child").read():
    time.sleep(0.01)
print("ready", flush=True)
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_the_controller_is_killed(start, local_app, tmp_path, number):
    local_app(WITH_EVERYTHING + "time.sleep(60)\n")
    job = start(1, "app.py", command=[sys.executable])
    job.wait_for("ready")
    pids = [int(pid) for pid in job.out.read_text().splitlines()[0].split()]
    assert pids[0] == job.process.pid
    os.kill(pids[0], number)
    job.wait()
    wait_until_gone([*pids, int((tmp_path / "child").read_text())])


def test_the_program_leaves_at_once(plain, local_app, tmp_path):
    local_app(WITH_EVERYTHING + "os._exit(5)\n")
    ended = plain("app.py")
    assert ended.status == 5
    pids = [int(pid) for pid in ended.lines[0].split()]
    wait_until_gone([*pids, int((tmp_path / "child").read_text())])


def test_session_opened_in_a_thread_that_ends(plain, local_app):
    local_app(
        """
opened = []
thread = threading.Thread(target=lambda: opened.append(di.session(2)))
thread.start()
thread.join()
time.sleep(0.2)
print(opened[0].call(ident).get_all())
"""
    )
    assert plain("app.py").lines == ["[0, 1]"]


def test_forks_of_the_program(plain, local_app):
    local_app(
        """
sess = di.session(2)
if os.fork() == 0:
    sys.exit(0)
os.wait()
print(sess.call(ident).get_all())
sess.shutdown()
"""
    )
    ended = plain("app.py")
    assert (ended.status, ended.out, ended.err) == (0, "[0, 1]\n", "")


@pytest.mark.parametrize("opened", ["di.session(2)", "di.ThreadedSession(2)"])
def test_a_fork_that_exits_inside_the_block(plain, local_app, opened):
    local_app(
        f"""
with {opened} as sess:
    pid = os.fork()
    if pid == 0:
        sys.exit(5)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), sess.call(ident).get_all())
"""
    )
    ended = plain("app.py")
    assert (ended.status, ended.out, ended.err) == (0, "5 [0, 1]\n", "")


@pytest.fixture
def interrupted(start, local_app):
    """Run a program, and interrupt it once worker 1 is in a function of it; return how it ends."""

    def run(work: str, call: str):
        local_app(
            f"""
import contextlib
sess = di.session(2)
def work():
    if ident():
        open("there", "w").close()
    {work}
def report():
    while not os.path.exists("there"):
        time.sleep(0.01)
    print("ready", flush=True)
print(sess.call(os.getpid).get(1), flush=True)
threading.Thread(target=report).start()
{call}
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
        wait_until_gone([int(ended.lines[0])])
        return ended

    return run


def test_ctrl_c(interrupted):
    ended = interrupted("time.sleep(60)", "sess.call(work).get(1)")
    assert "killed" not in ended.err


@pytest.mark.parametrize("block", ["sess", "contextlib.nullcontext()"])
def test_ctrl_c_with_a_worker_in_c_code(interrupted, block):
    """Nothing in Python can interrupt it, so it is killed."""
    ended = interrupted(
        "return ident() and sum(range(10**11))", f"with {block}:\n    sess.call(work).get(1)"
    )
    assert re.search(r"waiting for worker 1 .*, and the workers are killed", ended.err)


def test_an_exception_with_a_worker_that_goes_on(plain, local_app):
    local_app(
        """
def work():
    return ident() and sum(range(10**11))
with di.session(2) as sess:
    sess.call(work)
    raise ValueError("mine")
"""
    )
    ended = plain("app.py", env={"SPMD_DISCO_GRACE": "0.5"})
    assert ended.status == 1
    assert "ValueError: mine" in ended.err
    assert "the workers are killed" in ended.err


def test_threads_that_open_at_the_same_time(plain, local_app):
    local_app(
        """
opened, refused = [], []
def open_one():
    try:
        opened.append(di.ProcessSession(2))
    except di.DiscoError as e:
        refused.append(str(e))
threads = [threading.Thread(target=open_one) for _ in range(3)]
for t in threads: t.start()
for t in threads: t.join()
print(len(opened), [text.startswith("a session is open") for text in refused])
opened[0].shutdown()
"""
    )
    ended = plain("app.py")
    assert (ended.status, ended.out, ended.err) == (0, "1 [True, True]\n", "")


def test_twenty_sessions_leave_nothing(plain, local_app):
    local_app(
        """
import gc
def left():
    gc.collect()
    return len(os.listdir("/proc/self/fd")), threading.active_count()
def memory():
    with open("/proc/self/statm") as f:
        return int(f.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
pids = []
for i in range(20):
    with di.session(2) as sess:
        pids.append(sess.call(os.getpid).get(1))
    del sess
    if i == 3:
        before, size = left(), memory()
print(left() == before, memory() - size < 20e6, [p for p in pids if os.path.exists(f"/proc/{p}")])
"""
    )
    assert plain("app.py").lines == ["True True []"]


# Opening ------------------------------------------------------------------------------------------


def test_entrypoint(plain, local_app, app):
    app(
        """
        import sys
        from spmd_disco.worker_process import main

        sys.mark = "set up"
        if __name__ == "__main__":
            main()
        """,
        "own_worker.py",
    )
    local_app(
        """
with di.ProcessSession(2, entrypoint="own_worker") as sess:
    print(sess.call(lambda: getattr(sys, "mark", None)).get_all())
"""
    )
    assert plain("app.py").lines == ["[None, 'set up']"]


def test_a_worker_that_does_not_come(plain, local_app):
    local_app(
        """
try:
    di.ProcessSession(2, entrypoint="no_such_module")
except di.DiscoError as e:
    print(e)
print(di.session(2).call(ident).get_all())
"""
    )
    ended = plain("app.py")
    assert re.fullmatch(
        r"worker 1 \(pid \d+\) ended before the session was open: .*\n\[0, 1\]\n", ended.out
    )
    assert re.search(r"^\[worker 1\] .*No module named no_such_module", ended.err, re.MULTILINE)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ("0", "num_workers=0: a whole number from 1 is allowed"),
        ("'2'", "num_workers is an int, not '2'"),
        ("4, 3", "4 workers cannot be split into 3 equal groups"),
        ("2, entrypoint=5", "entrypoint is the name of a module, not 5"),
        ("2, timeout=0", "timeout=0: give a number of seconds above 0"),
    ],
)
def test_wrong_arguments(arguments, text):
    code = f"import spmd_disco; spmd_disco.ProcessSession({arguments})"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert text in shown.stderr, shown


def test_one_at_a_time(plain, local_app):
    local_app(
        """
first = di.session(2)
try:
    di.session(2)
except di.DiscoError as e:
    print(e)
del first
print(di.session(1).call(ident).get_all())
"""
    )
    assert plain("app.py").lines == [
        "a session is open (ProcessSession: 2 workers): shut it down before you open another",
        "[0]",
    ]


# The prompt ---------------------------------------------------------------------------------------


class Terminal:
    """A terminal in which a program runs."""

    def __init__(self, command: list[str], folder: Path, env: dict[str, str]) -> None:
        self.pid, self.fd = pty.fork()
        if self.pid == 0:
            os.chdir(folder)
            os.execve(command[0], command, env)
        self.shown = ""

    def read(self, text: str, limit: float = 30) -> str:
        """Read until `text` is shown; return what came before."""
        end = time.monotonic() + limit
        while text not in self.shown:
            assert time.monotonic() < end, self.shown
            if select.select([self.fd], [], [], 0.1)[0]:
                try:
                    self.shown += os.read(self.fd, 4096).decode()
                except OSError:
                    raise AssertionError(f"ended: {self.shown!r}") from None
        before, _, self.shown = self.shown.partition(text)
        return before

    def write(self, text: str) -> None:
        os.write(self.fd, text.encode())

    def close(self) -> int:
        """Wait for the end of the program."""
        while True:
            try:
                if not os.read(self.fd, 4096):
                    break
            except OSError:
                break
        _, status = os.waitpid(self.pid, 0)
        os.close(self.fd)
        return os.waitstatus_to_exitcode(status)


def test_prompt(tmp_path, environment):
    env = environment({"TERM": "dumb", "PYTHON_BASIC_REPL": "1"})
    terminal = Terminal([sys.executable, "-m", "spmd_disco", "-n", "3", "-i"], tmp_path, env)
    try:
        terminal.read(">>> ")
        terminal.write("import os, time, spmd_disco as di; sess = di.session()\n")
        terminal.read(">>> ")
        terminal.write("def f(x): return x + di.get_worker().worker_id\n\n")
        terminal.read(">>> ")
        # Completion.
        terminal.write("ses\t.num_worke\t + 70\n")
        assert "\n73" in terminal.read(">>> ")
        terminal.write(
            "d = sess.call(lambda: di.get_worker().worker_id and time.sleep(60)); d.get(1)\n"
        )
        time.sleep(0.5)
        terminal.write("\x03")
        assert "KeyboardInterrupt" in terminal.read(">>> ")
        terminal.write("sess.call(f, 20).get_all()\n")
        assert "[20, 21, 22]" in terminal.read(">>> ")
        terminal.write("exit(5)\n")
        assert terminal.close() == 5
    except BaseException:
        os.kill(terminal.pid, signal.SIGKILL)
        raise
