"""The drop-in for ``tvm.runtime.disco``: the ground of TVM's own tests of Disco, and its oracle."""

from __future__ import annotations

import gc
import importlib
import json
import pathlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

tvm = pytest.importorskip("tvm", reason="pip install -e '.[tvm]' brings TVM")

import spmd_disco  # noqa: E402
import spmd_disco.interop.tvm_disco as drop_in  # noqa: E402
from spmd_disco.open_session import close_dropped_session  # noqa: E402

drop_in.install()

importlib.import_module("tvm.exec.disco_worker")

import tvm_ffi  # noqa: E402
from tvm.runtime import disco as di  # noqa: E402
from tvm.script import ir as I  # noqa: E402
from tvm.script import relax as R  # noqa: E402

KINDS = [di.ThreadedSession, di.ProcessSession]
pytestmark = pytest.mark.timeout(180)


@pytest.fixture(params=KINDS, ids=lambda kind: kind.__name__)
def kind(request: pytest.FixtureRequest) -> Any:
    return request.param


def on_all(sess: Any, dref: Any) -> list[Any]:
    return [dref.debug_get_from_remote(i) for i in range(sess.num_workers)]


def arrays(sess: Any, dref: Any) -> list[np.ndarray]:
    return [tensor.numpy() for tensor in on_all(sess, dref)]


