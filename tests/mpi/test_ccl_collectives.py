"""Each collective against NumPy, over dtypes, layouts, sizes and groups."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from data_planes import make_ccl
from hypothesis import given, settings
from hypothesis import strategies as st
from mpi4py import MPI

from spmd_disco.errors import PeerError, SessionClosedError
from spmd_disco.transport.ccl import ReduceKind
from spmd_disco.transport.host_ccl import HostCCL
from spmd_disco.transport.wait import Waiter

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(120)]

WORLD = MPI.COMM_WORLD
SIZE = WORLD.size
ME = WORLD.rank


class Plane:
    """A data plane, and who is in this worker's group."""

    def __init__(self, groups: int) -> None:
        self.comm = WORLD.Dup()
        self.group_size = SIZE // groups
        self.group_comm = self.comm if groups == 1 else self.comm.Split(ME // self.group_size)
        self.ccl = make_ccl(self.comm, self.group_comm, Waiter(30), num_groups=groups)
        self.number = 0

    def begin(self) -> HostCCL:
        self.number += 1
        self.ccl.begin(self.number)
        return self.ccl

    @contextlib.contextmanager
    def failing(self) -> Iterator[HostCCL]:
        """A command that fails on this worker alone or on all, as the block says."""
        ccl = self.begin()
        try:
            yield ccl
        finally:
            ccl.fail(self.number)

    def members(self, in_group: bool) -> range:
        if not in_group:
            return range(SIZE)
        first = ME // self.group_size * self.group_size
        return range(first, first + self.group_size)

    def close(self) -> None:
        self.begin().close(self.number)
        if self.group_comm is not self.comm:
            self.group_comm.Free()
        self.comm.Free()


@pytest.fixture(scope="module", params=[g for g in (1, 2, 3, 4) if SIZE % g == 0])
def plane(request: pytest.FixtureRequest) -> Iterator[Plane]:
    plane = Plane(request.param)
    yield plane
    plane.close()


GROUP = pytest.mark.parametrize("in_group", [False, True], ids=["world", "group"])

INTEGERS = ["i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8"]
FLOATS: list[Any] = ["f2", "f4", "f8", "g", np.dtype(ml_dtypes.bfloat16)]
COMPLEX = ["F", "D", "G"]
SWAPPED = [">i4", ">f4", ">f8", ">c16"]
MOVED: list[Any] = [
    "?",
    "M8[s]",
    "m8[ms]",
    "S5",
    "U3",
    "V7",
    "V0",
    np.dtype([("a", "i4"), ("b", "f8", (2,))]),
    np.dtype(ml_dtypes.float8_e4m3fn),
    np.dtype(ml_dtypes.float8_e5m2),
    np.dtype(ml_dtypes.int4),
]


def sample(dtype: Any, count: int, seed: int) -> np.ndarray[Any, Any]:
    """Return small values that are exact in every dtype, another for each seed."""
    dtype = np.dtype(dtype)
    rng = np.random.default_rng(seed)
    if dtype.itemsize == 0:
        return np.zeros(count, dtype)
    if dtype.names:
        out = np.zeros(count, dtype)
        out["a"] = rng.integers(0, 99, count)
        return out
    if dtype.kind in "SUV" and dtype.isbuiltin != 2:
        raw = rng.integers(65, 90, (count, 9))
        if dtype.kind == "V":
            return np.frombuffer(raw.astype("u1")[:, :7].tobytes(), dtype).copy()
        return np.array(["".join(map(chr, row)) for row in raw], "U9").astype(dtype)
    values = rng.integers(0, 2 if dtype.kind == "b" else 5, count)
    if dtype.kind == "c":
        return (values + 1j * rng.integers(0, 5, count)).astype(dtype)
    return values.astype("i8").astype(dtype)


LAYOUTS = {
    "contiguous": lambda x: x.copy(),
    "fortran": lambda x: np.array(x, order="F"),
    "strided": lambda x: np.repeat(x, 2, axis=-1)[..., ::2],
    "reversed": lambda x: x[..., ::-1].copy()[..., ::-1],
}


def laid_out(layout: str, shape: tuple[int, ...], dtype: Any, fill: Any = None) -> Any:
    array = LAYOUTS[layout](np.zeros(shape, dtype))
    if fill is not None:
        array[...] = fill
    return array


def same(a: Any, b: Any) -> bool:
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    # The padding of a long double is nobody's value.
    return bool((a == b).all()) if a.dtype.char in "gG" else a.tobytes() == b.tobytes()


@GROUP
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [*INTEGERS, *FLOATS, *COMPLEX, *SWAPPED, *MOVED], ids=str)
def test_moving(plane: Plane, dtype: Any, layout: str, in_group: bool) -> None:
    members = plane.members(in_group)
    n, here, first = len(members), ME - members[0], members[0] == ME
    for shape in [(3, 4), (1, 2, 2), (), (0, 3), (7,)]:
        if shape == () and layout not in ("contiguous", "fortran"):
            continue
        count = int(np.prod(shape))
        parts = [sample(dtype, count, w).reshape(shape) for w in members]
        mine = laid_out(layout, shape, dtype, parts[here])
        mine.flags.writeable = False
        out = laid_out(layout, shape, dtype)
        whole = laid_out("contiguous" if shape == () else layout, (n, *shape), dtype)
        full = np.array(parts, dtype).reshape(whole.shape)
        ccl = plane.begin()
        ccl.allgather(mine, in_group, whole)
        assert same(whole, full)
        ccl.broadcast_from_worker0(mine if first else None, in_group, out)
        assert same(out, parts[0])
        ccl.scatter_from_worker0(full if first else "ignored", in_group, out)
        assert same(out, parts[here])
        whole[...] = np.zeros((), dtype)
        ccl.gather_to_worker0(mine, in_group, whole if first else None)
        if first:
            assert same(whole, full)


