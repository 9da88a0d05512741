"""Compiled modules over our data plane: sharded models against the unsharded ones, and errors."""

from __future__ import annotations

import json
import pathlib
import shutil
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

tvm = pytest.importorskip("tvm", reason="pip install -e '.[tvm]' brings TVM")

import tvm_models as models  # noqa: E402
from tvm.relax.op import ccl  # noqa: E402

import spmd_disco as di  # noqa: E402

pytestmark = pytest.mark.timeout(180)
KINDS = [di.ProcessSession, di.ThreadedSession]
ROWS, WIDTH, HIDDEN, HEADS = 16, 32, 64, 4


@pytest.fixture(params=KINDS, ids=lambda kind: kind.__name__)
def kind(request: pytest.FixtureRequest) -> Any:
    return request.param


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, Any], str]:
    """Compile modules, each of which has a name, once."""
    folder, known = tmp_path_factory.mktemp("libraries"), {}

    def library(name: str, make: Callable[[], Any]) -> str:
        if name not in known:
            known[name] = models.compiled(folder / f"{name}.so", make())
        return known[name]

    return library


def random(*shape: int) -> np.ndarray:
    return np.random.default_rng(shape).standard_normal(shape).astype(np.float32)


def mlp_arguments(parts: int) -> tuple[list[np.ndarray], list[list[np.ndarray]]]:
    """Return the whole arguments, and those of each worker."""
    x, w1, w2 = random(ROWS, WIDTH), random(WIDTH, HIDDEN), random(HIDDEN, WIDTH)
    columns, rows = np.split(w1, parts, axis=1), np.split(w2, parts)
    return [x, w1, w2], [[x, columns[i].copy(), rows[i].copy()] for i in range(parts)]


@pytest.mark.parametrize(("workers", "groups"), [(2, 1), (4, 2)])
def test_sharded_mlp(kind: Any, libraries: Any, workers: int, groups: int) -> None:
    parts = workers // groups
    whole, shards = mlp_arguments(parts)
    expected = models.run_here(
        libraries("mlp-1", lambda: models.mlp(ROWS, WIDTH, HIDDEN, 1)), *whole
    )
    path = libraries(f"mlp-{parts}", lambda: models.mlp(ROWS, WIDTH, HIDDEN, parts))
    with kind(workers, groups, tvm=True) as sess:
        module = sess.load_vm_module(path)
        arguments = [
            sess.put([shards[i % parts][k] for i in range(workers)]) for k in range(len(whole))
        ]
        for _ in range(3):
            for got in module["main"](*arguments).get_all():
                np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-4)


def test_sharded_attention(kind: Any, libraries: Any) -> None:
    arguments = [random(ROWS, WIDTH) / 4, *(random(WIDTH, WIDTH) / 4 for _ in range(4))]
    expected = models.run_here(
        libraries("attention-1", lambda: models.attention(ROWS, WIDTH, HEADS, 1)), *arguments
    )
    path = libraries("attention-2", lambda: models.attention(ROWS, WIDTH, HEADS, 2))
    with kind(2, tvm=True) as sess:
        given = [sess.broadcast(array) for array in arguments]
        for got in sess.load_vm_module(path)["main"](*given).get_all():
            np.testing.assert_allclose(got, expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "int32"])
def test_allreduce_of_compiled_code(kind: Any, libraries: Any, dtype: str) -> None:
    path = libraries(
        f"allreduce-{dtype}",
        lambda: models.collective((8, 4), dtype, lambda x: ccl.allreduce(x, "sum")),
    )
    numpy_dtype = np.dtype(getattr(ml_dtypes, dtype, dtype))
    with kind(2, tvm=True) as sess:
        x = sess.put([np.full((8, 4), i + 1, numpy_dtype) for i in range(2)])
        for got in sess.load_vm_module(path)["main"](x).get_all():
            assert got.dtype == numpy_dtype
            assert (got == 3).all()


def test_two_modules_at_once(kind: Any, libraries: Any) -> None:
    first = libraries(
        "gather", lambda: models.collective((2, 3), "float32", lambda x: ccl.allgather(x, 2))
    )
    second = libraries(
        "allreduce-float32",
        lambda: models.collective((8, 4), "float32", lambda x: ccl.allreduce(x, "sum")),
    )
    with kind(2) as sess:  # TVM comes with the first module
        one, two = sess.load_vm_module(first), sess.load_vm_module(second)
        x = sess.put([np.full((2, 3), i, np.float32) for i in range(2)])
        y = sess.put([np.full((8, 4), i, np.float32) for i in range(2)])
        for _ in range(3):
            gathered, total = one["main"](x), two["main"](y)
            for got in gathered.get_all():
                assert got.shape == (4, 3)
                assert got[:, 0].tolist() == [0, 0, 1, 1]
            assert all((got == 1).all() for got in total.get_all())


