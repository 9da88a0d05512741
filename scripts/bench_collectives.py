"""The data plane: each collective over 64 B to 64 MiB beside mpi4py's own call on the same ranks.

    mpirun -n 4 python -m spmd_disco scripts/bench_collectives.py

Prints JSON lines: medians, minima and maxima of interleaved rounds, the bytes that any algorithm
must move on one node (each input read once, each output written once), what that makes of the
copy bandwidth measured in the same run, and the ratio to mpi4py's blocking call: above 1, we are
faster. Ours includes the agreement of all workers before the data moves (arrive, then move).
"""

from __future__ import annotations

import os
import sys
import time

import numpy as np

import spmd_disco as di

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

from bench_common import check_rounds, emit, emit_header, parser, plot, summary

SIZES = [64, 1024, 4096, 65536, 2**20, 8 * 2**20, 64 * 2**20]
OPERATIONS = ["allreduce", "allgather", "broadcast", "scatter", "gather"]
#: Bytes to move in one round, which decides how often an operation is repeated in it.
BYTES_PER_ROUND = 64 * 2**20


def measure(operation: str, nbytes: int, rounds: int) -> tuple[list[float], list[float]]:
    """On all workers: time our operation and mpi4py's in turn; return µs of each round.

    `nbytes` is the size of the whole array: that which is reduced, broadcast, scattered, or the
    result of a gather.
    """
    worker = di.get_worker()
    comm, n = worker.comm, worker.num_workers
    count = max(1, nbytes // 4 // n) * n
    whole, other = np.ones(count, "f4"), np.zeros(count, "f4")
    part = np.ones(count // n, "f4")
    root = worker.worker_id == 0

    def ours(name):
        return di.get_global_func(f"runtime.disco.{name}")

    f = ours({"allreduce": "allreduce", "allgather": "allgather",
              "broadcast": "broadcast_from_worker0", "scatter": "scatter_from_worker0",
              "gather": "gather_to_worker0"}[operation])  # fmt: skip
    if operation == "allreduce":
        calls = (lambda: f(whole, "sum", False, other)), (lambda: comm.Allreduce(whole, other))
    elif operation == "allgather":
        calls = (lambda: f(part, False, whole)), (lambda: comm.Allgather(part, whole))
    elif operation == "broadcast":
        calls = (lambda: f(whole, False, whole)), (lambda: comm.Bcast(whole))
    elif operation == "scatter":
        calls = (
            (lambda: f(whole if root else None, False, part)),
            (lambda: comm.Scatter(whole if root else None, part)),
        )
    else:
        calls = (
            (lambda: f(part, False, whole if root else None)),
            (lambda: comm.Gather(part, whole if root else None)),
        )
    repeat = int(min(200, max(2, BYTES_PER_ROUND // nbytes)))
    times: tuple[list[float], list[float]] = ([], [])
    for i in range(rounds + 1):
        for call, spent in zip(calls, times, strict=True):
            comm.Barrier()
            start = time.perf_counter()
            for _ in range(repeat):
                call()
            comm.Barrier()
            if i:
                spent.append((time.perf_counter() - start) / repeat * 1e6)
    return times


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
    if operation in ("allreduce",):
        return 2 * n * nbytes
    if operation == "allgather":
        return nbytes + n * nbytes
    if operation == "broadcast":
        return nbytes + (n - 1) * nbytes
    return 2 * nbytes


def main() -> None:
    """Run all rows."""
    p = parser(__doc__.splitlines()[0])
    p.add_argument("--sizes", type=int, nargs="+", default=SIZES, metavar="BYTES")
    p.add_argument("--operations", nargs="+", default=OPERATIONS, choices=OPERATIONS)
    options = p.parse_args()
    check_rounds(options.rounds)
    rows = []
    with di.session() as sess:
        n = sess.num_workers
        bandwidth = sess.call(copy_bandwidth).get(0)
        emit_header(sess, copy_GBps=round(bandwidth, 2))
        for operation in options.operations:
            for nbytes in options.sizes:
                ours, peer = sess.call(measure, operation, nbytes, options.rounds).get(0)
                moved = bytes_to_move(operation, nbytes, n)
                speed = moved / (np.median(ours) * 1e-6) / 1e9
                rows.append(
                    emit(
                        {
                            "bench": operation,
                            "n": n,
                            "bytes": nbytes,
                            "unit": "us",
                            "ours": summary(ours),
                            "peer": summary(peer),
                            "ratio": summary([b / a for a, b in zip(ours, peer, strict=True)]),
                            "bytes_to_move": moved,
                            "share_of_copy_bandwidth": round(speed / bandwidth, 3),
                        }
                    )
                )
    if options.plot:
        plot(rows, options.plot, "bytes", "bench", "bytes", "µs")


if __name__ == "__main__":
    main()
