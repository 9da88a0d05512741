"""The native reductions and copies against NumPy, bit for bit."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spmd_disco import native
from spmd_disco.transport.ccl import ReduceKind
from spmd_disco.transport.reduce import divide_dtype, reduction

Array = npt.NDArray[Any]

pytestmark = pytest.mark.skipif(
    not native.available(), reason=f"no native module: {native.why_not}"
)

NAMES = list(getattr(native.core, "DTYPES", {}))
LEVELS = range(len(getattr(native.core, "LEVELS", ())))
CASES = []
for _name in NAMES:
    for _kind in ReduceKind:
        try:
            reduction(np.dtype(getattr(ml_dtypes, _name, _name)), _kind)
        except TypeError:
            continue
        CASES.append((_name, _kind))


def dtype_of(name: str) -> np.dtype[Any]:
    return np.dtype(getattr(ml_dtypes, name, name))


def expected(kind: ReduceKind, arrays: list[Array]) -> Array:
    """What transport/reduce.py says, done by NumPy one after the other."""
    dtype = arrays[0].dtype
    how = reduction(dtype, kind)
    ufunc = getattr(np, how.ufunc)
    parts = [x.view(np.uint8) if dtype == np.bool_ else x.astype(how.work) for x in arrays]
    with np.errstate(all="ignore"):
        total = parts[0]
        for part in parts[1:]:
            total = ufunc(total, part)
        if how.divide == "true":
            total = np.divide(total, how.work.type(len(arrays)))
        elif how.divide:
            work = divide_dtype(how.work, len(arrays))
            wide, number = total.astype(work), work.type(len(arrays))
            total = ((wide - np.fmod(wide, number)) // number).astype(how.work)
        return total.view(np.bool_) if dtype == np.bool_ else total.astype(dtype)


def random_array(rng: np.random.Generator, name: str, count: int) -> Array:
    """Any bits, or numbers of everyday size."""
    dtype = dtype_of(name)
    if name == "bool":
        return rng.integers(0, 2, count, dtype=np.uint8).view(np.bool_)
    if rng.random() < 0.5 or dtype.kind in "iu":
        return rng.integers(0, 256, count * dtype.itemsize, dtype=np.uint8).view(dtype)
    values = rng.normal(size=count)
    special = rng.random(count) < 0.1
    values[special] = rng.choice([0.0, -0.0, np.inf, -np.inf, np.nan, 1e-40, 1e38], special.sum())
    with np.errstate(all="ignore"):
        return values.astype(dtype)


def at_offset(x: Array, offset: int) -> Array:
    """Return the bytes of `x` at an address that is `offset` beyond a cache line."""
    memory = np.zeros(x.nbytes + 128, np.uint8)
    start = -memory.ctypes.data % 64 + offset
    view = memory[start : start + x.nbytes]
    view[:] = x.view(np.uint8)
    return view


def assert_same_bits(got: Array, want: Array, zeros: bool = True) -> None:
    """Compare the bits; a NaN is a NaN, and +0 is -0 unless `zeros`.

    NumPy itself is not of one mind about both: it depends on the place in the array.
    """
    if want.dtype.kind == "c":
        got, want = got.view(want.real.dtype), want.view(want.real.dtype)
    if want.dtype.kind == "f" or want.dtype == ml_dtypes.bfloat16:
        got, want = got.copy(), want.copy()
        for x in (got, want):
            x[np.isnan(x)] = np.nan
            if not zeros:
                x[x == 0] = 0
    np.testing.assert_array_equal(got.view(np.uint8), want.view(np.uint8))


def check(
    name: str, kind: ReduceKind, arrays: list[Array], offsets: list[int], **options: Any
) -> None:
    """Reduce into the inputs' own memory and into two other places."""
    dtype = dtype_of(name)
    inputs = [at_offset(x, o) for x, o in zip(arrays, offsets, strict=True)]
    outputs = [at_offset(np.zeros_like(arrays[0]), o) for o in (offsets[0], offsets[-1])]
    outputs += inputs[::2]
    native.core.reduce(native.core.DTYPES[name], int(kind), inputs, outputs, **options)
    want = expected(kind, arrays)
    for output in outputs:
        got = output.copy().view(dtype)
        if dtype.kind == "c" and kind is ReduceKind.PROD:
            # NumPy may fuse a product with a sum, and then rounds once less.
            finite = np.isfinite(got) & np.isfinite(want)
            eps = np.finfo(dtype).eps
            size = np.abs(np.array(arrays)).prod(axis=0)
            assert (np.abs(got - want)[finite] <= 8 * eps * size[finite]).all()
        else:
            assert_same_bits(got, want, zeros=kind not in (ReduceKind.MIN, ReduceKind.MAX))
    for before, after in zip(arrays[1::2], inputs[1::2], strict=True):
        np.testing.assert_array_equal(before.view(np.uint8), after)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(("name", "kind"), CASES)
def test_reduce(name: str, kind: ReduceKind, level: int) -> None:
    rng = np.random.default_rng(7)
    for members in (1, 2, 3, 4, 8):
        for count in (0, 1, 33, 1027):
            with np.errstate(all="ignore"):
                arrays = [random_array(rng, name, count) for _ in range(members)]
                for offsets in ([0] * members, list(range(members)), [5] * members):
                    check(name, kind, arrays, offsets, stream=False, level=level)
                    check(name, kind, arrays, offsets, stream=True, level=level)


