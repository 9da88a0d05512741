"""Small models compiled by TVM: the tests' own, tensor-parallel by the collectives of Relax."""

from __future__ import annotations

import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tvm
from tvm import relax
from tvm.relax.op import ccl
from tvm.script import tirx as T

Shape = tuple[int, ...]


def tensor(name: str, shape: Shape, dtype: str = "float32") -> relax.Var:
    return relax.Var(name, relax.TensorType(shape, dtype))


def compiled(path: pathlib.Path, module: Any) -> str:
    """Compile `module` for this machine's CPU into a library."""
    tvm.compile(module, target="llvm").export_library(str(path))
    return str(path)


def function(
    inputs: Sequence[relax.Var],
    body: Callable[[Callable[[Any], Any]], Any],
    name: str = "main",
    builder: relax.BlockBuilder | None = None,
) -> relax.BlockBuilder:
    """Build a function whose result is what `body` makes of the inputs."""
    builder = builder or relax.BlockBuilder()
    with builder.function(name, list(inputs)):
        with builder.dataflow():
            result = builder.emit_output(body(builder.emit))
        builder.emit_func_output(result)
    return builder


def mlp(rows: int, width: int, hidden: int, parts: int) -> Any:
    """Return an MLP of which each worker has its columns of w1 and its rows of w2.

    With one part there are no collectives: the unsharded one.
    """
    x = tensor("x", (rows, width))
    w1, w2 = tensor("w1", (width, hidden // parts)), tensor("w2", (hidden // parts, width))

    def body(emit: Callable[[Any], Any]) -> Any:
        source = emit(ccl.broadcast_from_worker0(x)) if parts > 1 else x
        up = emit(relax.op.nn.gelu(emit(relax.op.matmul(source, w1))))
        down = emit(relax.op.matmul(up, w2))
        return ccl.allreduce(down, "sum", in_group=True) if parts > 1 else relax.op.add(down, zero)

    zero = relax.const(np.zeros((), np.float32))
    return function([x, w1, w2], body).finalize()


def attention(length: int, width: int, heads: int, parts: int) -> Any:
    """Return self-attention whose heads are shared out; whole weights come from worker 0.

    Each takes ``(x, wq, wk, wv, wo)``, unsharded: the compiled code scatters the weights.
    """
    x = tensor("x", (length, width))
    weights = [tensor(name, (width, width)) for name in ("wq", "wk", "wv", "wo")]
    size, mine = width // heads, heads // parts

    def body(emit: Callable[[Any], Any]) -> Any:
        if parts > 1:
            source = emit(ccl.broadcast_from_worker0(x))
            q, k, v = (emit(ccl.scatter_from_worker0(w, parts, axis=1)) for w in weights[:3])
            out = emit(ccl.scatter_from_worker0(weights[3], parts, axis=0))
        else:
            source, (q, k, v, out) = x, weights

        def by_head(w: Any) -> Any:
            projected = emit(relax.op.matmul(source, w))
            split = emit(relax.op.reshape(projected, (length, mine, size)))
            return emit(relax.op.permute_dims(split, (1, 0, 2)))

        queries, keys, values = by_head(q), by_head(k), by_head(v)
        scores = emit(relax.op.matmul(queries, emit(relax.op.permute_dims(keys, (0, 2, 1)))))
        scaled = emit(relax.op.multiply(scores, relax.const(np.float32(size**-0.5))))
        mixed = emit(relax.op.matmul(emit(relax.op.nn.softmax(scaled, -1)), values))
        merged = emit(
            relax.op.reshape(emit(relax.op.permute_dims(mixed, (1, 0, 2))), (length, mine * size))
        )
        summed = emit(relax.op.matmul(merged, out))
        return ccl.allreduce(summed, "sum", in_group=False) if parts > 1 else summed

    return function([x, *weights], body).finalize()


def collective(shape: Shape, dtype: str, make: Callable[[Any], Any]) -> Any:
    """Return a module whose ``main`` does one collective."""
    x = tensor("x", shape, dtype)
    return function([x], lambda emit: make(x)).finalize()


def run_here(path: str, *args: np.ndarray) -> np.ndarray:
    """Run ``main`` of an unsharded library in this process, by TVM alone."""
    machine = relax.VirtualMachine(tvm.runtime.load_module(path), tvm.cpu())
    return machine["main"](*map(tvm.runtime.tensor, args)).numpy()


def shard_rows(rows: int, columns: int, parts: int) -> Any:
    """Return a module without a virtual machine, whose ``rows`` cuts a matrix into its parts."""

    @T.prim_func
    def cut(source: T.handle, target: T.handle):
        a = T.match_buffer(source, (rows, columns), "float32")
        b = T.match_buffer(target, (parts, rows // parts, columns), "float32")
        for part, row, column in T.grid(parts, rows // parts, columns):
            b[part, row, column] = a[part * (rows // parts) + row, column]

    return tvm.IRModule({"rows": cut.with_attr("global_symbol", "rows")})
