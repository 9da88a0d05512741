"""The pool of peer memory: blocks, growth and its limits, frees from anywhere, and forks."""

from __future__ import annotations

import gc
import os
import pathlib
import random
import threading

import ml_dtypes
import numpy as np
import pytest
from forked import children
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from sanitized import SANITIZERS, SOURCES, run_sanitized

from spmd_disco import native
from spmd_disco.transport import memory_limits

core = native.core
pytestmark = pytest.mark.skipif(core is None, reason=f"the native module is {native.why_not}")

KIB, MIB = 1 << 10, 1 << 20
PAGE = os.sysconf("SC_PAGESIZE")


def fill(block: object, value: int) -> None:
    np.frombuffer(block, np.uint8)[:] = value  # type: ignore[call-overload]


# ------------------------------------------------------------------ blocks


@pytest.mark.parametrize("nbytes", [0, 1, 63, 64, 65, 512, 513, 16384, 16385, 100_000, 3 * MIB])
def test_alignment_and_counters(nbytes):
    pool = core.Pool(16 * MIB)
    assert (pool.used, pool.reserved, pool.peak) == (0, 0, 0)
    block = pool.empty(nbytes)
    assert len(block) == nbytes
    assert block.address % (PAGE if nbytes > 16384 else core.POOL_ALIGNMENT) == 0
    assert block.address == pool.address + block.offset
    assert pool.locate(block.address, nbytes) == block.offset
    # At most a quarter more than asked, or the rest of a page, or of the smallest block.
    assert nbytes <= pool.used <= max(1.25 * nbytes + 64, nbytes + (PAGE if nbytes > 16384 else 0))
    assert pool.used <= pool.reserved <= pool.cap
    fill(block, 7)
    used = pool.used
    del block
    assert (pool.used, pool.peak) == (0, used)


def test_locate():
    pool = core.Pool(MIB)
    assert pool.size >= pool.cap == MIB
    assert pool.locate(pool.address, pool.size) == 0
    assert pool.locate(pool.address, pool.size + 1) == -1
    assert pool.locate(pool.address - 1, 1) == -1
    assert pool.locate(pool.address + pool.size, 0) == pool.size
    assert pool.locate(pool.address + pool.size - 1, 2) == -1
    assert pool.locate(0, 0) == -1
    assert pool.locate(2**64 - 1, 2**62) == -1
    assert pool.locate(pool.address, -1) == -1


def test_wrong_sizes():
    with pytest.raises(ValueError, match="0 bytes or more"):
        core.Pool(-1)
    with pytest.raises(OSError, match="Invalid argument"):
        core.Pool(2**62)
    pool = core.Pool(0)
    with pytest.raises(MemoryError, match="1 bytes"):
        pool.empty(1)
    for wrong in (-1, 2**63, 2**70):
        with pytest.raises((ValueError, OverflowError)):
            pool.empty(wrong)
    with pytest.raises(TypeError):
        pool.empty(1.5)
    with pytest.raises(TypeError, match="limit is"):
        core.Pool(0, limits=(("a",),))


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        ((), "float64"),
        ((0,), "int8"),
        ((3, 0, 2), "complex128"),
        ((5, 7), ml_dtypes.bfloat16),
        ((2,), ml_dtypes.float8_e4m3fn),
        ((4,), [("a", "i4"), ("b", "f8", (2,))]),
        ((3,), "V0"),
        ((3,), "M8[ns]"),
        ((2, 2), "U5"),
    ],
)
def test_arrays_of_any_kind(shape, dtype):
    dtype = np.dtype(dtype)
    pool = core.Pool(MIB)
    block = pool.empty(int(np.prod(shape)) * dtype.itemsize)
    array = np.ndarray(shape, dtype, buffer=block)
    assert array.flags.writeable
    assert array.flags.aligned
    assert array.flags.c_contiguous
    assert array.base is block
    array[...] = np.zeros((), dtype)
    assert array.tobytes() == np.zeros(shape, dtype).tobytes()


