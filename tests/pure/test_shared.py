"""How processes find each other's memory: by descriptors, and by names where that cannot be."""

from __future__ import annotations

import ctypes
import errno
import gc
import os
import platform
import struct
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
from forked import children
from forked_workers import Worker, run_forked

from spmd_disco import native
from spmd_disco.transport import ccl_choice, node
from spmd_disco.transport.peer_memory import PeerMemory

core: Any = native.core
pytestmark = pytest.mark.skipif(core is None, reason=f"the native module is {native.why_not}")

NOBODY = 2**22 + 1
MIB = 1 << 20
libc = ctypes.CDLL(None, use_errno=True)


def names() -> set[str]:
    return {name for name in os.listdir("/dev/shm") if name.startswith("spmd_disco-")}


def name_of(memory: Any) -> str:
    return f"spmd_disco-{memory.nonce.hex()}"


@pytest.mark.parametrize("named", [False, True])
def test_what_has_a_name_is_found_by_it(named):
    segment, pool = core.Segment.create(4096, 4096, named), core.Pool(MIB, named=named)
    memoryview(segment)[100] = 7
    for memory, find in ((segment, core.Segment.attach), (pool, core.PeerMap)):
        assert memory.named is named
        assert (name_of(memory) in names()) is named
        # By its process it is found in any case.
        assert find(os.getpid(), memory.fd, memory.nonce)
        if not named:
            with pytest.raises(FileNotFoundError, match=f"/proc/{NOBODY}/fd"):
                find(NOBODY, memory.fd, memory.nonce)
            continue
        assert os.stat(f"/dev/shm/{name_of(memory)}").st_mode & 0o777 == 0o600
        for pid, fd in ((NOBODY, memory.fd), (os.getpid(), 10_000), (os.getpid(), 0)):
            assert find(pid, fd, memory.nonce)
        found = find(NOBODY, 0, memory.nonce)
        memory.unlink()
        memory.unlink()
        assert name_of(memory) not in names()
        with pytest.raises(FileNotFoundError):
            find(NOBODY, 0, memory.nonce)
        assert bytes(memoryview(found)[:16]) == memory.nonce
    assert core.Segment.attach(os.getpid(), segment.fd, segment.nonce).named is False


def test_names_go_with_what_they_name():
    segment, pool = core.Segment.create(4096, 0, True), core.Pool(MIB, named=True)
    mine = {name_of(segment), name_of(pool)}
    assert mine <= names()

    def child() -> None:
        nonlocal segment, pool
        del segment, pool
        gc.collect()

    with children(child):
        pass
    # They are the parent's.
    assert mine <= names()
    del segment, pool
    gc.collect()
    assert not mine & names()


@pytest.mark.parametrize("end", ["", "sys.exit(3)", "1 / 0"])
def test_names_go_at_exit(end):
    program = (
        "import sys; from spmd_disco.native import core\n"
        "sys.kept = [core.Segment.create(4096, 0, True), core.Pool(1 << 20, named=True)]\n"
        "sys.kept.append(sys.kept)\n"
        f"print(*(m.nonce.hex() for m in sys.kept[:2]))\n{end}\n"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    left = {f"spmd_disco-{nonce}" for nonce in ended.stdout.split()}
    assert len(left) == 2, ended.stderr
    assert not left & names()


def test_side_blocks_have_names_while_they_are_unread():
    before = names()
    size = core.node_size(2, 1024, 1024)
    mine = core.Node(core.Segment.create(size, size, True), 0, 2, 1024, 1024)
    ring, reader = core.Ring(mine), core.Ring(core.Node(mine.segment, 1))
    mine.segment.unlink()
    # One that is used again is known to all, and those that are not kept are new each time.
    for count, mib, new in [(1, 1, 1), (2, 1, 0), (3, 20, 1), (4, 20, 1), (5, 1, 0)]:
        assert ring.try_push(count, bytes([count]) * (mib * MIB))
        assert len(names() - before) == new
        assert bytes(reader.pop()) == bytes([count]) * (mib * MIB)
        ring.collect()
        assert names() == before


def refuse(number: int, error: int) -> None:
    """Have a system call fail from now on in this process, as filters in containers do."""
    # Load the number of the call; where it is this one, return the error; else allow it.
    program = b"".join(
        struct.pack("=HBBI", *step)
        for step in (
            (0x20, 0, 0, 0),
            (0x15, 0, 1, number),
            (0x06, 0, 0, 0x00050000 | error),
            (0x06, 0, 0, 0x7FFF0000),
        )
    )
    code = ctypes.create_string_buffer(program)
    filter_ = ctypes.create_string_buffer(struct.pack("@HP", 4, ctypes.addressof(code)))
    assert libc.prctl(38, 1, 0, 0, 0) == 0  # PR_SET_NO_NEW_PRIVS
    if libc.prctl(22, 2, filter_, 0, 0) != 0:  # PR_SET_SECCOMP
        pytest.skip("this system has no filters of system calls")


@pytest.mark.parametrize("error", [errno.ENOSYS, errno.EPERM])
def test_without_memfd(error):
    numbers = {"x86_64": 319, "aarch64": 279}
    if platform.machine() not in numbers:
        pytest.skip(f"the number of memfd_create on {platform.machine()} is not known here")

    def child() -> None:
        refuse(numbers[platform.machine()], error)
        for memory in (core.Segment.create(4096), core.Pool(MIB)):
            assert memory.named
            assert name_of(memory) in names()
        del memory

    with children(child):
        pass


CLONE_NEWUSER = 0x10000000


class Communicator:
    """What `open_node` wants of one."""

    def __init__(self, worker: Worker) -> None:
        self.rank, self.size = worker.number, worker.size
        self.allgather: Callable[[Any], list[Any]] = worker.exchange


def test_processes_that_must_not_look_into_each_other():
    """A worker in a user namespace of its own finds the others' memory by its name."""
    before = names()

    def work(worker: Worker) -> tuple[Any, ...]:
        segment = core.Segment.create(4096)
        told = worker.exchange((os.getpid(), segment.fd, segment.nonce))
        alone = worker.number == 1 and libc.unshare(CLONE_NEWUSER) == 0
        try:
            core.Segment.attach(*told[0])
            closed = False
        except PermissionError:
            closed = alone
        worker.exchange(None)
        if not any(worker.exchange(closed)):
            return ()
        mine, why = node.open_node(Communicator(worker))
        assert mine is not None, why
        memory = PeerMemory(worker.exchange, worker.number)
        assert memory.available, memory.why_not
        block, why = ccl_choice._share_block(worker.exchange, worker.number, 1 << 16)
        assert block is not None, why
        named = mine.segment.named, memory.pool is not None and memory.pool.named, block.named
        worker.exchange(None)
        # All is unlinked while it is in use.
        return (*named, names() - before)

    played = run_forked(3, work)
    if not played[0]:
        pytest.skip("this system lets no process into a user namespace of its own")
    assert played == [(True, True, True, set()), *[(False, True, False, set())] * 2]
