"""Which runtimes can be used in this process."""

from __future__ import annotations

import functools
import importlib.util
import subprocess
import sys
from collections.abc import Callable

from . import cupy_support, native
from .config import byte_count, setting
from .device import ALIASES, TYPES

__all__ = ["runtime_enabled"]


def runtime_enabled(name: str) -> bool:
    """Whether a runtime can be used in this process, as TVM's ``runtime.enabled`` says of its own.

    Parameters
    ----------
    name : str
        ``"cpu"``: always. ``"cuda"``, also ``"cuda_host"``: CuPy can be imported, and there is a
        GPU. The other types of `Device` can be named, and have no runtime here. ``"mpi"``: mpi4py
        and an MPI library are there; MPI is not initialised for the answer. ``"peer"``: peer
        memory, on one node; this needs the native module, and that ``SPMD_DISCO_PEER_POOL`` is not
        0. ``"nccl"``: NCCL, by CuPy.

    Raises
    ------
    ValueError
        There is no runtime of that name.
    TypeError
        `name` is no string.
    """
    if not isinstance(name, str):
        raise TypeError(f"the name of a runtime is a str, not {name!r}")
    known = ALIASES.get(name, name)
    if known in _CHECKS:
        return _CHECKS[known]()
    if known in TYPES:
        return False
    allowed = ", ".join(dict.fromkeys([*_CHECKS, *TYPES]))
    raise ValueError(f"there is no runtime {name!r}; allowed are {allowed}")


@functools.cache
def _mpi() -> bool:
    if "mpi4py.MPI" in sys.modules:
        return True
    if importlib.util.find_spec("mpi4py") is None:
        return False
    # To load the library is the only way to know, and in this process that would initialise MPI,
    # or keep a later import from doing so.
    code = "import mpi4py; mpi4py.rc.initialize = False; from mpi4py import MPI"
    return subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 0


def _peer() -> bool:
    return native.available() and setting("PEER_POOL", None, byte_count) != 0


_CHECKS: dict[str, Callable[[], bool]] = {
    "cpu": lambda: True,
    "cuda": cupy_support.available,
    "cuda_host": cupy_support.available,
    "mpi": _mpi,
    "peer": _peer,
    "nccl": cupy_support.nccl_available,
}
