"""Parts of arrays in files of all formats."""

from __future__ import annotations

import io
import json
import os
import pathlib
import pickle
import re
import struct
import warnings
import zipfile
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from arrays_in_files import SAMPLES, any_bits, same
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import spmd_disco as di
from spmd_disco.files import parts
from spmd_disco.files.parts import BFLOAT16, Source
from spmd_disco.files.sources import ParamFiles, open_params

try:
    import safetensors.numpy
except ImportError as e:
    WITHOUT_SAFETENSORS = str(e)
else:
    WITHOUT_SAFETENSORS = ""
    if not hasattr(safetensors.safe_open, "offset_keys"):
        WITHOUT_SAFETENSORS = "safetensors is older than 0.6"
needs_safetensors = pytest.mark.skipif(bool(WITHOUT_SAFETENSORS), reason=WITHOUT_SAFETENSORS)

ARRAYS = {
    "matrix": any_bits((6, 8), np.float32),
    "deep": any_bits((2, 3, 4, 5), np.int16),
    "scalar": any_bits((), np.float64),
    "empty": np.zeros((0, 3), np.int8),
    "bytes": any_bits((7,), np.uint8),
    "odd/name.x": any_bits((3, 5), np.complex64),
    "bools": any_bits((5, 2), np.bool_),
}


def safetensors_file(path: pathlib.Path, arrays: dict[str, np.ndarray], **metadata: str) -> None:
    safetensors.numpy.save_file(arrays, path, metadata or None)


# ---- All formats


def write_cache(folder: pathlib.Path, arrays: Any) -> pathlib.Path:
    di.dump_tensor_cache(folder, arrays, {"by": "test"}, "raw", shard_cap_mb=0.0002)
    return folder


def write_param_dict(folder: pathlib.Path, arrays: Any) -> pathlib.Path:
    di.save_param_dict(folder / "x.params", arrays)
    return folder / "x.params"


def write_npz(folder: pathlib.Path, arrays: Any) -> pathlib.Path:
    np.savez(folder / "x.npz", **arrays)
    return folder / "x.npz"


def write_compressed(folder: pathlib.Path, arrays: Any) -> pathlib.Path:
    np.savez_compressed(folder / "x.npz", **arrays)
    return folder / "x.npz"


def write_safetensors(folder: pathlib.Path, arrays: Any) -> pathlib.Path:
    safetensors_file(folder / "x.safetensors", arrays, by="test")
    return folder / "x.safetensors"


def write_sharded(folder: pathlib.Path, arrays: Any) -> pathlib.Path:
    names = sorted(arrays)
    table = {}
    for i in range(3):
        file = f"model-{i}.safetensors"
        some = {name: arrays[name] for name in names[i::3]}
        safetensors_file(folder / file, {**some, "unlisted": np.zeros(3)})
        table.update(dict.fromkeys(some, file))
    content = {"metadata": {"by": "test"}, "weight_map": table}
    (folder / "model.safetensors.index.json").write_text(json.dumps(content))
    return folder


WRITERS = [
    write_cache,
    write_param_dict,
    write_npz,
    write_compressed,
    pytest.param(write_safetensors, marks=needs_safetensors),
    pytest.param(write_sharded, marks=needs_safetensors),
]


@pytest.mark.parametrize("write", WRITERS)
def test_all_formats(write: Any, tmp_path: pathlib.Path) -> None:
    path = write(tmp_path, ARRAYS)
    with open_params(path) as files:
        assert isinstance(files, ParamFiles)
        if "by" in files.metadata:
            assert files.metadata["by"] == "test"
        assert sorted(files) == sorted(ARRAYS)
        again = pickle.loads(pickle.dumps(files))
    for found in (files, again):
        for name, source in found.items():
            expected = ARRAYS[name]
            assert (source.name, source.shape, source.dtype) == (
                name, expected.shape, expected.dtype,
            )  # fmt: skip
            assert source.nbytes == expected.nbytes
            same(source.read(), expected)
            out = np.empty(expected.shape, expected.dtype, order="F")
            source.read_into(out)
            assert out.tobytes() == expected.tobytes()
    out = np.empty((2, 1, 4, 2), np.int16)
    files["deep"].read_into(out, (slice(None), slice(1, 2), slice(0, 4), slice(-3, -1)))
    assert (out == ARRAYS["deep"][:, 1:2, :, 2:4]).all()


