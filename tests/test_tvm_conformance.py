"""Random programs, run by TVM's own Disco and by ours: all registers must be the same.

Collectives are not among them, since TVM has none for arrays in host memory.
"""

from __future__ import annotations

import gc
import importlib
from collections.abc import Callable, Iterator
from typing import Any

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

tvm = pytest.importorskip("tvm", reason="pip install -e '.[tvm]' brings TVM")

import tvm_ffi  # noqa: E402

import spmd_disco.interop.tvm_disco as ours  # noqa: E402

importlib.import_module("tvm.exec.disco_worker")
theirs: Any = ours.ORIGINAL

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.skipif(
        not hasattr(theirs, "ThreadedSession"), reason="this TVM cannot be repaired to have Disco"
    ),
]

WORKERS = 4
FUNCTIONS = {
    int: "tests.disco.add_one",
    float: "tests.disco.add_one_float",
    str: "tests.disco.str",
    tuple: "tests.disco.shape_tuple",
    np.ndarray: "tests.disco.add_one_tensor",
}
VALUES: dict[type, st.SearchStrategy[Any]] = {
    int: st.integers(-(2**40), 2**40),
    float: st.floats(allow_nan=False, width=32),
    str: st.text(max_size=20).filter(lambda text: "\0" not in text),
    tuple: st.lists(st.integers(0, 2**40), min_size=1, max_size=4).map(tuple),
}


class Register:
    """One register in a program: its handles in all sessions, and the kind of its values."""

    def __init__(self, kind: type, handles: list[Any]) -> None:
        self.kind = kind
        self.handles = handles


def plain(value: Any) -> Any:
    """Return a value of TVM's as one that can be compared."""
    if isinstance(value, tvm.runtime.Tensor):
        array = value.numpy()
        return str(array.dtype), array.shape, array.tobytes()
    if isinstance(value, tvm_ffi.Shape):
        return tuple(value)
    return type(value).__mro__[-2].__name__ if value is None else value


def for_tvm(value: Any) -> Any:
    return tvm_ffi.Shape(value) if isinstance(value, tuple) else value


class Programs:
    """The same commands in several sessions."""

    def __init__(self, sessions: list[Any]) -> None:
        self.sessions = sessions

    def each(self, make: Callable[[Any, int], Any]) -> list[Any]:
        return [make(sess, i) for i, sess in enumerate(self.sessions)]

    def call(self, kind: type, argument: Any) -> Register:
        """Call the function for a kind of values, with a value or with a register."""

        def one(sess: Any, i: int) -> Any:
            function = sess.get_global_func(FUNCTIONS[kind])
            given = argument.handles[i] if isinstance(argument, Register) else for_tvm(argument)
            return sess.call_packed(function, given)

        return Register(kind, self.each(one))

    def array(self, values: list[np.ndarray]) -> Register:
        """Make an array with a value of its own on each worker."""

        def one(sess: Any, i: int) -> Any:
            dref = sess.empty(values[0].shape, str(values[0].dtype))
            for worker, value in enumerate(values):
                dref.debug_copy_from(worker, value)
            return dref

        return Register(np.ndarray, self.each(one))

    def to_worker_0(self, register: Register, value: np.ndarray) -> None:
        self.each(lambda sess, i: sess.copy_to_worker_0(tvm.runtime.tensor(value),
                                                        register.handles[i]))  # fmt: skip

    def from_worker_0(self, register: Register, shape: tuple[int, ...], dtype: str) -> None:
        """Fetch worker 0's array in all sessions, and compare."""

        def one(sess: Any, i: int) -> Any:
            host = tvm.runtime.empty(shape, dtype)
            sess.copy_from_worker_0(host, register.handles[i])
            sess.sync_worker_0()
            return plain(host)

        first, *others = self.each(one)
        assert all(other == first for other in others)

    def compare(self, registers: list[Register]) -> None:
        for register in registers:
            for worker in range(WORKERS):
                first, *others = (
                    plain(handle.debug_get_from_remote(worker)) for handle in register.handles
                )
                assert all(other == first for other in others), (register.kind, first, others)


@pytest.fixture(
    scope="module",
    params=[(kind, groups) for kind in (ours.ProcessSession, ours.ThreadedSession)
            for groups in (1, 2)],
    ids=lambda pair: f"{pair[0].__name__}, {pair[1]} groups",
)  # fmt: skip
def programs(request: pytest.FixtureRequest) -> Iterator[Programs]:
    """TVM's session over threads and one of ours.

    TVM's session over processes cannot be used: its workers do not find a function that the
    controller calls, and it cannot copy arrays to them, as of TVM 0.27.
    """
    kind, groups = request.param
    # A handle of TVM's that the garbage collector drops in another thread, one of ours for
    # instance, spoils TVM's channel.
    gc.collect()
    gc.disable()
    sessions = [theirs.ThreadedSession(WORKERS, groups), kind(WORKERS, groups)]
    try:
        yield Programs(sessions)
    finally:
        for sess in sessions:
            sess.shutdown()
        gc.enable()


@hypothesis.given(data=st.data())
@hypothesis.settings(
    max_examples=25,
    deadline=None,
    suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture],
)
def test_random_programs(programs: Programs, data: st.DataObject) -> None:
    registers: list[Register] = []
    arrays = st.sampled_from([np.float32, np.int32, np.float64, np.uint8])
    for _ in range(data.draw(st.integers(3, 12))):
        what = data.draw(st.sampled_from(["call", "chain", "array", "put", "fetch", "drop"]))
        ndarrays = [r for r in registers if r.kind is np.ndarray]
        if what == "call":
            kind = data.draw(st.sampled_from(list(VALUES)))
            registers.append(programs.call(kind, data.draw(VALUES[kind])))
        elif what == "chain" and registers:
            register = data.draw(st.sampled_from(registers))
            registers.append(programs.call(register.kind, register))
        elif what == "array":
            dtype = data.draw(arrays)
            values = [np.arange(6).reshape(2, 3).astype(dtype) + dtype(i) for i in range(WORKERS)]
            registers.append(programs.array(values))
        elif what in ("put", "fetch") and ndarrays:
            register = data.draw(st.sampled_from(ndarrays))
            dtype = str(register.handles[0].debug_get_from_remote(0).dtype)
            if what == "put":
                programs.to_worker_0(register, np.full((2, 3), 7, dtype))
            else:
                programs.from_worker_0(register, (2, 3), dtype)
        elif what == "drop" and registers:
            registers.remove(data.draw(st.sampled_from(registers)))
    programs.compare(registers)


def test_where_the_workers_are(programs: Programs) -> None:
    for name in ("worker_rank", "worker_id", "world_size"):
        results = programs.each(
            lambda sess, i, name=name: [
                plain(sess.get_global_func(f"runtime.disco.{name}")().debug_get_from_remote(w))
                for w in range(WORKERS)
            ]
        )
        assert results[0] == results[1], name
