"""Parameters from files onto the workers, over real sessions."""

from __future__ import annotations

import json
import os
import pathlib
import re
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI
from param_files import SHAPE, Apart, cut, dump, params, peer_memory, published, random, same
from session_helpers import on_all

import spmd_disco as di
from spmd_disco.loading.shard_info import part_of
from spmd_disco.transport import peer_memory as peer_memory_module

two_or_more = pytest.mark.mpi(min_size=2)
groups = pytest.mark.parametrize("num_groups", [1, 2])


@pytest.fixture(name="cache")
def cache_of_a_test(tmp_path: pathlib.Path) -> pathlib.Path:
    """A tensor cache with all of `params`, in many small files."""
    return dump(tmp_path / "cache", params(), shard_cap_mb=0.05)


# Each worker its own part -------------------------------------------------------------------------


@groups
@pytest.mark.parametrize("axis", [0, 1, 2, -1])
def test_slices(sess: di.Session, num_groups: int, axis: int, cache: pathlib.Path) -> None:
    wanted = {name: axis for name in params() if name.startswith("w_")}
    for in_group in (True, False):
        parts = sess.group_size if in_group else sess.num_workers
        loaded = sess.load_params(cache, wanted, in_group)
        assert list(loaded) == list(di.load_tensor_cache(cache))
        for name, dref in loaded.items():
            for worker, value in enumerate(dref.get_all()):
                whole = params()[name]
                if name in wanted:
                    whole = whole[part_of(SHAPE, axis % 3, worker % parts, parts)]
                same(value, whole)


def test_slices_are_writable_and_in_peer_memory(sess: di.Session, cache: pathlib.Path) -> None:
    array = sess.load_params(cache, {"w_int8": 0})["w_int8"]
    place = sess.call(where_it_lies, array).get_all()
    assert place == [(True, True, sess.num_workers > 1)] * sess.num_workers or not peer_memory(sess)


def where_it_lies(array: np.ndarray) -> tuple[bool, bool, bool]:
    from spmd_disco.worker import current_worker

    table = current_worker().memory.table
    address = array.__array_interface__["data"][0]
    return (
        array.flags.writeable,
        array.flags.c_contiguous,
        table is not None and table.locate(address, array.nbytes) is not None,
    )


def formats(folder: pathlib.Path, arrays: dict[str, np.ndarray]) -> Iterator[pathlib.Path]:
    """Write parameters in each format that there is."""
    np.savez(folder / "plain.npz", **arrays)
    yield folder / "plain.npz"
    np.savez_compressed(folder / "small.npz", **arrays)
    yield folder / "small.npz"
    di.save_param_dict(folder / "model.params", arrays)
    yield folder / "model.params"
    yield dump(folder / "cache", arrays)
    safetensors = pytest.importorskip("safetensors.numpy")
    safetensors.save_file(arrays, folder / "model.safetensors")
    yield folder / "model.safetensors"
    yield folder


def test_formats(sess: di.Session, tmp_path: pathlib.Path) -> None:
    arrays = {"a": random("float32"), "b": random("int16", (24,)), "c": random("float64", ())}
    for path in formats(tmp_path, arrays):
        loaded = sess.load_params(str(path), {"a": 1, "b": 0})
        assert sorted(loaded) == ["a", "b", "c"], path
        for i in range(sess.num_workers):
            same(loaded["a"].get(i), np.split(arrays["a"], sess.num_workers, 1)[i])
            same(loaded["b"].get(i), np.split(arrays["b"], sess.num_workers)[i])
            same(loaded["c"].get(i), arrays["c"])


@pytest.mark.parametrize("dtype", [">f4", "complex128", ">i2"])
def test_what_only_numpy_has(sess: di.Session, dtype: str, tmp_path: pathlib.Path) -> None:
    for name, array in (("c", random(dtype)), ("f", np.asfortranarray(random(dtype)))):
        np.save(tmp_path / f"{name}.npy", array)
        for axis in (0, 1, 2):
            loaded = sess.load_params(tmp_path / f"{name}.npy", {name: axis})[name]
            for i, part in enumerate(np.split(array, sess.num_workers, axis)):
                np.testing.assert_array_equal(loaded.get(i), part)


def test_float32_that_is_stored_as_bfloat16(sess: di.Session, tmp_path: pathlib.Path) -> None:
    array = random("float32")  # bfloat16 has each of these values
    di.dump_tensor_cache(tmp_path, {"w": array, "v": array}, encode_format="f32-to-bf16")
    for axis in (0, 2):
        loaded = sess.load_params(tmp_path, {"w": axis})
        for i, part in enumerate(np.split(array, sess.num_workers, axis)):
            same(loaded["w"].get(i), part)
            same(loaded["v"].get(i), array)


# One copy on each node ----------------------------------------------------------------------------


