"""More BLAS threads than cores."""

from __future__ import annotations

import os

import pytest

from spmd_disco.crowding import BLAS_THREADS, Place, crowding, here


@pytest.mark.parametrize(
    ("places", "wanted"),
    [
        ([Place("a", (0, 1), 2)], None),
        ([Place("a", (0, 1), 2)] * 2, "2 ranks on a use 4 BLAS threads in all on 2 cores"),
        ([Place("a", (0, 1), 1)] * 4, None),  # crowded, but not by BLAS
        ([Place("a", (0,), 1), Place("a", (1,), 1)], None),
        ([Place("a", (0, 1), 2), Place("b", (0, 1), 2)], None),
        ([Place("a", (0, 1), 2), *[Place("b", tuple(range(8)), 8)] * 2], "OMP_NUM_THREADS=4"),
    ],
)
def test_crowding(places, wanted):
    warning = crowding(places)
    if wanted is None:
        assert warning is None
    else:
        assert wanted in warning


def test_here(monkeypatch):
    for name in BLAS_THREADS:
        monkeypatch.delenv(name, raising=False)
    assert here().threads == len(here().cores) == len(os.sched_getaffinity(0))
    monkeypatch.setenv("OMP_NUM_THREADS", "3,2")
    assert here().threads == 3
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "1")
    assert here().threads == 1
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "many")
    assert here().threads == 3
