"""The data plane in shared memory, among forked processes and without MPI."""

from __future__ import annotations

import os
import pathlib
import random
import signal
import time
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from ccl_plan import Player, expected, make_plan
from forked_workers import Worker, run_forked
from sanitized import DATA_PLANE, SANITIZERS, run_sanitized

from spmd_disco import native
from spmd_disco.errors import DiscoError, DiscoTimeout, PeerError, SessionClosedError
from spmd_disco.transport.ccl import ReduceKind
from spmd_disco.transport.peer_ccl import PeerCCL
from spmd_disco.transport.wait import Waiter

core: Any = native.core
pytestmark = [
    pytest.mark.skipif(core is None, reason=f"the native module is {native.why_not}"),
    pytest.mark.timeout(120),
]

#: How a large operation moves: in the peers' pools, by reading their memory, or in pieces.
WAYS = ["pool", "memory", "staged"]


class Plane:
    """A data plane in one of the processes."""

    def __init__(
        self, worker: Worker, *, groups: int = 1, way: str = "memory", timeout: float = 30
    ) -> None:
        self.worker = worker
        if worker.number == 0:
            self.block = core.Segment.create(PeerCCL.required_bytes(worker.size, groups))
            mine = (os.getpid(), self.block.fd, self.block.nonce)
        else:
            mine = None
        address = worker.exchange(mine)[0]
        if worker.number > 0:
            self.block = core.Segment.attach(*address)
        self.pool = None
        pools = None
        if way == "pool":
            self.pool = core.Pool(1 << 28)
            told = worker.exchange((os.getpid(), self.pool.fd, self.pool.nonce))
            pools = core.PoolTable(
                [
                    self.pool if i == worker.number else core.PeerMap(*there)
                    for i, there in enumerate(told)
                ]
            )
        self.waiter = Waiter(timeout)
        self.ccl = PeerCCL(
            self.block, worker.number, worker.size, self.waiter, num_groups=groups, pools=pools
        )
        if way == "staged":
            # As where the system does not let processes read each other's memory.
            self.ccl._cells.read_memory = False
        worker.exchange(None)
        self.number = 0

    def begin(self) -> PeerCCL:
        self.number += 1
        self.ccl.begin(self.number)
        return self.ccl

    def empty(self, count: int, dtype: Any) -> Any:
        dtype = np.dtype(dtype)
        if self.pool is None:
            return np.empty(count, dtype)
        return np.ndarray((count,), dtype, self.pool.empty(max(1, count * dtype.itemsize)))


def sample(dtype: Any, count: int, seed: int) -> Any:
    return np.random.default_rng(seed).integers(0, 5, count).astype(dtype)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("size", [2, 3, 5])
def test_collectives(size: int, way: str) -> None:
    counts = [0, 1, 7, 1023, 4096, 4097, 30_011, 300_000]

    def work(worker: Worker) -> None:
        plane = Plane(worker, way=way)
        me, first = worker.number, worker.number == 0
        for count in counts:
            for dtype in ["f4", "i2", "f8", ml_dtypes.bfloat16, "?", "m8[s]"]:
                parts = [sample(dtype, count, w) for w in range(size)]
                mine, out = plane.empty(count, dtype), plane.empty(count, dtype)
                whole = plane.empty(size * count, dtype)
                mine[:] = parts[me]
                ccl = plane.begin()
                ccl.allreduce(mine, "max", False, out)
                wanted = np.maximum.reduce(np.array(parts))
                np.testing.assert_array_equal(out, wanted)
                ccl.allgather(mine, False, whole)
                np.testing.assert_array_equal(whole, np.concatenate(parts))
                ccl.broadcast_from_worker0(mine if first else None, False, out)
                np.testing.assert_array_equal(out, parts[0])
                ccl.scatter_from_worker0(whole if first else None, False, out)
                np.testing.assert_array_equal(out, parts[me])
                whole[:] = whole[::-1].copy()
                ccl.gather_to_worker0(mine, False, whole if first else None)
                if first:
                    np.testing.assert_array_equal(whole, np.concatenate(parts))
                ccl.allreduce(mine, ReduceKind.MAX, False, mine)
                np.testing.assert_array_equal(mine, wanted)
        plane.begin().close(plane.number)

    run_forked(size, work)


