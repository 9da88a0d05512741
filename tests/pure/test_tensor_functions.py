"""The functions on tensors, in a program without workers."""

from __future__ import annotations

import gc
import weakref

import ml_dtypes
import numpy as np
import pytest

import spmd_disco as di

DTYPES = [
    "bool", "int8", "uint16", "int32", "int64", ">i4", "float16", "float32", "float64", ">f8",
    "complex64", "complex128", "U3", "S5", "datetime64[ns]", "V7", "bfloat16", "float8_e4m3fn",
    "float8_e5m2", "int4", [("a", "i4"), ("b", "f8", (2,))],
]  # fmt: skip


def dtype_of(name):
    return np.dtype(getattr(ml_dtypes, name) if isinstance(name, str) and name in vars(ml_dtypes)
                    else name)  # fmt: skip


def filled(shape, dtype):
    """Return an array whose bytes are all different from zero, and mostly from each other."""
    array = np.empty(shape, dtype)
    raw = np.arange(array.nbytes) % 2 if array.dtype == bool else np.arange(array.nbytes) % 7 + 1
    array.reshape(-1).view(np.uint8)[:] = raw
    return array


# ------------------------------------------------------------------ copy_from_to


@pytest.mark.parametrize("name", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(3, 4), (5,), (), (1, 2, 2)])
def test_copies_go_by_bytes(name, shape):
    source = filled(shape, dtype_of(name))
    target = np.zeros(source.nbytes, np.uint8)
    assert di.copy_from_to(source, target) is target
    assert target.tobytes() == source.tobytes()
    back = np.zeros_like(source)
    di.copy_from_to(target, back)
    assert back.tobytes() == source.tobytes()


def test_copies_of_nothing():
    for shape in [(0,), (3, 0, 2)]:
        empty = np.empty(shape, np.float32)
        assert di.copy_from_to(empty, np.empty((0, 7), "i8")).shape == (0, 7)
        assert di.copy_to(empty, "cpu").shape == shape
        assert di.copy_to_bytes(empty) == b""
        assert di.copy_from_bytes(empty, b"") is empty
        assert di.create_view(empty, (2, 0), "bfloat16").shape == (2, 0)


def test_overlapping_copies():
    for to, by in [(slice(8, None), slice(-8)), (slice(-8), slice(8, None))]:
        array = np.arange(64, dtype=np.uint8)
        expected = array.copy()
        expected[to] = expected[by].copy()
        di.copy_from_to(array[by], array[to])
        assert array.tolist() == expected.tolist()


def test_sizes_must_be_equal():
    with pytest.raises(
        ValueError, match=r"src has 48 bytes \(shape \(3, 4\), float32\) and dst 56"
    ):
        di.copy_from_to(np.zeros((3, 4), "f4"), np.zeros(7))
    with pytest.raises(ValueError, match=r"data has 3 bytes and array 4 bytes"):
        di.copy_from_bytes(np.zeros(4, "i1"), b"abc")
    with pytest.raises(ValueError, match=r"data has 5 bytes"):
        di.copy_from_bytes(np.zeros(4, "i1"), b"abcde")


NOT_CONTIGUOUS = {
    "strided": np.arange(24).reshape(4, 6)[:, ::2],
    "Fortran": np.asfortranarray(np.arange(6).reshape(2, 3)),
    "backwards": np.arange(5)[::-1],
    "broadcast": np.broadcast_to(np.arange(3), (2, 3)),
}


@pytest.mark.parametrize("array", NOT_CONTIGUOUS.values(), ids=NOT_CONTIGUOUS)
def test_copies_by_bytes_want_contiguous_memory(array):
    other = np.zeros(array.shape, array.dtype)
    for attempt in (
        lambda: di.copy_from_to(array, other),
        lambda: di.copy_from_to(other, array),
        lambda: di.copy_to_bytes(array),
        lambda: di.copy_from_bytes(array, bytes(array.size * 8)),
        lambda: di.copy_from_bytes(other, array),
        lambda: di.create_view(array, (1,)),
    ):
        with pytest.raises(
            ValueError, match=r"not contiguous in C order: numpy\.ascontiguousarray"
        ):
            attempt()
    # A copy of the values is possible in any layout.
    copy = di.copy_to(array, "cpu")
    assert copy.flags.c_contiguous
    assert copy.tolist() == array.tolist()


