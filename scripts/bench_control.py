"""The control plane: dispatch, round trips, idle CPU and start-up, beside a loop of comm.bcast.

    mpirun -n 4 python -m spmd_disco scripts/bench_control.py

Prints JSON lines: medians, minima and maxima of interleaved rounds. The peer is what one writes by
hand with mpi4py: rank 0 broadcasts pickled (function, arguments), every rank calls it and keeps the
result. Its ranks wait inside MPI, at the price of a core each; see the rows `idle_cpu`.
"""

from __future__ import annotations

import os
import sys
import time

import spmd_disco as di

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

from bench_common import check_rounds, emit, emit_header, interleaved, parser, plot, summary

#: Commands per round.
COMMANDS = 1000
ROUND_TRIPS = 200
IDLE_SECONDS = 3.0


def add_one(x: int) -> int:
    """Do next to nothing: what is timed is everything around it."""
    return x + 1


# The peer, on all ranks: a worker function that runs the loop by hand -----------------------------


def bcast_loop(functions, count: int, kept: bool) -> float:
    """Broadcast `count` calls; return µs per call on rank 0."""
    comm = di.get_worker().comm
    results = {}
    comm.barrier()
    start = time.perf_counter()
    for i in range(count):
        name, args = comm.bcast(("f", (i,)) if comm.rank == 0 else None)
        results[i if kept else 0] = functions[name](*args)
    spent = time.perf_counter() - start
    comm.barrier()
    return spent / count * 1e6


def bcast_gather_loop(functions, count: int) -> float:
    """Broadcast a call and gather that it is done, `count` times; return µs each on rank 0."""
    comm = di.get_worker().comm
    comm.barrier()
    start = time.perf_counter()
    for i in range(count):
        name, args = comm.bcast(("f", (i,)) if comm.rank == 0 else None)
        functions[name](*args)
        comm.gather(None)
    return (time.perf_counter() - start) / count * 1e6


def bcast_recv_loop(functions, count: int) -> float:
    """Broadcast a call and send its result from the last rank; return µs each on rank 0."""
    comm = di.get_worker().comm
    last = comm.size - 1
    comm.barrier()
    start = time.perf_counter()
    for i in range(count):
        name, args = comm.bcast(("f", (i,)) if comm.rank == 0 else None)
        result = functions[name](*args)
        if last and comm.rank == last:
            comm.send(result, 0)
        elif last and comm.rank == 0:
            comm.recv(source=last)
    return (time.perf_counter() - start) / count * 1e6


def wait_in_bcast(seconds: float) -> float:
    """Let all ranks but 0 wait in a broadcast; return the CPU share of the last one, in percent."""
    comm = di.get_worker().comm
    comm.barrier()
    before = time.process_time()
    if comm.rank == 0:
        time.sleep(seconds)
    comm.bcast(None)
    return (time.process_time() - before) / seconds * 100


# Ours ---------------------------------------------------------------------------------------------


def dispatch(sess: di.Session, func, kept: bool) -> float:
    """Return µs per call, without waiting for the workers."""
    refs = []
    sess.sync()
    start = time.perf_counter()
    if kept:
        for i in range(COMMANDS):
            refs.append(sess.call(func, i))
    else:
        for i in range(COMMANDS):
            sess.call(func, i)
    spent = time.perf_counter() - start
    sess.sync()
    return spent / COMMANDS * 1e6


def call_and_sync(sess: di.Session, func) -> float:
    """Return µs per call and sync of all workers."""
    sess.sync()
    start = time.perf_counter()
    for i in range(ROUND_TRIPS):
        sess.call(func, i)
        sess.sync()
    return (time.perf_counter() - start) / ROUND_TRIPS * 1e6


def get_from_last(sess: di.Session, func) -> float:
    """Return µs per call and get of its result from the last worker."""
    last = sess.num_workers - 1
    sess.sync()
    start = time.perf_counter()
    for i in range(ROUND_TRIPS):
        sess.call(func, i).get(last)
    return (time.perf_counter() - start) / ROUND_TRIPS * 1e6


def idle(sess: di.Session) -> float:
    """Return the CPU share of the last worker while nothing is asked of it, in percent."""
    last = sess.num_workers - 1
    before = sess.call(time.process_time).get(last)
    time.sleep(IDLE_SECONDS)
    return (sess.call(time.process_time).get(last) - before) / IDLE_SECONDS * 100


def start_up() -> float:
    """Open a session, wait until all workers have answered; return milliseconds."""
    start = time.perf_counter()
    with di.session() as sess:
        sess.sync()
        return (time.perf_counter() - start) * 1e3


def main() -> None:
    """Run all rows."""
    options = parser(__doc__.splitlines()[0]).parse_args()
    check_rounds(options.rounds)
    rounds = options.rounds
    opened = [start_up() for _ in range(rounds + 1)][1:]
    rows = []
    with di.session() as sess:
        n = sess.num_workers
        emit_header(sess)
        by_reference = sess.call(lambda: add_one)
        functions = sess.call(lambda: {"f": add_one})
        sess.sync()

        def loop(function, *args):
            return lambda: sess.call(function, functions, *args).get(0)

        def row(name, unit, ours, peer):
            result = interleaved(rounds, ours, peer)
            rows.append(emit({"bench": name, "n": n, "unit": unit, **result}))

        row("dispatch", "us", lambda: dispatch(sess, by_reference, False),
            loop(bcast_loop, COMMANDS, False))  # fmt: skip
        row("dispatch_kept", "us", lambda: dispatch(sess, by_reference, True),
            loop(bcast_loop, COMMANDS, True))  # fmt: skip
        row("dispatch_import", "us", lambda: dispatch(sess, "operator.neg", False),
            loop(bcast_loop, COMMANDS, False))  # fmt: skip
        row("dispatch_by_value", "us", lambda: dispatch(sess, add_one, False),
            loop(bcast_loop, COMMANDS, False))  # fmt: skip
        row("call_and_sync", "us", lambda: call_and_sync(sess, by_reference),
            loop(bcast_gather_loop, ROUND_TRIPS))  # fmt: skip
        row("get_from_last", "us", lambda: get_from_last(sess, by_reference),
            loop(bcast_recv_loop, ROUND_TRIPS))  # fmt: skip
        if n > 1:
            share = interleaved(
                1, lambda: idle(sess), lambda: sess.call(wait_in_bcast, IDLE_SECONDS).get(n - 1)
            )
            emit({"bench": "idle_cpu", "n": n, "unit": "% of a core", **share})
        emit({"bench": "start_up", "n": n, "unit": "ms", "ours": summary(opened)})
    if options.plot:
        plot(rows, options.plot, "n", "bench", "workers", "µs")


if __name__ == "__main__":
    main()