def test_arrays_outlive_the_pool_object():
    pool = core.Pool(MIB)
    array = np.ndarray((1000,), np.float64, buffer=pool.empty(8000))
    array[:] = 3
    view = array[10:].reshape(2, -1)
    before = pool.used
    del array
    gc.collect()
    assert pool.used == before
    pool.close()
    del pool
    gc.collect()
    assert (view == 3).all()
    view[0] = 4
    assert view.sum() == 3 * 495 + 4 * 495


# ------------------------------------------------------------------ growth, and its limits


def test_growth_in_pieces_and_reuse():
    pool = core.Pool(64 * MIB)
    first = pool.empty(100)
    assert 0 < pool.reserved <= 4 * MIB
    large = pool.empty(20 * MIB)
    assert 20 * MIB <= pool.reserved <= 24 * MIB
    reserved, offset = pool.reserved, large.offset
    del large
    again = pool.empty(20 * MIB)
    assert (again.offset, pool.reserved) == (offset, reserved)
    del first, again
    # Neighbours that are free are merged, and what is missing is added to them.
    assert pool.empty(40 * MIB).offset <= offset
    assert pool.reserved <= 44 * MIB


def test_the_cap():
    pool = core.Pool(4 * MIB)
    blocks = [pool.empty(MIB) for _ in range(4)]
    assert pool.reserved == pool.cap
    with pytest.raises(
        MemoryError, match=f"{MIB} bytes .* {4 * MIB} of the pool's {4 * MIB} bytes"
    ):
        pool.empty(MIB)
    with pytest.raises(MemoryError, match="SPMD_DISCO_PEER_POOL"):
        pool.empty(1)
    with pytest.raises(MemoryError):
        pool.empty(2**62)
    for i, block in enumerate(blocks):
        fill(block, i)
    del blocks[1], block
    blocks.append(pool.empty(MIB))
    # What is free in two pieces can be had in one.
    del blocks[0], blocks[1]
    assert len(pool.empty(2 * MIB)) == 2 * MIB


def test_small_blocks_leave_the_cap_to_large_ones():
    pool = core.Pool(2 * MIB)
    small = [pool.empty(64) for _ in range(20_000)]
    with pytest.raises(MemoryError):
        pool.empty(MIB)
    del small
    assert len(pool.empty(2 * MIB)) == 2 * MIB


def test_a_full_group_is_an_error(tmp_path):
    usage, statistics = tmp_path / "usage", tmp_path / "stat"
    usage.write_text(f"{90 * MIB}\n")
    statistics.write_text(f"anon 5\ninactive_file {10 * MIB}\nactive_file 7\n")
    pool = core.Pool(64 * MIB, limits=((str(usage), str(statistics), 100 * MIB),))
    block = pool.empty(15 * MIB)
    with pytest.raises(MemoryError, match="the system has not so much left"):
        pool.empty(25 * MIB)
    statistics.write_text(f"cache 0\ntotal_inactive_file {20 * MIB}\n")
    other = pool.empty(25 * MIB)
    usage.write_text(f"{200 * MIB}\n")
    with pytest.raises(MemoryError):
        pool.empty(5 * MIB)
    # What the pool has can be had again, whatever the group's usage.
    del block, other
    assert len(pool.empty(40 * MIB)) == 40 * MIB


def test_trim():
    pool = core.Pool(64 * MIB)
    keep = pool.empty(100)
    fill(keep, 9)
    blocks = [pool.empty(5 * MIB) for _ in range(4)]
    for block in blocks:
        fill(block, 1)
    held = os.fstat(pool.fd).st_blocks * 512
    assert held >= 20 * MIB
    del block
    del blocks[::2]
    released = pool.trim()
    assert 10 * MIB <= released <= 14 * MIB
    assert os.fstat(pool.fd).st_blocks * 512 == held - released
    assert bytes(keep) == b"\t" * 100
    assert all((np.frombuffer(block, np.uint8) == 1).all() for block in blocks)
    new = pool.empty(5 * MIB)
    assert not np.frombuffer(new, np.uint8).any()
    del blocks, new, keep
    pool.trim()
    assert pool.reserved == 0
    assert os.fstat(pool.fd).st_blocks * 512 <= PAGE


