"""The launcher's own options, and the prompt."""

from __future__ import annotations

import re
import sys

import pytest

import spmd_disco
from spmd_disco import native

pytestmark = pytest.mark.timeout(180)


def test_version(run):
    ended = run(3, "--version")
    expected = f"spmd_disco {spmd_disco.__version__}\n"
    assert (ended.status, ended.out, ended.err) == (0, expected, "")


def test_help(run):
    ended = run(3, "--help")
    assert (ended.status, ended.err) == (0, "")
    assert ended.out.count("usage: python -m spmd_disco") == 1
    for option in ("--num-groups", "--no-prefix", "-i", "--info", "--allow-singleton", "--version"):
        assert option in ended.out
    assert max(map(len, ended.lines)) <= 100


@pytest.mark.parametrize(
    ("args", "env", "text"),
    [
        (["--nonsense", "app.py"], {}, "unknown option --nonsense"),
        ([], {}, "no program given"),
        (["app.py"], {"SPMD_DISCO_GRACE": "long"}, "SPMD_DISCO_GRACE='long'"),
        (["app.py"], {"SPMD_DISCO_PREFIX": "maybe"}, "SPMD_DISCO_PREFIX='maybe'"),
        (["app.py"], {"SPMD_DISCO_NUM_GROUPS": "0"}, "SPMD_DISCO_NUM_GROUPS"),
    ],
)
def test_refused(args, env, text, run):
    ended = run(3, *args, env=env)
    assert (ended.status, ended.out) == (2, "")
    assert ended.err.count("\n") == 1
    assert ended.err.startswith("spmd_disco: ")
    assert text in ended.err


@pytest.mark.parametrize("ranks", [0, 3])
def test_info(ranks, mpi, run, alone):
    env = {"SPMD_DISCO_SPIN_US": "50"}
    ended = run(ranks, "--info", env=env) if ranks else alone("--info", env=env)
    assert (ended.status, ended.err) == (0, "")
    shown = dict(re.split(r"  +", line, maxsplit=1) for line in ended.lines if line[0] != " ")
    assert shown["spmd_disco"] == spmd_disco.__version__
    assert sys.executable in shown["Python"]
    assert "mpi4py" in shown["packages"]
    assert {"mpich": "MPICH", "openmpi": "Open MPI"}[mpi] in shown["MPI library"]
    assert "thread level" in shown["MPI standard"]
    assert shown["ranks"] == str(ranks or 1)
    assert shown["launcher"].startswith("mpirun" if ranks else "none")
    assert "BLAS threads" in shown["cores per rank"]
    assert "SPMD_DISCO_SPIN_US=50" in shown["settings"]
    assert shown["native module"] == ("loaded" if native.available() else native.why_not)
    assert shown["control"].startswith(
        ("nothing", "ring" if native.available() else "mpi")[ranks > 0]
    )
    plane = "peer" if native.available() else "mpi"
    assert shown["data (CCL)"].startswith(("nothing", plane)[ranks > 0])
    assert shown["peer memory"].startswith("none") == (not (ranks and native.available()))
    assert len(ended.lines) <= 24


def test_info_without_what_is_native(run):
    env = {"SPMD_DISCO_NATIVE": "0", "SPMD_DISCO_CHANNEL": "ring"}
    ended = run(2, "--info", env=env)
    assert (ended.status, ended.err) == (0, "")
    assert re.search("^native module +switched off by SPMD_DISCO_NATIVE$", ended.out, re.MULTILINE)
    assert re.search("^control +none: SPMD_DISCO_CHANNEL=ring, but ", ended.out, re.MULTILINE)
    assert re.search(r"^data \(CCL\) +mpi ", ended.out, re.MULTILINE)
    assert re.search("^peer memory +none ", ended.out, re.MULTILINE)


def test_info_without_mpi(alone):
    ended = alone("--info", env={"MPI4PY_LIBMPI": "/nonexistent/libmpi.so"})
    assert (ended.status, ended.err) == (0, "")
    assert re.search("^MPI library +none: .*/nonexistent/libmpi.so", ended.out, re.MULTILINE)
    assert re.search("^without MPI +sessions of local processes ready", ended.out, re.MULTILINE)


SLURM = {"SLURM_NTASKS": "4", "SLURM_JOB_ID": "1", "SLURM_PROCID": "0", "SLURM_STEP_ID": "0"}


def test_singleton_trap(mpi, alone):
    ended = alone("-c", "print('runs')", env=SLURM)
    assert (ended.status, ended.out) == (2, "")
    assert ended.err.count("\n") == 1
    assert {"mpich": "srun --mpi=pmi2", "openmpi": "mpirun of Open MPI"}[mpi] in ended.err
    ended = alone("-c", "print('runs')", env={**SLURM, "SLURM_PROCID": "3"})
    assert (ended.out, ended.err) == ("", "")
    assert "attention: " in alone("--info", env=SLURM).out


@pytest.mark.parametrize("how", ["option", "environment"])
def test_singleton_allowed(how, alone):
    args = ["-c", "print('runs')"]
    if how == "option":
        ended = alone("--allow-singleton", *args, env=SLURM)
    else:
        ended = alone(*args, env={**SLURM, "SPMD_DISCO_ALLOW_SINGLETON": "1"})
    assert (ended.status, ended.out) == (0, "runs\n")


def test_one_rank_of_mpiexec_in_slurm_is_no_trap(run):
    assert run(1, "-c", "print('runs')", env=SLURM).out == "runs\n"


# The prompt ---------------------------------------------------------------------------------------

LINES = b"""\
x = 20
def f():
    return x + 1

f()
1 / 0
y = )
__name__
"""


def test_prompt_is_pythons(alone, plain):
    expected, ended = plain("-i", stdin=LINES), alone("-i", stdin=LINES)
    if sys.version_info >= (3, 13):
        # There the interpreter's own prompt shows source lines in tracebacks, unlike `code`.
        for one in (expected, ended):
            one.err = re.sub("^    .*\n", "", one.err, flags=re.MULTILINE)
    assert ended == expected


@pytest.mark.parametrize(
    ("code", "end"),
    [
        ("x = 3", ""),
        ("1 / 0", "exit(4)"),
        ("import sys; sys.exit(5)", ""),
        ("import sys; sys.exit('text')", "quit()"),
        ("raise KeyboardInterrupt", "import sys; sys.exit('gone')"),
    ],
)
def test_prompt_after_a_program(code, end, alone, plain):
    stdin = b"print(__name__)\n" + (end.encode() + b"\n" if end else b"")
    assert alone("-i", "-c", code, stdin=stdin) == plain("-i", "-c", code, stdin=stdin)


def test_prompt_over_ranks(run):
    lines = b"""\
import spmd_disco as di
sess = di.MPISession()
def f(x):
    return x + di.get_worker().worker_id

sess.call(f, 10).get_all()
sess.call(f, "a").get()
exit(6)
"""
    ended = run(3, "-i", stdin=lines)
    assert ended.status == 6
    assert ended.lines == ["[10, 11, 12]"]
    assert ended.err.count("Traceback") == 2
    assert ">>> " in ended.err