def pool_used() -> int:
    from spmd_disco.worker import current_worker

    memory = current_worker().memory
    return 0 if memory is None or memory.pool is None else memory.pool.used


@groups
def test_replicated_parameters_are_shared(
    sess: di.Session, num_groups: int, tmp_path: pathlib.Path
) -> None:
    array = random("float32", (1 << 18,))
    dump(tmp_path, {"w": array, "v": array})
    before = sess.call(pool_used).get_all()
    loaded = sess.load_params(tmp_path, lambda name, shape, dtype: "replicate")
    for dref in loaded.values():
        for value in dref.get_all():
            same(value, array)
        assert sess.call(lambda x: x.flags.writeable, dref).get_all() == [False] * sess.num_workers
    if peer_memory(sess):
        more = np.subtract(sess.call(pool_used).get_all(), before)
        assert more[0] >= 2 * array.nbytes
        assert more[1:].max() == 0
    del dref, loaded
    sess.sync()
    sess.share(np.zeros(1))  # takes back what nobody has any more
    sess.sync()
    assert max(sess.call(pool_used).get_all()) < array.nbytes


@pytest.mark.parametrize("node_size", [1, 2])
def test_several_nodes(
    monkeypatch: pytest.MonkeyPatch, node_size: int, tmp_path: pathlib.Path
) -> None:
    # Ranks that take each other for being on other nodes.
    node = MPI.COMM_WORLD.rank // node_size
    monkeypatch.setattr(peer_memory_module, "node_identity", lambda: f"node {node}")
    with di.MPISession(MPI.COMM_WORLD) as sess:
        if sess is None:
            return
        array = random("float32", (12, 1 << 12))
        dump(tmp_path, {"w": array, "cut": array})
        loaded = sess.load_params(tmp_path, {"cut": 0})
        for i in range(sess.num_workers):
            same(loaded["w"].get(i), array)
            same(loaded["cut"].get(i), np.split(array, sess.num_workers)[i])
        os.truncate(tmp_path / "params_shard_0.bin", 100)
        with pytest.raises((di.WorkerError, ValueError), match="params_shard_0"):
            sess.load_params(tmp_path)
        on_all(sess, 8)


# Shard functions ----------------------------------------------------------------------------------


@groups
def test_chains(sess: di.Session, num_groups: int, tmp_path: pathlib.Path) -> None:
    array = random("float32", (6, 24))
    dump(tmp_path, {"w": array, "v": array})
    for in_group in (True, False):
        parts = sess.group_size if in_group else sess.num_workers
        shape = (parts, 6, 24 // parts)
        info = {
            "w": [
                ["test_loading.columns", [shape, "float32"], parts],
                ["test_loading.scaled", [shape, "int16"], 3],
            ],
            "v": [(split_columns, (shape, np.float32))],
        }
        loaded = sess.load_params(tmp_path, info, in_group)
        for worker in range(sess.num_workers):
            part = np.split(array, parts, 1)[worker % parts]
            same(loaded["w"].get(worker), (part * 3).astype(np.int16))
            same(loaded["v"].get(worker), part)
    as_json = sess.load_params(tmp_path, json.dumps({"w": info["w"]}), False)
    same(as_json["w"].get(), (np.split(array, parts, 1)[0] * 3).astype(np.int16))


def split_columns(source: np.ndarray, out: np.ndarray) -> None:
    np.copyto(out, np.split(source, len(out), 1))


def test_a_callable_decides(sess: di.Session, cache: pathlib.Path) -> None:
    asked = {}

    def decide(name: str, shape: tuple[int, ...], dtype: np.dtype) -> Any:
        asked[name] = shape, dtype
        return 1 if name == "w_bool" else None

    loaded = sess.load_params(cache, decide)
    assert asked == {name: (x.shape, x.dtype) for name, x in params().items()}
    same(loaded["w_bool"].get(), np.split(params()["w_bool"], sess.num_workers, 1)[0])


# Presharded ---------------------------------------------------------------------------------------


@groups
def test_presharded(sess: di.Session, num_groups: int, tmp_path: pathlib.Path) -> None:
    arrays = {"b": random("float16"), "a": random("int8", (24,))}
    for in_group in (True, False):
        parts = sess.group_size if in_group else sess.num_workers
        folder = tmp_path / str(in_group)
        dump(folder, cut(arrays, parts) | {"whole": random("int32", (5,))})
        loaded = sess.load_params(folder, in_group=in_group)
        assert sorted(loaded) == ["a", "b", "whole"]
        for worker in range(sess.num_workers):
            for name, x in arrays.items():
                same(loaded[name].get(worker), np.split(x, parts)[worker % parts])
            same(loaded["whole"].get(worker), random("int32", (5,)))


# Refused before anything is sent ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("info", "complaint"),
    [
        ({"nothing": 0}, "shard_info has 'nothing', and there is no such parameter: there are"),
        ({"w_int8": 3}, "parameter 'w_int8' of shape (12, 24, 36) has no axis 3"),
        ({"scalar": 0}, "parameter 'scalar' of shape () has no axis 0"),
        ({"w_int8": "columns"}, "the shard_info of 'w_int8' is 'columns': allowed are"),
        ({"w_int8": [["test_loading.columns", [[5, 2], "int8"]]]}, "has the shape (5, 2), whose"),
        ('{"w_int8": 0}', "the shard_info of 'w_int8' is 0, which is no chain"),
    ],
    ids=range(6).__iter__(),
)
def test_wrong_shard_info(sess: di.Session, info: Any, complaint: str, cache: pathlib.Path) -> None:
    before = published(sess)
    with pytest.raises(ValueError, match=re.escape(complaint)):
        sess.load_params(cache, info)
    assert published(sess) == before


