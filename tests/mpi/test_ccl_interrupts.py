"""Signal handlers that raise at any moment of an operation."""

from __future__ import annotations

import random
import signal
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import numpy as np
import pytest
from data_planes import make_ccl
from mpi4py import MPI

from spmd_disco.errors import DiscoTimeout, PeerError
from spmd_disco.transport.host_ccl import HostCCL
from spmd_disco.transport.wait import Waiter

pytestmark = [
    pytest.mark.mpi,
    pytest.mark.timeout(300),
    # Python itself reports, and drops, what strikes in a call-back of the garbage collector, of
    # which Hypothesis has one.
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


class Strike(BaseException):
    """What the signal handler raises."""


class Striker:
    """Raises once at a random moment after it has been armed."""

    def __init__(self, seed: int) -> None:
        self.armed = False
        self.struck = 0
        self.random = random.Random(seed)
        self.previous = signal.signal(signal.SIGALRM, self.handle)

    def handle(self, number: int, frame: FrameType | None) -> None:
        if self.armed:
            self.armed = False
            self.struck += 1
            raise Strike

    def attack(self, function: Callable[..., None], *args: Any) -> None:
        """Call a function, and raise in it, or not; never after this method has returned."""
        try:
            self.armed = True
            # From before the first record is posted to long waits for a peer.
            seconds = self.random.choice([2e-5, 5e-5, 1e-4, 1e-3])
            signal.setitimer(signal.ITIMER_REAL, seconds)
            function(*args)
        finally:
            # A strike here ends the clause too, and there is only one.
            self.armed = False

    def attack_until_ended(self, function: Callable[..., None], *args: Any) -> None:
        """Call it again when it was interrupted, as the interpreter does."""
        while True:
            try:
                return self.attack(function, *args)
            except Strike:
                continue

    def close(self) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, self.previous)


@pytest.fixture
def striker() -> Iterator[Striker]:
    striker = Striker(MPI.COMM_WORLD.rank)
    yield striker
    striker.close()


def work(ccl: HostCCL, number: int, worker: int, size: int) -> None:
    ids = np.arange(size)
    send = np.full((3, 4), number * size + worker, np.int64)
    recv = np.zeros((4, 3), np.int64).T
    ccl.allreduce(send, "sum", False, recv)
    assert (recv == (number * size + ids).sum()).all()
    if number % 3 == 0:
        floats = np.full(7, float(worker))
        ccl.allreduce(floats, "max", False, floats)
        assert (floats == size - 1).all()
    if number % 4 == 0 and size > 1:
        # The same everywhere, since messages of an interrupted command may be taken in a later one.
        large = np.arange(3000)
        ccl.send_to_worker(large, (worker + 1) % size)
        taken = np.zeros_like(large)
        ccl.recv_from_worker(taken, (worker - 1) % size)
        assert (taken == large).all()
    if number % 5 == 0:
        half = np.full(2, number * size + worker, np.int16)
        whole = np.zeros((size, 2), np.int16)
        ccl.allgather(half, True, whole[: ccl.group_size])


@pytest.mark.parametrize("groups", [1, 2])
def test_raising_signal_handlers(groups: int, striker: Striker) -> None:
    world = MPI.COMM_WORLD
    size, worker = world.size, world.rank
    if size % groups:
        pytest.skip(f"{size} workers have no {groups} equal groups")
    comm, control = world.Dup(), world.Dup()
    group_comm = comm if groups == 1 else comm.Split(worker // (size // groups))
    waiter = Waiter(60)
    ccl = make_ccl(comm, group_comm, waiter, num_groups=groups)
    number = 0
    for _ in range(20):
        for _ in range(30):
            number += 1
            ccl.begin(number)
            try:
                if striker.random.random() < 0.5:
                    striker.attack(work, ccl, number, worker, size)
                else:
                    work(ccl, number, worker, size)
            except (Strike, PeerError, ValueError):
                if striker.random.random() < 0.3:
                    striker.attack_until_ended(ccl.fail, number)
                else:
                    ccl.fail(number)
            if ccl.outstanding:
                ccl.pump(False)
        barrier = control.Ibarrier()
        waiter.until(barrier.Test, lambda: "the others", idle=True)
        # Whatever happened: what all come to works.
        number += 1
        ccl.begin(number)
        work(ccl, number, worker, size)
    total = world.allreduce(striker.struck)
    assert total > 5
    number += 1
    ccl.begin(number)
    striker.attack_until_ended(ccl.close, number)
    if groups > 1:
        group_comm.Free()
    comm.Free()
    control.Free()


def test_time_limit(striker: Striker) -> None:
    """A wait that ends by its time limit can be followed by anything."""
    world = MPI.COMM_WORLD
    size, worker = world.size, world.rank
    comm = world.Dup()
    waiter = Waiter(0.05)
    ccl = make_ccl(comm, comm, waiter, num_groups=1)
    ccl.begin(1)
    array = np.full(10, float(worker))
    if worker == 0 and size > 1:
        with pytest.raises(DiscoTimeout, match=r"allreduce in the world \(operation 0\)"):
            ccl.allreduce(array, "sum", False, array)
        ccl.fail(1)
        waiter.timeout = 60
        world.Barrier()
    else:
        # Not idle, so nobody is told anything.
        world.Barrier()
        waiter.timeout = 60
        if size > 1:
            # All have arrived then, the first of them without staying for the end; so it is done.
            ccl.allreduce(array, "sum", False, array)
            assert (array == sum(range(size))).all()
    ccl.begin(2)
    if worker == 0:
        # It belongs to a later command now, and what worker 0 owes must not touch it.
        array[:] = 5
    ccl.allreduce(np.ones(1), "sum", False, result := np.zeros(1))
    assert result == size
    if worker == 0:
        assert (array == 5).all()
    ccl.begin(3)
    ccl.close(3)
    comm.Free()
