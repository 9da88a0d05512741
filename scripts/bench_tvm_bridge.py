"""What a collective costs when compiled code calls it, beside the same from Python.

    mpirun -n 2 python -m spmd_disco scripts/bench_tvm_bridge.py

A function that TVM has compiled does so many allreduces one after the other; a loop in Python does
as many on the same workers, in turn. JSON lines: µs of one, and by how much the compiled one takes
longer.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from typing import Any

import spmd_disco as di

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

from bench_common import check_rounds, emit, emit_header, refuse, summary

SIZES = [64, 65536]
#: Allreduces in one call of the compiled function, and such calls in one round.
CHAIN, CALLS = 32, 20


def compiled(folder: str, count: int) -> str:
    """Compile a chain of allreduces of so many float32, and return the library."""
    import tvm
    from tvm import relax

    x = relax.Var("x", relax.TensorType((count,), "float32"))
    builder = relax.BlockBuilder()
    with builder.function("main", [x]):
        with builder.dataflow():
            y = x
            for _ in range(CHAIN):
                y = builder.emit(relax.op.ccl.allreduce(y, "min"))
            y = builder.emit_output(y)
        builder.emit_func_output(y)
    path = os.path.join(folder, f"chain-{count}.so")
    tvm.compile(builder.finalize(), target="llvm").export_library(path)
    return path


def measure(function: Any, count: int, rounds: int) -> tuple[list[float], list[float]]:
    """On all workers: return µs of one allreduce in compiled code and in Python, by round."""
    x, y = di.empty(count, "f4"), di.empty(count, "f4")
    x[:] = 1
    allreduce = di.get_global_func("runtime.disco.allreduce")

    def in_python() -> None:
        for _ in range(CHAIN):
            allreduce(x, "min", True, y)

    times: tuple[list[float], list[float]] = ([], [])
    for i in range(rounds + 1):
        for each, call in zip(times, (lambda: function(x), in_python), strict=True):
            allreduce(x, "min", True, y)  # all begin together
            start = time.perf_counter()
            for _ in range(CALLS):
                call()
            if i:
                each.append((time.perf_counter() - start) / CALLS / CHAIN * 1e6)
    return times


def main() -> None:
    """Run both sizes."""
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--rounds", type=int, default=9, help="interleaved rounds, at least 9 (default)")
    options = p.parse_args()
    check_rounds(options.rounds)
    try:
        from spmd_disco.interop import tvm

        tvm.check()
    except ImportError as e:
        refuse(str(e))
    with di.session(tvm=True) as sess, tempfile.TemporaryDirectory() as folder:
        emit_header(sess, "mpi")
        for nbytes in SIZES:
            module = sess.load_vm_module(compiled(folder, nbytes // 4))
            found = sess.call(measure, module["main"], nbytes // 4, options.rounds).get()
            ours, python = (list(times) for times in found)
            more = [a - b for a, b in zip(ours, python, strict=True)]
            emit({"bench": "compiled_allreduce", "n": sess.num_workers, "bytes": nbytes,
                  "unit": "us", "peer_name": "from Python", "ours": summary(ours),
                  "peer": summary(python), "more": summary(more)})  # fmt: skip


if __name__ == "__main__":
    main()
