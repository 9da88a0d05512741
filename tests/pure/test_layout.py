"""How arrays lie in memory, and the helper that makes two calls one."""

from __future__ import annotations

import ctypes
import signal
from collections import deque
from functools import partial
from types import FrameType
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from spmd_disco.transport.atomic import post, run
from spmd_disco.transport.layout import (
    as_bytes,
    check_destination,
    copy_into,
    host_array,
    overlapping,
    packed,
    same_memory,
    unpack,
)


def test_host_array() -> None:
    array = np.zeros((2, 3))
    assert host_array(array, "x") is array
    matrix = array.view(type("Sub", (np.ndarray,), {}))
    assert type(host_array(matrix, "x")) is np.ndarray
    assert host_array(matrix, "x").base is not None


@pytest.mark.parametrize("x", [None, [1, 2], 3.0, np.float32(1), "text", memoryview(b"x")])
def test_not_an_array(x: object) -> None:
    with pytest.raises(TypeError, match=r"send must be a numpy.ndarray, not "):
        host_array(x, "send")


def test_arrays_that_cannot_move() -> None:
    for dtype in [object, [("a", object)]]:
        with pytest.raises(TypeError, match="references to Python objects"):
            host_array(np.zeros(2, dtype), "send")
    with pytest.raises(TypeError, match="mask"):
        host_array(np.ma.zeros(2), "send")

    class OnGpu:
        __cuda_array_interface__ = None

    with pytest.raises(TypeError, match="asnumpy"):
        host_array(OnGpu(), "send")


def test_destinations() -> None:
    array = np.zeros((4, 4))
    for good in (array, array.T, array[::-2], array[:0], np.zeros(()), np.zeros((1, 1))[:, :1]):
        check_destination(good, "recv")
    # A stride of 0 along a single element shares nothing.
    check_destination(np.lib.stride_tricks.as_strided(array, (1, 2), (0, 8)), "recv")
    with pytest.raises(ValueError, match="broadcast view"):
        check_destination(np.lib.stride_tricks.as_strided(array, (2, 2), (0, 8)), "recv")
    array.flags.writeable = False
    with pytest.raises(ValueError, match="read-only"):
        check_destination(array, "recv")


def test_packed_and_unpack() -> None:
    array = np.arange(12.0).reshape(3, 4)
    assert packed(array) is array
    for view in (array.T, array[::-1], array[:, ::2], np.asfortranarray(array), array[1:2, 1]):
        flat = packed(view)
        assert flat.flags.c_contiguous
        assert flat.shape == view.shape
        assert (flat == view).all()
        target = np.zeros((2, *view.T.shape))[::2].T[..., 0]
        unpack(target, flat)()
        assert (target == view).all()
    assert packed(array, np.dtype("f4")).dtype == np.float32
    assert packed(np.array(5, ">i4"), np.dtype("i4")).shape == ()
    halves = np.zeros(2, ml_dtypes.bfloat16)
    unpack(halves, np.array([1.0, 2.0], "f4"))()
    assert halves.tolist() == [1, 2]
    copy_into(array, array[::-1].copy().reshape(4, 3))
    assert array[0, 0] == 8


@pytest.mark.parametrize("dtype", ["f8", "M8[s]", "S3", "i4,f4", ml_dtypes.int4, "?"], ids=str)
def test_as_bytes(dtype: Any) -> None:
    array = np.zeros((2, 3), dtype)
    data = as_bytes(array)
    assert data.dtype == np.uint8
    assert data.size == array.nbytes
    assert np.shares_memory(data, array)
    assert as_bytes(np.zeros((), dtype)).size == array.itemsize
    assert as_bytes(np.zeros((0, 2), dtype)).size == 0
    assert as_bytes(np.zeros(3, "V0")).size == 0


def test_overlapping() -> None:
    array = np.zeros(10)
    assert overlapping(array[:6], array[5:])
    assert not overlapping(array[:5], array[5:])
    assert not overlapping(array, array[:0])
    assert same_memory(array[:5], array[:5].reshape(5, 1))
    assert not same_memory(array[:5], array[1:6])
    assert not same_memory(array[:5], array[:4])


def test_run_and_post_are_not_interrupted() -> None:
    """A handler that raises does so before or after all of it."""
    raised = 0

    class Strike(BaseException):
        pass

    def handle(number: int, frame: FrameType | None) -> None:
        raise Strike

    previous = signal.signal(signal.SIGUSR1, handle)
    # Not signal.raise_signal, which runs the handler itself before it returns.
    libc_raise = ctypes.CDLL(None)["raise"]
    strike = partial(libc_raise, int(signal.SIGUSR1))
    try:
        for _ in range(200):
            done: list[Any] = []
            sink: deque[tuple[Any, Any]] = deque()
            last: list[Any] = []
            try:
                run([partial(int, 1), strike, partial(int, 2)], done)
            except Strike:
                raised += 1
            assert done == [1, 0, 2]
            try:
                post([strike, partial(int, 3)], ["a", "b"], sink, partial(last.append, True))
            except Strike:
                raised += 1
            assert list(sink) == [(0, "a"), (3, "b")]
            assert last == [True]
    finally:
        signal.signal(signal.SIGUSR1, previous)
    assert raised == 400
