"""TVM's shard loader: the functions ``runtime.disco.ShardLoader…``, over real sessions."""

from __future__ import annotations

import json
import pathlib
import re
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from param_files import SHAPE, cut, dump, random, same
from session_helpers import on_all

import spmd_disco as di

groups = pytest.mark.parametrize("num_groups", [1, 2])


@di.register_func("test_loading.rows")
def rows(source: np.ndarray, parts: int, out: np.ndarray) -> None:
    out[...] = source.reshape(out.shape)


@di.register_func("test_loading.qkv_0")
def qkv_0(source: np.ndarray, parts: int, q: int, kv: int, out: np.ndarray) -> None:
    """Give each part its heads of query, key and value."""
    heads = source.reshape(q + 2 * kv, -1, source.shape[1])
    pieces = [np.split(heads[a:b], parts) for a, b in ((0, q), (q, q + kv), (q + kv, q + 2 * kv))]
    out[...] = [np.concatenate(of_one) for of_one in zip(*pieces, strict=True)]


@di.register_func("test_loading.qkv_1")
def qkv_1(source: np.ndarray, out: np.ndarray) -> None:
    out[...] = source.reshape(out.shape)


def loader_of(sess: di.Session, folder: pathlib.Path, info: Any, module: Any = None) -> di.DRef:
    index = folder / "tensor-cache.json"
    text = info if isinstance(info, str) else json.dumps(info)
    for name in re.findall(r"test_loading\.\w+", text):
        if di.get_global_func(name, allow_missing=True):
            sess.get_global_func(name)
    create = sess.get_global_func("runtime.disco.ShardLoader")
    return create(str(index), index.read_text(), text, module)


