"""The program finds what it would find under plain ``python``."""

from __future__ import annotations

import re
import zipfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.timeout(180)

LOOK = """\
import sys, inspect
print(sorted(globals()))
print([globals().get(n) for n in ("__name__", "__file__", "__package__", "__cached__", "__doc__")])
print(type(__loader__).__name__, __spec__ and (__spec__.name, __spec__.origin))
print(__builtins__, sys.argv, sys.path)
main = sys.modules["__main__"]
print(vars(main) is globals(), main)
"""


@pytest.mark.parametrize(
    "args",
    [
        ["app.py"],
        ["app.py", "-x", "--num-groups", "two words"],
        ["./sub/../sub/app.py"],
        ["link.py"],
        ["folder"],
        ["./folder/", "x"],
        ["app.zip", "x"],
        ["-m", "app", "-i"],
        ["-msub.app"],
        ["-m", "package", "x"],
        ["-c", LOOK, "x", "-m"],
        ["-c" + LOOK],
        ["--", "app.py", "--", "x"],
    ],
    ids=lambda args: " ".join(args).replace(LOOK, "LOOK"),
)
def test_surroundings(args, alone, plain, app, tmp_path):
    app(LOOK)
    app(LOOK, "sub/app.py")
    app(LOOK, "folder/__main__.py")
    app(LOOK, "package/__main__.py")
    app("", "package/__init__.py")
    (tmp_path / "link.py").symlink_to(Path("sub") / "app.py")
    with zipfile.ZipFile(tmp_path / "app.zip", "w") as archive:
        archive.writestr("__main__.py", LOOK)
    expected = plain(*args)
    assert expected.status == 0, expected.err
    assert alone(*args) == expected


def test_safe_path(alone, plain, app):
    app("import sys; print(sys.path)")
    env = {"PYTHONSAFEPATH": "1"}
    assert alone("app.py", env=env) == plain("app.py", env=env)


def test_compiled_file(alone, plain, app, tmp_path):
    import py_compile

    py_compile.compile(str(tmp_path / app(LOOK)), cfile=str(tmp_path / "app.pyc"))
    assert alone("app.pyc") == plain("app.pyc")


FAILURES = {
    "raises": "def f(x):\n    return 1 / x\n\nf(0)\n",
    "chained": "try:\n    1 / 0\nexcept Exception as e:\n    raise ValueError(2) from e\n",
    "context": "try:\n    {}[1]\nexcept KeyError:\n    [][1]\n",
    "syntax": "x = 1\ndef f(:\n",
    "import": "import not_to_be_found\n",
    "import that raises": "import broken\n",
    "warns": "import warnings\nwarnings.warn('beware')\n",
    "group": "import sys\nsys.excepthook(ValueError, ValueError(3), None)\nraise KeyError(1)\n",
    "hook": "import sys\nsys.excepthook = lambda *a: print('hook', a[0], a[2].tb_lineno)\n1/0\n",
    "hook fails": "import sys\ndef hook(*a):\n    [].x\nsys.excepthook = hook\n1 / 0\n",
    "hook exits": "import sys\nsys.excepthook = lambda *a: sys.exit(7)\n1 / 0\n",
    "exit 0": "import sys\nsys.exit(0)\n",
    "exit None": "raise SystemExit\n",
    "exit 3": "import sys\nsys.exit(3)\n",
    "exit 300": "import sys\nsys.exit(300)\n",
    "exit -1": "import sys\nsys.exit(-1)\n",
    "exit text": "import sys\nsys.exit('some text')\n",
    "exit object": "import sys\nsys.exit([1, 'x'])\n",
    "exit in a thread": (
        "import sys, threading\nthreading.Thread(target=sys.exit, args=(3,)).start()\n"
    ),
    "thread raises": (
        "import threading\n"
        "def f():\n    1 / 0\n"
        "threading.excepthook = lambda a: print('thread', a.exc_type)\n"
        "t = threading.Thread(target=f); t.start(); t.join()\n"
    ),
    "atexit": (
        "import atexit, sys\n"
        "@atexit.register\ndef one(): print('one')\n"
        "@atexit.register\ndef two(): raise ValueError('two')\n"
        "@atexit.register\ndef five(): sys.exit(5)\n"
        "sys.exit(4)\n"
    ),
    "order": (
        "import atexit, sys, threading, time\n"
        "atexit.register(print, 'atexit', file=sys.stderr)\n"
        "def f():\n    time.sleep(0.3)\n    print('thread', file=sys.stderr)\n"
        "threading.Thread(target=f).start()\n"
        "raise OSError(1, 'one')\n"
    ),
    "pool": (
        "import concurrent.futures as cf, time\n"
        "pool = cf.ThreadPoolExecutor(1)\n"
        "pool.submit(time.sleep, 0.2).add_done_callback(print)\n"
        "pool.submit(print, 'done')\n"
    ).replace(".add_done_callback(print)", ""),
}


@pytest.mark.parametrize("name", FAILURES)
def test_ends_like_python(name, alone, plain, app):
    app(FAILURES[name])
    app("def f():\n    raise RuntimeError('broken')\nf()\n", "broken.py")
    expected, ended = plain("app.py"), alone("app.py")
    for one in (expected, ended):
        one.err = re.sub("at 0x[0-9a-f]+", "at …", one.err)
    assert ended == expected