def reference(kind: ReduceKind, parts: list[Any]) -> Any:
    """Return what NumPy makes of it, in float32 where a half precision is reduced in that."""
    dtype = parts[0].dtype
    work = dtype.newbyteorder("=")
    if work == np.float16 or work == np.dtype(ml_dtypes.bfloat16):
        work = np.dtype(np.float32)
    stack = np.array([p.astype(work) for p in parts])
    if kind is ReduceKind.AVG:
        if work.kind == "m":
            stack, work = stack.view(np.int64), np.dtype(np.int64)
        total = np.add.reduce(stack, 0, dtype=work)
        if work.kind in "iu":
            quotients = [int(int(t) / len(parts)) for t in total.flat]
            return np.array(quotients, work).astype(dtype).reshape(total.shape)
        return np.divide(total, len(parts)).astype(dtype)
    ufunc = {"SUM": np.add, "PROD": np.multiply, "MIN": np.minimum, "MAX": np.maximum}[kind.name]
    return ufunc.reduce(stack, 0, dtype=None if work.kind in "bm" else work).astype(dtype)


@GROUP
@pytest.mark.parametrize("kind", list(ReduceKind), ids=lambda k: k.name.lower())
@pytest.mark.parametrize("dtype", ["?", "m8[s]", *INTEGERS, *FLOATS, *COMPLEX, *SWAPPED], ids=str)
def test_allreduce(plane: Plane, dtype: Any, kind: ReduceKind, in_group: bool) -> None:
    members = plane.members(in_group)
    here = ME - members[0]
    dtype = np.dtype(dtype)
    refused = (
        (dtype.kind == "c" and kind in (ReduceKind.MIN, ReduceKind.MAX))
        or (dtype.kind == "b" and kind is ReduceKind.AVG)
        or (dtype.kind == "m" and kind is ReduceKind.PROD)
    )
    for layout in LAYOUTS:
        for shape in [(3, 4), (), (0,), (1, 2, 2), (1001,)]:
            if shape == () and layout not in ("contiguous", "fortran"):
                continue
            count = int(np.prod(shape))
            parts = [sample(dtype, count, w).reshape(shape) for w in members]
            if dtype.kind in "im":
                parts = [np.asarray(-3 * p, dtype) for p in parts]
            mine = laid_out(layout, shape, dtype, parts[here])
            out = laid_out("contiguous", shape[::-1], dtype)
            if refused:
                with plane.failing() as ccl, pytest.raises(TypeError, match=kind.name.lower()):
                    ccl.allreduce(mine, kind, in_group, out)
                continue
            wanted = reference(kind, parts)
            ccl = plane.begin()
            ccl.allreduce(mine, kind, in_group, out)
            np.testing.assert_array_equal(out.reshape(shape), wanted)
            assert same(mine, parts[here])
            # In place, by the same array and by another view of it.
            ccl.allreduce(mine, kind.name, in_group, mine)
            np.testing.assert_array_equal(mine, wanted)
            mine[...] = parts[here]
            ccl.allreduce(mine, (int(kind),), in_group, mine[...])
            np.testing.assert_array_equal(mine, wanted)


