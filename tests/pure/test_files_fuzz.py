"""Files with anything in them: they are read in full, or refused with ValueError.

And never more is allocated than the file has, but for what it takes to say so.
"""

from __future__ import annotations

import copy
import io
import json
import os
import pathlib
import tracemalloc
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from arrays_in_files import SAMPLES
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import spmd_disco as di
from spmd_disco.files.sources import open_params
from spmd_disco.files.tensor_cache import TensorCacheIndex

#: Beside the file's own bytes. NumPy compiles headers, zipfile inflates.
OWN_MEMORY = 4 << 20

fuzz = settings(
    max_examples=int(os.environ.get("FILES_FUZZ_EXAMPLES", "250")),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@contextmanager
def bounded(nbytes: int) -> Iterator[None]:
    """See that no more memory is taken than twice the file's size and a little."""
    tracemalloc.start()
    try:
        yield
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 3 * nbytes + OWN_MEMORY


def read_or_refused(read: Callable[[], Any], nbytes: int) -> Any:
    with bounded(nbytes), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of NumPy about odd headers
        try:
            return read()
        except ValueError:
            return None


def tensors() -> dict[str, bytes]:
    found = {file.name: file.read_bytes() for file in SAMPLES.glob("*.tvmtensor")}
    arrays = {"a": np.arange(6.0).reshape(2, 3), "ö": np.ones((3, 1, 2), ml_dtypes.bfloat16)}
    found["params"] = di.save_param_dict_to_bytes(arrays)
    return found


def numpy_files() -> dict[str, bytes]:
    found = {}
    for name, save in [("npz", np.savez), ("compressed", np.savez_compressed)]:
        file = io.BytesIO()
        save(file, a=np.arange(300.0).reshape(2, 150), b=np.zeros((3, 2), ">i2", order="F"))
        found[name] = file.getvalue()
    file = io.BytesIO()
    np.save(file, np.arange(6.0).reshape(2, 3))
    found["npy"] = file.getvalue()
    return found


SEEDS = {**tensors(), **numpy_files()}


@st.composite
def mutated(draw: st.DrawFn, seeds: dict[str, bytes]) -> bytes:
    """Return a good file with a few bytes changed, cut off, put in or repeated."""
    data = bytearray(seeds[draw(st.sampled_from(sorted(seeds)))])
    for _ in range(draw(st.integers(1, 4))):
        place = draw(st.integers(0, max(len(data) - 1, 0)))
        match draw(st.sampled_from(["set", "number", "cut", "insert", "append", "repeat"])):
            case "set":
                data[place : place + 1] = draw(st.binary(min_size=1, max_size=1))
            case "number":
                number = draw(
                    st.sampled_from([0, 1, -1, 2**31 - 1, 2**32, 2**40, 2**62, 2**63 - 1, -(2**63)])
                )
                data[place : place + 8] = number.to_bytes(8, "little", signed=True)
            case "cut":
                del data[place:]
            case "insert":
                data[place:place] = draw(st.binary(max_size=9))
            case "append":
                data += draw(st.binary(max_size=9))
            case "repeat":
                data[place:place] = data[place : place + draw(st.integers(0, 80))]
    return bytes(data)


@fuzz
@given(data=st.one_of(mutated(tensors()), st.binary(max_size=100)))
def test_tensors_and_param_dicts(data: bytes) -> None:
    size = len(data)
    read_or_refused(lambda: di.load_tensor(io.BytesIO(data)), size)
    found = read_or_refused(lambda: di.load_param_dict_from_bytes(data), size)
    if found is not None:  # only what is written so is read
        assert di.save_param_dict_to_bytes(found) == data


@fuzz
@given(data=mutated(SEEDS))
def test_any_file(data: bytes, tmp_path: pathlib.Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(data)

    def read() -> Any:
        with open_params(file) as files:
            return {name: source.read() for name, source in files.items()}

    read_or_refused(read, 1100 * len(data))  # of compressed files
    tensor = read_or_refused(lambda: di.load_tensor(file), len(data))
    if tensor is not None:
        again = io.BytesIO()
        di.save_tensor(again, tensor)
        assert again.getvalue() == data


@fuzz
@given(data=st.data())
def test_safetensors(data: st.DataObject, tmp_path: pathlib.Path) -> None:
    safetensors = pytest.importorskip("safetensors.numpy")
    seed = safetensors.save({"a": np.arange(6.0).reshape(2, 3), "b": np.zeros(3, np.int8)})
    file = tmp_path / "x.safetensors"
    file.write_bytes(data.draw(mutated({"x": seed})))

    def read() -> Any:
        with open_params(file) as files:
            return {name: source.read() for name, source in files.items()}

    read_or_refused(read, file.stat().st_size)


odd_values = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 50),
    st.sampled_from([2**31, 2**62, 2**63, 2**64, -(2**63), 10**400]),
    st.floats(),
    st.text(max_size=6),
    st.sampled_from(["f32", "float64", "bfloat16", "int4", "../x", "/x", "raw", "f32-to-bf16"]),
    st.lists(st.integers(-1, 2**62), max_size=5),
    st.just([1] * 1000),
    st.just({}),
    st.just([[[[]]]]),
)


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield path
    if isinstance(value, dict | list):
        for key in value if isinstance(value, dict) else range(len(value)):
            yield from places(value[key], (*path, key))


INDEX = json.loads((SAMPLES / "cache_raw" / "tensor-cache.json").read_text())
PLACES = [path for path in places(INDEX) if path]


@fuzz
@given(changes=st.lists(st.tuples(st.sampled_from(PLACES), odd_values), min_size=1, max_size=3))
def test_indexes(changes: list[tuple[tuple[Any, ...], Any]], tmp_path: pathlib.Path) -> None:
    index = json.loads(json.dumps(INDEX))
    for path, value in changes:
        where = index
        try:
            for step in path[:-1]:
                where = where[step]
            where[path[-1]] = copy.deepcopy(value)
        except (LookupError, TypeError):
            pass  # an earlier change has replaced what was there
    text = json.dumps(index)
    data = (SAMPLES / "cache_raw" / "params_shard_0.bin").read_bytes()
    (tmp_path / "params_shard_0.bin").write_bytes(data)
    (tmp_path / "tensor-cache.json").write_text(text)
    size = len(data) + len(text)

    def load() -> Any:
        try:
            return di.load_tensor_cache(tmp_path)
        except FileNotFoundError:
            return None  # dataPath is another name

    found = read_or_refused(load, 10 * size)
    parsed = read_or_refused(lambda: TensorCacheIndex.parse(text, tmp_path), 10 * size)
    if found is not None:
        assert parsed is not None
        assert sum(record.nbytes for record in parsed.records) <= len(data)
        assert {name: x.shape for name, x in found.items()} == {
            record.name: record.shape for record in parsed.records
        }


@fuzz
@given(data=mutated({"x": json.dumps(INDEX).encode()}))
def test_texts_of_indexes(data: bytes, tmp_path: pathlib.Path) -> None:
    bin_file = SAMPLES / "cache_raw" / "params_shard_0.bin"
    (tmp_path / "params_shard_0.bin").write_bytes(bin_file.read_bytes())
    (tmp_path / "tensor-cache.json").write_bytes(data)

    def load() -> Any:
        try:
            return di.load_tensor_cache(tmp_path, verify=True)
        except FileNotFoundError:
            return None  # dataPath is another name

    found = read_or_refused(load, 10 * len(data))
    if found is not None:
        assert all(array.nbytes <= 41 for array in found.values())
