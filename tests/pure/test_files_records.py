"""TVM's tensor records and parameter dictionaries: what is written, read and refused."""

from __future__ import annotations

import io
import os
import pathlib
import re
import struct
import zlib
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from arrays_in_files import DTYPES, SAMPLES, any_bits, dtype_of, layouts, same

import spmd_disco as di
from spmd_disco.files.dtypes import CODES
from spmd_disco.files.records import dtype_from_string, dtype_to_string

SHAPES = [(), (0,), (1,), (5,), (2, 3), (3, 0, 2), (1, 2, 2), (2, 1, 3, 2)]


def record(
    shape: tuple[int, ...] = (2, 3),
    dtype: tuple[int, int, int] = (2, 32, 1),
    data: bytes = b"abcdefghijklmnopqrstuvwx",
    magic: int = 0xDD5E40F096B4A13F,
    reserved: int = 0,
    device: tuple[int, int] = (1, 0),
    ndim: int | None = None,
    nbytes: int | None = None,
) -> bytes:
    head = struct.pack("<QQii", magic, reserved, *device)
    head += struct.pack("<iBBH", len(shape) if ndim is None else ndim, *dtype)
    head += struct.pack(f"<{len(shape)}q", *shape)
    return head + struct.pack("<q", len(data) if nbytes is None else nbytes) + data


def params_bytes(
    names: list[bytes],
    records: list[bytes],
    magic: int = 0xF7E58D4F05049CB7,
    reserved: int = 0,
    count: int | None = None,
    tensors: int | None = None,
) -> bytes:
    head = struct.pack("<QQQ", magic, reserved, len(names) if count is None else count)
    for name in names:
        head += struct.pack("<Q", len(name)) + name
    return (
        head + struct.pack("<Q", len(records) if tensors is None else tensors) + b"".join(records)
    )


class Stream(io.RawIOBase):
    """A file like a pipe: it cannot seek, and gives and takes less than it is asked for."""

    def __init__(self, data: bytes = b"") -> None:
        super().__init__()
        self.data = bytearray(data)

    def readable(self) -> bool:
        return True

    def writable(self) -> bool:
        return True

    def readinto(self, out: Any) -> int:
        got = self.data[: min(len(out), 1000)]
        out[: len(got)] = got
        del self.data[: len(got)]
        return len(got)

    def write(self, data: Any) -> int:
        self.data += data[:1000]
        return min(len(data), 1000)


# ---- What TVM wrote


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("single_f32", np.array([[-1, -0.5, 0], [0.5, 1, 1.5]], np.float32)),
        ("single_i8", np.array([-128, -1, 0, 1, 127], np.int8)),
        ("single_scalar_f32", np.array(3.25, np.float32)),
    ],
)
def test_samples_of_tvm(name: str, expected: np.ndarray, tmp_path: pathlib.Path) -> None:
    file = SAMPLES / f"{name}.tvmtensor"
    same(di.load_tensor(file), expected)
    di.save_tensor(tmp_path / "own", expected)
    assert (tmp_path / "own").read_bytes() == file.read_bytes()


# ---- What is written can be read


@pytest.mark.parametrize("name", DTYPES)
def test_all_dtypes_shapes_and_layouts(name: str) -> None:
    for shape in SHAPES:
        a = any_bits(shape, dtype_of(name), zlib.crc32(name.encode()))
        code, bits = CODES[name]
        expected = record(shape, (code, bits, 1), a.tobytes())
        for layout, array in layouts(a).items():
            file = io.BytesIO()
            di.save_tensor(file, array)
            assert file.getvalue() == expected, (shape, layout)
            file.seek(0)
            same(di.load_tensor(file), a)


def test_dtype_names() -> None:
    for name in DTYPES:
        assert dtype_from_string(name) == dtype_of(name)
        assert dtype_to_string(dtype_of(name)) == name
    assert dtype_to_string(">f8") == "float64"
    with pytest.raises(
        ValueError, match=r"dtype 'int4' is none that can be read: allowed are int8"
    ):
        dtype_from_string("int4")