def test_formats_of_one_tensor(tmp_path: pathlib.Path) -> None:
    with open_params(SAMPLES / "single_i8.tvmtensor") as files:
        same(files["single_i8"].read(), np.array([-128, -1, 0, 1, 127], np.int8))
    np.save(tmp_path / "some.weights.npy", ARRAYS["matrix"])
    with open_params(os.fsencode(tmp_path / "some.weights.npy")) as files:  # type: ignore[arg-type]
        assert list(files) == ["some.weights"]
        same(files["some.weights"].read(), ARRAYS["matrix"])
    (tmp_path / "some.weights.npy").rename(tmp_path / "x")
    assert list(open_params(str(tmp_path / "x"))) == ["x"]


@needs_safetensors
def test_folders(tmp_path: pathlib.Path) -> None:
    safetensors_file(tmp_path / "model.safetensors", {"a": np.arange(3)})
    assert list(open_params(tmp_path)) == ["a"]
    di.dump_tensor_cache(tmp_path, {"b": np.arange(3)})
    assert list(open_params(tmp_path)) == ["b"]


def test_order_of_the_file(tmp_path: pathlib.Path) -> None:
    arrays = {name: np.zeros(3) for name in "zyxab"}
    for write in (write_cache, write_param_dict, write_npz, write_compressed):
        assert list(open_params(write(tmp_path, arrays))) == list("zyxab")


@needs_safetensors
def test_dtypes_of_safetensors(tmp_path: pathlib.Path) -> None:
    kinds = {
        "BF16": "bfloat16",
        "F8_E4M3": "float8_e4m3fn",
        "F8_E5M2": "float8_e5m2",
        "F8_E8M0": "float8_e8m0fnu",
    }
    kinds = {kind: name for kind, name in kinds.items() if hasattr(ml_dtypes, name)}
    header: dict[str, Any] = {}
    data = b""
    expected = {}
    for kind, name in kinds.items():
        expected[name] = any_bits((4, 6), getattr(ml_dtypes, name))
        end = len(data) + expected[name].nbytes
        header[name] = {"dtype": kind, "shape": [4, 6], "data_offsets": [len(data), end]}
        data += expected[name].tobytes()
    text = json.dumps(header).encode()
    (tmp_path / "x.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + data)
    files = open_params(tmp_path / "x.safetensors")
    for name, array in expected.items():
        same(files[name].read(), array)


@needs_safetensors
@pytest.mark.parametrize(
    ("header", "text"),
    [
        ('{"a":{"dtype":"F4","shape":[4],"data_offsets":[0,2]}}', "dtype F4, which cannot be read"),
        ('{"a":{"dtype":"I8","shape":[4],"data_offsets":[0,4]}}', "or is damaged"),
        ('{"a":{"dtype":"I8","shape":[2],"data_offsets":[2,4]}}', "or is damaged"),
        ('{"a":{"dtype":"I8","shape":[9007199254740992,9007199254740992],"data_offsets":[0,2]}}',
         "or is damaged"),
        ('{"a":{"dtype":"I8","shape":[0,4611686018427387904,8],"data_offsets":[0,0]},'
         '"b":{"dtype":"I8","shape":[2],"data_offsets":[0,2]}}', "more than memory|or is damaged"),
        ("{", "or is damaged"),
    ],
)  # fmt: skip
def test_bad_safetensors(header: str, text: str, tmp_path: pathlib.Path) -> None:
    data = struct.pack("<Q", len(header)) + header.encode() + b"ab"
    (tmp_path / "x.safetensors").write_bytes(data)
    with pytest.raises(ValueError, match=text):
        open_params(tmp_path / "x.safetensors")


@needs_safetensors
@pytest.mark.parametrize(
    ("content", "text"),
    [
        ({"weight_map": {"a": "../x.safetensors"}}, "not within the folder of the index"),
        ({"weight_map": {"a": "x.safetensors", "b": "x.safetensors"}}, "says that 'b' is in 'x"),
        ({"weight_map": {"a": 3}}, "'a' of 'weight_map' of .* is 3: it has to be a string"),
        ({"weight_map": []}, "'weight_map' of .* is a list of 0: it has to be an object"),
        ({"weight_map": {}, "metadata": 3}, "'metadata' of .* is 3"),
        ({}, "is no index of parameters"),
        ([], "is no index of parameters"),
    ],
)
def test_bad_indexes_of_safetensors(content: Any, text: str, tmp_path: pathlib.Path) -> None:
    safetensors_file(tmp_path / "x.safetensors", {"a": np.zeros(2)})
    (tmp_path / "x.index.json").write_text(json.dumps(content))
    with pytest.raises(ValueError, match=text):
        open_params(tmp_path / "x.index.json")


def test_what_is_no_file_of_parameters(tmp_path: pathlib.Path) -> None:
    (tmp_path / "x").write_bytes(b"hello, world")
    (tmp_path / "y").write_bytes(b"")
    for name in "xy":
        with pytest.raises(ValueError, match="is no file of parameters: allowed are a folder with"):
            open_params(tmp_path / name)
    with pytest.raises(ValueError, match=r"the folder .* has no parameters: allowed are a"):
        open_params(tmp_path)
    with pytest.raises(FileNotFoundError):
        open_params(tmp_path / "none")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ValueError, match="no regular file"):
        open_params(tmp_path / "pipe")


