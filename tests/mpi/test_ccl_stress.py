"""Thousands of random commands; see ccl_plan.py."""

from __future__ import annotations

import random

import pytest
from ccl_plan import Player, expected, make_plan
from data_planes import make_ccl
from mpi4py import MPI

from spmd_disco.transport.wait import Waiter

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(300)]


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_random_commands(seed: int) -> None:
    world = MPI.COMM_WORLD
    size, worker = world.size, world.rank
    groups = 2 if size % 2 == 0 and seed != 1 else 1
    comm, control = world.Dup(), world.Dup()
    group_comm = comm if groups == 1 else comm.Split(worker // (size // groups))
    waiter = Waiter(60)
    ccl = make_ccl(comm, group_comm, waiter, num_groups=groups)
    player = Player(ccl, waiter, lambda: control.Ibarrier().Test)
    plan = make_plan(seed, 1000, size)
    played = player.play(plan, random.Random(seed * 100 + worker))
    if groups > 1:
        group_comm.Free()
    comm.Free()
    control.Free()
    wanted = expected(plan, size, groups)[worker]
    for number, (got, want) in enumerate(zip(played, wanted, strict=True), 1):
        assert got == want, f"command {number} ({plan[number - 1]}) on worker {worker}"
