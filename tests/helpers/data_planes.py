"""The data planes that the same tests run over: ``SPMD_DISCO_CCL`` says which, as for sessions."""

from __future__ import annotations

import os

from mpi4py import MPI

from spmd_disco import native
from spmd_disco.transport.ccl_choice import ccl_setting
from spmd_disco.transport.host_ccl import HostCCL
from spmd_disco.transport.mpi_ccl import MPICCL
from spmd_disco.transport.peer_ccl import PeerCCL
from spmd_disco.transport.wait import Waiter

__all__ = ["CCL_NAME", "make_ccl"]

CCL_NAME = ccl_setting() or ("peer" if native.available() else "mpi")


def make_ccl(
    comm: MPI.Intracomm, group_comm: MPI.Intracomm, waiter: Waiter, *, num_groups: int
) -> HostCCL:
    """Return a data plane among the ranks of `comm`."""
    if CCL_NAME == "mpi":
        return MPICCL(comm, group_comm, waiter, num_groups=num_groups)
    core = native.core
    assert core is not None
    if comm.rank == 0:
        block = core.Segment.create(PeerCCL.required_bytes(comm.size, num_groups))
        comm.bcast((os.getpid(), block.fd, block.nonce))
    else:
        block = core.Segment.attach(*comm.bcast(None))
    # Rank 0 may give its own handle away once all others have theirs.
    comm.Barrier()
    return PeerCCL(block, comm.rank, comm.size, waiter, num_groups=num_groups)