def test_a_closed_pool_gives_back_what_becomes_free():
    pool = core.Pool(64 * MIB)
    large, small = pool.empty(20 * MIB), pool.empty(10)
    pool.close()
    pool.close()
    with pytest.raises(RuntimeError, match="closed"):
        pool.empty(1)
    assert 20 * MIB <= pool.reserved < 21 * MIB
    del large
    assert 0 < pool.reserved < MIB
    del small
    assert pool.reserved == 0


# ------------------------------------------------------------------ against a model


class Model(RuleBasedStateMachine):
    """Any order of allocations, frees and trims: no two blocks overlap, and contents stay."""

    CAP = 4 * MIB

    def __init__(self) -> None:
        super().__init__()
        self.pool = core.Pool(self.CAP)
        self.blocks: list[tuple[object, int]] = []
        self.stamp = 0

    @rule(
        nbytes=st.one_of(
            st.integers(0, 600), st.integers(600, 40_000), st.integers(40_000, 3_000_000)
        )
    )
    def allocate(self, nbytes: int) -> None:
        self.stamp = (self.stamp + 1) % 256
        try:
            block = self.pool.empty(nbytes)
        except MemoryError:
            # Never while as much again is free as is needed in one piece.
            assert nbytes + self.pool.used + RUNS > self.CAP
            return
        fill(block, self.stamp)
        self.blocks.append((block, self.stamp))

    @precondition(lambda self: self.blocks)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        block, stamp = self.blocks.pop(data.draw(st.integers(0, len(self.blocks) - 1)))
        assert (np.frombuffer(block, np.uint8) == stamp).all()  # type: ignore[call-overload]

    @rule()
    def trim(self) -> None:
        self.pool.trim()

    @invariant()
    def counters(self) -> None:
        assert sum(len(b) for b, _ in self.blocks) <= self.pool.used  # type: ignore[arg-type]
        assert self.pool.used <= self.pool.reserved <= self.pool.cap

    @invariant()
    def apart(self) -> None:
        spans = sorted((b.offset, len(b)) for b, _ in self.blocks)  # type: ignore[attr-defined]
        ends = [PAGE, *(at + n for at, n in spans)]
        assert all(end <= at for end, (at, _) in zip(ends, spans, strict=False))


#: What runs of small blocks may hold besides the blocks in use: one run for each size.
RUNS = 28 * 64 * KIB

TestModel = Model.TestCase
TestModel.settings = settings(
    max_examples=40,
    stateful_step_count=60,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)


# ------------------------------------------------------------------ threads and processes


def test_frees_from_other_threads():
    pool = core.Pool(64 * MIB)
    made: list[list[tuple[object, int]]] = [[] for _ in range(4)]
    wrong: list[str] = []

    def work(me: int) -> None:
        # Each thread frees what its neighbour has made.
        chance = random.Random(me)
        mine, others = made[me], made[(me + 1) % len(made)]
        try:
            for _ in range(8000):
                if chance.random() < 0.5:
                    stamp = chance.randrange(256)
                    block = pool.empty(int(2 ** chance.uniform(0, 16)))
                    fill(block, stamp)
                    mine.append((block, stamp))
                elif others:
                    block, stamp = others.pop()
                    if not (np.frombuffer(block, np.uint8) == stamp).all():
                        wrong.append("a block was overwritten")
                    del block
        except BaseException as e:
            wrong.append(repr(e))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(made))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    made.clear()
    assert pool.used == 0
    pool.trim()
    assert pool.reserved == 0