@pytest.mark.parametrize(
    "args",
    [
        ["missing.py"],
        ["missing/"],
        ["unreadable.py"],
        ["-m", "missing"],
        ["-m", "missing.module"],
        ["-m", "app.py"],
        ["-m", "raising"],
        ["-m", "package"],
        ["empty"],
        ["-c", "1/0"],
        ["-c", "x ="],
        ["-c", "import raising"],
    ],
    ids=" ".join,
)
def test_cannot_run(args, alone, plain, app, tmp_path):
    app("1 / 0", "raising.py")
    app("", "package/__init__.py")
    (tmp_path / "empty").mkdir()
    (tmp_path / "unreadable.py").symlink_to("nowhere.py")
    expected = plain(*args)
    assert expected.status
    assert alone(*args) == expected


@pytest.mark.parametrize("name", ["raises", "exit 3", "exit text", "hook exits", "order"])
def test_ends_like_python_under_mpiexec(name, run, plain, app):
    app(FAILURES[name])
    assert run(3, "app.py") == plain("app.py")


def test_missing_program_under_mpiexec(run, plain):
    assert run(3, "missing.py") == plain("missing.py")


def test_surroundings_under_mpiexec(run, plain, app):
    app(LOOK)
    for args in (["app.py", "-x"], ["-m", "app"]):
        assert run(2, *args) == plain(*args)


@pytest.mark.parametrize(
    ("ranks", "size"),
    [
        # More than a pipe holds does not get through Hydra, nor an end of file through the PRRTE
        # of Open MPI 5.0, whatever the program is (pmodels/mpich#2336, openpmix/openpmix#4024).
        (2, 60_000),
        (0, 200 * 1024),
    ],
    ids=["under mpiexec", "without"],
)
def test_standard_input_is_the_programs(ranks, size, run, alone, app):
    app(f"import sys; text = sys.stdin.read({size}); print(len(text), text[:3], text[-3:])")
    given = b"abc" + b"x" * (size - 6) + b"xyz"
    ended = run(ranks, "app.py", stdin=given) if ranks else alone("app.py", stdin=given)
    assert (ended.lines, ended.err) == ([f"{size} abc xyz"], "")


def test_program_from_standard_input(mpi, run, alone, plain):
    def program(lines: int) -> bytes:
        return (LOOK + "print(sys.stdin.read() == '')\n" + "x = 1\n" * lines + "1 / 0\n").encode()

    long = program(40_000)
    expected = plain("-", "x", stdin=long)
    assert expected.status == 1
    assert alone("-", "x", stdin=long) == expected
    if mpi == "openmpi":
        pytest.skip("Open MPI's mpiexec does not pass on the end of file")
    short = program(9_000)
    assert run(2, "-", "x", stdin=short) == plain("-", "x", stdin=short)


def test_main_is_a_real_module(alone, app):
    app(
        """
        import inspect, pickle, sys

        class Point:
            def __init__(self, x):
                self.x = x

        def f():
            return Point(3)

        assert pickle.loads(pickle.dumps(f())).x == 3
        assert pickle.loads(pickle.dumps(f)) is f
        assert inspect.getsource(f) == "def f():\\n    return Point(3)\\n", inspect.getsource(f)
        assert inspect.getmodule(f) is sys.modules["__main__"]
        print("fine")
        """
    )
    ended = alone("app.py")
    assert (ended.status, ended.out, ended.err) == (0, "fine\n", "")


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_multiprocessing(method, run, app):
    app(
        """
        import multiprocessing, sys

        def double(x):
            return 2 * x

        if __name__ == "__main__":
            with multiprocessing.get_context(sys.argv[1]).Pool(2) as pool:
                print(pool.map(double, range(4)))
        """
    )
    ended = run(2, "app.py", method)
    assert (ended.status, ended.out, ended.err) == (0, "[0, 2, 4, 6]\n", "")


def test_forked_child_that_goes_on_to_the_end(run, app):
    app(
        """
        import atexit, os, sys
        pid = os.fork()
        atexit.register(print, "child" if pid == 0 else "parent", "ends")
        if pid == 0:
            sys.exit(5)
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
        """
    )
    ended = run(2, "app.py")
    assert ended.status == 0
    assert ended.lines == ["child ends", "5", "parent ends"]


def test_the_other_ranks_do_not_run_the_program(run, app, tmp_path):
    app("open(__file__ + '.ran', 'a').write('x'); import app2")
    app("open(__file__ + '.ran', 'a').write('x')", "app2.py")
    for args in (["app.py"], ["-m", "app"]):
        assert run(4, *args).status == 0
    assert [(tmp_path / f"{name}.py.ran").read_text() for name in ("app", "app2")] == ["xx", "xx"]


def test_mpi_finalized_by_the_program(run, app):
    app(
        """
        import atexit
        from mpi4py import MPI
        print(MPI.Is_initialized(), MPI.COMM_WORLD.size)
        atexit.register(print, "atexit")
        MPI.Finalize()
        print("finalized")
        raise SystemExit(6)
        """
    )
    ended = run(3, "app.py")
    assert (ended.status, ended.lines) == (6, ["True 3", "finalized", "atexit"])
    assert ended.err == ""