@pytest.mark.parametrize("way", WAYS)
def test_more_than_the_caches_hold(way: str) -> None:
    def work(worker: Worker) -> None:
        plane = Plane(worker, way=way)
        me, count = worker.number, 3 * 2**20 + 5
        parts = [sample("f4", count, w) for w in range(2)]
        mine, out = plane.empty(count, "f4"), plane.empty(count, "f4")
        whole = plane.empty(2 * count, "f4")
        mine[:] = parts[me]
        ccl = plane.begin()
        ccl.allreduce(mine, "sum", False, out)
        assert (out == parts[0] + parts[1]).all()
        ccl.allgather(mine, False, whole)
        assert (whole == np.concatenate(parts)).all()
        ccl.broadcast_from_worker0(mine if me == 0 else None, False, out)
        assert (out == parts[0]).all()
        ccl.scatter_from_worker0(whole if me == 0 else None, False, out)
        assert (out == parts[me]).all()
        whole[:] = 0
        ccl.gather_to_worker0(mine, False, whole if me == 0 else None)
        assert me or (whole == np.concatenate(parts)).all()

    run_forked(2, work)


@pytest.mark.parametrize("lies", ["ordinary", "mixed"])
@pytest.mark.parametrize("size", [2, 3])
def test_arrays_here_and_there(size: int, lies: str) -> None:
    """Where some arrays lie in pools, and others do not, it is the same on all workers."""

    def work(worker: Worker) -> None:
        plane = Plane(worker, way="pool")
        me, first = worker.number, worker.number == 0
        rng = random.Random(5)
        for _ in range(60):
            count = rng.choice([5000, 40_000])
            places = [[rng.random() < 0.5 for _ in range(4)] for _ in range(size)]
            here = places[me] if lies == "mixed" else [False] * 4

            def empty(count: int, in_pool: bool) -> Any:
                return plane.empty(count, "f4") if in_pool else np.empty(count, "f4")

            parts = [sample("f4", count, w) for w in range(size)]
            mine, out = empty(count, here[0]), empty(count, here[1])
            whole = empty(size * count, here[2])
            mine[:] = parts[me]
            ccl = plane.begin()
            ccl.allreduce(mine, "sum", False, out)
            np.testing.assert_array_equal(out, np.add.reduce(parts))
            ccl.allgather(mine, False, whole)
            np.testing.assert_array_equal(whole, np.concatenate(parts))
            ccl.broadcast_from_worker0(mine if first else None, False, out)
            np.testing.assert_array_equal(out, parts[0])
            ccl.scatter_from_worker0(whole if first else None, False, out)
            np.testing.assert_array_equal(out, parts[me])
            whole[:] = 0
            ccl.gather_to_worker0(mine, False, whole if first else None)
            assert not first or (whole == np.concatenate(parts)).all()
        plane.begin().close(plane.number)

    run_forked(size, work)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("size", "groups"), [(2, 1), (3, 1), (4, 2), (6, 3)])
def test_random_commands(size: int, groups: int, way: str) -> None:
    plan = make_plan(size, 300, size)

    def work(worker: Worker) -> list[list[str]]:
        plane = Plane(worker, groups=groups, way=way)
        barriers = core.Segment.attach(*worker.exchange(address)[0])
        epochs = np.frombuffer(barriers, np.int64)[8:]
        passed = 0

        def barrier() -> Callable[[], bool]:
            nonlocal passed
            passed += 1
            epochs[worker.number] = passed
            return lambda: bool((epochs[:size] >= passed).all())

        player = Player(plane.ccl, plane.waiter, barrier)
        return player.play(plan, random.Random(worker.number))

    segment = core.Segment.create(4096)
    address = (os.getpid(), segment.fd, segment.nonce)
    played = run_forked(size, work)
    wanted = expected(plan, size, groups)
    for worker in range(size):
        for number, (got, want) in enumerate(zip(played[worker], wanted[worker], strict=True), 1):
            assert got == want, f"command {number} ({plan[number - 1]}) on worker {worker}"


def test_many_commands_without_operations() -> None:
    """A member that has taken part in nothing for long finds the others' newest records."""

    def work(worker: Worker) -> None:
        plane = Plane(worker)
        one, out = np.ones(1), np.zeros(1)
        for number in range(2000):
            ccl = plane.begin()
            if worker.number == 0 and number % 100:
                ccl.fail(plane.number)
                continue
            try:
                ccl.allreduce(one, "sum", False, out)
                assert number % 100 == 0
                assert out == 3
            except PeerError:
                assert number % 100
                ccl.fail(plane.number)
        plane.begin().close(plane.number)

    run_forked(3, work)


def test_one_command_with_many_operations() -> None:
    def work(worker: Worker) -> None:
        plane = Plane(worker)
        ccl = plane.begin()
        for number in range(20_000):
            array = np.array([number, worker.number])
            ccl.allreduce(array, "sum", False, array)
            assert array.tolist() == [2 * number, 1]

    run_forked(2, work)


