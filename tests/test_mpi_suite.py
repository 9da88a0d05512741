"""`tests/mpi`, on 1, 2, 3 and 4 ranks, and over MPI alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

#: Seconds for one test, after which every rank shows where it is, and for all tests of one job.
TEST_LIMIT = 60
JOB_LIMIT = 900


def run_tests(
    run_job: Callable[..., Any], request: pytest.FixtureRequest, ranks: int, *paths: str
) -> None:
    job = run_job(
        ranks,
        *("-m", "pytest", *paths, "--with-mpi", "--color=no", "-p", "no:cacheprovider"),
        *("-m", request.config.option.markexpr),
        # All ranks show their stacks before the first one ends itself and so the whole job.
        *("-o", f"faulthandler_timeout={TEST_LIMIT}"),
        *(f"--timeout={TEST_LIMIT + 5}", "--timeout-method=thread"),
        limit=JOB_LIMIT,
    )
    if job.status != 0:
        pytest.fail(f"{' '.join(paths)} on {ranks} ranks: {job}", pytrace=False)
    print(job.stdout)


@pytest.mark.timeout(JOB_LIMIT + 60)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_mpi_suite(ranks: int, run_job: Callable[..., Any], request: pytest.FixtureRequest) -> None:
    run_tests(run_job, request, ranks, "tests/mpi")


@pytest.mark.timeout(JOB_LIMIT + 60)
@pytest.mark.parametrize("ranks", [3])
def test_over_mpi_alone(
    ranks: int,
    run_job: Callable[..., Any],
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As between hosts: commands and arrays by MPI."""
    monkeypatch.setenv("SPMD_DISCO_CHANNEL", "mpi")
    monkeypatch.setenv("SPMD_DISCO_CCL", "mpi")
    run_tests(run_job, request, ranks, "tests/mpi")