@settings(max_examples=200, deadline=None)
@given(
    case=st.sampled_from(CASES),
    members=st.integers(1, 8),
    count=st.one_of(st.integers(0, 70), st.integers(0, 5000)),
    seed=st.integers(0, 2**32 - 1),
    level=st.integers(0, max(len(LEVELS) - 1, 0)),
    stream=st.booleans(),
    data=st.data(),
)
def test_reduce_of_anything(
    case: tuple[str, ReduceKind],
    members: int,
    count: int,
    seed: int,
    level: int,
    stream: bool,
    data: st.DataObject,
) -> None:
    rng = np.random.default_rng(seed)
    offsets = data.draw(st.lists(st.integers(0, 63), min_size=members, max_size=members))
    with np.errstate(all="ignore"):
        arrays = [random_array(rng, case[0], count) for _ in range(members)]
        check(*case, arrays, offsets, stream=stream, level=level)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", ["float16", "bfloat16"])
def test_all_16_bit_floats(name: str, level: int) -> None:
    """Every value survives, and every rounding is right: sums of all values with a few others."""
    every = np.arange(1 << 16, dtype=np.uint16).view(dtype_of(name))
    with np.errstate(all="ignore"):
        check(name, ReduceKind.SUM, [every], [0], level=level)
        for other in (every[1], every[0x3C01], every[0x0401], every[0x7BFF], every[0x8002]):
            others = np.full_like(every, other)
            for kind in ReduceKind:
                check(name, kind, [every, others], [0, 0], level=level)
        check(name, ReduceKind.AVG, [every, every[::-1].copy(), every], [0, 0, 0], level=level)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(("name", "kind"), CASES)
def test_the_place_makes_no_difference(name: str, kind: ReduceKind, level: int) -> None:
    rng = np.random.default_rng(3)
    arrays = [random_array(rng, name, 700) for _ in range(3)]

    def result(start: int, stop: int, **options: Any) -> Array:
        parts = [x[start:stop].view(np.uint8) for x in arrays]
        output = np.empty_like(parts[0])
        native.core.reduce(native.core.DTYPES[name], int(kind), parts, [output], **options)
        return output.view(dtype_of(name))

    whole = result(0, 700, level=level)
    assert_same_bits(result(0, 700), whole)
    for start, stop in ((0, 1), (1, 700), (333, 334), (5, 600)):
        for stream in (False, True):
            assert_same_bits(result(start, stop, level=level, stream=stream), whole[start:stop])


def test_many_small_integers_are_averaged() -> None:
    arrays = [np.full(10, 1, np.int8) for _ in range(200)]
    check("int8", ReduceKind.AVG, arrays, [0] * 200)


def test_large() -> None:
    rng = np.random.default_rng(1)
    arrays = [rng.normal(size=3_000_001).astype(np.float32) for _ in range(3)]
    for stream in (False, True):
        check("float32", ReduceKind.SUM, arrays, [0, 0, 0], stream=stream)


def test_refused() -> None:
    core = native.core
    a, b = np.zeros(16, np.uint8), np.zeros(17, np.uint8)
    float32 = core.DTYPES["float32"]
    for dtype, kind in [(core.DTYPES["bool"], 4), (core.DTYPES["complex64"], 2), (99, 0), (1, 5)]:
        with pytest.raises(TypeError, match=f"dtype {dtype} cannot be reduced by kind {kind}"):
            core.reduce(dtype, kind, [a], [a])
    with pytest.raises(ValueError, match="no input"):
        core.reduce(float32, 0, [], [a])
    with pytest.raises(ValueError, match="16 and 17 bytes"):
        core.reduce(float32, 0, [a], [b])
    with pytest.raises(ValueError, match="17 bytes: an element has 4"):
        core.reduce(float32, 0, [b], [b])
    with pytest.raises(ValueError, match="overlaps"):
        core.reduce(float32, 0, [b[:16]], [b[1:]])
    with pytest.raises(ValueError, match="overlaps"):
        core.reduce(float32, 0, [a], [b[:16], b[1:]])
    with pytest.raises(ValueError, match=r"level 17: .* 0 to"):
        core.reduce(float32, 0, [a], [a], level=17)
    with pytest.raises((BufferError, ValueError)):
        core.reduce(float32, 0, [bytes(16)], [bytes(16)])
    with pytest.raises(TypeError, match="sequence"):
        core.reduce(float32, 0, 5, [a])
    core.reduce(float32, 0, [a], [])


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("size", [0, 1, 4095, 4096, 5001, 1 << 20])
def test_copy(size: int, stream: bool) -> None:
    source = np.random.default_rng(size).integers(0, 256, size + 16, dtype=np.uint8)
    for offset in (0, 1, 15):
        target = np.zeros(size + 64, np.uint8)
        native.core.copy(
            target[offset : offset + size], source[16 - offset :][:size], stream=stream
        )
        np.testing.assert_array_equal(target[offset : offset + size], source[16 - offset :][:size])
        assert not target[:offset].any()
        assert not target[offset + size :].any()


def test_copy_refused() -> None:
    a = np.zeros(16, np.uint8)
    with pytest.raises(ValueError, match="the sizes must be equal"):
        native.core.copy(a, a[:8].copy())
    with pytest.raises(ValueError, match="overlap"):
        native.core.copy(a[:8], a[4:12])
    with pytest.raises((BufferError, TypeError)):
        native.core.copy(bytes(3), b"abc")
