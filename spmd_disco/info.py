"""``python -m spmd_disco --info``: one screen to paste into a bug report."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import socket
import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from . import native
from ._version import __version__
from .config import PREFIX
from .crowding import BLAS_THREADS
from .errors import DiscoError
from .ranks import launcher
from .singleton import trap

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["collect", "without_mpi"]

_PACKAGES = ("numpy", "mpi4py", "ml_dtypes", "cloudpickle")
_THREAD_LEVELS = ("MPI_THREAD_SINGLE", "FUNNELED", "SERIALIZED", "MULTIPLE")


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _blas_threads() -> str:
    """Tell how many threads the matrix products of NumPy use on this rank."""
    if importlib.util.find_spec("threadpoolctl") is not None:
        import numpy  # noqa: F401  (its BLAS library has to be loaded to be asked)
        import threadpoolctl

        pools = threadpoolctl.threadpool_info()
        blas = [
            f"{p['num_threads']} ({p['internal_api']})" for p in pools if p["user_api"] == "blas"
        ]
        if blas:
            return ", ".join(blas)
    said = [f"{name}={os.environ[name]}" for name in BLAS_THREADS if os.environ.get(name)]
    return ", ".join(said) or "not limited by the environment"


def _gpus() -> str:
    """Tell which GPUs this rank sees, if CuPy is there to ask."""
    if importlib.util.find_spec("cupy") is None:
        return "CuPy not installed"
    try:
        import cupy
    except Exception as e:
        # An installation that does not fit the machine is just what a bug report has to say.
        return f"CuPy {_cupy_version()} cannot be imported: {type(e).__name__}: {e}"
    text = f"CuPy {cupy.__version__}"
    if not cupy.is_available():
        return f"{text}, no GPU"
    count = cupy.cuda.runtime.getDeviceCount()
    names = [cupy.cuda.runtime.getDeviceProperties(i)["name"].decode() for i in range(count)]
    text = f"{text}, {count} GPU{'s' if count != 1 else ''}: {', '.join(sorted(set(names)))}"
    try:
        from cupy.cuda import nccl
    except ImportError as e:
        return f"{text}; no NCCL ({e})"
    return f"{text}; NCCL {nccl.get_version()}"


def _cupy_version() -> str:
    for distribution in importlib.metadata.packages_distributions().get("cupy", ()):
        return _version(distribution)
    return "(unknown version)"


def _cuda_awareness(world: MPI.Intracomm) -> str:
    """Tell whether MPI takes GPU memory, where the library says so (key of MPI 4.1)."""
    hint = world.Get_info()
    kinds = hint.Get("mpi_memory_alloc_kinds")
    hint.Free()
    if not kinds:
        return "unknown (the library does not say)"
    return f"{'yes' if 'cuda' in kinds else 'no'} (memory kinds: {kinds})"


def _channel(world: MPI.Intracomm) -> str:
    """Tell what carries the commands of a session over all ranks. Collective."""
    from .transport.node import open_node

    if world.size == 1:
        return "nothing (there is one rank)"
    try:
        node, why_not = open_node(world)
    except (DiscoError, ValueError) as e:
        return f"none: {e}"
    return f"mpi ({why_not})" if node is None else "ring, in shared memory"


def _ccl(world: MPI.Intracomm) -> str:
    """Tell what moves the arrays of a session over all ranks. Collective."""
    from .transport.ccl_choice import open_peer_ccl
    from .transport.wait import Waiter

    if world.size == 1:
        return "nothing (there is one rank)"
    try:
        ccl, why_not = open_peer_ccl(
            world.allgather, world.rank, world.size, Waiter(), num_groups=1, node=None, memory=None
        )
    except ValueError as e:
        return f"none: {e}"
    return f"mpi ({why_not})" if ccl is None else "peer, through shared memory"


def _peer_memory(world: MPI.Intracomm) -> str:
    """Tell how much peer memory this rank has in a session over all ranks. Collective."""
    from .transport.peer_memory import PeerMemory

    try:
        memory = PeerMemory(world.allgather, world.rank)
    except ValueError as e:
        return f"none: {e}"
    if not memory.available:
        return f"none ({memory.why_not})"
    size = "none, alone on its node" if memory.pool is None else f"{memory.pool.cap >> 20} MiB"
    memory.close()
    return size


def _ranges(numbers: Iterable[int]) -> str:
    """Write sorted numbers the short way: ``0-3, 6``."""
    parts: list[list[int]] = []
    for number in sorted(numbers):
        if parts and number == parts[-1][-1] + 1:
            parts[-1] = [parts[-1][0], number]
        else:
            parts.append([number])
    return ", ".join("-".join(map(str, part)) for part in parts)


def _alike(values: list[str]) -> list[str]:
    """Say what all ranks have in common once, and what differs with its ranks."""
    ranks: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        ranks.setdefault(value, []).append(rank)
    if len(ranks) == 1:
        return [values[0]]
    return [f"{value} (ranks {_ranges(which)})" for value, which in ranks.items()]


def _of_this_process() -> dict[str, str]:
    """Tell what may differ from process to process, where MPI plays no part in it."""
    return {
        "host": socket.gethostname(),
        "python": f"{platform.python_version()} ({sys.executable})",
        "packages": ", ".join(f"{name} {_version(name)}" for name in _PACKAGES),
        "native": "loaded" if native.available() else native.why_not,
        "cores": f"{_cores()}; BLAS threads: {_blas_threads()}",
        "gpus": _gpus(),
        "settings": ", ".join(
            f"{name}={value}"
            for name, value in sorted(os.environ.items())
            if name.startswith(PREFIX)
        ),
    }


def without_mpi(why: Exception) -> str:
    """Say what is to be known of this machine where there is no MPI library."""
    mine = _of_this_process()
    local = "need the native module" if not native.available() else "ready (-n, ProcessSession)"
    lines = [
        ("spmd_disco", __version__),
        ("Python", mine["python"]),
        ("packages", mine["packages"]),
        ("native module", mine["native"]),
        ("platform", platform.platform()),
        ("MPI library", f"none: {' '.join(str(why).split())[:200]}"),
        ("without MPI", f"sessions of local processes {local}"),
        ("host", mine["host"]),
        ("cores", mine["cores"]),
        ("GPUs", mine["gpus"]),
        ("settings", mine["settings"] or "none"),
    ]
    return _table(lines)


def _table(lines: list[tuple[str, str]]) -> str:
    width = max(len(label) for label, _ in lines)
    return "".join(f"{label:{width}}  {value}\n" for label, value in lines)


def collect(world: MPI.Intracomm) -> str | None:
    """Gather what is to be known about a job. Collective.

    Parameters
    ----------
    world : mpi4py.MPI.Intracomm
        All ranks of the job.

    Returns
    -------
    str or None
        Lines of text on rank 0; None on the others.
    """
    from mpi4py import MPI

    # The settings may differ too, where a launcher does not pass the environment on.
    mine: dict[str, Any] = {
        **_of_this_process(),
        "channel": _channel(world),
        "ccl": _ccl(world),
        "memory": _peer_memory(world),
    }
    everyone = world.gather(mine, root=0)
    if everyone is None:
        return None
    hosts: dict[str, list[int]] = {}
    for rank, of_rank in enumerate(everyone):
        hosts.setdefault(of_rank["host"], []).append(rank)
    lines: list[tuple[str, str]] = [("spmd_disco", __version__)]

    def add(label: str, values: list[str]) -> None:
        for number, value in enumerate(values):
            lines.append((label if number == 0 else "", value))

    def common(key: str) -> list[str]:
        return _alike([of_rank[key] for of_rank in everyone])

    add("Python", common("python"))
    add("packages", common("packages"))
    add("native module", common("native"))
    add("platform", [platform.platform()])
    library = MPI.Get_library_version().rstrip("\0").strip().splitlines()[0]
    version = ".".join(map(str, MPI.Get_version()))
    levels = (
        MPI.THREAD_SINGLE,
        MPI.THREAD_FUNNELED,
        MPI.THREAD_SERIALIZED,
        MPI.THREAD_MULTIPLE,
    )
    level = dict(zip(levels, _THREAD_LEVELS, strict=True)).get(MPI.Query_thread(), "unknown")
    add("MPI library", [" ".join(library.split())])
    add("MPI standard", [f"{version}, thread level {level.removeprefix('MPI_THREAD_')}"])
    add("CUDA-aware MPI", [_cuda_awareness(world)])
    add("launcher", [launcher(os.environ)])
    add("ranks", [str(world.size)])
    why = trap(os.environ, MPI.get_vendor()[0]) if world.size == 1 else None
    if why:
        add("", [f"attention: {why}"])
    add("hosts", [f"{host}: {len(on)} (ranks {_ranges(on)})" for host, on in hosts.items()])
    add("cores per rank", common("cores"))
    add("control", common("channel"))
    add("data (CCL)", common("ccl"))
    add("peer memory", common("memory"))
    add("GPUs", common("gpus"))
    add("settings", [text or "none" for text in common("settings")])
    return _table(lines)
