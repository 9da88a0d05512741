"""spmd_disco: one controller drives many SPMD workers, on MPI."""

from . import builtin as _builtin
from ._version import __version__
from .benchmark import BenchmarkResult, WorkerTimes
from .device import Device, cpu, cuda, preferred_host_device
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
from .files.cache_writer import dump_tensor_cache
from .files.param_dict import (
    load_param_dict,
    load_param_dict_from_bytes,
    save_param_dict,
    save_param_dict_to_bytes,
)
from .files.records import load_tensor, save_tensor
from .files.tensor_cache import load_tensor_cache, tensor_cache_metadata
from .mpi_session import MPISession
from .pools import MemoryInfo, MemoryPool, WorkerMemory, memory_pool
from .process_session import ProcessSession
from .protocol import DiscoAction
from .registry import get_global_func, register_func
from .runtimes import runtime_enabled
from .sessions import Session
from .tensor import empty, empty_like
from .tensor_functions import (
    copy_from_bytes,
    copy_from_to,
    copy_to,
    copy_to_bytes,
    create_view,
)
from .threaded_session import ThreadedSession
from .timers import Timer, register_timer
from .transport.ccl import ReduceKind
from .worker import WorkerInfo, get_worker

register_global_func = register_func

__all__ = [
    "BenchmarkResult",
    "DModule",
    "DPackedFunc",
    "DRef",
    "Device",
    "DiscoAction",
    "DiscoError",
    "DiscoTimeout",
    "Failure",
    "MPISession",
    "MemoryInfo",
    "MemoryPool",
    "PeerError",
    "ProcessSession",
    "ReduceKind",
    "Session",
    "SessionClosedError",
    "Timer",
    "ThreadedSession",
    "WorkerDied",
    "WorkerError",
    "WorkerInfo",
    "WorkerMemory",
    "WorkerTimes",
    "__version__",
    "copy_from_bytes",
    "copy_from_to",
    "copy_to",
    "copy_to_bytes",
    "cpu",
    "create_view",
    "cuda",
    "dump_tensor_cache",
    "empty",
    "empty_like",
    "get_global_func",
    "get_worker",
    "load_param_dict",
    "load_param_dict_from_bytes",
    "load_tensor",
    "load_tensor_cache",
    "memory_pool",
    "preferred_host_device",
    "register_func",
    "register_global_func",
    "register_timer",
    "runtime_enabled",
    "save_param_dict",
    "save_param_dict_to_bytes",
    "save_tensor",
    "session",
    "tensor_cache_metadata",
]

del _builtin