@groups
@pytest.mark.parametrize("index", [lambda i: (i,), int, np.int64, lambda i: [i]])
def test_shard_loader_load(
    sess: di.Session, num_groups: int, index: Callable[[int], Any], tmp_path: pathlib.Path
) -> None:
    n = sess.num_workers
    arrays = {"x_0": random("float16", (24, 36)), "x_1": random("float32", (36, 24))}
    arrays |= {"x_2": random("bfloat16", (5,))}
    info = {
        "x_0": [["test_loading.columns", [(n, 24, 36 // n), "float16"], n]],
        "x_1": [["test_loading.rows", [(n, 36 // n, 24), "float32"], n]],
        "not there": [["not there either", [(3,), "int8"]]],  # passed over, as in TVM
    }
    loader = loader_of(sess, dump(tmp_path, arrays), info)
    load = sess.get_global_func("runtime.disco.ShardLoaderLoad")
    loaded = [load(loader, index(i)) for i in range(3)]
    for i in range(n):
        same(loaded[0].get(i), np.split(arrays["x_0"], n, 1)[i])
        same(loaded[1].get(i), np.split(arrays["x_1"], n)[i])
        same(loaded[2].get(i), arrays["x_2"])


def test_shard_loader_load_all(sess: di.Session, tmp_path: pathlib.Path) -> None:
    n = sess.num_workers
    qkv = random("float16", (12 * 5 + 2 * 12 * 5, 20))
    arrays = {"param_1": random("float32", (7,)), "param_0": qkv}
    info = {
        "param_0": [
            ["test_loading.qkv_0", [[n, 36 // n, 5, 20], "float16"], n, 12, 12],
            ["test_loading.qkv_1", [[n, 180 // n, 20], "float16"]],
        ]
    }
    loader = loader_of(sess, dump(tmp_path, arrays), info)
    loaded = sess.call("runtime.disco.ShardLoaderLoadAll", loader).get_all()
    thirds = np.split(qkv, 3)
    for i, (first, second) in enumerate(loaded):
        same(first, np.concatenate([np.split(third, n)[i] for third in thirds]))
        same(second, arrays["param_1"])


def test_shard_loader_load_param_on_worker_0(sess: di.Session, tmp_path: pathlib.Path) -> None:
    arrays = {"param_1": random("float32"), "param_0": random("int8")}
    loader = loader_of(sess, dump(tmp_path, arrays), {})
    for index in (1, (1,)):
        load = "runtime.disco.ShardLoaderLoadParamOnWorker0"
        first, *others = sess.call(load, loader, index).get_all()
        same(first, arrays["param_1"])
        assert {(x.shape, x.dtype) for x in others} <= {(SHAPE, np.dtype(np.float32))}


@groups
def test_shard_loader_presharded(sess: di.Session, num_groups: int, tmp_path: pathlib.Path) -> None:
    n = sess.num_workers
    arrays = {"param_0": random("float16"), "param_1": random("bfloat16")}
    loader = loader_of(sess, dump(tmp_path, cut(arrays, n)), "")
    for i in range(2):
        one = sess.call("runtime.disco.ShardLoaderLoadPresharded", loader, (i,)).get_all()
        for worker in range(n):
            same(one[worker], np.split(arrays[f"param_{i}"], n)[worker])
    everything = sess.call("runtime.disco.ShardLoaderLoadAllPresharded", loader).get_all()
    for worker, found in enumerate(everything):
        for i, array in enumerate(found):
            same(array, np.split(arrays[f"param_{i}"], n)[worker])


def test_shard_loader_reads_what_was_saved(sess: di.Session, tmp_path: pathlib.Path) -> None:
    arrays = {"param_0": random("float16"), "param_1": random("int8", (3,))}
    saved = {name: sess.call(np.roll, array, 1, 0) for name, array in arrays.items()}
    sess.save_params(tmp_path, saved, in_group=False, shard_cap_mb=0.01)
    loader = loader_of(sess, tmp_path, {})
    everything = sess.call("runtime.disco.ShardLoaderLoadAllPresharded", loader).get_all()
    one = sess.call("runtime.disco.ShardLoaderLoadPresharded", loader, 1).get_all()
    for worker in range(sess.num_workers):
        same(everything[worker][0], saved["param_0"].get(worker))
        same(everything[worker][1], saved["param_1"].get(worker))
        same(one[worker], saved["param_1"].get(worker))


class Library:
    """A module, as compiled ones are: functions as items, and its own shard_info."""

    def __init__(self, parts: int) -> None:
        self.parts = parts

    def get_shard_info(self) -> str:
        return json.dumps({"w": [["twice", [[self.parts, 12 // self.parts], "float32"]]]})

    def twice(self, source: np.ndarray, out: np.ndarray) -> None:
        out[...] = 2 * source.reshape(out.shape)

    def __getitem__(self, name: str) -> Any:
        try:
            return getattr(self, name)
        except AttributeError:
            raise KeyError(name) from None


@pytest.mark.parametrize("kind", ["items", "attributes", "dict"])
def test_shard_loader_asks_the_module(sess: di.Session, kind: str, tmp_path: pathlib.Path) -> None:
    n = sess.num_workers

    def make() -> Any:
        library = Library(n)
        if kind == "dict":
            return {"get_shard_info": library.get_shard_info, "twice": library.twice}
        if kind == "attributes":
            return types.SimpleNamespace(get_shard_info=library.get_shard_info, twice=library.twice)
        return library

    dump(tmp_path, {"w": np.arange(12, dtype=np.float32)})
    module = sess.call(make)
    loader = loader_of(sess, tmp_path, "", module)
    loaded = sess.call("runtime.disco.ShardLoaderLoad", loader, 0).get_all()
    same(np.concatenate(loaded), 2 * np.arange(12, dtype=np.float32))
    # What is given beats what the module says, and functions may be global ones, too.
    info = {"w": [["test_loading.scaled", [[n, 12 // n], "float32"], 3]]}
    if n == 1:
        loader = loader_of(sess, tmp_path, info, module)
        tripled = sess.call("runtime.disco.ShardLoaderLoad", loader, 0).get()
        same(tripled, 3 * np.arange(12, dtype=np.float32).reshape(1, 12)[0])


def test_shard_loader_with_a_module_that_tvm_compiled(
    sess: di.Session, tmp_path: pathlib.Path
) -> None:
    tvm = pytest.importorskip("tvm", reason="apache-tvm is not installed")
    n, width = sess.num_workers, 12 // sess.num_workers
    given = tvm.te.placeholder((4, 12), "float32")
    made = tvm.te.compute((n, 4, width), lambda part, i, j: given[i, part * width + j] * 2)
    function = tvm.te.create_prim_func([given, made]).with_attr("global_symbol", "cut")
    library = str(tmp_path / "cut.so")
    tvm.compile(function, target="llvm").export_library(library)
    whole = random("float32", (4, 12))
    info = {"w": [["cut", [[n, 4, width], "float32"]]]}
    module = sess.call("tvm.runtime.load_module", library)
    loader = loader_of(sess, dump(tmp_path, {"w": whole}), info, module)
    loaded = sess.call("runtime.disco.ShardLoaderLoad", loader, 0).get_all()
    same(np.concatenate(loaded, 1), whole * 2)


def test_shard_loader_errors(sess: di.Session, tmp_path: pathlib.Path) -> None:
    n = sess.num_workers
    dump(tmp_path, {"w": np.zeros(12, np.float32)} | cut({"a": np.zeros(n + 1)}, n + 1))
    chain = [["test_loading.rows", [[n + 1, 2], "float32"], n]]

    def refused(complaint: str, make: Callable[[], di.DRef]) -> None:
        with pytest.raises(di.WorkerError, match=complaint):
            make().get_all()
        on_all(sess, 7)

    loader = loader_of(sess, tmp_path, {"w": chain})
    load = sess.get_global_func("runtime.disco.ShardLoaderLoad")
    presharded = sess.get_global_func("runtime.disco.ShardLoaderLoadPresharded")
    refused(
        rf"'w': the output of .*'test_loading\.rows' has the shape \({n + 1}, 2\)",
        lambda: load(loader, 0),
    )
    refused("has no parameter -1: allowed are 0 to", lambda: load(loader, -1))
    refused(f"has no parameter {n + 2}: allowed are", lambda: load(loader, (n + 2,)))
    refused("a shard loader is what", lambda: load(3, 0))
    for index in (None, True, "0", (1, 2), 1.0):
        refused("is an int or a shape of one, not", lambda index=index: load(loader, index))
    refused(
        "has no parameter 'param_0': there are",
        lambda: sess.call("runtime.disco.ShardLoaderLoadAll", loader),
    )
    refused(
        "has no parameter 'param_5'",
        lambda: sess.call("runtime.disco.ShardLoaderLoadParamOnWorker0", loader, 5),
    )
    refused("'w' of .* is not presharded", lambda: presharded(loader, 0))
    refused(
        "'w': its shard function 'nowhere' is not defined, among the global functions",
        lambda: loader_of(sess, tmp_path, {"w": [["nowhere", [[n], "int8"]]]}),
    )
    refused("is not JSON", lambda: loader_of(sess, tmp_path, "{"))
    dump(tmp_path / "2", cut({"param_0": np.zeros(n + 1)}, n + 1))
    other = loader_of(sess, tmp_path / "2", {})
    refused(f"is one of {n + 1} shards, and there are {n} workers", lambda: presharded(other, 0))
    refused(
        f"has no parameter 'param_0_shard-1-of-{n}'",
        lambda: sess.call("runtime.disco.ShardLoaderLoadAllPresharded", other),
    )
    if n > 1:
        shards = list(cut({"param_0": np.zeros(n)}, n).items())
        dump(tmp_path / "3", dict(shards[::-1]))
        wrong = loader_of(sess, tmp_path / "3", {})
        refused("are ordered by shard, then by parameter", lambda: presharded(wrong, 0))
