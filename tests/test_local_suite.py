"""Those tests of `tests/mpi` that ask for a session, over processes and threads without MPI."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

REPO = Path(__file__).parent.parent
#: Seconds for one test, and for all tests of one size.
TEST_LIMIT = 60
LIMIT = 900


@pytest.mark.timeout(LIMIT + 60)
@pytest.mark.parametrize(
    ("kind", "workers"),
    [("ProcessSession", 1), ("ProcessSession", 3), ("ThreadedSession", 1), ("ThreadedSession", 4)],
)
def test_local_suite(kind: str, workers: int, request: pytest.FixtureRequest) -> None:
    command = [
        *(sys.executable, "-m", "pytest", "tests/mpi", "-p", "no:pytest_mpi", "--color=no"),
        *("-p", "no:cacheprovider", "-m", request.config.option.markexpr),
        *(f"--timeout={TEST_LIMIT}", "--timeout-method=thread"),
    ]
    ended = subprocess.run(
        command,
        cwd=REPO,
        env={**os.environ, "TEST_SESSION": kind, "TEST_WORKERS": str(workers)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        encoding="utf-8",
        errors="replace",
        timeout=LIMIT,
    )
    if ended.returncode != 0:
        pytest.fail(f"tests/mpi over a {kind} of {workers}:\n{ended.stdout}", pytrace=False)
    print(ended.stdout)
