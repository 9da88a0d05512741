"""Which data plane a session gets."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from spmd_disco import native
from spmd_disco.transport import ccl_choice
from spmd_disco.transport.ccl_choice import open_peer_ccl
from spmd_disco.transport.wait import Waiter

needs_native = pytest.mark.skipif(
    not native.available(), reason=f"the native module is {native.why_not}"
)


def open_with(exchange: Callable[[Any], Sequence[Any]], num_workers: int = 1) -> Any:
    return open_peer_ccl(exchange, 0, num_workers, Waiter(1), num_groups=1, node=None, memory=None)


def alone(value: Any) -> list[Any]:
    return [value]


@pytest.fixture(autouse=True)
def no_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SPMD_DISCO_CCL", raising=False)
    monkeypatch.setattr(ccl_choice._Warned, "yet", False)


@needs_native
@pytest.mark.parametrize("setting", ["", "peer"])
def test_one_node(setting: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPMD_DISCO_CCL", setting)
    ccl, why = open_with(alone)
    assert ccl.name == "peer"
    assert why == ""
    ccl.begin(1)
    ccl.allreduce(np.arange(3), "sum", False, out := np.zeros(3, int))
    assert out.tolist() == [0, 1, 2]
    ccl.close(2)


def test_mpi_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPMD_DISCO_CCL", "mpi")
    assert open_with(alone) == (None, "SPMD_DISCO_CCL=mpi")


def test_bad_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPMD_DISCO_CCL", "pigeon")
    with pytest.raises(ValueError, match=r"worker 0: SPMD_DISCO_CCL='pigeon'.*peer and mpi"):
        open_with(alone)


def test_settings_that_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    def exchange(mine: Any) -> list[Any]:
        return [mine, ("mpi", *mine[1:])]

    with pytest.raises(ValueError, match="must be the same for all workers; it is '', 'mpi'"):
        open_with(exchange, 2)


@needs_native
@pytest.mark.parametrize("setting", ["", "peer"])
def test_several_nodes(
    setting: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("SPMD_DISCO_CCL", setting)

    def exchange(mine: Any) -> list[Any]:
        return [mine, (mine[0], "another node", *mine[2:])]

    with caplog.at_level(logging.WARNING, "spmd_disco"):
        for _ in range(2):
            assert open_with(exchange, 2) == (None, "the workers are on several nodes")
    # Said once, and only to those who asked for it.
    assert len(caplog.records) == (setting == "peer")
    assert all("SPMD_DISCO_CCL=mpi silences" in r.getMessage() for r in caplog.records)


@needs_native
def test_memory_that_cannot_be_mapped() -> None:
    def exchange(mine: Any) -> list[Any]:
        return [mine, "worker 1: no such process" if isinstance(mine, str) else mine]

    assert open_with(exchange, 2) == (None, "worker 1: no such process")


def test_without_the_native_module(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "core", None)
    monkeypatch.setattr(native, "why_not", "switched off")
    assert open_with(alone) == (None, "worker 0: the native module is switched off")
