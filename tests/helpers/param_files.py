"""What the tests of loading and saving parameters have in common."""

from __future__ import annotations

import os
import pathlib
from typing import Any

import ml_dtypes
import numpy as np

import spmd_disco as di
from spmd_disco.loading.shard_info import shard_name

#: All dimensions can be split among 1, 2, 3 and 4 workers.
SHAPE = (12, 24, 36)
DTYPES = ["float32", "float16", "bfloat16", "float8_e4m3fn", "int8", "uint16", "int64", "bool"]


def random(dtype: Any, shape: tuple[int, ...] = SHAPE, seed: int = 0) -> np.ndarray:
    """Return values that are all finite, and all kinds of bits."""
    values = np.random.default_rng(seed).integers(-100, 100, shape)
    return values.astype(getattr(ml_dtypes, dtype, None) or dtype)


def params() -> dict[str, np.ndarray]:
    found = {f"w_{dtype}": random(dtype, seed=i) for i, dtype in enumerate(DTYPES)}
    return found | {"scalar": random("float32", ()), "empty": random("int8", (0, 12))}


def same(a: Any, b: Any) -> None:
    a, b = np.asarray(a), np.asarray(b)
    assert a.dtype == b.dtype
    assert a.shape == b.shape
    assert a.tobytes() == b.tobytes()


def dump(folder: pathlib.Path, arrays: dict[str, np.ndarray], **options: Any) -> pathlib.Path:
    di.dump_tensor_cache(folder, arrays, encode_format="raw", **options)
    return folder


def published(sess: di.Session) -> int:
    return sess._controller.channel.published


def peer_memory(sess: di.Session) -> bool:
    memory = sess._controller.worker.memory
    return memory is not None and memory.available


def cut(arrays: dict[str, np.ndarray], parts: int) -> dict[str, np.ndarray]:
    return {
        shard_name(name, i, parts): np.split(x, parts)[i]
        for i in range(parts)
        for name, x in arrays.items()
    }


@di.register_func("test_loading.columns")
def columns(source: np.ndarray, parts: int, out: np.ndarray) -> None:
    rows, width = source.shape
    out[...] = source.reshape(rows, parts, width // parts).swapaxes(0, 1)


@di.register_func("test_loading.scaled")
def scaled(source: np.ndarray, factor: int, out: np.ndarray) -> None:
    np.multiply(source, factor, out=out, casting="unsafe")


def go_to(folders: list[str]) -> str:
    before = os.getcwd()
    os.chdir(folders[di.get_worker().worker_id])
    return before


class Apart:
    """A path that means a folder of its own for each worker, as on nodes that share no disk."""

    path = pathlib.Path("/proc/self/cwd/x")

    def __init__(self, sess: di.Session, folder: pathlib.Path) -> None:
        self.sess = sess
        self.folders = [folder / f"of worker {i}" for i in range(sess.num_workers)]
        for mine in self.folders:
            (mine / "x").mkdir(parents=True)

    def __enter__(self) -> Apart:
        self.before = self.sess.call(go_to, [str(f) for f in self.folders]).get_all()
        return self

    def __exit__(self, *error: object) -> None:
        self.sess.call(go_to, self.before).get_all()