@pytest.mark.parametrize(
    "name", ["int4", "uint4", "int2", "float4_e2m1fn", "float6_e2m3fn", "float6_e3m2fn"]
)
def test_parts_of_bytes_are_refused_by_name(name: str, tmp_path: pathlib.Path) -> None:
    dtype = getattr(ml_dtypes, name, None)
    if dtype is None:
        pytest.skip(f"this ml_dtypes has no {name}")
    with pytest.raises(ValueError, match=f"dtype '{name}' cannot be saved: allowed are int8"):
        di.save_tensor(tmp_path / "x", np.zeros(3, dtype))
    with pytest.raises(ValueError, match=f"parameter 'p': an array of dtype '{name}'"):
        di.save_param_dict(tmp_path / "x", {"p": np.zeros(3, dtype)})
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "value",
    [np.array([object()]), np.array(["a"]), np.zeros(2, "i4,f4"), np.zeros(1, "M8[s]"),
     np.zeros(1, np.longdouble), np.array([b"x"])],
)  # fmt: skip
def test_other_dtypes_are_refused(value: np.ndarray, tmp_path: pathlib.Path) -> None:
    with pytest.raises(ValueError, match="cannot be saved"):
        di.save_tensor(tmp_path / "x", value)
    assert not list(tmp_path.iterdir())


def test_masked_arrays_are_refused() -> None:
    with pytest.raises(TypeError, match="masked array"):
        di.save_tensor(io.BytesIO(), np.ma.masked_array([1], [True]))


def test_arrays_of_others() -> None:
    class Theirs:
        def numpy(self) -> np.ndarray:
            return np.arange(3)

    file = io.BytesIO()
    di.save_tensor(file, Theirs())
    file.seek(0)
    same(di.load_tensor(file), np.arange(3))


def test_large_arrays_go_in_pieces(tmp_path: pathlib.Path) -> None:
    a = any_bits((3, 700_001), np.float32)
    for layout, array in layouts(a).items():
        di.save_tensor(tmp_path / "x", array)
        same(di.load_tensor(tmp_path / "x"), a)
        assert (tmp_path / "x").stat().st_size == 56 + a.nbytes, layout


def test_open_files_and_streams() -> None:
    arrays = {
        "a": any_bits((300, 7), np.int16),
        "b": any_bits((), np.float64),
        "e": np.zeros((0, 2)),
    }
    for file in (io.BytesIO(), Stream()):
        for array in arrays.values():
            di.save_tensor(file, array)
        di.save_param_dict(file, arrays)
        if file.seekable():
            file.seek(0)
        for array in arrays.values():
            same(di.load_tensor(file), array)
        found = di.load_param_dict(file)
        assert list(found) == list(arrays)
        for name, array in arrays.items():
            same(found[name], array)


@pytest.mark.parametrize("seekable", [True, False])
def test_streams_that_end_early(seekable: bool) -> None:
    data = record((1 << 40,), nbytes=1 << 42)
    file = io.BytesIO(data) if seekable else Stream(data)
    with pytest.raises(
        ValueError, match=r"too short: .*needs 4398046511104 bytes, and 24 are there"
    ):
        di.load_tensor(file)


def test_text_files_and_other_things(tmp_path: pathlib.Path) -> None:
    (tmp_path / "x").write_bytes(record())
    with (
        open(tmp_path / "x") as file,
        pytest.raises(TypeError, match="in text mode: open it in binary mode"),
    ):
        di.load_tensor(file)  # type: ignore[arg-type]
    with pytest.raises(
        TypeError, match="a path or a file opened in binary mode is needed, not int"
    ):
        di.load_tensor(3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="in text mode"):
        di.save_tensor(io.StringIO(), np.zeros(1))  # type: ignore[arg-type]
    os.mkfifo(tmp_path / "pipe")
    for load in (di.load_tensor, di.load_param_dict):
        with pytest.raises(ValueError, match="no regular file: open it, and pass the open file"):
            load(tmp_path / "pipe")
    with pytest.raises(FileNotFoundError):
        di.load_tensor(tmp_path / "none")


# ---- Files get their names when they are whole


class Breaks:
    """What fails while it is written."""

    def __init__(self, after: int) -> None:
        self.after = after

    def __iter__(self) -> Any:
        for i in range(self.after):
            yield f"p{i}", np.full(1000, i)
        raise RuntimeError("no more")


