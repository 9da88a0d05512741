"""Files of ours and of TVM's, byte for byte, both ways: where apache-tvm is installed."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from arrays_in_files import any_bits, layouts, same

import spmd_disco as di

try:
    import tvm
    from tvm.contrib import tvmjs
except ImportError as e:
    pytest.skip(f"apache-tvm is needed: {e}", allow_module_level=True)

#: TVM's Python does not close the files that it reads.
pytestmark = [
    pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

TENSORS = [
    "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16", "float32",
    "float64", "bool", "bfloat16", "float8_e4m3fn", "float8_e5m2",
]  # fmt: skip
#: Those that TVM's own Python cannot make from NumPy, but its files can hold.
BY_BYTES = [
    "float8_e3m4", "float8_e4m3", "float8_e4m3b11fnuz", "float8_e4m3fnuz", "float8_e5m2fnuz",
    "float8_e8m0fnu",
]  # fmt: skip
SHAPES = [(), (0,), (5,), (2, 3), (3, 0, 2), (1, 2, 2)]


def dtype_of(name: str) -> Any:
    return np.dtype(getattr(ml_dtypes, name, None) or name)


def to_tvm(array: np.ndarray, name: str) -> Any:
    tensor = tvm.runtime.empty(array.shape, name)
    if array.size:
        raw = np.ascontiguousarray(array).reshape(array.shape).view(f"u{array.itemsize}")
        flat = tensor._create_view(array.shape, f"uint{8 * array.itemsize}")
        np.from_dlpack(flat)[...] = raw
    return tensor


def bits_of(tensor: Any) -> bytes:
    name = str(tensor.dtype)
    size = dtype_of(name).itemsize
    shape = tuple(tensor.shape)
    if 0 in shape:
        return b""
    return np.from_dlpack(tensor._create_view(shape, f"uint{8 * size}")).tobytes()


def arrays() -> dict[str, tuple[str, np.ndarray]]:
    names = TENSORS + [name for name in BY_BYTES if hasattr(ml_dtypes, name)]
    return {
        f"{name} {shape}": (name, any_bits(shape, dtype_of(name), i))
        for i, name in enumerate(names)
        for shape in SHAPES
    }


def test_param_dicts(tmp_path: pathlib.Path) -> None:
    known = arrays()
    theirs = {key: to_tvm(array, name) for key, (name, array) in known.items()}
    ours = {key: array for key, (_, array) in known.items()}
    data = bytes(tvm.runtime.save_param_dict(theirs))
    assert di.save_param_dict_to_bytes(ours) == data
    found = di.load_param_dict_from_bytes(data)
    assert list(found) == list(ours)
    for key, array in found.items():
        same(array, ours[key])
    # Its own (3, 0, 2) is something that TVM refuses.
    ours = {key: array for key, array in ours.items() if 0 not in array.shape[1:]}
    di.save_param_dict(tmp_path / "x", ours)
    back = tvm.runtime.load_param_dict_from_file(str(tmp_path / "x"))
    assert sorted(back) == sorted(ours)
    for key, tensor in back.items():
        assert str(tensor.dtype) == known[key][0]
        assert tuple(tensor.shape) == ours[key].shape
        assert bits_of(tensor) == ours[key].tobytes()


def test_tvm_arrays_can_be_saved(tmp_path: pathlib.Path) -> None:
    values = np.arange(6, dtype=np.float32).reshape(2, 3)
    di.save_tensor(tmp_path / "x", tvm.runtime.tensor(values))
    same(di.load_tensor(tmp_path / "x"), values)


def caches(seed: int) -> dict[str, np.ndarray]:
    """Return arrays of random sizes, few of which fit into one data file."""
    rng = np.random.default_rng(seed)
    names = TENSORS + ["complex64", "complex128"] + ["float32"] * 10
    found = {}
    for i in range(40):
        name = str(rng.choice(names))
        shape = tuple(int(n) for n in rng.integers(0 if i else 1, 9, rng.integers(0, 4)))
        found[f"p{i} {name}"] = any_bits(shape, dtype_of(name), seed * 100 + i)
    found["special"] = np.float32(
        [np.nan, -np.nan, np.inf, -np.inf, 3.4e38, -3.4e38, 1e-45, 0, -0.0, 1.00390625, 1.01171875]
    )
    return found


@pytest.mark.parametrize(
    "encode_format", ["raw", "f32-to-bf16", {"special": "raw", "*": "f32-to-bf16"}]
)
@pytest.mark.parametrize("cap", [0, 0.0001, 0.0005, 32])
@pytest.mark.parametrize("seed", range(3))
def test_what_is_written(
    seed: int, cap: float, encode_format: Any, tmp_path: pathlib.Path, capsys: Any
) -> None:
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    params = caches(seed)
    metadata = {"ä": [1, 2.5, None, {"b": True}], "n": 2**70}
    with np.errstate(all="ignore"):
        tvmjs.dump_tensor_cache(params, str(theirs), encode_format, metadata, cap)
    di.dump_tensor_cache(ours, params, metadata, encode_format, cap)
    assert sorted(f.name for f in ours.iterdir()) == sorted(f.name for f in theirs.iterdir())
    for file in theirs.iterdir():
        assert (ours / file.name).read_bytes() == file.read_bytes(), file.name
    # Layouts that TVM does not tell apart are the same bytes for us.
    for name, array in params.items():
        for layout, other in layouts(array).items():
            di.dump_tensor_cache(tmp_path / "one", {name: array}, encode_format="raw")
            expected = (tmp_path / "one" / "params_shard_0.bin").read_bytes()
            di.dump_tensor_cache(tmp_path / "one", {name: other}, encode_format="raw")
            assert (tmp_path / "one" / "params_shard_0.bin").read_bytes() == expected, layout
        break


@pytest.mark.parametrize("encode_format", ["raw", "f32-to-bf16"])
def test_what_tvm_reads(encode_format: str, tmp_path: pathlib.Path) -> None:
    params = {
        name: array for name, array in caches(1).items() if not name.endswith(("64", "128", "bool"))
    }
    params["bool"] = np.array([True, False])
    di.dump_tensor_cache(tmp_path, params, {"a": 1}, encode_format, 0.0005)
    ours = di.load_tensor_cache(tmp_path, verify=True)
    theirs, metadata = tvmjs.load_tensor_cache(str(tmp_path), tvm.cpu())
    assert metadata == di.tensor_cache_metadata(tmp_path) == {"a": 1}
    assert list(theirs) == list(ours)
    for name, tensor in theirs.items():
        assert tuple(tensor.shape) == ours[name].shape
        assert bits_of(tensor) == ours[name].tobytes(), name


@pytest.mark.parametrize("encode_format", ["raw", "f32-to-bf16"])
def test_what_the_runtime_of_tvm_reads(encode_format: str, tmp_path: pathlib.Path) -> None:
    load = tvm.get_global_func("vm.builtin.tensor_cache.load")
    get = tvm.get_global_func("vm.builtin.tensor_cache.get")
    clear = tvm.get_global_func("vm.builtin.tensor_cache.clear")
    params = {
        name: array for name, array in caches(2).items() if "complex" not in name and array.size
    }
    di.dump_tensor_cache(tmp_path, params, None, encode_format, 0.0005)
    ours = di.load_tensor_cache(tmp_path)
    clear()
    load(str(tmp_path), 1, 0)
    try:
        for name, array in ours.items():
            tensor = get(name)
            assert tensor is not None, name
            assert tuple(tensor.shape) == array.shape
            assert bits_of(tensor) == array.tobytes(), name
    finally:
        clear()


def test_what_tvm_wrote_is_read(tmp_path: pathlib.Path) -> None:
    params = caches(3)
    tvmjs.dump_tensor_cache(params, str(tmp_path), "raw", {"a": 1}, 0.0005)
    found = di.load_tensor_cache(tmp_path, verify=True)
    assert found.keys() == params.keys()
    for name, array in found.items():
        same(array, params[name])
    files = di.load_tensor_cache(tmp_path)
    tvmjs.dump_tensor_cache(
        {
            name: to_tvm(x, str(x.dtype))
            for name, x in params.items()
            if str(x.dtype) in TENSORS[:10]
        },
        str(tmp_path / "own"),
        "raw",
    )
    for name, array in di.load_tensor_cache(tmp_path / "own").items():
        same(array, files[name])


def test_only_empty_arrays(tmp_path: pathlib.Path) -> None:
    """TVM leaves them out of the index; we do not, and TVM reads that."""
    empty = {"e": np.zeros((0, 3), np.float32)}
    tvmjs.dump_tensor_cache(empty, str(tmp_path / "theirs"))
    assert json.loads((tmp_path / "theirs" / "tensor-cache.json").read_text())["records"] == []
    di.dump_tensor_cache(tmp_path / "ours", empty)
    found, _ = tvmjs.load_tensor_cache(str(tmp_path / "ours"), tvm.cpu())
    assert tuple(found["e"].shape) == (0, 3)
