"""The session that fits where the program runs."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .sessions import Session

__all__ = ["session"]


def session(*, num_groups: int | None = None, timeout: float | None = None) -> Session:
    """Open the session kind that fits where the program runs: an `MPISession`.

    Parameters
    ----------
    num_groups : int, optional
        Into how many groups the workers are split; default 1.
    timeout : float, optional
        The limit of a single wait, in seconds; default none.
    """
    from .mpi_session import MPISession

    return MPISession(num_groups=num_groups, timeout=timeout)
