"""The environment in which one rank means that something is wrong."""

from __future__ import annotations

import pytest

from spmd_disco.ranks import launcher, rank
from spmd_disco.singleton import trap

BATCH = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4", "SLURM_PROCID": "0"}
STEP = {**BATCH, "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "4"}
HYDRA = {"PMI_RANK": "0", "PMI_SIZE": "1", "MPI_LOCALRANKID": "0"}
PRTE = {"PMIX_RANK": "0", "OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1"}


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"SLURM_NTASKS": "1"},
        {**STEP, "SLURM_STEP_NUM_TASKS": "1"},
        HYDRA,
        {**HYDRA, **BATCH},
        {**PRTE, **BATCH},
        {**STEP, "PMI_RANK": "0", "PMI_SIZE": "1"},
    ],
)
def test_no_trap(environ):
    assert trap(environ, "MPICH") is None


@pytest.mark.parametrize(
    ("environ", "vendor", "remedy"),
    [
        (BATCH, "MPICH", "srun --mpi=pmi2"),
        (STEP, "MPICH", "srun --mpi=pmi2"),
        (STEP, "Open MPI", "mpirun of Open MPI"),
        (STEP, "Some MPI", "mpirun of Some MPI"),
        ({**STEP, "PMI_RANK": "0", "PMI_SIZE": "4"}, "Open MPI", "mpirun of Open MPI"),
        ({"PMI_RANK": "0", "PMI_SIZE": "4"}, "Open MPI", "mpirun of that library"),
    ],
)
def test_trap(environ, vendor, remedy):
    why = trap(environ, vendor)
    assert why is not None
    assert remedy in why
    assert "--allow-singleton" in why
    assert "\n" not in why


@pytest.mark.parametrize(
    "environ",
    [{**STEP, "SLURM_PROCID": "3"}, {**STEP, "PMI_RANK": "1", "PMI_SIZE": "4"}],
)
def test_only_the_first_rank_says_so(environ):
    assert trap(environ, "MPICH") == ""


def test_rank():
    assert rank({}) is None
    assert rank(BATCH) is None  # the batch shell's own
    assert rank({**STEP, "SLURM_PROCID": "2"}) == 2
    assert rank({**STEP, "PMI_RANK": "3"}) == 3
    assert rank({"OMPI_COMM_WORLD_RANK": "1", "PMIX_RANK": "1"}) == 1


def test_launcher():
    assert launcher({**HYDRA, **BATCH}) == "mpirun (MPICH)"
    assert launcher({**PRTE, **BATCH}) == "mpirun (Open MPI)"
    assert launcher({**STEP, "PMI_RANK": "3"}) == "srun (Slurm)"
    assert launcher({"FLUX_TASK_RANK": "3"}) == "one that sets FLUX_TASK_RANK"
    assert launcher(BATCH) == "none (plain python)"
