"""The control plane: dispatch, round trips, idle CPU and start-up, beside others in the same job.

    mpirun -n 4 python -m spmd_disco scripts/bench_control.py

Prints JSON lines: medians, minima and maxima of interleaved rounds. The peer `mpi` is what one
writes by hand with mpi4py: rank 0 broadcasts pickled (function, arguments), every rank calls it and
keeps the result. Its ranks wait inside MPI, at the price of a core each; see the row `idle_cpu`.
The peer `tvm` is TVM's own Disco with as many workers, started by rank 0.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable

import spmd_disco as di
from spmd_disco import native

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

from bench_common import (
    PEERS,
    check_rounds,
    curves_of,
    draw,
    emit,
    emit_header,
    interleaved,
    parser,
)
from bench_tvm import TVMDisco

ROWS = ["dispatch", "dispatch_kept", "dispatch_import", "dispatch_by_value", "stream",
        "call_and_sync", "get_from_last", "idle_cpu", "start_up", "start_processes"]  # fmt: skip


def add_one(x: int) -> int:
    """Do next to nothing: what is timed is everything around it."""
    return x + 1


# The peer of mpi4py, on all ranks: worker functions that run the loop by hand ---------------------


def bcast_loop(functions, count: int, kept: bool, to_the_end: bool) -> float:
    """Broadcast `count` calls; return µs per call on rank 0, or until all have done the last."""
    comm = di.get_worker().comm
    results = {}
    comm.barrier()
    start = time.perf_counter()
    for i in range(count):
        name, args = comm.bcast(("f", (i,)) if comm.rank == 0 else None)
        results[i if kept else 0] = functions[name](*args)
    spent = time.perf_counter() - start
    comm.barrier()
    if to_the_end:
        spent = time.perf_counter() - start
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


class BcastLoop:
    """What is measured, by a loop of pickled ``comm.bcast``.

    Parameters
    ----------
    sess : spmd_disco.Session
        Brings the loop to the ranks, which is not timed.
    commands : int
        Commands in one round of dispatches; of round trips a fifth of it.
    """

    def __init__(self, sess: di.Session, commands: int) -> None:
        self.sess, self.commands = sess, commands
        self.functions = sess.call(lambda: {"f": add_one})
        sess.sync()

    def dispatch(self, kept: bool = False, to_the_end: bool = False) -> float:
        arguments = (self.functions, self.commands, kept, to_the_end)
        return self.sess.call(bcast_loop, *arguments).get(0)

    def call_and_sync(self) -> float:
        return self.sess.call(bcast_gather_loop, self.functions, self.commands // 5).get(0)

    def get_from_last(self) -> float:
        return self.sess.call(bcast_recv_loop, self.functions, self.commands // 5).get(0)

    def idle(self, seconds: float) -> float:
        return self.sess.call(wait_in_bcast, seconds).get(self.sess.num_workers - 1)


# Ours ---------------------------------------------------------------------------------------------


def dispatch(
    sess: di.Session, func, commands: int, kept: bool = False, to_the_end: bool = False
) -> float:
    """Return µs per call, without waiting for the workers, or until all have done the last."""
    refs = []
    sess.sync()
    start = time.perf_counter()
    if kept:
        for i in range(commands):
            refs.append(sess.call(func, i))
    else:
        for i in range(commands):
            sess.call(func, i)
    spent = time.perf_counter() - start
    sess.sync()
    if to_the_end:
        spent = time.perf_counter() - start
    return spent / commands * 1e6


def call_and_sync(sess: di.Session, func, trips: int) -> float:
    """Return µs per call and sync of all workers."""
    sess.sync()
    start = time.perf_counter()
    for i in range(trips):
        sess.call(func, i)
        sess.sync()
    return (time.perf_counter() - start) / trips * 1e6


def get_from_last(sess: di.Session, func, trips: int) -> float:
    """Return µs per call and get of its result from the last worker."""
    last = sess.num_workers - 1
    sess.sync()
    start = time.perf_counter()
    for i in range(trips):
        sess.call(func, i).get(last)
    return (time.perf_counter() - start) / trips * 1e6


def idle(sess: di.Session, seconds: float) -> float:
    """Return the CPU share of the last worker while nothing is asked of it, in percent."""
    last = sess.num_workers - 1
    before = sess.call(time.process_time).get(last)
    time.sleep(seconds)
    return (sess.call(time.process_time).get(last) - before) / seconds * 100


def start_up(open_session: Callable[[], di.Session]) -> float:
    """Open a session, wait until all workers have answered; return milliseconds."""
    start = time.perf_counter()
    with open_session() as sess:
        sess.sync()
        return (time.perf_counter() - start) * 1e3


def main() -> None:
    """Run the rows that are asked for."""
    p = parser(__doc__.splitlines()[0])
    p.add_argument("--rows", nargs="+", default=ROWS, choices=ROWS, help="default: all")
    p.add_argument("--commands", type=int, default=1000, metavar="N",
                   help="commands in a round, and a fifth of it round trips (1000)")  # fmt: skip
    p.add_argument("--idle-seconds", type=float, default=1.0, metavar="S",
                   help="how long one round of idle_cpu takes (default: 1)")  # fmt: skip
    options = p.parse_args()
    check_rounds(options.rounds)
    commands, trips = options.commands, max(1, options.commands // 5)
    rows = []
    # One session at a time: before the one in which all other rows are measured.
    with di.session() as sess:
        n = sess.num_workers
    tvm = None if options.peer == "mpi" else TVMDisco(options.peer, n, commands)
    started = {}
    if "start_up" in options.rows:
        started["start_up"] = interleaved(options.rounds, lambda: start_up(di.session), None)
    if "start_processes" in options.rows and native.available():
        started["start_processes"] = interleaved(
            options.rounds, lambda: start_up(lambda: di.ProcessSession(n)), tvm and tvm.start_up
        )
    with di.session() as sess:
        peer = tvm or BcastLoop(sess, commands)
        by_reference = sess.call(lambda: add_one)
        sess.sync()
        emit_header(sess, options.peer, **({"tvm": tvm.version} if tvm else {}))

        def row(name: str, ours: Callable[[], float], theirs: Callable[[], float] | None,
                unit: str = "us") -> None:  # fmt: skip
            if name in options.rows:
                result = interleaved(options.rounds, ours, theirs)
                rows.append(emit({"bench": name, "n": n, "unit": unit,
                                  "peer_name": PEERS[options.peer], **result}))  # fmt: skip

        def dispatch_of(func, **how: bool) -> Callable[[], float]:
            return lambda: dispatch(sess, func, commands, **how)

        row("dispatch", dispatch_of(by_reference), peer.dispatch)
        row("dispatch_kept", dispatch_of(by_reference, kept=True),
            lambda: peer.dispatch(kept=True))  # fmt: skip
        # TVM calls what has been looked up by its name, and nothing else.
        row("dispatch_import", dispatch_of("operator.neg"), None if tvm else peer.dispatch)
        row("dispatch_by_value", dispatch_of(add_one), None if tvm else peer.dispatch)
        row("stream", dispatch_of(by_reference, to_the_end=True),
            lambda: peer.dispatch(to_the_end=True))  # fmt: skip
        row("call_and_sync", lambda: call_and_sync(sess, by_reference, trips), peer.call_and_sync)
        row("get_from_last", lambda: get_from_last(sess, by_reference, trips), peer.get_from_last)
        if n > 1 and options.peer != "tvm-threads":
            row("idle_cpu", lambda: idle(sess, options.idle_seconds),
                lambda: peer.idle(options.idle_seconds), "% of a core")  # fmt: skip
        for name, result in started.items():
            emit({"bench": name, "n": n, "unit": "ms", "peer_name": PEERS[options.peer], **result})
        if tvm:
            tvm.close()
    if options.plot:
        timed = [row for row in rows if row["unit"] == "us"]
        draw(options.plot, curves_of(timed, "n"), "workers", "µs", cores=os.cpu_count())


if __name__ == "__main__":
    main()
