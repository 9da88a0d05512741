"""spmd_disco: one controller drives many SPMD workers, on MPI."""

from . import builtin as _builtin
from ._version import __version__
from .device import Device, cpu
from .dref import DModule, DPackedFunc, DRef
from .errors import (
    DiscoError,
    DiscoTimeout,
    Failure,
    PeerError,
    SessionClosedError,
    WorkerDied,
    WorkerError,
)
from .factory import session
from .mpi_session import MPISession
from .process_session import ProcessSession
from .protocol import DiscoAction
from .registry import get_global_func, register_func
from .sessions import Session
from .tensor import empty, empty_like
from .transport.ccl import ReduceKind
from .worker import WorkerInfo, get_worker

register_global_func = register_func

__all__ = [
    "DModule",
    "DPackedFunc",
    "DRef",
    "Device",
    "DiscoAction",
    "DiscoError",
    "DiscoTimeout",
    "Failure",
    "MPISession",
    "PeerError",
    "ProcessSession",
    "ReduceKind",
    "Session",
    "SessionClosedError",
    "WorkerDied",
    "WorkerError",
    "WorkerInfo",
    "__version__",
    "cpu",
    "empty",
    "empty_like",
    "get_global_func",
    "get_worker",
    "register_func",
    "register_global_func",
    "session",
]

del _builtin
