"""Tell when the threads of NumPy's matrix products are more than the cores there are for them."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from typing import NamedTuple

__all__ = ["BLAS_THREADS", "Place", "crowding", "here"]

#: The variables that limit the threads of the BLAS libraries, the particular ones first.
BLAS_THREADS = ("OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "BLIS_NUM_THREADS", "OMP_NUM_THREADS")


class Place(NamedTuple):
    """Where a rank runs: its host, the cores that it may use, and its BLAS threads."""

    host: str
    cores: tuple[int, ...]
    threads: int


def here() -> Place:
    """Return the place of this process: BLAS has as many threads as cores unless told otherwise."""
    cores = tuple(sorted(os.sched_getaffinity(0)))
    said = (os.environ.get(name, "").partition(",")[0] for name in BLAS_THREADS)
    threads = next((int(text) for text in said if text.isdecimal() and int(text)), len(cores))
    return Place(socket.gethostname(), cores, threads)


def crowding(places: Sequence[Place]) -> str | None:
    """Return a warning if some host has more BLAS threads than cores, and fewer would help."""
    for host in dict.fromkeys(place.host for place in places):
        ranks = [place for place in places if place.host == host]
        cores = len({core for place in ranks for core in place.cores})
        threads = sum(place.threads for place in ranks)
        if threads > cores and any(place.threads > 1 for place in ranks):
            return (
                f"{len(ranks)} ranks on {host} use {threads} BLAS threads in all on {cores} cores, "
                f"which slows them down: set OMP_NUM_THREADS={max(1, cores // len(ranks))} (or "
                "SPMD_DISCO_CROWDING_WARNING=0 to silence this)"
            )
    return None