def test_a_shard_function_that_is_not_there(sess: di.Session, cache: pathlib.Path) -> None:
    before = published(sess)
    info = {"w_int8": [["test_loading.none", [[sess.num_workers, 2], "int8"]]]}
    with pytest.raises(ValueError, match=r"'w_int8': no global function 'test_loading\.none' is"):
        sess.load_params(cache, info)
    assert published(sess) == before


@two_or_more
def test_a_dimension_that_cannot_be_divided(sess: di.Session, tmp_path: pathlib.Path) -> None:
    dump(tmp_path, {"w": np.zeros((3, 13))})
    before = published(sess)
    with pytest.raises(ValueError, match=f"13 is not divisible by {sess.num_workers}"):
        sess.load_params(tmp_path, {"w": -1})
    assert published(sess) == before


@groups
def test_presharded_for_others(sess: di.Session, num_groups: int, tmp_path: pathlib.Path) -> None:
    before = published(sess)
    other = sess.num_workers + 1
    dump(tmp_path / "other", cut({"a": np.zeros(other)}, other))
    with pytest.raises(ValueError, match=f"'a' is cut into {other} shards .* open a session with"):
        sess.load_params(tmp_path / "other")
    if num_groups > 1:
        dump(tmp_path / "world", cut({"a": np.zeros(sess.num_workers)}, sess.num_workers))
        with pytest.raises(ValueError, match="of each group: give in_group=False"):
            sess.load_params(tmp_path / "world")
    dump(tmp_path / "mine", cut({"a": np.zeros(12)}, sess.group_size))
    with pytest.raises(ValueError, match=r"how to split 'a', which the files have in .* already"):
        sess.load_params(tmp_path / "mine", {"a": 0})
    assert published(sess) == before


@pytest.mark.parametrize("path", ["missing", "empty"])
def test_there_is_nothing_to_load(sess: di.Session, path: str, tmp_path: pathlib.Path) -> None:
    (tmp_path / "empty").mkdir()
    before = published(sess)
    with pytest.raises((ValueError, OSError), match=path):
        sess.load_params(tmp_path / path)
    assert published(sess) == before


@pytest.mark.parametrize("info", [3, 1.5, {"w"}])
def test_shard_info_of_a_wrong_type(sess: di.Session, info: Any, cache: pathlib.Path) -> None:
    with pytest.raises(TypeError, match="shard_info is a dict by parameter, a callable"):
        sess.load_params(cache, info)


# Failures on workers ------------------------------------------------------------------------------


def test_a_shard_function_that_fails(sess: di.Session, cache: pathlib.Path) -> None:
    parts = sess.num_workers

    def fail(source: np.ndarray, out: np.ndarray) -> None:
        raise KeyError("no such head")

    with pytest.raises(di.WorkerError) as e:
        sess.load_params(cache, {"w_int8": [[fail, [[parts, 7], "float32"]]]})
    text = str(e.value)
    for part in (
        "parameter 'w_int8': the shard function 'fail' failed",
        f"for {parts} worker",
        f"an input of shape {SHAPE} and int8",
        f"an output of shape ({parts}, 7) and float32",
        "no such head",
    ):
        assert part in text
    on_all(sess, 1)


def truncate(path: str, size: int) -> Callable[..., None]:
    def function(source: np.ndarray, out: np.ndarray) -> None:
        os.truncate(path, size)

    return function


