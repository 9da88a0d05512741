"""TVM's tensor caches: what is written, read and refused."""

from __future__ import annotations

import copy
import hashlib
import json
import os
import pathlib
import re
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from arrays_in_files import DTYPES, SAMPLES, any_bits, dtype_of, layouts, same

import spmd_disco as di
from spmd_disco.files.bfloat16 import to_bfloat16_bits
from spmd_disco.files.tensor_cache import TensorCacheIndex

CACHE = SAMPLES / "cache_raw"
INDEX = json.loads((CACHE / "tensor-cache.json").read_text())


def index_of(folder: pathlib.Path) -> Any:
    return json.loads((folder / "tensor-cache.json").read_text())


def names_of(folder: pathlib.Path) -> list[list[str]]:
    return [[r["name"] for r in shard["records"]] for shard in index_of(folder)["records"]]


# ---- What TVM wrote


def test_sample_of_tvm(tmp_path: pathlib.Path) -> None:
    found = di.load_tensor_cache(CACHE, verify=True)
    assert list(found) == ["f32", "i8", "bf16", "f16"]
    same(found["f32"], np.array([[-1, -0.5, 0], [0.5, 1, 1.5]], np.float32))
    same(found["i8"], np.array([-128, -1, 0, 1, 127], np.int8))
    assert found["bf16"].dtype == ml_dtypes.bfloat16
    assert found["bf16"].astype("f4").tolist()[0] == [1, -2.5]
    same(found["f16"], np.array([[[0.1, -65504]]], np.float16))
    assert di.tensor_cache_metadata(CACHE) == {"note": "sample"}
    di.dump_tensor_cache(tmp_path, found, {"note": "sample"}, encode_format="raw")
    for file in CACHE.iterdir():
        assert (tmp_path / file.name).read_bytes() == file.read_bytes()
    assert len([*tmp_path.iterdir()]) == 2


def test_the_older_name_of_the_index(tmp_path: pathlib.Path) -> None:
    for file in CACHE.iterdir():
        (tmp_path / file.name.replace("tensor-cache", "ndarray-cache")).write_bytes(
            file.read_bytes()
        )
    assert len(di.load_tensor_cache(str(tmp_path), verify=True)) == 4
    assert len(di.load_tensor_cache(tmp_path / "ndarray-cache.json")) == 4
    assert di.tensor_cache_metadata(tmp_path) == {"note": "sample"}


# ---- What is written can be read


@pytest.mark.parametrize("encode_format", ["raw", "f32-to-bf16"])
def test_all_dtypes_and_layouts(encode_format: str, tmp_path: pathlib.Path) -> None:
    arrays: dict[str, np.ndarray] = {}
    expected = {}
    for name in DTYPES:
        for shape in [(), (0, 3), (2, 3, 5)]:
            a = any_bits(shape, dtype_of(name), len(arrays))
            for layout, array in layouts(a).items():
                key = f"{name} {shape} {layout}"
                arrays[key] = array
                expected[key] = a
                if encode_format != "raw" and name == "float32":
                    bits = to_bfloat16_bits(a.reshape(-1)).astype(np.uint32) << np.uint32(16)
                    expected[key] = bits.view(np.float32).reshape(shape)
    di.dump_tensor_cache(tmp_path, arrays, {"a": [1]}, encode_format, shard_cap_mb=0.0005)
    found = di.load_tensor_cache(tmp_path, verify=True)
    assert found.keys() == arrays.keys()
    for name, array in found.items():
        same(array, expected[name])
    assert len(names_of(tmp_path)) > 10
    for shard in index_of(tmp_path)["records"]:
        data = (tmp_path / shard["dataPath"]).read_bytes()
        assert len(data) == shard["nbytes"]
        assert hashlib.md5(data).hexdigest() == shard["md5sum"]


def test_rounding_to_bfloat16() -> None:
    rng = np.random.default_rng(0)
    bits = rng.integers(0, 2**32, 200_000, dtype=np.uint32)
    # Those next to each bfloat16, in the middle between two of them, and beside the middle.
    every = (np.arange(2**16, dtype=np.uint32) << 16)[:, None]
    bits = np.concatenate(
        [bits, (every | np.array([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], np.uint32)).reshape(-1)]
    )
    values = bits.view(np.float32)
    found = to_bfloat16_bits(values)
    assert found.dtype == np.uint16
    inside = np.isfinite(values)
    inside[inside] = np.abs(values[inside]) < float(ml_dtypes.finfo(ml_dtypes.bfloat16).max)
    nearest = values[inside].astype(ml_dtypes.bfloat16).view(np.uint16)
    assert (found[inside] == nearest).all()
    assert (found[~inside] == (bits[~inside] >> 16)).all()
    same(
        to_bfloat16_bits(np.float32([np.nan, np.inf, 3.4e38])), np.uint16([0x7FC0, 0x7F80, 0x7F7F])
    )