def test_read_only_destinations():
    array = np.zeros(4, "u1")
    array.flags.writeable = False
    with pytest.raises(ValueError, match="dst is read-only"):
        di.copy_from_to(np.ones(4, "u1"), array)
    with pytest.raises(ValueError, match="array is read-only"):
        di.copy_from_bytes(array, b"abcd")
    assert di.copy_to(array, "cpu").flags.writeable
    assert not di.create_view(array, (2, 2)).flags.writeable
    assert di.copy_to_bytes(array) == bytes(4)


@pytest.mark.parametrize("wrong", [[1, 2], 3.0, None, np.float32(1), b"ab", "text"])
def test_what_is_no_array(wrong):
    array = np.zeros(2)
    for attempt in (
        lambda: di.copy_from_to(wrong, array),
        lambda: di.copy_from_to(array, wrong),
        lambda: di.copy_to(wrong, "cpu"),
        lambda: di.copy_to_bytes(wrong),
        lambda: di.copy_from_bytes(wrong, b""),
        lambda: di.create_view(wrong, (1,)),
    ):
        with pytest.raises(TypeError, match="not an array of NumPy or CuPy"):
            attempt()


@pytest.mark.parametrize("dtype", [object, [("a", "i4"), ("b", object)]])
def test_arrays_of_objects_have_no_bytes(dtype):
    array = np.empty(3, dtype)
    for attempt in (
        lambda: di.copy_from_to(array, array),
        lambda: di.copy_to(array, "cpu"),
        lambda: di.copy_to_bytes(array),
        lambda: di.create_view(array, (1,), "i4"),
        lambda: di.copy_from_bytes(array, bytes(24)),
    ):
        with pytest.raises(TypeError, match="which has no bytes"):
            attempt()
    with pytest.raises(TypeError):
        di.create_view(np.zeros(8), (1,), dtype)


# ------------------------------------------------------------------ copy_to


@pytest.mark.parametrize("name", DTYPES, ids=str)
def test_copy_to_is_always_a_fresh_allocation(name):
    source = filled((2, 3), dtype_of(name))
    copy = di.copy_to(source, di.cpu())
    assert copy.dtype == source.dtype
    assert copy.tobytes() == source.tobytes()
    assert not np.shares_memory(copy, source)


def test_copy_to_what_there_is():
    array = np.arange(3)
    assert di.copy_to(array, "cpu:1", "global").tolist() == [0, 1, 2]
    assert di.copy_to(array, array, "").tolist() == [0, 1, 2]
    with pytest.raises(ValueError, match="no memory scope 'texture'; allowed is 'global'"):
        di.copy_to(array, "cpu", "texture")
    with pytest.raises(TypeError, match="a memory scope is a str, not 3"):
        di.copy_to(array, "cpu", 3)
    with pytest.raises(ValueError, match="device 'abacus' is unknown"):
        di.copy_to(array, "abacus")
    with pytest.raises(ValueError, match="no device vulkan:0 here"):
        di.copy_to(array, "vulkan")
    if not di.runtime_enabled("cuda"):
        for device in ("cuda", "cuda_host"):
            with pytest.raises(ValueError, match=f"no device {device}:0 here"):
                di.copy_to(array, device)


# ------------------------------------------------------------------ create_view


def test_views_of_other_shapes_and_dtypes():
    array = np.arange(12, dtype="f4").reshape(3, 4)
    view = di.create_view(array, (2, 2), byte_offset=4)
    assert view.tolist() == [[1, 2], [3, 4]]
    view[0, 0] = 50
    assert array[0, 1] == 50
    assert di.create_view(array, 12).shape == (12,)
    assert (
        di.create_view(array, np.int64(3), "int64", np.int8(8)).tobytes() == array.tobytes()[8:32]
    )
    assert di.create_view(array, (), "bfloat16").dtype == ml_dtypes.bfloat16
    assert di.create_view(array, (24,), "bfloat16").tobytes() == array.tobytes()
    assert di.create_view(np.array(2.5), (1, 1)).tolist() == [[2.5]]
    # Not aligned: NumPy can work with that.
    assert di.create_view(array, (2,), "f4", 1).tobytes() == array.tobytes()[1:9]


