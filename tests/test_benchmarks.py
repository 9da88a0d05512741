"""The benchmark scripts run, and print what they say; how fast anything is, is not tested."""

from __future__ import annotations

import importlib.util
import json
import pathlib
from collections.abc import Callable
from typing import Any

import pytest

from spmd_disco import native

SCRIPTS = pathlib.Path(__file__).parent.parent / "scripts"
CONTROL = SCRIPTS / "bench_control.py"
COLLECTIVES = SCRIPTS / "bench_collectives.py"
LOAD = SCRIPTS / "bench_load.py"


def check(summary: dict[str, float]) -> None:
    assert 0 <= summary["min"] <= summary["median"] <= summary["max"]


def rows_of(job: Any) -> list[dict[str, Any]]:
    assert job.status == 0, str(job)
    where, *rows = map(json.loads, job.stdout.splitlines())
    assert where["bench"] == "environment"
    assert where["n"] == 2
    for row in rows:
        for key in ("ours", "peer", "ratio"):
            if key in row:
                check(row[key])
    return rows


def test_control(run_job: Callable[..., Any]) -> None:
    arguments = ("--commands", "20", "--idle-seconds", "0.01")
    rows = rows_of(run_job(2, "-m", "spmd_disco", CONTROL, *arguments))
    assert [row["bench"] for row in rows] == [
        *("dispatch", "dispatch_kept", "dispatch_import", "dispatch_by_value", "stream"),
        *("call_and_sync", "get_from_last", "idle_cpu", "start_up"),
        *(["start_processes"] if native.available() else []),
    ]
    assert all("peer" in row for row in rows if not row["bench"].startswith("start"))


def test_collectives(run_job: Callable[..., Any]) -> None:
    sizes = [64, 4096, 2**20]
    arguments = ("--sizes", *map(str, sizes))
    rows = rows_of(run_job(2, "-m", "spmd_disco", COLLECTIVES, *arguments))
    names = ["allreduce", "allreduce_bfloat16", "allgather", "broadcast", "scatter", "gather"]
    assert [(row["bench"], row["bytes"], row["arrays"]) for row in rows] == [
        *((name, size, kind) for name in names for size in sizes for kind in ("ordinary", "pool")),
        *((name, 2**20, "pool") for name in ("session_broadcast", "session_share")),
    ]
    moved = {row["bench"]: row["bytes_to_move"] for row in rows if row["bytes"] == 64}
    assert moved == dict(zip(names, [256, 256, 192, 128, 128, 128], strict=True))


def test_load(run_job: Callable[..., Any]) -> None:
    rows = rows_of(run_job(2, "-m", "spmd_disco", LOAD, "--size", "4", "--tensors", "4"))
    names = ["load_slices", "load_slices_of_columns", "load_replicated", "load_chain"]
    assert [row["bench"] for row in rows] == names


@pytest.mark.parametrize(
    ("script", "arguments"),
    [
        (CONTROL, ("--rows", "dispatch", "--commands", "5")),
        (COLLECTIVES, ("--operations", "gather", "--sizes", "64", "128")),
    ],
    ids=["control", "collectives"],
)
def test_plot(
    script: pathlib.Path,
    arguments: tuple[str, ...],
    run_job: Callable[..., Any],
    tmp_path: pathlib.Path,
) -> None:
    pytest.importorskip("matplotlib", reason="pip install -e '.[examples]' brings matplotlib")
    picture = tmp_path / "plot.png"
    rows_of(run_job(2, "-m", "spmd_disco", script, *arguments, "--plot", picture))
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("script", [CONTROL, COLLECTIVES, LOAD], ids=lambda path: path.stem)
def test_refuses(script: pathlib.Path, run_job: Callable[..., Any]) -> None:
    job = run_job(2, "-m", "spmd_disco", script, "--rounds", "8")
    assert job.status == 2, str(job)
    assert f"{script.name}: --rounds 8" in job.stderr, str(job)
    assert not job.stdout, str(job)


@pytest.mark.parametrize("script", [CONTROL, COLLECTIVES], ids=lambda path: path.stem)
def test_names_the_extra_where_tvm_is_missing(
    script: pathlib.Path, run_job: Callable[..., Any]
) -> None:
    if importlib.util.find_spec("tvm") is not None:
        pytest.skip("TVM is installed here")
    job = run_job(2, "-m", "spmd_disco", script, "--peer", "tvm")
    assert job.status == 2, str(job)
    assert "pip install 'spmd-disco[tvm]'" in job.stderr, str(job)
    assert "Traceback" not in job.stderr, str(job)


def test_compares_with_tvm(run_job: Callable[..., Any]) -> None:
    pytest.importorskip("tvm_ffi", reason="pip install -e '.[tvm]' brings TVM")
    arguments = ("--peer", "tvm", "--commands", "20", "--idle-seconds", "0.01")
    rows = rows_of(run_job(2, "-m", "spmd_disco", CONTROL, *arguments))
    compared = {row["bench"] for row in rows if "peer" in row}
    assert compared >= {"dispatch", "stream", "call_and_sync", "get_from_last", "start_processes"}
    job = run_job(2, "-m", "spmd_disco", COLLECTIVES, "--peer", "tvm")
    assert job.status == 2, str(job)
    assert "no collective library for arrays in host memory" in job.stderr, str(job)
