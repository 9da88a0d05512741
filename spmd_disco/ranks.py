"""What the launchers of MPI jobs tell a process through its environment, before MPI starts."""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["job_size", "launcher", "rank", "without_rank"]

#: Set for each rank by the process manager of the job. Slurm's come last: under mpirun they belong
#: to the batch shell, and every rank finds the same ones.
_RANK = (
    "OMPI_COMM_WORLD_RANK",
    "PMI_RANK",
    "PMIX_RANK",
    "MV2_COMM_WORLD_RANK",
    "PALS_RANKID",
    "FLUX_TASK_RANK",
)
_SIZE = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE")


def _number(environ: Mapping[str, str], names: tuple[str, ...]) -> int | None:
    for name in names:
        text = environ.get(name, "")
        if text.isdecimal():
            return int(text)
    return None


def rank(environ: Mapping[str, str]) -> int | None:
    """Return this process's rank, or None where no launcher says one (a plain ``python``)."""
    known = _number(environ, _RANK)
    if known is None and "SLURM_STEP_ID" in environ:
        known = _number(environ, ("SLURM_PROCID",))
    return known


def job_size(environ: Mapping[str, str]) -> int | None:
    """Return the number of ranks that the process manager has started, or None if it says none."""
    return _number(environ, _SIZE)


def without_rank(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a process that is no rank of the job."""
    return {name: text for name, text in environ.items() if name not in (*_RANK, *_SIZE)}


def launcher(environ: Mapping[str, str]) -> str:
    """Name the program that has started this process, as far as it can be told."""
    if "OMPI_COMM_WORLD_SIZE" in environ:
        return "mpirun (Open MPI)"
    if "PMI_RANK" in environ and ("MPI_LOCALRANKID" in environ or "HYDI_CONTROL_FD" in environ):
        return "mpirun (MPICH)"
    if "SLURM_STEP_ID" in environ and "SLURM_PROCID" in environ:
        return "srun (Slurm)"
    if rank(environ) is not None:
        return "one that sets " + next(n for n in _RANK if environ.get(n, "").isdecimal())
    return "none (plain python)"
