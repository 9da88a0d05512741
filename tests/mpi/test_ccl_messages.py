"""Messages between two workers."""

from __future__ import annotations

from collections.abc import Iterator

import ml_dtypes
import numpy as np
import pytest
from data_planes import make_ccl
from mpi4py import MPI

from spmd_disco.errors import PeerError
from spmd_disco.transport.host_ccl import HostCCL
from spmd_disco.transport.wait import Waiter

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(60)]

WORLD = MPI.COMM_WORLD
SIZE = WORLD.size
ME = WORLD.rank
several = pytest.mark.skipif(SIZE == 1, reason="one worker has nobody to send to")


class Worker:
    """A data plane with as many groups as it can have."""

    def __init__(self) -> None:
        self.groups = 2 if SIZE % 2 == 0 else SIZE
        self.comm = WORLD.Dup()
        self.group_comm = self.comm
        if self.groups > 1:
            self.group_comm = self.comm.Split(ME // (SIZE // self.groups))
        self.waiter = Waiter(20)
        self.ccl = make_ccl(self.comm, self.group_comm, self.waiter, num_groups=self.groups)
        self.number = 0

    def begin(self) -> HostCCL:
        self.number += 1
        self.ccl.begin(self.number)
        return self.ccl

    def idle(self) -> None:
        """Wait for all others as for the next command."""
        self.waiter.until(WORLD.Ibarrier().Test, lambda: "the next command", idle=True)


@pytest.fixture(scope="module")
def worker() -> Iterator[Worker]:
    worker = Worker()
    yield worker
    worker.begin().close(worker.number)
    if worker.group_comm is not worker.comm:
        worker.group_comm.Free()
    worker.comm.Free()


@several
@pytest.mark.parametrize("count", [0, 1, 100, 5000, 3_000_000])
@pytest.mark.parametrize("dtype", ["u1", "f8", "M8[s]", ml_dtypes.bfloat16], ids=str)
def test_ring(worker: Worker, dtype: type, count: int) -> None:
    ccl = worker.begin()
    before, after = (ME - 1) % SIZE, (ME + 1) % SIZE
    sent = np.full(count, ME + 1, "i8").astype(dtype)
    ccl.send_to_worker(sent, after)
    # A private copy has been sent.
    sent.view("u1")[:] = 77
    got = np.zeros((2 * count, 1), dtype)[::2]
    ccl.recv_from_worker(got, before)
    assert (got == np.full(count, before + 1, "i8").astype(dtype)[:, None]).all()


@several
def test_order(worker: Worker) -> None:
    """Large and small ones, some of them of earlier commands, come in the order of their sends."""
    sizes = [3, 9000, 1, 0, 20_000, 7]
    for size in sizes:
        ccl = worker.begin()
        if ME == 0:
            for other in range(1, SIZE):
                ccl.send_to_worker(np.full(size, size, "i4"), other)
    ccl = worker.begin()
    for size in sizes:
        buffer = np.zeros(size, "i4")
        ccl.recv_from_worker0(buffer)
        assert ME == 0 or (buffer == size).all()


@several
def test_received_in_a_later_command(worker: Worker) -> None:
    ccl = worker.begin()
    if ME == 0:
        for other in range(1, SIZE):
            ccl.send_to_worker(np.array([other]), other)
    worker.idle()
    buffer = np.zeros((1, 1), int)
    worker.begin().recv_from_worker0(buffer)
    assert buffer == ME


def test_groups(worker: Worker) -> None:
    ccl = worker.begin()
    size = SIZE // worker.groups
    group = ME // size
    if group + 1 < worker.groups:
        ccl.send_to_next_group(np.array([ME]))
    else:
        with pytest.raises(ValueError, match="last of"):
            ccl.send_to_next_group(np.array([ME]))
    buffer = np.zeros(1, int)
    if group > 0:
        ccl.recv_from_prev_group(buffer)
        assert buffer == ME - size
    else:
        with pytest.raises(ValueError, match="first of"):
            ccl.recv_from_prev_group(buffer)


def test_bad_arguments(worker: Worker) -> None:
    ccl = worker.begin()
    array = np.zeros(1)
    with pytest.raises(ValueError, match="itself"):
        ccl.send_to_worker(array, ME)
    with pytest.raises(ValueError, match="itself"):
        ccl.recv_from_worker(array, ME)
    with pytest.raises(ValueError, match=f"0 to {SIZE - 1}"):
        ccl.send_to_worker(array, SIZE)
    with pytest.raises(ValueError, match=f"0 to {SIZE - 1}"):
        ccl.recv_from_worker(array, -1)
    with pytest.raises(TypeError, match="integer"):
        ccl.recv_from_worker(array, "0")  # type: ignore[arg-type]
    if SIZE > 1:
        array.flags.writeable = False
        with pytest.raises(ValueError, match="read-only"):
            ccl.recv_from_worker(array, (ME + 1) % SIZE)


@several
@pytest.mark.parametrize("count", [3, 10_000])
def test_wrong_buffer(worker: Worker, count: int) -> None:
    ccl = worker.begin()
    if ME == 0:
        for _ in range(2):
            ccl.send_to_worker(np.zeros(count, "i4"), 1)
        ccl.send_to_worker(np.full(1, 5.0), 1)
    if ME == 1:
        with pytest.raises(ValueError, match=r"sent int32 .*float32"):
            ccl.recv_from_worker(np.zeros(count, "f4"), 0)
        with pytest.raises(ValueError, match=rf"{count} elements.*{count + 1} elements"):
            ccl.recv_from_worker(np.zeros(count + 1, "i4"), 0)
        # Both have been consumed.
        ccl.recv_from_worker(buffer := np.zeros(1), 0)
        assert buffer == 5


@several
@pytest.mark.parametrize("how", ["fails first", "fails later", "leaves", "goes on", "newer"])
def test_sender_that_sends_nothing(worker: Worker, how: str) -> None:
    ccl = worker.begin()
    number = worker.number
    if ME == 0:
        if how.startswith("fails"):
            if how == "fails later":
                end = MPI.Wtime() + 0.01
                worker.waiter.until(lambda: MPI.Wtime() > end, lambda: "nothing")
            ccl.fail(number)
        elif how == "newer":
            worker.begin().send_to_worker(np.ones(1), 1)
    elif ME == 1:
        match = f"failed in this command .{number}" if "fails" in how else "left this command"
        with pytest.raises(PeerError, match=f"recv_from_worker0 from worker 0: worker 0 {match}"):
            ccl.recv_from_worker0(np.zeros(1))
        ccl.fail(number)
    if how == "newer" and ME != 0:
        worker.begin()
    if how == "newer" and ME == 1:
        ccl.recv_from_worker0(buffer := np.zeros(1))
        assert buffer == 1
    if how == "leaves":
        worker.idle()
    worker.begin().allreduce(np.ones(2), "sum", False, out := np.zeros(2))
    assert (out == SIZE).all()


@several
def test_sent_before_it_failed(worker: Worker) -> None:
    ccl = worker.begin()
    if ME == 0:
        ccl.send_to_worker(np.ones(1), 1)
        ccl.fail(worker.number)
    elif ME == 1:
        ccl.recv_from_worker0(buffer := np.zeros(1))
        assert buffer == 1
        with pytest.raises(PeerError, match="failed"):
            ccl.recv_from_worker0(buffer)
        ccl.fail(worker.number)
    worker.idle()


@several
@pytest.mark.parametrize("count", [1, 10_000])
def test_messages_of_a_failed_command_are_dropped(worker: Worker, count: int) -> None:
    ccl = worker.begin()
    if ME == 0:
        ccl.send_to_worker(np.zeros(count), 1)
    elif ME == 1:
        ccl.fail(worker.number)
    ccl = worker.begin()
    if ME == 0:
        ccl.send_to_worker(np.ones(count), 1)
    elif ME == 1:
        ccl.recv_from_worker0(buffer := np.zeros(count))
        assert (buffer == 1).all()
    worker.idle()


@several
def test_waiting_and_outstanding(worker: Worker) -> None:
    worker.idle()
    ccl = worker.begin()
    assert ccl.waiting is None
    if ME == 0:
        ccl.send_to_worker(np.zeros(3_000_000), 1)
        assert ccl.outstanding or ccl.name == "peer"
    seen = []

    def see(idle: bool) -> None:
        if ccl.waiting:
            seen.append(ccl.waiting)

    if ME == 1:
        end = MPI.Wtime() + 0.2
        worker.waiter.until(lambda: MPI.Wtime() > end, lambda: "nothing")
    else:
        worker.waiter.add_hook(see)
    ccl.allreduce(np.zeros(1), "sum", False, np.zeros(1))
    assert ME == 1 or seen[0] == "allreduce in the world (operation 0)"
    if ME == 1:
        ccl.recv_from_worker0(np.zeros(3_000_000))
    worker.idle()
    assert ccl.waiting is None


def test_close_drops_what_nobody_received() -> None:
    worker = Worker()
    ccl = worker.begin()
    for other in range(SIZE):
        if other != ME:
            ccl.send_to_worker(np.zeros(10), other)
            ccl.send_to_worker(np.zeros(100_000), other)
    worker.begin().close(worker.number)
    # Nothing is left for somebody else's receive.
    WORLD.Barrier()
    assert not worker.comm.Iprobe(MPI.ANY_SOURCE, MPI.ANY_TAG)
    if worker.group_comm is not worker.comm:
        worker.group_comm.Free()
    worker.comm.Free()


def test_many_sessions() -> None:
    """Communicators and persistent requests are given back."""
    for _ in range(100):
        comm = WORLD.Dup()
        ccl = make_ccl(comm, comm, Waiter(20), num_groups=1)
        ccl.begin(1)
        ccl.allreduce(np.ones(1), "sum", True, out := np.zeros(1))
        assert out == SIZE
        ccl.begin(2)
        ccl.close(2)
        comm.Free()
