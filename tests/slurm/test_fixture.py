"""The Slurm of the tests goes when it should, and comes back."""

from __future__ import annotations

import pathlib
import signal
import subprocess
import sys
import time

import pytest

from .conftest import FIXTURE, LIMIT, Cluster, environment, start, stop

pytestmark = [pytest.mark.slurm, pytest.mark.slow, pytest.mark.timeout(300)]


def daemons(state: pathlib.Path) -> list[str]:
    """Return the processes of the Slurm in `state`."""
    mine = f"SLURM_CONF={state / 'slurm.conf'}".encode()
    found = []
    for process in pathlib.Path("/proc").glob("[0-9]*"):
        try:
            if mine in (process / "environ").read_bytes().split(b"\0"):
                found.append((process / "comm").read_text().strip())
        except OSError:
            continue  # it has ended
    return sorted(found)


def number_of_each(state: pathlib.Path) -> list[int]:
    running = daemons(state)
    return [running.count(name) for name in ("munged", "slurmctld", "slurmd")]


def test_goes_with_its_owner_and_its_jobs_with_it(
    able_to_start: None, tmp_path: pathlib.Path
) -> None:
    state = tmp_path / "state"
    with subprocess.Popen(["sleep", "1000"], env=environment()) as owner:
        try:
            cluster = Cluster(start(state, owner.pid), tmp_path)
            program = "import os, signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(1000)"
            job = cluster.submit("--wrap", f"{sys.executable} -c '{program}'")
            end = time.monotonic() + LIMIT
            while not any("time.sleep" in line for line in cluster.processes(job)):
                assert time.monotonic() < end, cluster.facts(job)
                time.sleep(0.1)
        finally:
            owner.send_signal(signal.SIGKILL)
    end = time.monotonic() + 40
    while left := daemons(state):
        assert time.monotonic() < end, left
        time.sleep(0.1)
    assert not state.exists()
    stop(state)  # nothing to do is no failure


def test_stops_and_starts_again(able_to_start: None, tmp_path: pathlib.Path) -> None:
    state = tmp_path / "state"
    for _ in range(2):
        try:
            config = start(state, owner=1)
            assert number_of_each(state) == [1, 1, 2]
            again = subprocess.run([FIXTURE / "start.sh", state], capture_output=True, text=True)
            assert again.returncode == 1
            assert "holds a Slurm already" in again.stderr
            assert config.exists(), "the second start must leave the first alone"
            assert number_of_each(state) == [1, 1, 2]
        finally:
            stop(state)
        assert daemons(state) == []
        assert not state.exists()


def test_failed_start_leaves_nothing(able_to_start: None, tmp_path: pathlib.Path) -> None:
    state = tmp_path / "state"
    # A slurmd that cannot run, found before the real one.
    broken = tmp_path / "bin" / "slurmd"
    broken.parent.mkdir()
    broken.write_text("#!/bin/sh\necho no nodes today >&2\nexit 1\n")
    broken.chmod(0o755)
    env = environment()
    env["PATH"] = f"{broken.parent}:{env['PATH']}"
    started = subprocess.run(
        [FIXTURE / "start.sh", state], env=env, capture_output=True, text=True, timeout=LIMIT
    )
    assert started.returncode == 1
    assert "no nodes today" in started.stderr
    assert "slurmd-n1 has ended" in started.stderr
    assert daemons(state) == []
    assert not state.exists()
