"""The data plane: each collective over 64 B to 64 MiB beside mpi4py's own call on the same ranks.

    mpirun -n 4 python -m spmd_disco scripts/bench_collectives.py

Prints JSON lines: medians, minima and maxima of interleaved rounds, the bytes that any algorithm
must move on one node (each input read once, each output written once), what that makes of the
copy bandwidth measured in the same run, and the ratio to mpi4py's blocking call: above 1, we are
faster. Ours includes the agreement of all workers before the data moves (arrive, then move). Each
row says whether our arrays are in peer memory (`pool`) or `ordinary`; mpi4py's are ordinary.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

import spmd_disco as di

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

from bench_common import (
    PEERS,
    Curve,
    check_rounds,
    draw,
    emit,
    emit_header,
    interleaved,
    parser,
    refuse,
    summary,
)
from bench_tvm import ccl_for_host_arrays

SIZES = [64, 1024, 4096, 65536, 2**20, 8 * 2**20, 64 * 2**20]
ARRAYS = ["ordinary", "pool"]
#: Between workers, timed on the workers.
BETWEEN_WORKERS = ["allreduce", "allreduce_bfloat16", "allgather", "broadcast", "scatter", "gather"]
#: From an array of the controller, timed there.
FROM_CONTROLLER = ["session_broadcast", "session_share"]
OPERATIONS = [*BETWEEN_WORKERS, *FROM_CONTROLLER]
#: Bytes to move in one round, which decides how often an operation is repeated in it.
BYTES_PER_ROUND = 64 * 2**20
#: From this size on it makes sense to hand an array of the controller to the workers once.
LEAST_FROM_CONTROLLER = 2**20


def measure(operation: str, nbytes: int, rounds: int, kinds: list[str]) -> dict[str, list[float]]:
    """On all workers: time our operation and mpi4py's in turn; return µs of each round.

    `nbytes` is the size of the whole array: that which is reduced, broadcast, scattered, or the
    result of a gather. In bfloat16 mpi4py has to go by way of float32.
    """
    worker = di.get_worker()
    comm, n = worker.comm, worker.num_workers
    root = worker.worker_id == 0
    dtype = np.dtype("f4")
    if operation == "allreduce_bfloat16":
        import ml_dtypes

        dtype = np.dtype(ml_dtypes.bfloat16)
    count = max(1, nbytes // dtype.itemsize // n) * n

    def arrays(empty: Callable[..., Any]) -> tuple[Any, Any, Any]:
        made = empty(count, dtype), empty(count, dtype), empty(count // n, dtype)
        for array in made:
            array[...] = 1
        return made

    def ours(kind: str) -> Callable[[], Any]:
        whole, other, part = arrays(di.empty if kind == "pool" else np.empty)
        tvm_name = {"allreduce": "allreduce", "allreduce_bfloat16": "allreduce",
                    "allgather": "allgather", "broadcast": "broadcast_from_worker0",
                    "scatter": "scatter_from_worker0", "gather": "gather_to_worker0"}  # fmt: skip
        f = di.get_global_func(f"runtime.disco.{tvm_name[operation]}")
        return {
            "allreduce": lambda: f(whole, "sum", False, other),
            "allreduce_bfloat16": lambda: f(whole, "sum", False, other),
            "allgather": lambda: f(part, False, whole),
            "broadcast": lambda: f(whole, False, whole),
            "scatter": lambda: f(whole if root else None, False, part),
            "gather": lambda: f(part, False, whole if root else None),
        }[operation]

    def mpi4py() -> Callable[[], Any]:
        whole, other, part = arrays(np.empty)
        wide, sums = np.empty(count, "f4"), np.empty(count, "f4")

        def with_casts() -> None:
            wide[...] = whole
            comm.Allreduce(wide, sums)
            other[...] = sums

        return {
            "allreduce": lambda: comm.Allreduce(whole, other),
            "allreduce_bfloat16": with_casts,
            "allgather": lambda: comm.Allgather(part, whole),
            "broadcast": lambda: comm.Bcast(whole),
            "scatter": lambda: comm.Scatter(whole if root else None, part),
            "gather": lambda: comm.Gather(part, whole if root else None),
        }[operation]

    calls = {**{kind: ours(kind) for kind in kinds}, "peer": mpi4py()}
    times: dict[str, list[float]] = {name: [] for name in calls}
    repeat = int(min(200, max(2, BYTES_PER_ROUND // nbytes)))
    for i in range(rounds + 1):
        for name, call in calls.items():
            comm.Barrier()
            start = time.perf_counter()
            for _ in range(repeat):
                call()
            comm.Barrier()
            if i:
                times[name].append((time.perf_counter() - start) / repeat * 1e6)
    return times


# From the controller ------------------------------------------------------------------------------


def receive(buffers: dict[int, Any], count: int) -> None:
    """On all workers: take part in a broadcast of mpi4py, into memory that is there already."""
    if count not in buffers:
        buffers[count] = np.empty(count, "f4")
    di.get_worker().comm.Bcast(buffers[count])


def from_controller(sess: di.Session, operation: str, nbytes: int, rounds: int) -> dict[str, Any]:
    """Time how an array of the controller comes to all workers; return summaries.

    A broadcast is compared with mpi4py's, which has its memory already; sharing, after which all
    workers of the node read one copy, with the time to copy the array once.
    """
    host = np.ones(nbytes // 4, "f4")
    copy = np.empty_like(host)
    buffers = sess.call(dict)
    give = sess.broadcast if operation == "session_broadcast" else sess.share

    def ours() -> float:
        start = time.perf_counter()
        given = give(host)
        sess.sync()
        spent = time.perf_counter() - start
        del given
        sess.sync()
        return spent * 1e6

    def bcast() -> float:
        start = time.perf_counter()
        sess.call(receive, buffers, host.size)
        sess.sync()
        return (time.perf_counter() - start) * 1e6

    def copy_once() -> float:
        start = time.perf_counter()
        np.copyto(copy, host)
        return (time.perf_counter() - start) * 1e6

    peer = bcast if operation == "session_broadcast" else copy_once
    return interleaved(rounds, ours, peer)


# Rows ---------------------------------------------------------------------------------------------


def copy_bandwidth() -> float:
    """On worker 0: return the GB/s of a copy of 64 MiB, read and write counted."""
    a, b = np.ones(16 * 2**20, "f4"), np.zeros(16 * 2**20, "f4")
    best = float("inf")
    for _ in range(5):
        start = time.perf_counter()
        np.copyto(b, a)
        best = min(best, time.perf_counter() - start)
    return 2 * a.nbytes / best / 1e9


def bytes_to_move(operation: str, nbytes: int, n: int) -> int:
    """Return the bytes that must be read and written at least, over all workers of a node."""
    if operation in ("allreduce", "allreduce_bfloat16"):
        return 2 * n * nbytes
    if operation == "allgather":
        return nbytes + n * nbytes
    if operation == "broadcast":
        return nbytes + (n - 1) * nbytes
    if operation == "session_broadcast":
        return nbytes + n * nbytes
    return 2 * nbytes


def bandwidths_of(rows: list[dict[str, Any]]) -> dict[str, dict[str, Curve]]:
    """Make GB/s, of the bytes that must move, out of the µs of all rows: panels for `draw`."""
    panels: dict[str, dict[str, Any]] = {}
    for row in rows:
        curves = panels.setdefault(row["bench"], {})
        label = "spmd_disco, pool" if row["arrays"] == "pool" else "spmd_disco"
        for key, name in (("ours", label), ("peer", row["peer_name"])):
            speeds = {what: row["bytes_to_move"] / us / 1e3 for what, us in row[key].items()}
            curve = curves.setdefault(name, [])
            if all(size != row["bytes"] for size, _ in curve):  # the peer is in the rows of both
                curve.append((row["bytes"], speeds))
    return panels


def main() -> None:
    """Run all rows."""
    p = parser(__doc__.splitlines()[0])
    p.add_argument("--sizes", type=int, nargs="+", default=SIZES, metavar="BYTES")
    p.add_argument("--operations", nargs="+", default=OPERATIONS, choices=OPERATIONS)
    p.add_argument("--arrays", nargs="+", default=ARRAYS, choices=ARRAYS)
    options = p.parse_args()
    check_rounds(options.rounds)
    if options.peer != "mpi":
        found = ccl_for_host_arrays()
        refuse(
            f"--peer {options.peer}: TVM offers the collective library {found}, which this script "
            "does not know: run it with --peer mpi"
            if found
            else f"--peer {options.peer}: this TVM has no collective library for arrays in host "
            "memory, so there is nothing to compare with: run it with --peer mpi"
        )
    rows = []
    with di.session() as sess:
        n = sess.num_workers
        bandwidth = sess.call(copy_bandwidth).get(0)
        emit_header(sess, options.peer, copy_GBps=round(bandwidth, 2))

        def row(operation: str, nbytes: int, arrays: str, result: dict[str, Any]) -> None:
            moved = bytes_to_move(operation, nbytes, n)
            speed = moved / (result["ours"]["median"] * 1e-6) / 1e9
            name = "one copy" if operation == "session_share" else PEERS[options.peer]
            rows.append(emit({"bench": operation, "n": n, "bytes": nbytes, "arrays": arrays,
                              "unit": "us", "peer_name": name, **result, "bytes_to_move": moved,
                              "share_of_copy_bandwidth": round(speed / bandwidth, 3)}))  # fmt: skip

        for operation in options.operations:
            for nbytes in options.sizes:
                if operation in BETWEEN_WORKERS:
                    arguments = (operation, nbytes, options.rounds, options.arrays)
                    times = sess.call(measure, *arguments).get(0)
                    peer = times.pop("peer")
                    for arrays, ours in times.items():
                        ratio = [b / a for a, b in zip(ours, peer, strict=True)]
                        row(operation, nbytes, arrays, {"ours": summary(ours),
                            "peer": summary(peer), "ratio": summary(ratio)})  # fmt: skip
                elif nbytes >= LEAST_FROM_CONTROLLER:
                    result = from_controller(sess, operation, nbytes, options.rounds)
                    row(operation, nbytes, "pool", result)
    if options.plot:
        draw(options.plot, bandwidths_of(rows), "bytes", "GB/s",
             limit=("copy on one core", bandwidth))  # fmt: skip


if __name__ == "__main__":
    main()