def test_what_fails_leaves_nothing(tmp_path: pathlib.Path, monkeypatch: Any) -> None:
    file = tmp_path / "x"
    with pytest.raises(RuntimeError, match="no more"):
        di.save_param_dict(file, Breaks(3))
    assert not list(tmp_path.iterdir())
    di.save_tensor(file, np.arange(3))
    file.chmod(0o640)

    def full(stream: Any, data: Any) -> None:
        stream.write(bytes(data)[:5])
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("spmd_disco.files.records.write_all", full)
        with pytest.raises(OSError, match="No space left"):
            di.save_tensor(file, np.arange(4))
    assert [f.name for f in tmp_path.iterdir()] == ["x"]
    same(di.load_tensor(file), np.arange(3))
    di.save_tensor(file, np.arange(5))
    assert file.stat().st_mode & 0o777 == 0o640


def test_a_link_stays(tmp_path: pathlib.Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "x")
    di.save_tensor(tmp_path / "link", np.arange(3))
    assert (tmp_path / "link").is_symlink()
    same(di.load_tensor(tmp_path / "x"), np.arange(3))


def test_devices_are_written_to() -> None:
    di.save_tensor("/dev/null", np.arange(3))
    assert not os.path.isfile("/dev/null")


# ---- Records that are refused

BAD_RECORDS = {
    "empty": (b"", r"at byte 0 the magic number of the tensor needs 16 bytes, and 0 are"),
    "magic": (record(magic=7), r"begins with 0x0000000000000007, and a tensor with 0xdd5e40f096"),
    "reserved": (record(reserved=9), r"has 9 in its reserved field: only 0 is known"),
    "device": (record(device=(2, 0)), r"device type 2 and number 0: only 1 and 0, the CPU"),
    "device number": (record(device=(1, 3)), r"device type 1 and number 3"),
    "negative ndim": (record(ndim=-1), r"has -1 dimensions: 0 to (64|32) are allowed"),
    "huge ndim": (record(ndim=2**31 - 1), r"has 2147483647 dimensions"),
    "ndim": (record(ndim=3), r"shape \[2, 3, 24\] and dtype float32, which are 576 bytes"),
    "code": (record(dtype=(99, 32, 1)), r"dtype code 99 of 32 bits and 1 lanes"),
    "handle": (record(dtype=(3, 64, 1)), r"dtype handle of 64 bits"),
    "int4": (record(dtype=(0, 4, 1)), r"dtype int of 4 bits and 1 lanes .* none that can be read"),
    "float4": (record(dtype=(17, 4, 1)), r"dtype float4_e2m1fn of 4 bits"),
    "lanes": (record(dtype=(2, 32, 4)), r"dtype float32 of 32 bits and 4 lanes"),
    "no lanes": (record(dtype=(2, 32, 0)), r"dtype float32 of 32 bits and 0 lanes"),
    "bits": (record(dtype=(2, 80, 1)), r"dtype float of 80 bits"),
    "negative": (record((-2, -3)), r"shape \[-2, -3\], with a negative dimension"),
    "overflow": (record((2**32, 2**32), nbytes=0), r"more than memory can be addressed"),
    "overflow by 0": (record((2**62, 0, 2**62), nbytes=0), r"more than memory can be addressed"),
    "nbytes": (record(nbytes=25), r"are 24 bytes, but says that it has 25"),
    "negative nbytes": (record(nbytes=-24), r"are 24 bytes, but says that it has -24"),
    "too short": (record()[:-1], r"at byte 56 the data of the tensor needs 24 bytes, and 23 are"),
    "too long": (record() + b"x", r"it has 1 bytes behind what belongs into it, .* byte 80"),
    "terabytes": (record((2**40,), nbytes=2**42), r"needs 4398046511104 bytes, and 24 are there"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD_RECORDS)
def test_bad_records(case: str, tmp_path: pathlib.Path) -> None:
    data, text = BAD_RECORDS[case]
    (tmp_path / "x").write_bytes(data)
    with pytest.raises(ValueError, match=f"^{re.escape(str(tmp_path))}/x.*{text}"):
        di.load_tensor(tmp_path / "x")


BAD_PARAMS = {
    "magic": (params_bytes([], [], magic=1), "and a parameter dictionary with 0xf7e58d4f05049cb7"),
    "reserved": (params_bytes([], [], reserved=1), "1 in its reserved field"),
    "count": (params_bytes([b"a"], [record()], count=2**61), "needs 18446744073709551616 bytes"),
    "fewer": (params_bytes([b"a"], [record()], tensors=0), "has 1 names, but 0 tensors"),
    "more": (params_bytes([b"a"], [record()], tensors=2), "has 1 names, but 2 tensors"),
    "name": (params_bytes([b"\xff\xfe"], [record()]), "name 0 of 1 is not UTF-8"),
    "twice": (params_bytes([b"a", b"a"], [record()] * 2), "has parameter 'a' twice"),
    "cut": (params_bytes([b"a", b"b"], [record()] * 2)[:-80], "'b' needs 16 bytes, and 0 are"),
    "cut data": (params_bytes([b"a"], [record()])[:-1], "the data of parameter 'a' needs 24 bytes"),
    "longer": (params_bytes([b"a"], [record()]) + b"xyz", "it has 3 bytes behind what belongs"),
    "record": (params_bytes([b"a"], [record(magic=3)]), "parameter 'a' begins with 0x00000000"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD_PARAMS)
def test_bad_param_dicts(case: str, tmp_path: pathlib.Path) -> None:
    data, text = BAD_PARAMS[case]
    (tmp_path / "x").write_bytes(data)
    with pytest.raises(ValueError, match=f"^{re.escape(str(tmp_path))}/x.*{text}"):
        di.load_param_dict(tmp_path / "x")
    with pytest.raises(ValueError, match=f"^the bytes.*{text}"):
        di.load_param_dict_from_bytes(data)


def test_param_dicts(tmp_path: pathlib.Path) -> None:
    arrays = {"z": any_bits((2, 3), "f4"), "": any_bits((), "i8"), "ä\n": np.zeros((0, 4), bool)}
    expected = params_bytes(
        [b"z", b"", "ä\n".encode()],
        [
            record((2, 3), (2, 32, 1), arrays["z"].tobytes()),
            record((), (0, 64, 1), arrays[""].tobytes()),
            record((0, 4), (6, 8, 1), b""),
        ],
    )
    assert di.save_param_dict_to_bytes(arrays) == expected
    assert di.save_param_dict_to_bytes(iter(arrays.items())) == expected
    di.save_param_dict(tmp_path / "x", arrays)
    assert (tmp_path / "x").read_bytes() == expected
    for found in (
        di.load_param_dict(tmp_path / "x"),
        di.load_param_dict(os.fsencode(tmp_path / "x")),  # type: ignore[arg-type]
        di.load_param_dict_from_bytes(expected),
        di.load_param_dict_from_bytes(bytearray(expected)),
        di.load_param_dict_from_bytes(memoryview(expected)),
    ):
        assert list(found) == list(arrays)
        for name, array in arrays.items():
            same(found[name], array)
            assert found[name].flags.writeable
    assert di.load_param_dict_from_bytes(di.save_param_dict_to_bytes({})) == {}


@pytest.mark.parametrize(
    ("params", "error", "text"),
    [
        ({3: np.zeros(1)}, TypeError, "the name of a parameter is a str, not int: 3"),
        ([("a", np.zeros(1)), ("a", np.zeros(1))], ValueError, "parameter 'a' is there twice"),
        ([np.zeros(3)], TypeError, "pairs of a name and an array, not ndarray"),
        ({"\ud800": np.zeros(1)}, ValueError, "cannot be written"),
        ({"a": [object()]}, ValueError, "parameter 'a': an array of dtype 'object'"),
    ],
)
def test_bad_params(params: Any, error: type, text: str, tmp_path: pathlib.Path) -> None:
    with pytest.raises(error, match=text):
        di.save_param_dict(tmp_path / "x", params)
    assert not list(tmp_path.iterdir())


def test_bytes_are_bytes() -> None:
    with pytest.raises(TypeError, match="is read from bytes, not str"):
        di.load_param_dict_from_bytes("abc")  # type: ignore[arg-type]