def from_worker_0(sess: Any, dref: Any, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    host = tvm.runtime.empty(shape, dtype)
    sess.copy_from_worker_0(host, dref)
    sess.sync_worker_0()
    return host.numpy()


def filled(sess: Any, values: list[np.ndarray]) -> Any:
    dref = sess.empty(values[0].shape, str(values[0].dtype))
    for i, value in enumerate(values):
        dref.debug_copy_from(i, value)
    return dref


# The session --------------------------------------------------------------------------------------


def test_it_is_in_the_place_of_tvms_module() -> None:
    assert di is drop_in
    assert sys.modules["tvm.runtime.disco"] is drop_in
    assert tvm_ffi.get_global_func("runtime.disco.compiled_ccl")() == "mpi"


@pytest.mark.parametrize("num_workers", [1, 2, 4])
def test_values(kind: Any, num_workers: int) -> None:
    sess = kind(num_workers=num_workers)
    assert isinstance(sess, di.Session)
    assert sess.num_workers == num_workers
    function: di.DPackedFunc = sess.get_global_func("tests.disco.add_one")
    result: di.DRef = function(1)
    assert isinstance(function, di.DPackedFunc)
    assert isinstance(result, di.DRef)
    assert on_all(sess, result) == [2] * num_workers
    assert on_all(sess, sess.get_global_func("tests.disco.add_one_float")(1.5)) == (
        [2.0] * num_workers
    )
    for name in ("tests.disco.str", "tests.disco.str_obj"):
        assert on_all(sess, sess.call_packed(sess.get_global_func(name), "hello")) == (
            ["hello_suffix"] * num_workers
        )
    shapes = on_all(sess, sess.get_global_func("tests.disco.shape_tuple")(tvm_ffi.Shape([1, 2, 3])))
    assert all(isinstance(shape, tvm_ffi.Shape) for shape in shapes)
    assert [list(shape) for shape in shapes] == [[1, 2, 3, 4, 5]] * num_workers
    array = sess.empty((2, 3), "float32", tvm.cpu())
    array.debug_copy_from(num_workers - 1, tvm.runtime.tensor(np.full((2, 3), 5, "float32")))
    for i in range(num_workers - 1):
        array.debug_copy_from(i, np.full((2, 3), i, "float32"))
    more = sess.get_global_func("tests.disco.add_one_tensor")(array)
    tensors = on_all(sess, more)
    assert all(isinstance(tensor, tvm.runtime.Tensor) for tensor in tensors)
    assert tensors[-1].numpy().tolist() == np.full((2, 3), 6.0).tolist()
    assert sess.get_global_func("runtime.disco.worker_rank")().debug_get_from_remote(
        num_workers - 1
    ) == (num_workers - 1)
    # Dropped without a word, as in TVM's own tests; the next one opens all the same.


def test_copies_of_worker_0(kind: Any) -> None:
    sess = kind(2)
    host = tvm.runtime.tensor(np.arange(6, dtype="float32").reshape(2, 3))
    there = sess.copy_to_worker_0(host)
    assert from_worker_0(sess, there, (2, 3), "float32").tolist() == host.numpy().tolist()
    assert there.debug_get_from_remote(1) is None
    array = sess.empty((2, 3), "float32")
    assert sess.copy_to_worker_0(host, array) is array
    assert from_worker_0(sess, array, (3, 2), "float32").tolist() == [[0, 1], [2, 3], [4, 5]]


def test_bfloat16(kind: Any) -> None:
    import ml_dtypes

    sess = kind(2)
    array = filled(sess, [np.full(8, i + 1, ml_dtypes.bfloat16) for i in range(2)])
    total = sess.empty((8,), "bfloat16")
    sess.allreduce(array, total)
    for tensor in on_all(sess, total):
        assert tensor.dtype == "bfloat16"
        back = spmd_disco.interop.tvm_values.array_of(tensor)
        assert back.tolist() == [3.0] * 8


def test_errors_do_not_end_the_process(kind: Any) -> None:
    sess = kind(2)
    sess.get_global_func("tests.disco.shape_tuple")("no shape")
    with pytest.raises(spmd_disco.WorkerError, match="AssertionError"):
        sess._sync_all()
    with pytest.raises(
        ValueError, match=r"no global function .tests\.disco\.nothing. is registered"
    ):
        sess.get_global_func("tests.disco.nothing")
    assert on_all(sess, sess.get_global_func("tests.disco.add_one")(1)) == [2, 2]
    with pytest.raises(ValueError, match="allowed are nccl, rccl, mpi"):
        sess.init_ccl("gloo")


def test_socket_session_says_how_to_run_over_hosts() -> None:
    with pytest.raises(NotImplementedError, match=r"mpirun -n 8 python -m spmd_disco app\.py"):
        di.SocketSession(2, 4, 1, "localhost", 8080)


def test_entrypoint(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_entry.py").write_text(
        "import tvm_ffi\n"
        "@tvm_ffi.register_global_func('tests.mine', override=True)\n"
        "def mine(x): return x * 3\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    sess = di.ProcessSession(2, entrypoint="my_entry")
    assert on_all(sess, sess.get_global_func("tests.mine")(2)) == [6, 6]
    sess.shutdown()
    with pytest.raises(ImportError, match="no_such_entry"):
        di.ProcessSession(2, entrypoint="no_such_entry")
    di.ProcessSession(1).shutdown()


# Collectives --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("num_workers", "num_groups"), [(2, 1), (4, 2)])
def test_collectives(kind: Any, num_workers: int, num_groups: int, capfd: Any) -> None:
    sess = kind(num_workers=num_workers, num_groups=num_groups)
    sess.init_ccl(tvm_ffi.get_global_func("runtime.disco.compiled_ccl")(), *range(num_workers))
    size = num_workers // num_groups
    rng = np.random.default_rng(1)
    mine = [rng.random((3, 4), "float32") for _ in range(num_workers)]
    firsts = [i // size * size for i in range(num_workers)]
    source = filled(sess, mine)
    target = sess.empty((3, 4), "float32")
    ufuncs = {"sum": np.sum, "prod": np.prod, "min": np.min, "max": np.max, "avg": np.mean}
    for op, reduce in ufuncs.items():
        for in_group in (True, False):
            sess.allreduce(source, target, op=op, in_group=in_group)
            for i, got in enumerate(arrays(sess, target)):
                members = mine[firsts[i] : firsts[i] + size] if in_group else mine
                np.testing.assert_allclose(got, reduce(members, axis=0), rtol=1e-6)
    gathered = sess.empty((size, 3, 4), "float32")
    sess.allgather(source, gathered)
    for i, got in enumerate(arrays(sess, gathered)):
        np.testing.assert_array_equal(got, mine[firsts[i] : firsts[i] + size])
    sess.broadcast_from_worker0(source, target)
    for i, got in enumerate(arrays(sess, target)):
        np.testing.assert_array_equal(got, mine[firsts[i]])
    # The shapes differ, and the numbers of elements fit.
    flat = sess.empty((12 // size,), "float32")
    sess.scatter_from_worker0(source, flat)
    for i, got in enumerate(arrays(sess, flat)):
        np.testing.assert_array_equal(got, mine[firsts[i]].reshape(size, -1)[i % size])
    back = sess.empty((size, 12 // size), "float32", worker0_only=True)
    sess.gather_to_worker0(flat, back)
    for i, got in enumerate(on_all(sess, back)):
        if i == firsts[i]:
            np.testing.assert_array_equal(got.numpy().reshape(3, 4), mine[i])
        else:
            assert got is None
    everyone = sess.broadcast(mine[0], in_group=False)
    assert all(np.array_equal(got, mine[0]) for got in arrays(sess, everyone))
    rows = rng.random((num_workers, 2), "float32")
    for i, got in enumerate(arrays(sess, sess.scatter(rows, in_group=False))):
        np.testing.assert_array_equal(got, rows[i])
    sess.shutdown()
    assert capfd.readouterr().err == ""


def test_messages(kind: Any) -> None:
    sess = kind(4, 2)
    sess.init_ccl("mpi", 0, 1, 2, 3)
    values = [np.full(4, float(i), "float32") for i in range(4)]
    array = filled(sess, values)
    name = "runtime.disco.mpi.test_send_to_next_group_recv_from_prev_group"
    sess.get_global_func(name)(array)
    assert [int(got[0]) for got in arrays(sess, array)] == [0, 1, 0, 1]
    array = filled(sess, values)
    sess.get_global_func("runtime.disco.mpi.test_worker2_sends_to_worker0")(array)
    assert [int(got[0]) for got in arrays(sess, array)] == [2, 1, 2, 3]


# Compiled modules ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    @I.ir_module
    class Mod:
        @R.function
        def total(x: R.Tensor((4, 8), "float32")) -> R.Tensor((4, 8), "float32"):
            with R.dataflow():
                y: R.Tensor((4, 8), "float32") = R.ccl.allreduce(x, "sum")
                R.output(y)
            return y

        @R.function
        def pair(x: R.Tensor((4, 8), "float32")):
            with R.dataflow():
                y = R.add(x, x)
                z = R.multiply(x, x)
                R.output(y, z)
            return (y, z)

        @R.function
        def transform_params(
            get: R.Callable([R.Object, R.Prim("int64")], R.Object),
        ) -> R.Tuple(R.Tensor((4, 4), "int32"), R.Tensor((2, 2), "float32")):
            a = get(R.str("A"), R.prim_value(0))
            a = R.match_cast(a, R.Tensor((4, 4), "int32"))
            b = get(R.str("B"), R.prim_value(1))
            b = R.match_cast(b, R.Tensor((2, 2), "float32"))
            return (a, b)

    path = tmp_path_factory.mktemp("library") / "mod.so"
    tvm.compile(Mod, target="llvm").export_library(str(path))
    return path


def test_compiled_functions(kind: Any, library: pathlib.Path) -> None:
    sess = kind(2)
    sess.init_ccl("mpi", 0, 1)
    module = sess.load_vm_module(str(library))
    assert isinstance(module, di.DModule)
    values = [np.random.default_rng(i).random((4, 8), "float32") for i in range(2)]
    x = filled(sess, values)
    for got in arrays(sess, module["total"](x)):
        np.testing.assert_allclose(got, values[0] + values[1], rtol=1e-6)
    pair = module["pair"](x)
    for i in range(2):
        twice, squared = pair.debug_get_from_remote(i)
        assert isinstance(twice, tvm.runtime.Tensor)
        np.testing.assert_allclose(squared.numpy(), values[i] ** 2, rtol=1e-6)
    for i, got in enumerate(arrays(sess, pair[0])):
        np.testing.assert_allclose(got, 2 * values[i], rtol=1e-6)


def test_lazy_parameters_through_a_callback(kind: Any, library: pathlib.Path) -> None:
    sess = kind(2)
    callback = sess.get_global_func("tests.disco.test_callback")
    get_item = sess.call_packed(callback, tvm.cpu())
    params = sess.load_vm_module(str(library))["transform_params"](get_item)
    for i in range(2):
        a, b = params.debug_get_from_remote(i)
        np.testing.assert_array_equal(a.numpy(), np.arange(16).reshape(4, 4))
        np.testing.assert_array_equal(b.numpy(), np.arange(4).reshape(2, 2))
        assert (a.dtype, b.dtype) == ("int32", "float32")


# Files --------------------------------------------------------------------------------------------


HALVES = """
import tvm_ffi

@tvm_ffi.register_global_func("tests.halves", override=True)
def halves(source, target):
    target.copyfrom(source.numpy().reshape(2, 2, 6))
"""


def test_shard_loader(kind: Any, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tvm.contrib import tvmjs

    params = {f"param_{i}": np.random.default_rng(i).random((4, 6), "float32") for i in range(2)}
    tvmjs.dump_tensor_cache(params, str(tmp_path), encode_format="raw")
    metadata = (tmp_path / "tensor-cache.json").read_text()

    (tmp_path / "my_halves.py").write_text(HALVES)
    monkeypatch.syspath_prepend(tmp_path)
    info = {"param_0": [["tests.halves", [[2, 2, 6], "float32"]]]}
    sess = kind(2)
    sess.import_python_module("my_halves")
    sess.init_ccl("mpi", 0, 1)
    create = sess.get_global_func("runtime.disco.ShardLoader")
    load = sess.get_global_func("runtime.disco.ShardLoaderLoad")
    loader = create(str(tmp_path / "tensor-cache.json"), metadata, json.dumps(info), None)
    for i, got in enumerate(arrays(sess, load(loader, tvm_ffi.Shape([0])))):
        np.testing.assert_array_equal(got, params["param_0"][2 * i : 2 * i + 2])
    for got in arrays(sess, load(loader, tvm_ffi.Shape([1]))):
        np.testing.assert_array_equal(got, params["param_1"])
    on_first = sess.get_global_func("runtime.disco.ShardLoaderLoadParamOnWorker0")(loader, 1)
    np.testing.assert_array_equal(on_first.debug_get_from_remote(0).numpy(), params["param_1"])


# Under MPI ----------------------------------------------------------------------------------------

APP = """
import numpy as np
import spmd_disco.interop.tvm_disco
spmd_disco.interop.tvm_disco.install()
from tvm.runtime import disco as di
import tvm
sess = di.MPISession(num_groups=2)
sess.import_python_module("tvm.exec.disco_worker")
print(sess.get_global_func("tests.disco.add_one")(1).debug_get_from_remote(3))
sess.init_ccl("mpi", 0, 1, 2, 3)
x = sess.scatter(np.arange(8, dtype="float32").reshape(4, 2), in_group=False)
y = sess.empty((2,), "float32")
sess.allreduce(x, y, "sum")
host = tvm.runtime.empty((2,), "float32")
sess.copy_from_worker_0(host, y)
print(host.numpy().tolist(), y.debug_get_from_remote(3).numpy().tolist())
"""


def test_over_mpi(run_job: Callable[..., Any]) -> None:
    job = run_job(4, "-m", "spmd_disco", "-c", APP)
    assert (job.status, job.stdout) == (0, "2\n[2.0, 4.0] [10.0, 12.0]\n"), str(job)


@pytest.fixture(autouse=True)
def no_session_is_left() -> Iterator[None]:
    yield
    gc.collect()
    close_dropped_session()