def test_order_of_data_files(tmp_path: pathlib.Path) -> None:
    sizes = {"a": 40, "b": 30, "c": 60, "d": 29, "e": 1, "f": 49, "g": 0, "h": 200, "i": 10}
    arrays = {name: np.zeros(size, np.int8) for name, size in sizes.items()}
    di.dump_tensor_cache(tmp_path, arrays, shard_cap_mb=100 / 2**20)
    assert names_of(tmp_path) == [["c"], ["a", "b", "d"], ["h"], ["e", "f", "g", "i"]]
    assert list(di.load_tensor_cache(tmp_path)) == ["c", "a", "b", "d", "h", "e", "f", "g", "i"]


def test_only_empty_arrays(tmp_path: pathlib.Path) -> None:
    di.dump_tensor_cache(tmp_path, {"e": np.zeros((0, 3), np.float32)})
    same(di.load_tensor_cache(tmp_path, verify=True)["e"], np.zeros((0, 3), np.float32))
    di.dump_tensor_cache(tmp_path, {})
    assert di.load_tensor_cache(tmp_path, verify=True) == {}


def test_format_by_parameter(tmp_path: pathlib.Path) -> None:
    arrays = {name: np.float32([1.001]) for name in "abc"}
    di.dump_tensor_cache(tmp_path, arrays, encode_format={"a": "f32-to-bf16", "*": "raw"})
    found = di.load_tensor_cache(tmp_path)
    assert [float(x[0]) for x in found.values()] == [1, np.float32(1.001), np.float32(1.001)]
    as_stored = di.load_tensor_cache(tmp_path / "tensor-cache-b16.json")
    assert [x.dtype.name for x in as_stored.values()] == ["bfloat16", "float32", "float32"]


def test_an_older_cache_is_replaced(tmp_path: pathlib.Path) -> None:
    many = {f"p{i}": np.ones(100, np.float32) for i in range(5)}
    folder = tmp_path / "new" / "folder"
    di.dump_tensor_cache(folder, many, shard_cap_mb=0)
    (folder / "tensor-cache.json").rename(folder / "ndarray-cache.json")
    (folder / "own.bin").write_bytes(b"mine")

    def breaks() -> Any:
        yield "x", np.zeros(3)
        yield "y", np.zeros(300)
        raise RuntimeError("no more")

    before = {f.name: f.read_bytes() for f in folder.iterdir()}
    with pytest.raises(RuntimeError, match="no more"):
        di.dump_tensor_cache(folder, breaks(), shard_cap_mb=0)
    assert {f.name: f.read_bytes() for f in folder.iterdir()} == before
    di.dump_tensor_cache(folder, {"x": np.zeros(3)}, metadata=lambda: {"late": True})
    assert sorted(f.name for f in folder.iterdir()) == [
        "own.bin", "params_shard_0.bin", "tensor-cache.json",
    ]  # fmt: skip
    assert di.tensor_cache_metadata(folder) == {"late": True}


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"encode_format": "bf16"}, ValueError, "'bf16' for '\\*': allowed are raw, f32-to-bf16"),
        ({"encode_format": {"a": "x"}}, ValueError, "encode_format is 'x' for 'a'"),
        ({"encode_format": {"b": "raw"}}, ValueError, "neither parameter 'a' nor '\\*'"),
        ({"encode_format": 3}, TypeError, "a str or a dict by parameter, not int"),
        ({"shard_cap_mb": -1}, ValueError, "shard_cap_mb is -1: it has to be 0 or more"),
        ({"shard_cap_mb": float("nan")}, ValueError, "shard_cap_mb is nan"),
        ({"shard_cap_mb": "32"}, TypeError, "shard_cap_mb is a number of MiB, not '32'"),
        ({"shard_cap_mb": True}, TypeError, "shard_cap_mb is a number of MiB, not True"),
        ({"metadata": {1, 2}}, TypeError, "metadata has to be what JSON can hold"),
        ({"metadata": float("nan")}, ValueError, "metadata has to be what JSON can hold"),
        ({"metadata": lambda: b""}, TypeError, "metadata has to be what JSON can hold"),
        ({"params": {"a": np.zeros(1, "M8[s]")}}, ValueError, "parameter 'a': an array of dtype"),
        ({"params": [("a", np.zeros(1))] * 2}, ValueError, "parameter 'a' is there twice"),
        ({"params": {0: np.zeros(1)}}, TypeError, "the name of a parameter is a str, not int"),
    ],
)
def test_wrong_arguments(options: Any, error: type, text: str, tmp_path: pathlib.Path) -> None:
    with pytest.raises(error, match=text):
        di.dump_tensor_cache(tmp_path, **{"params": {"a": np.zeros(1)}, **options})
    assert not list(tmp_path.iterdir())