def test_a_forked_child_leaves_the_pool_alone():
    pool = core.Pool(MIB)
    blocks = [pool.empty(1000)]
    fill(blocks[0], 5)
    used = pool.used

    def child() -> None:
        with pytest.raises(RuntimeError, match="forked"):
            pool.empty(10)
        assert bytes(blocks[0]) == b"\5" * 1000
        blocks.clear()
        gc.collect()
        assert (pool.used, pool.trim()) == (used, 0)
        pool.close()
        # A pool of its own is another matter.
        own = core.Pool(MIB)
        assert len(own.empty(100)) == 100

    with children(child):
        pass
    assert pool.used == used
    assert bytes(blocks[0]) == b"\5" * 1000
    assert pool.empty(1000).offset != blocks[0].offset


def test_maps_of_peers():
    pool, other = core.Pool(64 * MIB), core.Pool(MIB)
    small = pool.empty(100)
    fill(small, 3)

    def peer() -> None:
        mapped = core.PeerMap(os.getppid(), pool.fd, pool.nonce)
        table = core.PoolTable([mapped, None, other])
        assert mapped.size == pool.size
        memory = np.frombuffer(mapped, np.uint8)
        assert bytes(memory[small.offset : small.offset + 100]) == b"\3" * 100
        assert table.address(0, small.offset, 100) == mapped.address + small.offset
        assert table.locate(mapped.address + 5, 7) == (0, 5)
        memory[small.offset] = 8

    with children(peer):
        pass
    assert bytes(small)[:2] == b"\x08\x03"

    # What the pool grows by later is in the map, too.
    mapped = core.PeerMap(os.getpid(), pool.fd, pool.nonce)
    large = pool.empty(30 * MIB)
    fill(large, 6)
    got = np.frombuffer(mapped, np.uint8)[large.offset : large.offset + len(large)]
    assert (got == 6).all()


def test_maps_of_what_is_no_pool(tmp_path):
    pool, other = core.Pool(MIB), core.Pool(MIB)
    with pytest.raises(OSError, match="not the pool"):
        core.PeerMap(os.getpid(), pool.fd, other.nonce)
    with pytest.raises(OSError, match="not the pool"):
        core.PeerMap(os.getpid(), pool.fd, b"short")
    with open(tmp_path / "file", "w+b") as file, pytest.raises(OSError, match="not the pool"):
        core.PeerMap(os.getpid(), file.fileno(), pool.nonce)
    with pytest.raises(OSError, match=r"/proc/.*/fd/"):
        core.PeerMap(os.getpid(), 10_000, pool.nonce)


def test_tables_check_what_they_are_given():
    pool, other = core.Pool(MIB), core.Pool(8 * MIB)
    mapped = core.PeerMap(os.getpid(), other.fd, other.nonce)
    table = core.PoolTable([None, mapped, pool])
    assert len(table) == 3
    for member, memory in ((1, mapped), (2, pool)):
        assert table.locate(memory.address, memory.size) == (member, 0)
        assert table.locate(memory.address + memory.size - 1, 1) == (member, memory.size - 1)
        assert table.address(member, memory.size, 0) == memory.address + memory.size
        for offset, nbytes in (
            (memory.size, 1),
            (0, memory.size + 1),
            (-1, 1),
            (1, -1),
            (5, 2**62),
        ):
            with pytest.raises(ValueError, match=f"member {member}"):
                table.address(member, offset, nbytes)
    ordinary = np.empty(100, np.uint8)
    assert table.locate(ordinary.ctypes.data, 100) is None
    for member in (0, 3, -1):
        with pytest.raises(ValueError, match="mapped here"):
            table.address(member, 0, 1)
    with pytest.raises(TypeError, match="member 1 is a"):
        core.PoolTable([None, b"x"])
    del pool, other, mapped
    gc.collect()
    assert table.address(2, 0, 1)  # the table keeps them


