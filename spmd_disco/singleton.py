"""The classic trap: N copies of a program, each of which believes that it is the whole job.

It happens where the process manager that starts the ranks and the MPI library that they use do not
speak the same protocol, and where a batch script starts the program with plain ``python``.
"""

from __future__ import annotations

from collections.abc import Mapping

from .ranks import job_size, rank

__all__ = ["trap"]


def _slurm_tasks(environ: Mapping[str, str]) -> int:
    """Return how many tasks Slurm has started here, or would start; 1 outside Slurm."""
    names = ("SLURM_STEP_NUM_TASKS",) if "SLURM_STEP_NUM_TASKS" in environ else ()
    for name in (*names, "SLURM_NTASKS", "SLURM_NPROCS"):
        text = environ.get(name, "")
        if text.isdecimal():
            return int(text)
    return 1


def trap(environ: Mapping[str, str], vendor: str) -> str | None:
    """Say what is wrong with a job in which MPI finds a single rank, or None if all is well.

    Parameters
    ----------
    environ : mapping
        The environment of the process.
    vendor : str
        The MPI library as mpi4py names it: "MPICH", "Open MPI", ….

    Returns
    -------
    str or None
        One sentence with the remedy; empty on ranks that leave the word to the first one.
    """
    size = job_size(environ)
    tasks = _slurm_tasks(environ)
    if size == 1 or (size is None and tasks <= 1):
        return None
    if (rank(environ) or 0) != 0:
        return ""
    if size is not None and tasks <= 1:
        return (
            f"the launcher has started {size} ranks, but the MPI library of mpi4py ({vendor}) sees "
            "a single one: start the job with the mpirun of that library, or say "
            "--allow-singleton if each rank is meant to run the program alone"
        )
    if vendor == "MPICH":
        remedy = "srun --mpi=pmi2, or with the mpirun of MPICH"
    elif vendor == "Open MPI":
        remedy = "the mpirun of Open MPI in place of srun"
    else:
        remedy = f"the mpirun of {vendor}, or with an srun --mpi=… that it supports"
    return (
        f"Slurm has {tasks} tasks for this job, but MPI ({vendor}) sees a single rank: start the "
        f"program with {remedy}, or say --allow-singleton if one rank is meant"
    )