# ---- Caches that are refused


def shard(**changes: Any) -> Callable[[Any], None]:
    return lambda index: index["records"][0].update(changes)


def tensor(i: int = 0, **changes: Any) -> Callable[[Any], None]:
    return lambda index: index["records"][0]["records"][i].update(changes)


def without(*path: Any) -> Callable[[Any], None]:
    def change(index: Any) -> None:
        for step in path[:-1]:
            index = index[step]
        del index[path[-1]]

    return change


def twice(index: Any) -> None:
    index["records"] *= 2


def parameter_twice(index: Any) -> None:
    index["records"][0]["records"][1]["name"] = "f32"


IN_SHARD = ("records", 0, "records", 0)
BAD = {
    "no records": (without("records"), "has no 'records', which has to be a list"),
    "records": (lambda i: i.update(records={}), "'records' of .* is an object of 0"),
    "record": (lambda i: i.update(records=[3]), "data file 0 of .* is 3: it has to be an object"),
    "no path": (without("records", 0, "dataPath"), "has no 'dataPath', which has to be a string"),
    "path": (shard(dataPath=None), "'dataPath' of data file 0 .* is None"),
    "no name": (shard(dataPath=""), "names the data file '': that is no name"),
    "NUL": (shard(dataPath="a\0b"), "that is no name of a file"),
    "folder": (shard(dataPath="."), "not within the folder"),
    "up": (shard(dataPath="../x"), "'../x', which is not within the folder of the index"),
    "up and down": (shard(dataPath="a/../b"), "not within the folder"),
    "backslash": (shard(dataPath="..\\x"), "not within the folder"),
    "absolute": (shard(dataPath="/etc/passwd"), "'/etc/passwd', which is not within the folder"),
    "surrogate": (shard(dataPath="\ud800"), "'dataPath' of .* is no Unicode"),
    "missing": (shard(dataPath="none.bin"), None),
    "shard format": (shard(format="raw"), "'format' of .* is 'raw': only 'raw-shard' is allowed"),
    "shard nbytes": (shard(nbytes=42), "has 41 bytes, and .* says that it has 42"),
    "less nbytes": (shard(nbytes=40), "lies at bytes 37 to 41, outside its file, which has 40"),
    "float nbytes": (shard(nbytes=41.0), "'nbytes' of data file 0 .* is 41.0: .* an integer"),
    "bool nbytes": (shard(nbytes=True), "'nbytes' of data file 0 .* is True"),
    "huge nbytes": (shard(nbytes=2**63), "'nbytes' .* allowed are 0 to 2\\*\\*63 - 1"),
    "negative nbytes": (shard(nbytes=-1), "'nbytes' of data file 0 .* is -1"),
    "md5": (shard(md5sum=3), "'md5sum' of data file 0 .* is 3: it has to be a string"),
    "no tensors": (without("records", 0, "records"), "'params_shard_0.bin' in .* has no 'records'"),
    "tensor": (lambda i: i["records"][0]["records"].append([]), "record 4 of .* is a list of 0"),
    "tensor name": (tensor(name=7), "'name' of record 0 of 'params_shard_0.bin' .* is 7"),
    "no shape": (without(*IN_SHARD, "shape"), "has no 'shape'"),
    "shape": (tensor(shape="23"), "'shape' of parameter 'f32', record 0 .* is '23'"),
    "float": (tensor(shape=[2, 3.0]), "'shape' of parameter 'f32'.* has 3.0 among its dimensions"),
    "bool": (tensor(shape=[True, 6]), "has True among its dimensions"),
    "NaN": (tensor(shape=[float("nan")]), "has nan among its dimensions"),
    "infinity": (tensor(byteOffset=float("inf")), "'byteOffset' of .* is inf"),
    "negative": (tensor(shape=[-2, -3]), "has -2 among its dimensions"),
    "huge": (tensor(shape=[10**4000]), "has a huge number among its dimensions"),
    "overflow": (tensor(shape=[2**32, 2**32]), "more than memory can be addressed"),
    "overflow by 0": (tensor(shape=[2**62, 0, 2**62], nbytes=0), "more than memory can be"),
    "ndim": (tensor(shape=[1] * 100000), "has 100000 dimensions: at most (64|32) are allowed"),
    "other shape": (tensor(shape=[2, 4]), "'nbytes' .* is 24, but \\[2, 4\\] of float32 are 32"),
    "dtype": (tensor(dtype="float33"), "dtype 'float33' is none that can be read"),
    "int4": (tensor(dtype="int4"), "dtype 'int4' is none that can be read"),
    "vector": (tensor(dtype="float32x4"), "dtype 'float32x4' is none"),
    "no dtype": (tensor(dtype=None), "'dtype' of .* is None: it has to be a string"),
    "other dtype": (tensor(dtype="float64"), "is 24, but \\[2, 3\\] of float64 are 48 bytes"),
    "format": (tensor(format="zip"), "'format' of .* is 'zip': allowed are raw, f32-to-bf16"),
    "bf16": (tensor(format="f32-to-bf16"), "is 24, but \\[2, 3\\] of bfloat16 are 12 bytes"),
    "nbytes": (tensor(nbytes=23), "'nbytes' of .* is 23, but"),
    "string": (tensor(nbytes="24"), "'nbytes' of .* is '24'"),
    "offset": (tensor(3, byteOffset=38), "lies at bytes 38 to 42, outside its file, which has 41"),
    "far": (tensor(3, byteOffset=2**63 - 1), "outside its file"),
    "negative offset": (tensor(byteOffset=-1), "'byteOffset' of .* is -1"),
    "overlap": (tensor(1, byteOffset=23), "'f32' and 'i8' .* overlap: .* byte 24, .* at 23"),
    "same file": (twice, "has the data file 'params_shard_0.bin' twice"),
    "same name": (parameter_twice, "has parameter 'f32' twice"),
}  # fmt: skip