def test_loans():
    pool = core.Pool(MIB)
    table = core.PoolTable([pool])
    block = pool.empty(128 + 100)
    fill(block, 0)
    np.frombuffer(block, np.uint8)[128:] = 4
    states = memoryview(block)[:70]
    loan = core.Loan(table, 0, block.offset, 100, 69, 70)
    array = np.ndarray((100,), np.uint8, buffer=loan)
    assert not array.flags.writeable
    assert (array == 4).all()
    assert states[69] == 1
    view = array[5:]
    del array, loan

    def child() -> None:
        nonlocal view
        del view
        gc.collect()

    with children(child):
        pass
    assert states[69] == 1
    del view
    assert states[69] == 2
    assert not any(states[:69])
    for wrong in [(1, 0, 1, 0, 1), (0, -1, 1, 0, 1), (0, 0, 1, 1, 1), (0, 0, pool.size, 0, 1)]:
        with pytest.raises(ValueError, match="no loan"):
            core.Loan(table, *wrong)


# ------------------------------------------------------------------ limits of memory


def groups(proc: pathlib.Path, cgroup: str, mount: str, files: dict[str, dict[str, str]]) -> None:
    (proc / "self").mkdir(parents=True)
    (proc / "meminfo").write_text("MemTotal: 9000000 kB\nMemAvailable: 1000000 kB\n")
    (proc / "self" / "cgroup").write_text(cgroup)
    (proc / "self" / "mountinfo").write_text(mount)
    for folder, texts in files.items():
        path = proc / folder
        path.mkdir(parents=True, exist_ok=True)
        for name, text in texts.items():
            (path / name).write_text(text)


def test_limits_of_version_2(tmp_path):
    stat = "anon 1\ninactive_file 1000\n"
    groups(
        tmp_path,
        "0::/jobs/one\n",
        f"30 20 0:5 / {tmp_path}/fs rw - cgroup2 cgroup2 rw\n31 20 0:6 / /tmp rw - tmpfs x rw\n",
        {
            "fs/jobs/one": {"memory.max": "max\n", "memory.current": "5\n", "memory.stat": stat},
            "fs/jobs": {"memory.max": "50000\n", "memory.current": "30000\n", "memory.stat": stat},
        },
    )
    (limit,) = memory_limits.limits(tmp_path)
    assert limit.usage == f"{tmp_path}/fs/jobs/memory.current"
    assert limit.limit == 50_000
    assert memory_limits.available(tmp_path) == 21_000


def test_limits_of_version_1_in_a_container(tmp_path):
    mount = (
        f"30 20 0:5 /docker/abc {tmp_path}/fs ro,nosuid shared:1 - cgroup cgroup rw,memory\n"
        f"31 20 0:6 /docker/abc {tmp_path}/cpu ro - cgroup cgroup rw,cpu\n"
    )
    files = {
        "memory.limit_in_bytes": "9000000\n",
        "memory.usage_in_bytes": "9500000\n",
        "memory.stat": "inactive_file 5\ntotal_inactive_file 600000\n",
    }
    groups(tmp_path, "4:memory:/docker/abc\n1:cpu:/docker/abc\n0::/\n", mount, {"fs": files})
    assert [limit.limit for limit in memory_limits.limits(tmp_path)] == [9_000_000]
    assert memory_limits.available(tmp_path) == 100_000
    (tmp_path / "fs/memory.usage_in_bytes").write_text("90000000\n")
    assert memory_limits.available(tmp_path) == 0
    (tmp_path / "fs/memory.limit_in_bytes").write_text("9223372036854771712\n")
    assert memory_limits.available(tmp_path) == 1_024_000_000


def test_limits_where_there_are_none(tmp_path):
    groups(tmp_path, "", "", {})
    assert memory_limits.limits(tmp_path) == []
    assert memory_limits.available(tmp_path) == 1_024_000_000
    assert memory_limits.available() > 0


# ------------------------------------------------------------------ under sanitizers


@pytest.mark.parametrize("sanitizer", SANITIZERS)
def test_threads_under_a_sanitizer(sanitizer, tmp_path):
    stress = pathlib.Path(__file__).parent / "pool_stress.c"
    run_sanitized(sanitizer, [stress, SOURCES / "pool.c", SOURCES / "shared.c"], tmp_path)