@GROUP
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("count", [1, 3, 1000, 300_001])
def test_nan_and_equal_bits(plane: Plane, dtype: Any, count: int, in_group: bool) -> None:
    members = plane.members(in_group)
    here = ME - members[0]
    parts = []
    for w in members:
        part = np.random.default_rng(w).standard_normal(count).astype(dtype)
        part[w % count :: 7] = np.nan
        part[w % count :: 11] = np.inf
        part[w % count :: 5] = -0.0 if w % 2 else 0.0
        parts.append(part)
    for kind in (ReduceKind.MIN, ReduceKind.MAX, ReduceKind.SUM):
        out = np.empty(count, dtype)
        plane.begin().allreduce(parts[here], kind, in_group, out)
        if kind is not ReduceKind.SUM:
            wanted = reference(kind, parts).astype("g")
            np.testing.assert_array_equal(out.astype("g"), wanted)
        # Written-out padding of a long double is nobody's value.
        bits = out.astype("f8").tobytes()
        comm = WORLD if not in_group else plane.group_comm
        assert len(set(comm.allgather(bits))) == 1


@GROUP
def test_averages_of_integers_are_truncated(plane: Plane, in_group: bool) -> None:
    members = plane.members(in_group)
    n = len(members)
    for dtype in ("i1", "i4", "i8", "u1", "u8", "m8[s]"):
        sign = 1 if dtype[0] == "u" else -1
        array = np.array([sign * (ME - members[0] + 1), 0], dtype)
        plane.begin().allreduce(array, "avg", in_group, array)
        wanted = sign * (n * (n + 1) // 2 // n)
        assert array.astype("i8").tolist() == [wanted, 0]


@GROUP
def test_bfloat16_is_rounded_once(plane: Plane, in_group: bool) -> None:
    n = len(plane.members(in_group))
    # In bfloat16 itself 256 + 1 would stay 256 each time.
    array = np.full(3, 256 if plane.members(in_group)[0] == ME else 1, ml_dtypes.bfloat16)
    out = np.empty_like(array)
    plane.begin().allreduce(array, ReduceKind.SUM, in_group, out)
    assert same(out, np.full(3, 256 + n - 1, np.float32).astype(ml_dtypes.bfloat16))


@GROUP
@pytest.mark.parametrize(
    "dtype", ["float8_e4m3fn", "float8_e5m2", "int4", "S3", "U2", "V4", "M8[s]", "O", "i4,f4"]
)
def test_refused_dtypes(plane: Plane, dtype: str, in_group: bool) -> None:
    real = np.dtype(getattr(ml_dtypes, dtype, dtype))
    array = np.empty(3, real)
    with plane.failing() as ccl, pytest.raises(TypeError, match=r"dtype"):
        ccl.allreduce(array, "sum", in_group, array)
    if dtype == "O":
        with plane.failing() as ccl, pytest.raises(TypeError, match="references"):
            ccl.allgather(array, in_group, array)
        with plane.failing() as ccl, pytest.raises(TypeError, match="references"):
            ccl.gather_to_worker0(array, in_group, array)


@GROUP
def test_overlap(plane: Plane, in_group: bool) -> None:
    members = plane.members(in_group)
    n, here = len(members), ME - members[0]
    for kind in ("sum", "max"):
        memory = np.zeros(12)
        memory[:8] = np.arange(8) + here
        plane.begin().allreduce(memory[:8], kind, in_group, memory[4:])
        added = n * (n - 1) / 2 if kind == "sum" else n - 1
        factor = n if kind == "sum" else 1
        np.testing.assert_array_equal(memory[4:], factor * np.arange(8) + added)
    memory = np.zeros(4 * n)
    memory[:4] = here + 1
    plane.begin().allgather(memory[:4], in_group, memory)
    np.testing.assert_array_equal(memory, np.repeat(np.arange(n) + 1, 4))
    plane.begin().gather_to_worker0(memory[4 * here :][:4], in_group, memory)
    if here == 0:
        np.testing.assert_array_equal(memory, np.repeat(np.arange(n) + 1, 4))
    plane.begin().scatter_from_worker0(memory, in_group, memory[-4:])
    np.testing.assert_array_equal(memory[-4:], here + 1)
    shifted = np.arange(6) + 10 * here
    plane.begin().broadcast_from_worker0(shifted[:5], in_group, shifted[1:])
    np.testing.assert_array_equal(shifted[1:], np.arange(5))
    # A broadcast view is a source like any other.
    view = np.broadcast_to(np.float32(ME), (3, 2))
    out = np.empty((2, 3), "f4")
    plane.begin().allreduce(view, "sum", in_group, out)
    assert (out == sum(members)).all()


@GROUP
def test_bad_arguments(plane: Plane, in_group: bool) -> None:
    n = len(plane.members(in_group))
    first = plane.members(in_group)[0] == ME
    a, b = np.zeros(4), np.zeros(4, "f4")
    read_only = np.zeros(4)
    read_only.flags.writeable = False
    cases: list[tuple[type[Exception], str, Any]] = [
        (TypeError, "float64 and recv float32", lambda c: c.allreduce(a, 0, in_group, b)),
        (ValueError, "4 elements", lambda c: c.allreduce(a, 0, in_group, np.zeros(5))),
        (ValueError, "read-only", lambda c: c.allreduce(a, 0, in_group, read_only)),
        (
            ValueError,
            "broadcast view",
            lambda c: c.allreduce(a, 0, in_group, np.lib.stride_tricks.as_strided(a, (4,), (0,))),
        ),
        (ValueError, "no reduction", lambda c: c.allreduce(a, "mean", in_group, a)),
        (ValueError, "no reduction", lambda c: c.allreduce(a, True, in_group, a)),
        (TypeError, r"numpy\.ndarray, not list", lambda c: c.allreduce([1.0], 0, in_group, a)),
        (TypeError, "not NoneType", lambda c: c.allgather(None, in_group, a)),
        (TypeError, "not NoneType", lambda c: c.broadcast_from_worker0(a, in_group, None)),
        (TypeError, "masked", lambda c: c.allreduce(np.ma.array(a), 0, in_group, a)),
        (ValueError, f"{n * 4}", lambda c: c.allgather(a, in_group, np.zeros(n * 4 + n))),
    ]
    everywhere = len(cases)
    cases += [
        (TypeError, "None", lambda c: c.broadcast_from_worker0(None, in_group, a)),
        (TypeError, "None", lambda c: c.scatter_from_worker0(None, in_group, a)),
        (TypeError, "float32", lambda c: c.scatter_from_worker0(b, in_group, a)),
        (
            ValueError,
            "as many",
            lambda c: c.broadcast_from_worker0(np.zeros(3), in_group, a),
        ),
        (
            ValueError,
            "must have",
            lambda c: c.gather_to_worker0(a, in_group, np.zeros(n)),
        ),
    ]
    if n > 1:
        cases.append(
            (
                ValueError,
                "evenly",
                lambda c: c.scatter_from_worker0(np.zeros(4 * n + 1), in_group, a),
            )
        )
    for index, (error, match, call) in enumerate(cases):
        with plane.failing() as ccl:
            if first or index < everywhere:
                with pytest.raises(error, match=match):
                    call(ccl)


@GROUP
@pytest.mark.parametrize("what", ["shape", "dtype", "kind", "operation", "many dimensions"])
def test_mismatch_raises_on_all_and_moves_nothing(plane: Plane, what: str, in_group: bool) -> None:
    members = plane.members(in_group)
    if len(members) == 1:
        pytest.skip("one worker agrees with itself")
    odd = members[-1] == ME
    shape: tuple[int, ...] = (2, 3) if what == "shape" and odd else (6,)
    if what == "many dimensions":
        shape = (1,) * 7 + ((2, 3) if odd else (3, 2))
    dtype = "i4" if what == "dtype" and odd else "f4"
    kind = "max" if what == "kind" and odd else "sum"
    send = np.ones(shape, dtype)
    recv = np.full(shape, 7, dtype)
    ccl = plane.begin()
    operation = partial(ccl.allreduce, send, kind, in_group, recv)
    if what == "operation" and odd:
        operation = partial(ccl.broadcast_from_worker0, None, in_group, recv)
    with pytest.raises(ValueError, match="nothing has moved") as caught:
        operation()
    assert (recv == 7).all()
    text = str(caught.value)
    comm = plane.group_comm if in_group else WORLD
    assert len(set(comm.allgather(text))) == 1
    assert f"worker {members[-1]}: " in text
    for word in {
        "shape": ["(2, 3)", "(6,)"],
        "dtype": ["int32", "float32"],
        "kind": ["max", "sum"],
        "operation": ["broadcast_from_worker0", "allreduce sum of float32 (6,)"],
        "many dimensions": ["…"],
    }[what]:
        assert word in text
    # The command goes on where it is caught.
    ccl.allreduce(np.ones(3), "sum", in_group, out := np.zeros(3))
    assert (out == len(members)).all()


def wait_idle(ccl: HostCCL) -> None:
    """Wait for all workers as for the next command."""
    ccl._waiter.until(WORLD.Ibarrier().Test, lambda: "the next command", idle=True)


@pytest.mark.skipif(SIZE == 1, reason="one worker has no peers")
@pytest.mark.parametrize("how", ["fails", "leaves"])
def test_peers_are_released(plane: Plane, how: str) -> None:
    ccl = plane.begin()
    match = {"fails": "worker 1 failed in this command", "leaves": "worker 1 left"}[how]
    if ME == 1:
        if how == "fails":
            ccl.fail(plane.number)
    else:
        with pytest.raises(PeerError, match=match):
            ccl.allreduce(np.ones(1), "sum", False, np.zeros(1))
        # At once for the rest of the command.
        with pytest.raises(PeerError, match=match):
            ccl.allgather(np.ones(1), False, np.zeros(SIZE))
        ccl.fail(plane.number)
    wait_idle(ccl)
    plane.begin().allreduce(np.ones(2), "sum", False, out := np.zeros(2))
    assert (out == SIZE).all()


@pytest.mark.skipif(SIZE == 1, reason="one worker has no peers")
def test_peer_that_has_gone_on(plane: Plane) -> None:
    """Worker 1 is at the next command, where it waits for the others."""
    ccl = plane.begin()
    if ME != 1:
        with pytest.raises(PeerError, match="worker 1 left this command"):
            ccl.allreduce(np.ones(1), "sum", False, np.zeros(1))
        ccl.fail(plane.number)
    plane.begin().allreduce(np.ones(2), "sum", False, out := np.zeros(2))
    assert (out == SIZE).all()


@st.composite
def views(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[slice, ...], tuple[int, ...]]:
    """Return the shape of an array, a slice of it, and an order of its axes."""
    shape = tuple(draw(st.lists(st.integers(0, 4), min_size=0, max_size=4)))
    slices = tuple(
        slice(draw(st.integers(0, 2)), None, draw(st.sampled_from([1, 2, -1, -2]))) for _ in shape
    )
    return shape, slices, tuple(draw(st.permutations(range(len(shape)))))


@settings(derandomize=True, deadline=None, max_examples=60, database=None)
@given(
    given=views(),
    kind=st.sampled_from(list(ReduceKind)),
    dtype=st.sampled_from(["i2", "f4", "f2", "f8"]),
)
def test_any_view(given: Any, kind: ReduceKind, dtype: str) -> None:
    plane = HYPOTHESIS["plane"]
    shape, slices, order = given

    def view(fill: int) -> Any:
        whole = np.zeros(shape, dtype)
        whole[...] = (np.arange(whole.size).reshape(shape) % 5) + fill
        return whole[(..., *slices)].transpose(order)

    send, recv = view(ME), view(0)
    ccl = plane.begin()
    ccl.allreduce(send, kind, False, recv)
    np.testing.assert_array_equal(recv, reference(kind, [view(w) for w in range(SIZE)]))
    ccl.broadcast_from_worker0(send, False, recv)
    np.testing.assert_array_equal(recv, view(0))
    whole = np.zeros((SIZE, *send.shape), dtype).swapaxes(0, -1)
    if whole.size == SIZE * send.size:
        ccl.allgather(send, False, whole)
        np.testing.assert_array_equal(
            whole.reshape(-1), np.concatenate([view(w).reshape(-1) for w in range(SIZE)])
        )


HYPOTHESIS: dict[str, Plane] = {}


@pytest.fixture(scope="module", autouse=True)
def hypothesis_plane() -> Iterator[None]:
    """Close what `test_any_view` shares among its examples."""
    HYPOTHESIS["plane"] = Plane(1)
    yield
    HYPOTHESIS.pop("plane").close()


def test_use_after_close() -> None:
    plane = Plane(1)
    plane.close()
    plane.ccl.close(plane.number)
    plane.ccl.pump(True)
    plane.ccl.fail(plane.number)
    with pytest.raises(SessionClosedError):
        plane.ccl.allreduce(np.ones(1), "sum", False, np.ones(1))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_more_than_two_gib() -> None:
    if SIZE != 2:
        pytest.skip("2 ranks need 12 GiB of memory")
    plane = Plane(1)
    size = 2**31 + 12
    array = np.zeros(size, np.uint8)
    array[:: 1 << 20] = ME + 1
    array[-1] = ME + 3
    ccl = plane.begin()
    ccl.allreduce(array, "sum", False, array)
    assert array[-1] == 7
    assert (array[:: 1 << 20] == 3).all()
    array[-1] = 10 + ME
    ccl.broadcast_from_worker0(array if ME == 0 else None, False, array)
    assert array[-1] == 10
    # Pieces of more than 2^30 bytes each, and more than 2^31 together.
    half = size // 2
    piece = np.full(half, 5 + ME, np.uint8)
    ccl.allgather(piece, False, array)
    assert (array[::4096][: half // 4096] == 5).all()
    assert array[half] == 6
    assert array[-1] == 6
    array[half:] = 9
    ccl.scatter_from_worker0(array if ME == 0 else None, False, piece)
    assert piece[0] == piece[-1] == (5 if ME == 0 else 9)
    ccl.gather_to_worker0(piece, False, array if ME == 0 else None)
    del piece
    if ME == 0:
        assert array[half - 1] == 5
        assert array[half] == 9
        ccl.send_to_worker(array, 1)
    else:
        array[:] = 0
        ccl.recv_from_worker(array, 0)
        assert array[half - 1] == 5
        assert array[-1] == 9
    plane.close()