@pytest.mark.parametrize("how", ["fails", "leaves", "begins", "closes"])
def test_release(how: str) -> None:
    """Who waits for a member that has gone is released, whatever the size."""

    def work(worker: Worker) -> None:
        plane = Plane(worker)
        for count in (3, 50_000):
            ccl = plane.begin()
            if worker.number == 0:
                time.sleep(0.01)
                if how == "fails":
                    ccl.fail(plane.number)
                elif how == "leaves":
                    ccl.leave(plane.number)
                elif how == "begins":
                    ccl.begin(plane.number + 1)
                elif count > 3:
                    ccl.close(plane.number)
                else:
                    ccl.fail(plane.number)
            else:
                why = {"fails": "failed in this", "closes": "failed in this|shutting down"}
                with pytest.raises(PeerError, match=f"worker 0 .*{why.get(how, 'left this')}"):
                    ccl.allreduce(np.ones(count), "sum", False, np.zeros(count))
                ccl.fail(plane.number)
            plane.number += 1
            worker.exchange(None)

    run_forked(3, work)


def test_worker_that_breaks_off() -> None:
    """A large operation is given up together, and a small one is done by the others."""

    def work(worker: Worker) -> None:
        plane = Plane(worker)
        for count in (50_000, 3):
            ccl = plane.begin()
            array = np.full(count, float(worker.number))
            out = np.zeros(count)
            if worker.number == 0:
                plane.waiter.timeout = 0.05
                with pytest.raises(DiscoTimeout, match="allreduce in the world"):
                    ccl.allreduce(array, "sum", False, out)
                plane.waiter.timeout = 30
                array[:] = -1
                worker.exchange(None)
                worker.exchange(None)
                ccl.fail(plane.number)
            else:
                worker.exchange(None)
                if count == 3:
                    ccl.allreduce(array, "sum", False, out)
                    assert (out == 3).all()
                else:
                    with pytest.raises(PeerError, match="worker 0 has broken off its wait"):
                        ccl.allreduce(array, "sum", False, out)
                    assert (out == 0).all()
                    ccl.fail(plane.number)
                worker.exchange(None)
            plane.begin().allreduce(np.ones(9999), "sum", False, whole := np.zeros(9999))
            assert (whole == 3).all()

    run_forked(3, work)


@pytest.mark.parametrize("way", WAYS)
def test_death_in_the_middle(way: str) -> None:
    """Nobody waits for ever for a process that ends in the middle of a move."""

    def work(worker: Worker) -> str:
        plane = Plane(worker, way=way, timeout=5)
        count = 1 << 22
        send, recv = plane.empty(count, "f4"), plane.empty(count, "f4")
        send[:] = 1
        if worker.number == 1:
            signal.setitimer(signal.ITIMER_REAL, 0.2)
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
        try:
            while True:
                plane.begin().allreduce(send, "sum", False, recv)
        except (PeerError, DiscoTimeout) as e:
            return str(e)

    result, nothing = run_forked(2, work, may_die=True)
    assert nothing is None
    # Between two moves it is the session's watcher that would see it.
    assert "worker 1 has ended" in result or "still waiting" in result


@pytest.mark.parametrize("way", WAYS)
def test_many_messages(way: str) -> None:
    """Messages of all sizes come in order, however long they have to wait; also at the end."""
    rng = random.Random(3)
    counts = [rng.choice([0, 1, 100, 1000, 9000, 70_000]) for _ in range(120)]

    def work(worker: Worker) -> None:
        plane = Plane(worker, way=way)
        me, size = worker.number, worker.size
        after, before = (me + 1) % size, (me - 1) % size
        ccl = plane.begin()
        for number, count in enumerate(counts[:60]):
            array = np.full(count, 1000 * me + number, np.int32)
            ccl.send_to_worker(array, after)
            array[:] = -1
        # The first of them before the last are sent.
        for number, count in enumerate(counts):
            if number + 60 < len(counts):
                other = np.full(counts[number + 60], 1000 * me + number + 60, np.int32)
                ccl.send_to_worker(other, after)
            elif number + 60 == len(counts) and me == 0:
                # Whoever closes waits until what it has sent is read.
                ccl.leave(plane.number)
            got = np.zeros(count, np.int32)
            ccl.recv_from_worker(got, before)
            assert (got == 1000 * before + number).all()
        plane.begin().close(plane.number)

    run_forked(3, work)


