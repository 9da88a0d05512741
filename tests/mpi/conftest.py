"""pytest on every rank under mpiexec: one report, and no rank that goes its own way.

    mpiexec -n 4 python -m pytest --with-mpi tests/mpi

Rank 0 prints the progress, the other ranks only what failed there. After each test the ranks
compare what became of it, so that a failure on one rank is a failure on all, and all stop together.

Tests that ask for `sess` know nothing of MPI. Without it, in one process,

    TEST_WORKERS=4 python -m pytest -p no:pytest_mpi tests/mpi

runs these over a ProcessSession, and with TEST_SESSION=ThreadedSession beside it over threads.
Tests marked `processes` want workers with a process of their own.
"""

from __future__ import annotations

import io
import os
from collections.abc import Generator

import pytest
from mpi4py import MPI

import spmd_disco as di

#: The workers of the ProcessSession that takes the place of MPI's ranks; 0 under mpiexec.
WORKERS = int(os.environ.get("TEST_WORKERS", "0"))
#: The kind of session then.
SESSION = getattr(di, os.environ.get("TEST_SESSION", "ProcessSession"))
THREADS = SESSION is di.ThreadedSession

# ------------------------------------------------------------------ reports, and keeping in step


class FailuresOnly:
    """What a rank other than 0 prints."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        self.show(report, "collecting")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if not hasattr(report, "failed_elsewhere"):
            self.show(report, report.when)

    def show(self, report: pytest.CollectReport | pytest.TestReport, when: str) -> None:
        if report.failed:
            sections = "".join(f"\n-- {title}\n{text}" for title, text in report.sections)
            text = f"{report.nodeid} failed ({when})\n{report.longreprtext}{sections}"
            self.write(text)

    def pytest_internalerror(self, excrepr: object) -> None:
        self.write(f"internal error\n{excrepr}")

    def write(self, text: str) -> None:
        # In one write, past Python's buffers, so that the reports of several ranks do not mix.
        lines = "".join(f"[rank {self.rank}] {line}\n" for line in text.splitlines())
        os.write(2, lines.encode(errors="replace"))


class InStep:
    """Compare the ranks' outcomes after each test."""

    def __init__(self) -> None:
        # One of our own: what a test leaves behind on the world must not be taken for an outcome.
        self.comm = MPI.COMM_WORLD.Dup()
        self.failed: list[str] = []

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        if report.failed:
            self.failed.append(report.when)
        if report.when == "teardown":
            ranks = self.comm.allgather((item.nodeid, self.failed))
            tests = sorted({nodeid for nodeid, _ in ranks})
            if len(tests) > 1:
                pytest.exit(f"the ranks are at different tests: {', '.join(tests)}", returncode=3)
            elsewhere = [str(rank) for rank, (_, failed) in enumerate(ranks) if failed]
            if elsewhere and not self.failed:
                report.outcome = "failed"
                report.longrepr = f"failed on rank {', '.join(elsewhere)}"
                report.failed_elsewhere = True
            self.failed = []
        return report


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    """Set up the reports: pytest's own on rank 0, only failures elsewhere."""
    if WORKERS:
        return
    if MPI.COMM_WORLD.size > 1:
        config.pluginmanager.register(InStep())
    if MPI.COMM_WORLD.rank > 0:
        config.pluginmanager.register(FailuresOnly(MPI.COMM_WORLD.rank))
        # Other plugins expect the reporter to be there, so it stays, and is not heard.
        config.get_terminal_writer()._file = io.StringIO()


# ------------------------------------------------------------------ sessions


@pytest.fixture(name="num_groups")
def default_num_groups() -> int:
    """How many groups the session of a test has; tests parametrize it."""
    return 1


@pytest.fixture(name="sess")
def session_of_a_test() -> None:
    """A session over all ranks: on rank 0 the test gets it, the other ranks serve instead."""


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test that asks for `sess` on the controller, and its workers on the other ranks."""
    names = pyfuncitem._fixtureinfo.argnames
    if "sess" not in names:
        return None
    num_groups = pyfuncitem.funcargs.get("num_groups", 1)
    size = WORKERS or MPI.COMM_WORLD.size
    if size % num_groups:
        pytest.skip(f"{size} workers cannot be split into {num_groups} groups")
    if WORKERS:
        opened: di.Session = SESSION(WORKERS, num_groups)
    else:
        opened = di.MPISession(MPI.COMM_WORLD, num_groups=num_groups)
    with opened as sess:
        if sess is not None:
            args = {name: pyfuncitem.funcargs[name] for name in names}
            pyfuncitem.obj(**(args | {"sess": sess}))
    return True


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Without MPI, leave out what needs it."""
    if not WORKERS:
        return
    kept, left_out = [], []
    for item in items:
        mark = item.get_closest_marker("mpi")
        needed = 1 if mark is None else mark.kwargs.get("min_size", 1)
        fits = (
            "sess" in getattr(item, "fixturenames", ())
            and item.get_closest_marker("communicators") is None
            and not (THREADS and item.get_closest_marker("processes"))
            and needed <= WORKERS
        )
        (kept if fits else left_out).append(item)
    config.hook.pytest_deselected(items=left_out)
    items[:] = kept