def cache(folder: pathlib.Path, text: str | bytes) -> pathlib.Path:
    data = (CACHE / "params_shard_0.bin").read_bytes()
    (folder / "params_shard_0.bin").write_bytes(data)
    (folder / "tensor-cache.json").write_bytes(text if isinstance(text, bytes) else text.encode())
    return folder


@pytest.mark.parametrize("case", BAD)
def test_bad_indexes(case: str, tmp_path: pathlib.Path) -> None:
    change, text = BAD[case]
    index = copy.deepcopy(INDEX)
    change(index)
    cache(tmp_path, json.dumps(index))
    if text is None:
        with pytest.raises(FileNotFoundError):
            di.load_tensor_cache(tmp_path)
        return
    with pytest.raises(ValueError, match=text) as caught:
        di.load_tensor_cache(tmp_path)
    assert str(tmp_path / "tensor-cache.json") in str(caught.value)
    assert len(str(caught.value)) < 600
    if "says that it has" not in text:
        with pytest.raises(ValueError, match=text):
            TensorCacheIndex.parse(json.dumps(index), tmp_path)


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b"", "is not the JSON that it should be"),
        (b"[]", "is a list of 0: it has to be an object"),
        (b"null", "is None: it has to be an object"),
        (b"{", "is not the JSON that it should be"),
        (b"\xff\xfe{}", "is not UTF-8"),
        (b'{"records": [], "records": []}', "the key 'records' is there twice"),
        (b"[" * 200_000, "nested too deeply"),
        (b'{"records": [{"nbytes": ' + b"9" * 5000 + b"}]}", "is not the JSON|has no 'dataPath'"),
    ],
)
def test_bad_json(content: bytes, text: str, tmp_path: pathlib.Path) -> None:
    with pytest.raises(ValueError, match=text):
        di.load_tensor_cache(cache(tmp_path, content))
    with pytest.raises(ValueError, match=text):
        di.tensor_cache_metadata(tmp_path)