# ---- NumPy's files


@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("dtype", ["<f4", ">f4", ">c16", "<U5", ">U5", "S3", ">M8[s]", "?", "V3"])
def test_npy(order: Any, dtype: str, tmp_path: pathlib.Path) -> None:
    a = np.arange(60).reshape(3, 4, 5).astype("S3" if dtype == "V3" else dtype)
    a = np.asarray(a.view("V3") if dtype == "V3" else a, order=order)
    np.save(tmp_path / "x.npy", a)
    source = open_params(tmp_path / "x.npy")["x"]
    native = a.astype(a.dtype.newbyteorder("="))
    same(source.read(), native)
    for index in [(), (slice(1, 3),), (slice(None), slice(2, 4)), (slice(1, 2),) * 3]:
        expected = native[index]
        for out_order in "CF":
            out = np.empty(expected.shape, native.dtype, order=out_order)  # type: ignore[call-overload]
            source.read_into(out, index)
            assert out.tobytes() == expected.tobytes()


def npy_header(text: str, version: bytes = b"\x01\x00") -> bytes:
    length = struct.pack("<H" if version == b"\x01\x00" else "<I", len(text))
    return b"\x93NUMPY" + version + length + text.encode()


GOOD = "{'descr': '<f4', 'fortran_order': False, 'shape': (2, 3)}"


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (npy_header(GOOD) + b"x" * 23, "has 23 bytes behind its header, and .* are 24"),
        (npy_header(GOOD) + b"x" * 25, "has 25 bytes behind its header"),
        (npy_header(GOOD)[:20], "its header is damaged"),
        (npy_header("{'descr'"), "its header is damaged"),
        (npy_header(GOOD.replace("(2, 3)", "(-2, -3)")) + b"x" * 24, "negative|damaged"),
        (npy_header(GOOD.replace("(2, 3)", "(2.0, 3)")) + b"x" * 24, "damaged"),
        (npy_header(GOOD.replace("(2, 3)", "(True, 6)")) + b"x" * 24, "to be integers"),
        (npy_header(GOOD.replace("(2, 3)", f"({2**40}, {2**40})")), "more than memory can be"),
        (npy_header(GOOD.replace("(2, 3)", f"({2**40},)")), "has 0 bytes behind its header"),
        (npy_header(GOOD.replace("<f4", "|O")) + b"x" * 48, "holds Python objects"),
        (npy_header(GOOD.replace("<f4", "|V0")), "whose elements cannot be read"),
        (npy_header(GOOD.replace("'<f4'", "('<f4', (2,))")), "whose elements cannot be|damaged"),
        (npy_header("(" * 5000), "its header is damaged"),
        (npy_header(GOOD, b"\x02\x00") + b"x" * 23, "has 23 bytes behind"),
        (npy_header(GOOD, b"\x03\x00") + b"x" * 24, "of version \\(3, 0\\) of .npy files"),
        (npy_header(GOOD, b"\x09\x00") + b"x" * 24, "of version \\(9, 0\\)"),
        (b"\x93NUMPY\x02\x00\xff\xff\xff\xff", "its header is damaged"),
    ],
)
def test_bad_npy(data: bytes, text: str, tmp_path: pathlib.Path) -> None:
    (tmp_path / "x.npy").write_bytes(data)
    with pytest.raises(ValueError, match=f"^{re.escape(str(tmp_path))}/x.npy.*{text}"):
        open_params(tmp_path / "x.npy")
    with zipfile.ZipFile(tmp_path / "x.npz", "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("x.npy", data)
    with pytest.raises(ValueError, match=f"^{re.escape(str(tmp_path))}/x.npz.*{text}"):
        open_params(tmp_path / "x.npz")


def npz(members: dict[str, bytes], method: int = zipfile.ZIP_STORED) -> bytearray:
    file = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of names that are there twice
        with zipfile.ZipFile(file, "w", method) as archive:
            for name, data in members.items():
                archive.writestr(name, data)
    return bytearray(file.getvalue())


def npy(array: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


def test_bad_npz(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "x.npz"

    def refused(data: bytes, text: str) -> None:
        path.write_bytes(data)
        with pytest.raises(ValueError, match=text):
            open_params(path)

    one = npy(np.arange(1000))
    refused(b"PK\x03\x04", "is no .npz file, or is damaged")
    refused(npz({"x.txt": b"x"}), "in .npz files there are only .npy files")
    refused(npz({"x.npy": b"x"}), "is no .npy file")
    refused(npz({"x.npy": one}, zipfile.ZIP_LZMA), "is compressed by method 14: NumPy has 8, and 0")
    data = npz({"a.npy": one, "b.npy": one})
    refused(data.replace(b"b.npy", b"a.npy"), "has parameter 'a' twice")
    place = data.rindex(b"PK\x01\x02")  # of b in the list of members
    moved = data.copy()
    moved[place + 42 : place + 46] = struct.pack("<I", 0)
    refused(moved, "members 'a' and 'b' overlap|is damaged")
    moved[place + 42 : place + 46] = struct.pack("<I", 12)
    refused(moved, "is not where the list of members says|is damaged")
    longer = data.copy()
    longer[place + 20 : place + 28] = struct.pack("<II", 2**30, 2**30)
    refused(longer, "and the file has")
    secret = data.copy()
    secret[place + 8] |= 1
    refused(secret, "is encrypted")
    data = npz({"a.npy": one}, zipfile.ZIP_DEFLATED)
    place = data.rindex(b"PK\x01\x02")
    data[place + 24 : place + 28] = struct.pack("<I", 2**31)
    refused(data, "claims to be 2147483648 bytes out of")


def test_compressed_data_that_are_damaged(tmp_path: pathlib.Path) -> None:
    data = npz({"a.npy": npy(np.random.default_rng(0).random(100_000))}, zipfile.ZIP_DEFLATED)
    data[len(data) // 2] ^= 0x55
    (tmp_path / "x.npz").write_bytes(data)
    source = open_params(tmp_path / "x.npz")["a"]
    with pytest.raises(ValueError, match=r"x.npz.*parameter 'a' is damaged"):
        source.read()


# ---- Parts


@st.composite
def cases(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[slice, ...], str, str, int]:
    shape = tuple(draw(st.lists(st.integers(0, 7), max_size=4)))
    index = []
    for n in shape[: draw(st.integers(0, len(shape)))]:
        start = draw(st.integers(0, n))
        index.append(slice(start, draw(st.integers(start, n))))
    dtype = draw(st.sampled_from(["u1", "<i2", "<f4", "<c16", ">f4", "V3", "bf16"]))
    order = draw(st.sampled_from(["C", "F", "strided", "reversed"]))
    return shape, tuple(index), dtype, order, draw(st.integers(0, 9))


@pytest.mark.parametrize(
    ("own", "window"), [(1 << 14, 1 << 25), (1, 1 << 25), (1 << 14, 40), (64, 100)]
)
@pytest.mark.parametrize("fortran", [False, True])
@given(case=cases())
@settings(
    max_examples=120,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
def test_any_part(
    own: int, window: int, fortran: bool, case: Any, tmp_path: pathlib.Path, monkeypatch: Any
) -> None:
    shape, index, name, order, offset = case
    monkeypatch.setattr(parts, "OWN_READ", own)
    monkeypatch.setattr(parts, "WINDOW", window)
    monkeypatch.setattr(parts, "CONVERTED", 32)
    monkeypatch.setattr(parts, "READ", 50)
    encoding = "raw"
    if name == "bf16":
        stored = any_bits(shape, ml_dtypes.bfloat16)
        expected = (stored.view(np.uint16).astype(np.uint32) << np.uint32(16)).view(np.float32)
        encoding = BFLOAT16
    else:
        kind = np.dtype("u1" if name == "V3" else name)
        stored = any_bits((*shape, 3) if name == "V3" else shape, kind)
        stored = stored.view("V3").reshape(shape) if name == "V3" else stored
        expected = stored.astype(stored.dtype.newbyteorder("="))
        if stored.dtype != expected.dtype:
            encoding = parts.SWAPPED
    file = tmp_path / "data"
    file.write_bytes(b"x" * offset + stored.tobytes("F" if fortran else "C") + b"y")
    source = Source(
        "p", shape, expected.dtype, str(file), offset, encoding=encoding, fortran=fortran
    )
    part = expected[index]
    if order in "CF":
        out = np.empty(part.shape, part.dtype, order=order)
    elif not part.ndim:
        out = np.empty((), part.dtype)
    elif order == "strided":
        out = np.empty((*part.shape[:-1], 2 * part.shape[-1]), part.dtype)[..., 1::2]
    else:
        out = np.empty(part.shape[::-1], part.dtype).T[::-1]
    source.read_into(out, index)
    assert out.tobytes() == part.tobytes()
    assert source.read().tobytes() == expected.tobytes()


def test_all_of_bfloat16(tmp_path: pathlib.Path) -> None:
    bits = np.arange(2**16, dtype=np.uint16)
    bits.tofile(tmp_path / "x")
    source = Source("p", (4, 2**14), np.dtype("f4"), str(tmp_path / "x"), 0, encoding=BFLOAT16)
    expected = (bits.astype(np.uint32) << np.uint32(16)).view(np.float32).reshape(4, 2**14)
    same(source.read(), expected)
    out = np.empty((4, 5), np.float32)
    source.read_into(out, (slice(None), slice(7, 12)))
    assert out.tobytes() == expected[:, 7:12].tobytes()


def test_more_than_4_gib(tmp_path: pathlib.Path) -> None:
    """With holes: the file takes no space on the disk."""
    with open(tmp_path / "x", "wb") as file:
        file.truncate(5 << 30)
        file.seek((5 << 30) - 3)
        file.write(b"abc")
    flat = Source("p", (5 << 30,), np.dtype("u1"), str(tmp_path / "x"), 0)
    out = np.empty(4, np.uint8)
    flat.read_into(out, (slice((5 << 30) - 4, None),))
    assert out.tobytes() == b"\0abc"
    rows = Source("p", (5, 1 << 28), np.dtype("f4"), str(tmp_path / "x"), 0)
    part = np.ones((5, 2), np.float32)
    rows.read_into(part, (slice(None), slice((1 << 28) - 2, None)))
    assert part.tobytes() == b"\0" * 37 + b"abc"


class Counting(parts.FileBytes):
    read = 0

    def fill(self, out: memoryview, offset: int) -> int:
        Counting.read += len(out)
        return super().fill(out, offset)

    def view(self, offset: int, nbytes: int) -> Any:
        raise AssertionError("nothing is mapped for long runs")


@pytest.mark.parametrize("write", [p for p in WRITERS if p is not write_compressed])
def test_only_what_is_needed_is_read(write: Any, tmp_path: pathlib.Path, monkeypatch: Any) -> None:
    arrays = {"a": any_bits((4, 60_000), np.float32), "b": any_bits((40, 10_000), np.float32)}
    files = open_params(write(tmp_path, arrays))
    monkeypatch.setattr(parts, "FileBytes", Counting)
    monkeypatch.setattr(Counting, "read", 0)
    out = np.empty((4, 15_000), np.float32)
    files["a"].read_into(out, (slice(None), slice(15_000, 30_000)))
    assert out.tobytes() == arrays["a"][:, 15_000:30_000].tobytes()
    assert Counting.read == out.nbytes
    out = np.empty((10, 10_000), np.float32)
    files["b"].read_into(out, (slice(30, None),))
    assert out.tobytes() == arrays["b"][30:].tobytes()
    assert Counting.read == 2 * 10_000 * 4 + 4 * 15_000 * 4 + 80_000 * 4


def test_wrong_arguments(tmp_path: pathlib.Path) -> None:
    np.arange(6, dtype=np.float32).tofile(tmp_path / "x")
    source = Source("p", (2, 3), np.dtype("f4"), str(tmp_path / "x"), 0)
    out = np.zeros((2, 3), np.float32)
    for wrong, index, text in [
        (out[:1], (), r"shape \(2, 3\) and dtype float32, and is to be read into .* \(1, 3\)"),
        (out.astype("f8"), (), r"dtype float32, and is to be .* dtype float64"),
        (out.astype(">f4"), (), r"of shape \(2, 3\) and dtype >f4"),
        (out, (slice(0, 1),), r"the part has shape \(1, 3\)"),
        (out, (slice(None, None, 2),), r"slices of step 1, not slice\(None, None, 2\)"),
        (out, (slice(None, None, -1),), r"slices of step 1"),
        (out, (0,), r"slices of step 1, not 0"),
        (out, slice(0, 1), r"a tuple of at most as many slices"),
        (out, (slice(None),) * 3, r"has 2 dimensions: .* a tuple of at most as many slices"),
    ]:
        with pytest.raises(ValueError, match=f"parameter 'p'.*{text}"):
            source.read_into(wrong, index)  # type: ignore[arg-type]
    out.flags.writeable = False
    with pytest.raises(ValueError, match="parameter 'p' is to be read into a read-only array"):
        source.read_into(out)


@pytest.mark.parametrize("write", WRITERS)
def test_files_that_have_changed(write: Any, tmp_path: pathlib.Path) -> None:
    files = open_params(write(tmp_path, {"m": ARRAYS["matrix"]}))
    path = files["m"].path
    size = os.path.getsize(path)
    for other in (size - 1, size + 1, 0):
        os.truncate(path, other)
        with pytest.raises(ValueError, match=f"^{re.escape(path)} .*parameter 'm'.*changed|has"):
            files["m"].read()
    os.unlink(path)
    with pytest.raises(FileNotFoundError):
        files["m"].read()


def test_a_file_that_ends_while_it_is_read(tmp_path: pathlib.Path, monkeypatch: Any) -> None:
    np.zeros(100, np.int8).tofile(tmp_path / "x")
    source = Source("p", (100,), np.dtype("i1"), str(tmp_path / "x"), 0)

    class Ends(parts.FileBytes):
        def fill(self, out: memoryview, offset: int) -> int:
            return super().fill(out[:90], offset)

    monkeypatch.setattr(parts, "FileBytes", Ends)
    with pytest.raises(ValueError, match=r"/x ends at byte 90, and parameter 'p' needs 10 more"):
        source.read()


def test_mapped(tmp_path: pathlib.Path) -> None:
    """The array lies in the page cache, and what is written to it stays in this process."""
    params = {
        "w": np.arange(2048, dtype=np.float32).reshape(32, 64),
        "b": np.arange(3, dtype=np.int8),
        "odd": np.arange(4.0),
        "none": np.zeros((0, 2)),
    }
    di.dump_tensor_cache(tmp_path, params, encode_format="raw")
    with open_params(tmp_path) as files:
        w = files["w"].mapped()
        assert w is not None
        assert w.flags.writeable
        assert w.ctypes.data % 64 == 0
        w += 1
        assert np.array_equal(w, params["w"] + 1)
        assert np.array_equal(files["w"].read(), params["w"])
        assert np.array_equal(files["b"].mapped(), params["b"])
        assert files["odd"].offset % 64
        assert files["odd"].mapped() is None
        assert files["none"].mapped() is None
    di.dump_tensor_cache(tmp_path, params)
    with open_params(tmp_path) as files:
        assert files["w"].mapped() is None  # stored as bfloat16