@pytest.mark.parametrize("name", DTYPES, ids=str)
def test_views_of_every_dtype(name):
    dtype = dtype_of(name)
    source = filled((4, 3), dtype)
    as_bytes = di.create_view(source, (source.nbytes,), "u1")
    assert as_bytes.tobytes() == source.tobytes()
    again = di.create_view(as_bytes, (3, 2), dtype, 6 * dtype.itemsize)
    assert again.dtype == dtype
    assert again.tobytes() == source[2:].tobytes()
    assert np.shares_memory(again, source)


@pytest.mark.parametrize(
    ("shape", "dtype", "offset"),
    [
        ((2, 7), None, 0),
        ((3, 4), None, 1),
        ((1,), None, 48),
        ((), None, 45),
        ((7,), "f8", 0),
        ((2**62, 2**62), "f8", 0),
        ((1,), None, -4),
        ((1,), None, 2**70),
        ((0,), None, 49),
    ],
)
def test_views_lie_in_their_array(shape, dtype, offset):
    array = np.zeros((3, 4), "f4")
    with pytest.raises(ValueError, match=r"of an array of 48 bytes.* must lie in the array"):
        di.create_view(array, shape, dtype, offset)


def test_what_is_no_view():
    array = np.zeros(6)
    with pytest.raises(ValueError, match=r"\(-1, 2\) has a negative dimension"):
        di.create_view(array, (-1, 2))
    for shape in (1.5, (2.0,), None, "3"):
        with pytest.raises(TypeError):
            di.create_view(array, shape)
    with pytest.raises(TypeError):
        di.create_view(array, (1,), None, 0.0)
    with pytest.raises(TypeError, match="names no dtype"):
        di.create_view(array, (1,), "float9")
    with pytest.raises(TypeError, match="have no size"):
        di.create_view(array, (1,), "S")


def test_a_view_keeps_its_array_alive():
    class Memory(bytearray):
        """What can be referred to weakly."""

    memory = Memory(np.arange(1000).tobytes())
    alive = weakref.ref(memory)
    array = np.frombuffer(memory, np.int64)
    del memory
    view = di.create_view(array, (10,), byte_offset=80)
    del array
    gc.collect()
    assert view.tolist() == list(range(10, 20))
    assert type(view) is np.ndarray
    assert alive() is not None
    del view
    gc.collect()
    assert alive() is None


# ------------------------------------------------------------------ bytes


@pytest.mark.parametrize("name", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(3, 4), (5,), ()])
def test_bytes_there_and_back(name, shape):
    source = filled(shape, dtype_of(name))
    data = di.copy_to_bytes(source)
    assert type(data) is bytes
    assert data == source.tobytes()
    for given in (data, bytearray(data), memoryview(data), np.frombuffer(data, "u1"), source):
        target = np.zeros_like(source)
        assert di.copy_from_bytes(target, given) is target
        assert target.tobytes() == data


@pytest.mark.parametrize("wrong", ["text", 3, None, [1, 2]])
def test_what_has_no_bytes(wrong):
    with pytest.raises(TypeError, match="not bytes or another buffer"):
        di.copy_from_bytes(np.zeros(4, "u1"), wrong)
    with pytest.raises(ValueError, match="data is not contiguous"):
        di.copy_from_bytes(np.zeros(4, "u1"), memoryview(bytes(8))[::2])


def test_names_of_the_functions():
    for name in ("copy_from_to", "copy_to", "create_view", "copy_from_bytes", "copy_to_bytes"):
        assert di.get_global_func(f"runtime.disco.{name}") is getattr(di, name)
    assert di.get_global_func("runtime.TVMTensorCopyFromTo") is di.copy_from_to
    assert di.get_global_func("runtime.TVMTensorCreateView") is di.create_view
    assert di.get_global_func("runtime.TVMTensorAllocWithScope") is di.empty


@pytest.mark.slow
def test_more_than_two_gib():
    n = (1 << 31) + 9
    array = np.zeros(n, "u1")
    array[-3:] = 1, 2, 3
    view = di.create_view(array, (3,), byte_offset=n - 3)
    assert view.tolist() == [1, 2, 3]
    target = np.empty(n, "i1")
    di.copy_from_to(array, target)
    assert target[-4:].tolist() == [0, 1, 2, 3]


def test_memory_pools_belong_to_workers():
    with pytest.raises(di.DiscoError, match=r"sess\.memory_info\(\)"):
        di.memory_pool()
