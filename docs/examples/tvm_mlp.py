"""A perceptron with one hidden layer, compiled by TVM, tensor-parallel over all workers.

    mpirun -n 2 python -m spmd_disco docs/examples/tvm_mlp.py [--rows N --width N --hidden N]

or, without MPI, python -m spmd_disco -n 2 docs/examples/tvm_mlp.py. It needs TVM, which
pip install -e '.[tvm,mpich]' brings.

Each worker has some columns of the first matrix and the same rows of the second one. The compiled
code ends in an allreduce, which goes over the session. The result is compared with that of the
whole perceptron, which TVM runs alone, and so are the times.
"""

import argparse
import tempfile
from pathlib import Path

import numpy as np
import tvm
from tvm import relax

import spmd_disco as di


def perceptron(rows: int, width: int, hidden: int, workers: int) -> tvm.IRModule:
    """Return the part of each worker, of so many; with one it is the whole."""
    x = relax.Var("x", relax.TensorType((rows, width), "float32"))
    up = relax.Var("up", relax.TensorType((width, hidden // workers), "float32"))
    down = relax.Var("down", relax.TensorType((hidden // workers, width), "float32"))
    builder = relax.BlockBuilder()
    with builder.function("main", [x, up, down]):
        with builder.dataflow():
            inner = builder.emit(relax.op.nn.relu(builder.emit(relax.op.matmul(x, up))))
            result = builder.emit(relax.op.matmul(inner, down))
            if workers > 1:
                result = builder.emit(relax.op.ccl.allreduce(result, "sum"))
            result = builder.emit_output(result)
        builder.emit_func_output(result)
    return builder.finalize()


def compiled(folder: str, *size: int) -> str:
    """Compile the part for this machine's CPU, and return the library."""
    path = str(Path(folder) / f"perceptron-{size[-1]}.so")
    tvm.compile(perceptron(*size), target="llvm").export_library(path)
    return path


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--rows", type=int, default=64)
    p.add_argument("--width", type=int, default=256)
    p.add_argument("--hidden", type=int, default=1024)
    options = p.parse_args()
    rows, width, hidden = options.rows, options.width, options.hidden
    rng = np.random.default_rng(0)
    x, up, down = (
        rng.standard_normal(shape).astype(np.float32) / shape[0] ** 0.5
        for shape in ((rows, width), (width, hidden), (hidden, width))
    )
    with di.session(tvm=True) as sess, tempfile.TemporaryDirectory() as folder:
        n = sess.num_workers
        if hidden % n:
            p.error(f"--hidden {hidden} cannot be split among {n} workers")
        module = sess.load_vm_module(compiled(folder, rows, width, hidden, n))
        parts = (
            sess.broadcast(x),
            sess.scatter(np.stack(np.split(up, n, axis=1)), in_group=False),
            sess.scatter(np.stack(np.split(down, n)), in_group=False),
        )
        sharded = sess.time_evaluator(module["main"], number=5, repeat=5)(*parts)
        got = module["main"](*parts).get_all()

        whole = tvm.runtime.load_module(compiled(folder, rows, width, hidden, 1))
        machine = relax.VirtualMachine(whole, tvm.cpu())
        arguments = [tvm.runtime.tensor(array) for array in (x, up, down)]
        expected = machine["main"](*arguments).numpy()
        alone = machine.time_evaluator("main", tvm.cpu(), number=5, repeat=5)(*arguments)

    error = max(float(np.abs(each - expected).max()) for each in got)
    print(f"largest difference {error:.1e}, of values up to {np.abs(expected).max():.1f}")
    print(f"{n} workers {sharded.median * 1e3:.2f} ms, TVM alone {alone.median * 1e3:.2f} ms")
    if not np.allclose(got, expected, rtol=1e-4, atol=1e-4):
        raise SystemExit("the results differ")


if __name__ == "__main__":
    main()