def test_closing_waits_for_readers() -> None:
    def work(worker: Worker) -> float:
        plane = Plane(worker, way="staged")
        ccl = plane.begin()
        start = time.monotonic()
        if worker.number == 0:
            ccl.send_to_worker(np.arange(100_000), 1)
            plane.begin().close(plane.number)
        else:
            time.sleep(0.2)
            ccl.recv_from_worker0(got := np.zeros(100_000, int))
            assert (got == np.arange(100_000)).all()
            plane.begin().close(plane.number)
        return time.monotonic() - start

    assert min(run_forked(2, work)) > 0.15


def test_bury() -> None:
    """A process that has ended is waited for no more, once one of the others says so."""

    def work(worker: Worker) -> None:
        plane = Plane(worker)
        ccl = plane.begin()
        worker.exchange(None)
        if worker.number == 2:
            return
        if worker.number == 0:
            time.sleep(0.02)
            ccl.bury(2)
        for count in (1, 50_000):
            with pytest.raises(PeerError, match="the process of worker 2 has ended"):
                ccl.allreduce(np.ones(count), "sum", False, np.ones(count))
        with pytest.raises(PeerError, match="the process of worker 2 has ended"):
            ccl.recv_from_worker(np.ones(1), 2)
        ccl.close(2)

    run_forked(3, work)


def test_after_the_end() -> None:
    def work(worker: Worker) -> None:
        plane = Plane(worker, way="pool")
        ccl = plane.begin()
        ccl.close(plane.number)
        ccl.close(plane.number)
        ccl.begin(2)
        ccl.leave(2)
        ccl.fail(2)
        ccl.pump(True)
        ccl.bury(1)
        assert not ccl.outstanding
        assert ccl.waiting is None
        for operation in (
            lambda: ccl.allreduce(np.ones(1), "sum", False, np.ones(1)),
            lambda: ccl.send_to_worker(np.ones(1), 1 - worker.number),
        ):
            with pytest.raises(SessionClosedError):
                operation()
        with pytest.raises(RuntimeError, match="closed"):
            ccl._cells.resume()

    run_forked(2, work)


def test_numpy_reduces_in_pieces() -> None:
    def work(worker: Worker) -> None:
        plane = Plane(worker)
        count = 300_001
        given = np.arange(count).astype("m8[s]") * (worker.number + 1)
        out = np.empty(count, "m8[s]")
        plane.begin().allreduce(given, "sum", False, out)
        assert (out == np.arange(count).astype("m8[s]") * 6).all()
        longs = np.arange(count).astype("g") + worker.number
        plane.begin().allreduce(longs, "avg", False, longs)
        assert (longs == np.arange(count) + 1).all()

    run_forked(3, work)


@pytest.mark.parametrize("seed", range(6))
def test_damaged_memory(seed: int) -> None:
    """Whatever lies in the block, a worker does not crash; it may wait for ever, or be wrong."""

    def work(worker: Worker) -> None:
        plane = Plane(worker, way=["pool", "memory"][seed % 2], timeout=0.02)
        memory = np.frombuffer(plane.block, np.uint8)
        rng = np.random.default_rng(seed)
        for _ in range(200):
            ccl = plane.begin()
            if worker.number == 1:
                # What is in use, here and there a whole word, and anything.
                places = np.flatnonzero(memory[: 1 << 20].copy())
                at = rng.choice(places, 3)
                memory[at] = rng.integers(0, 256, 3)
                word = int(rng.choice(places)) // 8 * 8
                memory[word : word + 8] = rng.integers(0, 256, 8)
            try:
                for count in (3, 5000):
                    send, recv = plane.empty(count, "f4"), plane.empty(count, "f4")
                    ccl.allreduce(send, "sum", False, recv)
                    ccl.broadcast_from_worker0(send, False, recv)
                    if worker.number == 0:
                        ccl.send_to_worker(send, 1)
                    else:
                        ccl.recv_from_worker0(recv)
            except (DiscoError, ValueError, ConnectionError):
                ccl.fail(plane.number)

    run_forked(2, work, limit=4, may_hang=True)


@pytest.mark.parametrize("sanitizer", SANITIZERS)
def test_threads_under_a_sanitizer(sanitizer: str, tmp_path: pathlib.Path) -> None:
    stress = pathlib.Path(__file__).parent / "cells_stress.c"
    run_sanitized(sanitizer, [stress, *DATA_PLANE], tmp_path)


def test_no_mpi() -> None:
    """Importing and using it needs no MPI."""
    import subprocess
    import sys

    code = (
        "import sys; sys.modules['mpi4py'] = None\n"
        "from spmd_disco.transport import peer_ccl, ccl_choice\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