def test_links_that_leave_the_folder(tmp_path: pathlib.Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    cache(folder, json.dumps(INDEX))
    data = folder / "params_shard_0.bin"
    data.rename(folder / "inside")
    data.symlink_to("inside")
    assert len(di.load_tensor_cache(folder)) == 4
    (folder / "inside").rename(tmp_path / "outside")
    data.unlink()
    data.symlink_to(tmp_path / "outside")
    with pytest.raises(ValueError, match=r"a link to .*/outside, which is not within the folder"):
        di.load_tensor_cache(folder)
    data.unlink()
    (folder / "sub").symlink_to(tmp_path)
    (folder / "tensor-cache.json").write_text(
        json.dumps(INDEX).replace("params_shard_0.bin", "sub/outside")
    )
    with pytest.raises(ValueError, match="not within the folder of the index"):
        di.load_tensor_cache(folder)
    (tmp_path / "link").symlink_to(folder)  # the folder itself may be anywhere
    (folder / "sub").unlink()
    (folder / "sub").mkdir()
    (tmp_path / "outside").rename(folder / "sub" / "outside")
    assert len(di.load_tensor_cache(tmp_path / "link", verify=True)) == 4


def test_one_file_by_two_names(tmp_path: pathlib.Path) -> None:
    index = copy.deepcopy(INDEX)
    other = copy.deepcopy(INDEX["records"][0])
    other["dataPath"] = "other.bin"
    for r in other["records"]:
        r["name"] += "2"
    index["records"].append(other)
    cache(tmp_path, json.dumps(index))
    (tmp_path / "other.bin").symlink_to("params_shard_0.bin")
    with pytest.raises(ValueError, match=r"'other.bin' twice, also as 'params_shard_0.bin'"):
        di.load_tensor_cache(tmp_path)


def test_snapshots_of_the_hugging_face_cache(tmp_path: pathlib.Path) -> None:
    snapshot = tmp_path / "models--x" / "snapshots" / "0123"
    blobs = tmp_path / "models--x" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for i, file in enumerate(CACHE.iterdir()):
        (blobs / str(i)).write_bytes(file.read_bytes())
        (snapshot / file.name).symlink_to(f"../../blobs/{i}")
    assert len(di.load_tensor_cache(snapshot, verify=True)) == 4


def test_data_files_are_files(tmp_path: pathlib.Path) -> None:
    cache(tmp_path, json.dumps(INDEX))
    (tmp_path / "params_shard_0.bin").unlink()
    os.mkfifo(tmp_path / "params_shard_0.bin")
    with pytest.raises(ValueError, match=r"params_shard_0.bin is no regular file"):
        di.load_tensor_cache(tmp_path)


def test_verify(tmp_path: pathlib.Path) -> None:
    cache(tmp_path, json.dumps(INDEX))
    data = bytearray((tmp_path / "params_shard_0.bin").read_bytes())
    data[0] ^= 1
    (tmp_path / "params_shard_0.bin").write_bytes(data)
    assert len(di.load_tensor_cache(tmp_path)) == 4
    with pytest.raises(
        ValueError,
        match=f"^{re.escape(str(tmp_path))}/params_shard_0.bin has MD5 [0-9a-f]{{32}}, and .* says "
        "that it has '5ceea7935fa6fc404f31d1b6c28a6029'",
    ):
        di.load_tensor_cache(tmp_path, verify=True)
    index = copy.deepcopy(INDEX)
    del index["records"][0]["md5sum"]
    cache(tmp_path, json.dumps(index))
    with pytest.raises(ValueError, match=r"no 'md5sum' for 'params_shard_0.bin': it cannot be"):
        di.load_tensor_cache(tmp_path, verify=True)


def test_what_is_not_there(tmp_path: pathlib.Path) -> None:
    with pytest.raises(
        FileNotFoundError, match=r"neither tensor-cache.json nor ndarray-cache.json"
    ):
        di.load_tensor_cache(tmp_path)
    with pytest.raises(FileNotFoundError):
        di.tensor_cache_metadata(tmp_path / "none.json")


def test_index_without_files(tmp_path: pathlib.Path) -> None:
    index = TensorCacheIndex.parse((CACHE / "tensor-cache.json").read_text(), tmp_path)
    assert [r.name for r in index.records] == ["f32", "i8", "bf16", "f16"]
    assert index.metadata == {"note": "sample"}
    assert index.records[2].shape == (2, 2)
    assert index.records[2].offset == 29
    assert index.records[2].path == str(tmp_path / "params_shard_0.bin")
    assert TensorCacheIndex.parse('{"records": []}', tmp_path).metadata == {}