@pytest.mark.parametrize("what", [0, "replicate", "chain"])
def test_a_file_that_becomes_short(sess: di.Session, what: Any, tmp_path: pathlib.Path) -> None:
    """As when somebody copies over it: found while the workers read."""
    dump(tmp_path, {"a": np.zeros(12), "b": np.ones((1200, 100))})
    n, file = sess.num_workers, tmp_path / "params_shard_0.bin"
    if not file.stat().st_size > 5000:
        file = tmp_path / "params_shard_1.bin"
    info = {"a": [[truncate(str(file), 5000), [[n, 1], "int8"]]], "b": what}
    if what == "chain":
        info["b"] = [["test_loading.columns", [[n, 1200, 100 // n], "float64"], n]]
    if 100 % n and what == "chain":
        info["b"][0][1][0] = [n, 1]
    with pytest.raises(di.WorkerError) as e:
        sess.load_params(tmp_path, info)
    assert file.name in str(e.value)
    assert "'b'" in str(e.value)
    on_all(sess, 2)


@pytest.mark.processes
@two_or_more
def test_a_worker_without_the_files(sess: di.Session, tmp_path: pathlib.Path) -> None:
    with Apart(sess, tmp_path) as here:
        dump(here.folders[0] / "x", {"w": np.zeros(12)})
        with pytest.raises(di.WorkerError) as e:
            sess.load_params(here.path, {"w": 0})
        assert "worker 0" not in str(e.value).splitlines()[0]
        assert "/proc/self/cwd/x" in str(e.value)
    on_all(sess, 3)


@pytest.mark.processes
@two_or_more
def test_a_worker_with_other_files(sess: di.Session, tmp_path: pathlib.Path) -> None:
    with Apart(sess, tmp_path) as here:
        for i, folder in enumerate(here.folders):
            dump(folder / "x", {"w": np.zeros(12, "int8" if i != 1 else "uint8")})
        with pytest.raises(di.WorkerError, match="has other parameters on worker 1 of"):
            sess.load_params(here.path)
    on_all(sess, 4)


@two_or_more
@pytest.mark.parametrize("what", [0, "replicate"])
def test_memory_is_short(sess: di.Session, what: Any, tmp_path: pathlib.Path) -> None:
    if not peer_memory(sess):
        pytest.skip("without peer memory, memory has no limit of ours")
    size = 1 << 40
    tensor = {"name": "w", "shape": [12, size // 12], "dtype": "int8", "format": "raw"}
    tensor |= {"nbytes": size // 12 * 12, "byteOffset": 0}
    file = {"dataPath": "w.bin", "format": "raw-shard", "nbytes": size, "records": [tensor]}
    index = {"metadata": {}, "records": [file | {"nbytes": tensor["nbytes"]}]}
    (tmp_path / "tensor-cache.json").write_text(json.dumps(index))
    (tmp_path / "w.bin").touch()
    os.truncate(tmp_path / "w.bin", tensor["nbytes"])  # one hole
    with pytest.raises(di.WorkerError, match="MemoryError"):
        sess.load_params(tmp_path, {"w": what})
    on_all(sess, 5)


# What it costs ------------------------------------------------------------------------------------


def resident() -> int:
    """Return this process's anonymous and shared memory, in bytes."""
    text = pathlib.Path("/proc/self/status").read_text(encoding="ascii")
    return sum(int(kb) for kb in re.findall(r"^Rss(?:Anon|Shmem):\s+(\d+) kB", text, re.M)) << 10


@pytest.mark.slow
@pytest.mark.parametrize("axis", [0, 1])
def test_no_worker_ever_has_a_whole_parameter(
    sess: di.Session, axis: int, tmp_path: pathlib.Path
) -> None:
    one = np.ones((96, 1), np.float32)
    columns = {"a": 1 << 18, "b": 1 << 18, "c": 3 << 18, "shared": 1 << 16}
    arrays = {name: np.broadcast_to(one, (96, n // 12 * 12)) for name, n in columns.items()}
    dump(tmp_path, arrays, shard_cap_mb=512)
    own = sum(
        x.nbytes // (1 if name == "shared" else sess.num_workers) for name, x in arrays.items()
    )
    peak = before = resident()
    stop = threading.Event()

    def watch() -> None:
        nonlocal peak
        while not stop.wait(0.001):
            peak = max(peak, resident())

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        loaded = sess.load_params(tmp_path, {"a": axis, "b": axis, "c": axis})
    finally:
        stop.set()
        watcher.join()
    assert peak - before <= 1.3 * own + (64 << 20)
    sums = sess.call(lambda x: float(x.sum()), loaded["c"]).get_all()
    assert sums == [arrays["c"].size / sess.num_workers] * sess.num_workers


def test_progress(sess: di.Session, cache: pathlib.Path, capfd: pytest.CaptureFixture[str]) -> None:
    sess.load_params(cache, {"w_int8": 0})
    sess.load_params(cache, {"w_int8": 0}, progress=False)
    assert "loading" not in capfd.readouterr().err
    sess.load_params(cache, {"w_int8": 0}, progress=True)
    shown = capfd.readouterr().err
    assert re.search(r"\rloading .*100% .*KiB of .*\n", shown)
