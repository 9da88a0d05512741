"""Loading parameters, each worker its own part, beside numpy.fromfile in one process.

    mpirun -n 4 python -m spmd_disco scripts/bench_load.py

Makes a synthetic tensor cache in a temporary folder, whose files stay in the page cache, and prints
JSON lines: medians, minima and maxima of interleaved rounds, in GB/s of the file's bytes. The peer
reads the same files by `numpy.fromfile`, on the controller alone and while the workers sleep, into
arrays that it keeps until it has all of them, as a loader does.
"""

from __future__ import annotations

import argparse
import functools
import os
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

import spmd_disco as di

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

from bench_common import PEERS, check_rounds, emit, emit_header, interleaved, refuse

ROWS = ["slices", "slices_of_columns", "replicated", "chain"]


def columns_of(x: np.ndarray, parts: int, out: np.ndarray) -> None:
    """Cut columns into parts: what the chain does on worker 0."""
    rows, width = x.shape
    out[...] = x.reshape(rows, parts, width // parts).swapaxes(0, 1)


def make_cache(folder: Path, size: int, tensors: int, parts: int) -> tuple[list[str], int, int]:
    """Write `tensors` matrices, together of about `size` bytes; return names, rows and columns."""
    rows = columns = 0
    while 4 * tensors * (rows + 12) * (columns + 12) <= size:  # as square as it can be
        rows, columns = rows + 12, columns + 12
    if not rows or rows % parts:
        refuse(f"--size {size}: {tensors} matrices of it cannot be split among {parts} workers")
    matrix = np.random.default_rng(0).random((rows, columns), np.float32)
    names = [f"param_{i}" for i in range(tensors)]
    di.dump_tensor_cache(folder, dict.fromkeys(names, matrix), encode_format="raw")
    return names, rows, columns


def main() -> None:
    """Run the rows that are asked for."""
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--rounds", type=int, default=9, help="interleaved rounds, at least 9 (default)")
    p.add_argument("--rows", nargs="+", default=ROWS, choices=ROWS, help="default: all")
    p.add_argument("--size", type=float, default=2048, metavar="MIB", help="all of it (2048)")
    p.add_argument("--tensors", type=int, default=64, metavar="N", help="how many (64)")
    p.add_argument("--folder", metavar="DIR", help="where the cache goes (default: /tmp)")
    options = p.parse_args()
    check_rounds(options.rounds)
    with (
        di.session() as sess,
        tempfile.TemporaryDirectory(dir=options.folder) as temporary,
    ):
        n, folder = sess.num_workers, Path(temporary)
        size = int(options.size * (1 << 20))
        names, rows, columns = make_cache(folder, size, options.tensors, n)
        files = sorted(folder.glob("*.bin"))
        total = sum(file.stat().st_size for file in files)
        PEERS["fromfile"] = "numpy.fromfile, one process"
        emit_header(sess, "fromfile")

        def ours(shard_info: dict) -> float:
            sess.sync()
            start = time.perf_counter()
            loaded = sess.load_params(folder, shard_info, progress=False)
            spent = time.perf_counter() - start
            assert len(loaded) == len(names)
            return spent

        def peer() -> float:
            start = time.perf_counter()
            arrays = [np.fromfile(file, np.uint8) for file in files]
            spent = time.perf_counter() - start
            assert len(arrays) == len(files)
            return spent

        step = [columns_of, [(n, rows, columns // n), "float32"], n]
        infos = {
            "slices": dict.fromkeys(names, 0),
            "slices_of_columns": dict.fromkeys(names, 1),
            "replicated": {},
            "chain": {name: [step] for name in names},
        }
        for row in options.rows:
            result = interleaved(options.rounds, functools.partial(ours, infos[row]), peer)
            for key in ("ours", "peer"):
                times = result.pop(key)
                result[f"{key}_seconds"] = times
                result[key] = {
                    "median": round(total / times["median"] / 1e9, 4),
                    "min": round(total / times["max"] / 1e9, 4),
                    "max": round(total / times["min"] / 1e9, 4),
                }
            emit(
                {
                    "bench": f"load_{row}",
                    "bytes": total,
                    "tensors": len(names),
                    "unit": "GB/s",
                    "peer_name": PEERS["fromfile"],
                    **result,
                }
            )


if __name__ == "__main__":
    main()