def test_errors(kind: Any, libraries: Any, tmp_path: pathlib.Path) -> None:
    path = libraries(
        "allreduce-float32",
        lambda: models.collective((8, 4), "float32", lambda x: ccl.allreduce(x, "sum")),
    )
    with kind(2, tvm=True) as sess:
        module = sess.load_vm_module(path)
        right = sess.put([np.ones((8, 4), np.float32)] * 2)
        wrong = sess.put([np.ones((8, 4), np.float32), np.ones((8, 5), np.float32)])
        module["main"](wrong)
        with pytest.raises(di.WorkerError) as caught:
            sess.sync()
        assert caught.value.failures[0].worker_id == 1
        assert not caught.value.failures[0].consequence
        # The one that waited for it has been released, by the error of its own kind.
        assert any("PeerError" in failure.type for failure in caught.value.failures)
        assert all((got == 2).all() for got in module["main"](right).get_all())
        with pytest.raises(di.WorkerError, match="has no function 'nothing'"):
            module["nothing"](right).get()
        with pytest.raises(FileNotFoundError, match=r"nowhere\.so"):
            sess.load_vm_module(str(tmp_path / "nowhere.so"))
        broken = tmp_path / "broken.so"
        broken.write_bytes(b"no library")
        sess.load_vm_module(str(broken))
        with pytest.raises(di.WorkerError, match="cannot load"):
            sess.sync()
        assert all((got == 2).all() for got in module["main"](right).get_all())


def test_a_library_that_is_written_anew(kind: Any, libraries: Any, tmp_path: pathlib.Path) -> None:
    shape = (2, 3)
    first = libraries(
        "add", lambda: models.collective(shape, "float32", lambda x: ccl.allreduce(x, "sum"))
    )
    second = libraries(
        "max", lambda: models.collective(shape, "float32", lambda x: ccl.allreduce(x, "max"))
    )
    path = tmp_path / "mine.so"
    with kind(2, tvm=True) as sess:
        x = sess.put([np.full(shape, i + 1, np.float32) for i in range(2)])
        for library, expected in ((first, 3), (second, 2)):
            path.unlink(missing_ok=True)
            shutil.copy(library, path)
            for got in sess.load_vm_module(str(path))["main"](x).get_all():
                assert (got == expected).all()


def test_functions_on_both_sides(kind: Any) -> None:
    with kind(2, tvm=True) as sess:
        # TVM's own, by name.
        assert sess.call("ffi.String", "text").get_all() == ["text"] * 2
        di.register_func("tests.published", lambda x: x * 2, publish=True, override=True)
        sess.call("tests.published", 1)

        def from_tvm() -> float:
            import tvm_ffi

            array = np.full(3, di.get_worker().worker_id + 1.0)
            tensor = tvm_ffi.get_global_func("tests.published")(tvm_ffi.from_dlpack(array))
            return float(np.from_dlpack(tensor).sum())

        assert sess.call(from_tvm).get_all() == [6.0, 12.0]


APP = """
import json, sys
import numpy as np
import spmd_disco as di
path, shards = sys.argv[1], np.load(sys.argv[2])
with di.session() as sess:
    n = sess.num_workers
    given = [sess.put([shards[f"{i}-{k}"] for i in range(n)]) for k in range(3)]
    print(json.dumps([r.tolist() for r in sess.load_vm_module(path)["main"](*given).get_all()]))
"""


def test_over_mpi(run_job: Callable[..., Any], libraries: Any, tmp_path: pathlib.Path) -> None:
    whole, shards = mlp_arguments(2)
    expected = models.run_here(
        libraries("mlp-1", lambda: models.mlp(ROWS, WIDTH, HIDDEN, 1)), *whole
    )
    path = libraries("mlp-2", lambda: models.mlp(ROWS, WIDTH, HIDDEN, 2))
    arrays = {f"{i}-{k}": array for i, each in enumerate(shards) for k, array in enumerate(each)}
    np.savez(tmp_path / "shards.npz", **arrays)
    job = run_job(2, "-m", "spmd_disco", "--tvm", "-c", APP, path, tmp_path / "shards.npz")
    assert job.status == 0, str(job)
    for got in json.loads(job.stdout):
        np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_example(ranks: int, run_job: Callable[..., Any]) -> None:
    example = pathlib.Path(__file__).parent.parent / "docs" / "examples" / "tvm_mlp.py"
    sizes = ("--rows", "8", "--width", "16", "--hidden", "32")
    job = run_job(ranks, "-m", "spmd_disco", example, *sizes)
    assert job.status == 0, str(job)
    assert f"{ranks} workers " in job.stdout
    assert "largest difference" in job.stdout
