"""What workers have, into presharded caches, over real sessions."""

from __future__ import annotations

import os
import pathlib
from collections.abc import Callable

import numpy as np
import pytest
from param_files import Apart, dump, params, published, random, same
from session_helpers import on_all

import spmd_disco as di
from spmd_disco.loading.shard_info import shard_name

two_or_more = pytest.mark.mpi(min_size=2)
groups = pytest.mark.parametrize("num_groups", [1, 2])


def mine(arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return what worker i has of each parameter: a value that no other has."""
    i = di.get_worker().worker_id % di.get_worker().group_size
    return {
        name: np.roll(x.view(), i, 0) if x.ndim else x + x.dtype.type(i)
        for name, x in arrays.items()
    }


def layouts() -> dict[str, np.ndarray]:
    x = random("float32")
    return {
        "c": x,
        "fortran": np.asfortranarray(x),
        "strided": x[::2, ::-1, 1:],
        "scalar": x[0, 0, 0].reshape(()),
        "empty": x[:0],
        "big": x.astype(">f4"),
    }


def each(name: str) -> Callable[[dict[str, np.ndarray]], np.ndarray]:
    return lambda arrays: arrays[name]


def drefs_of(sess: di.Session, arrays: dict[str, np.ndarray]) -> dict[str, di.DRef]:
    held = sess.call(mine, arrays)
    return {name: sess.call(each(name), held) for name in arrays}


@groups
@pytest.mark.parametrize("cap", [32, 0.01])
def test_save_and_load(
    sess: di.Session, num_groups: int, cap: float, tmp_path: pathlib.Path
) -> None:
    arrays = params() | layouts()
    saved = drefs_of(sess, arrays)
    for in_group in (True, False):
        folder = tmp_path / str(in_group)
        sess.save_params(folder, saved, in_group, metadata={"note": 1}, shard_cap_mb=cap)
        assert di.tensor_cache_metadata(folder)["note"] == 1
        di.load_tensor_cache(folder, verify=True)
        loaded = sess.load_params(folder, in_group=in_group)
        assert list(loaded) == list(arrays)
        for name in arrays:
            for a, b in zip(saved[name].get_all(), loaded[name].get_all(), strict=True):
                same(b, a.astype(a.dtype.newbyteorder("=")) if a.dtype.byteorder == ">" else a)
        names = set(os.listdir(folder))
        assert not [name for name in names if "tmp" in name]


def test_save_over_an_older_cache(sess: di.Session, tmp_path: pathlib.Path) -> None:
    arrays = {"a": random("float32"), "b": random("float32")}
    sess.save_params(tmp_path, drefs_of(sess, arrays), shard_cap_mb=0.001)
    (tmp_path / "kept.bin").write_bytes(b"not of the cache")
    sess.save_params(tmp_path, drefs_of(sess, {"a": random("int8")}))
    data = {f"params_shard_{i}.bin" for i in range(sess.num_workers)}
    assert set(os.listdir(tmp_path)) == {"tensor-cache.json", "kept.bin"} | data
    same(sess.load_params(tmp_path)["a"].get(), random("int8"))


def test_tvm_reads_what_was_saved(sess: di.Session, tmp_path: pathlib.Path) -> None:
    tvm = pytest.importorskip("tvm", reason="apache-tvm is not installed")
    n = sess.num_workers
    arrays = {"param_0": random("float32"), "param_1": random("int8", (3,))}
    saved = drefs_of(sess, arrays)
    sess.save_params(tmp_path, saved, shard_cap_mb=0.1)
    tvm.get_global_func("vm.builtin.tensor_cache.load")(str(tmp_path), 1, 0)
    names = [shard_name(name, i, n) for i in range(n) for name in arrays]
    found = tvm.get_global_func("vm.builtin.param_array_from_cache_by_name")(names)
    tvm.get_global_func("vm.builtin.tensor_cache.clear")()
    expected = [saved[name].get(i) for i in range(n) for name in arrays]
    for theirs, ours in zip(found, expected, strict=True):
        same(theirs.numpy(), ours)


def test_what_cannot_be_saved(sess: di.Session, tmp_path: pathlib.Path) -> None:
    dref = sess.call(np.zeros, 3)
    before = published(sess)
    for arguments, kind, complaint in (
        (([dref],), TypeError, "are a dict of DRefs by name, not list"),
        (({"a": np.zeros(3)},), TypeError, "'a' is a ndarray, and must be a DRef"),
        (({1: dref},), TypeError, "the name of a parameter is a str"),
        (({"a_shard-1-of-2": dref},), ValueError, "that of a shard: give it without its ending"),
        (({"a": dref}, True, {"x": {1}}), TypeError, "not JSON serializable"),
        (({"a": dref}, True, None, 0), ValueError, "shard_cap_mb is 0: it has to be above 0"),
    ):
        with pytest.raises(kind, match=complaint):
            sess.save_params(tmp_path / "x", *arguments)
    assert published(sess) == before
    assert not (tmp_path / "x").exists()
    for value in ("text", np.zeros(3, "M8[s]"), np.zeros(2, "i4,f4"), None):
        made = sess.put([value] * sess.num_workers)
        with pytest.raises(di.WorkerError, match=r"on worker \d cannot be saved: an array of"):
            sess.save_params(tmp_path, {"a": made})
    assert os.listdir(tmp_path) == []


@pytest.mark.processes
@two_or_more
def test_a_save_that_fails_leaves_the_old_cache(sess: di.Session, tmp_path: pathlib.Path) -> None:
    with Apart(sess, tmp_path) as here:
        dump(here.folders[0] / "x", {"old": np.arange(3)})
        # Only worker 0 and the controller have the same folder.
        with pytest.raises(di.DiscoError, match="has to be one folder for all nodes"):
            sess.save_params(here.path, {"new": sess.call(np.zeros, 3)})
        sess.sync()
        for i, folder in enumerate(here.folders):
            assert len(os.listdir(folder / "x")) == (0 if i else 2)
        same(di.load_tensor_cache(here.folders[0] / "x")["old"], np.arange(3))
        os.rmdir(here.folders[1] / "x")
        (here.folders[1] / "x").write_bytes(b"no folder")
        with pytest.raises(di.WorkerError, match=r"FileExistsError|NotADirectoryError"):
            sess.save_params(here.path, {"new": sess.call(np.zeros, 3)})
        sess.sync()
        assert len(os.listdir(here.folders[0] / "x")) == 2
    on_all(sess, 6)


@two_or_more
@pytest.mark.parametrize("num_groups", [2])
def test_groups_that_differ_are_not_saved_as_one(
    sess: di.Session, num_groups: int, tmp_path: pathlib.Path
) -> None:
    other = sess.call(lambda: np.full(3, di.get_worker().group_id))
    with pytest.raises(ValueError, match=r"one of the parameters 'a_.*give in_group=False"):
        sess.save_params(tmp_path, {"a": other})
    longer = sess.call(lambda: np.zeros(3 + di.get_worker().group_id))
    with pytest.raises(ValueError, match=r"parameter 'a' on worker .*give in_group=False"):
        sess.save_params(tmp_path, {"a": longer})
    sess.sync()
    assert os.listdir(tmp_path) == []
    sess.save_params(tmp_path, {"a": longer}, in_group=False)
    last = sess.load_params(tmp_path, in_group=False)["a"].get(sess.num_workers - 1)
    same(last, np.zeros(4))
