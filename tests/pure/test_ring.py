"""The ring of commands and the boxes of replies, among processes and with damaged memory."""

from __future__ import annotations

import os
import pathlib
import random
import signal
import time
import zlib
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
from forked import children
from hypothesis import given, settings
from hypothesis import strategies as st
from sanitized import SANITIZERS, SOURCES, run_sanitized

from spmd_disco import native
from spmd_disco.transport.wait import Waiter

core = native.core
pytestmark = pytest.mark.skipif(core is None, reason=f"the native module is {native.why_not}")

KIB, MIB = 1 << 10, 1 << 20


def make(workers: int, ring_size: int = 4 * KIB, box_size: int = 1 * KIB) -> Any:
    segment = core.Segment.create(core.node_size(workers, ring_size, box_size))
    return core.Node(segment, 0, workers, ring_size, box_size)


def other(node: Any, worker: int) -> Any:
    """Return the end of another process, in this one."""
    return core.Node(node.segment, worker)


def attached(pid: int, fd: int, nonce: bytes, worker: int) -> Any:
    return core.Node(core.Segment.attach(pid, fd, nonce), worker)


def address(node: Any) -> tuple[int, int, bytes]:
    return os.getpid(), node.segment.fd, node.segment.nonce


def wait(node: Any, ready: Callable[[], Any], what: str) -> Any:
    waiter = Waiter(20.0)
    waiter.node = node
    return waiter.until(ready, lambda: what, idle=True)


def push(node: Any, ring: Any, message: bytes) -> None:
    wait(node, lambda: ring.has_room(len(message)), "room")
    assert ring.try_push(ring.published + 1, message)


def drain(queue: deque[tuple[int, memoryview]]) -> list[tuple[int, bytes]]:
    taken = [(worker, bytes(message)) for worker, message in queue]
    queue.clear()
    return taken


def fds() -> int:
    return len(os.listdir("/proc/self/fd"))


# ------------------------------------------------------------------ the ring


@pytest.mark.parametrize("size", [1 * KIB, 4 * KIB, 64 * KIB])
def test_every_reader_gets_everything_in_order(size):
    random_ = random.Random(size)
    # Beyond a quarter of the ring, so that there are side blocks among them.
    sizes = [random_.choice([1, 7, 8, 60, 100, 255, 256, 700, 5000]) for _ in range(3000)]
    node = make(4, size)
    ring, where = core.Ring(node), address(node)

    def reader(worker: int) -> None:
        mine = attached(*where, worker)
        theirs = core.Ring(mine)
        for number, expected in enumerate(sizes):
            message = wait(mine, theirs.pop, "a message")
            assert len(message) == expected
            assert bytes(message) == bytes([number % 251]) * expected
            if worker == 2 and number % 500 == 0:
                time.sleep(0.002)  # now and then one is slow
        assert theirs.pop() is None

    with children(*(lambda w=w: reader(w) for w in (1, 2, 3))):
        for number, count in enumerate(sizes):
            push(node, ring, bytes([number % 251]) * count)
    assert ring.published == len(sizes)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.integers(1, 300)), max_size=200))
def test_a_ring_is_a_queue(steps):
    """Against a deque: what does not fit is refused, and changes nothing."""
    node = make(2, 1 * KIB)
    ring, reader = core.Ring(node), core.Ring(other(node, 1))
    expected: deque[bytes] = deque()
    for pushes, size in steps:
        if pushes:
            message = bytes([size % 256]) * size
            room = ring.has_room(size)
            number = ring.published
            assert ring.try_push(number + 1, message) is room
            assert ring.published == number + room
            if room:
                expected.append(message)
            else:
                assert expected, "an empty ring has room for everything"
        else:
            got = reader.pop()
            assert (got is None) is (not expected)
            if expected:
                assert bytes(got) == expected.popleft()
    while expected:
        assert bytes(reader.pop()) == expected.popleft()
    assert reader.pop() is None


def test_the_slowest_reader_counts():
    node = make(3, 1 * KIB)
    ring = core.Ring(node)
    fast, slow = core.Ring(other(node, 1)), core.Ring(other(node, 2))
    while ring.try_push(ring.published + 1, bytes(100)):
        assert fast.pop() is not None
    assert ring.slowest() == 2
    assert ring.published == 8
    assert fast.pop() is None
    assert not ring.has_room(100)
    slow.pop()
    assert ring.has_room(100)


def test_what_is_popped_is_the_readers_own():
    node = make(2, 1 * KIB)
    ring, reader = core.Ring(node), core.Ring(other(node, 1))
    ring.try_push(1, b"first")
    first = reader.pop()
    first[:] = b"taken"  # it is writable
    for number in range(2, 40):
        assert ring.try_push(number, b"x" * 200)
        assert bytes(reader.pop()) == b"x" * 200
    assert bytes(first) == b"taken"


def test_a_worker_without_others():
    node = make(1)
    ring = core.Ring(node)
    for number in range(1, 300):
        assert ring.try_push(number, bytes(100))
    assert ring.published == 299
    assert ring.slowest() == 0


def test_large_messages_lie_in_aligned_memory_and_come_whole():
    node = make(2, 256 * KIB)
    ring, where = core.Ring(node), address(node)
    sizes = [70 * KIB, 3 * MIB, 20 * MIB, 64 * KIB + 1, 5 * MIB, 100, 70 * MIB, 1 * MIB]

    def reader() -> None:
        import numpy as np

        mine = attached(*where, 1)
        theirs = core.Ring(mine)
        for count in sizes:
            message = wait(mine, theirs.pop, "a message")
            assert len(message) == count
            assert zlib.crc32(message) == zlib.crc32(bytes([count % 256]) * count)
            if count >= 64 * KIB:
                assert np.frombuffer(message, np.uint8).ctypes.data % 64 == 0

    with children(reader):
        for count in sizes:
            push(node, ring, bytes([count % 256]) * count)


def test_side_blocks_are_used_again_and_freed():
    node = make(2, 1 * KIB)
    ring, where = core.Ring(node), address(node)
    before = fds()

    def reader() -> None:
        mine = attached(*where, 1)
        theirs = core.Ring(mine)
        opened = set()
        for count in range(120):
            message = wait(mine, theirs.pop, "a message")
            assert bytes(message) == bytes([count]) * (MIB + count)
            opened.add(fds())
        assert max(opened) - min(opened) <= 4
        for _ in range(3):
            wait(mine, theirs.pop, "a very large message")
            assert fds() <= max(opened)

    with children(reader):
        for count in range(120):
            push(node, ring, bytes([count]) * (MIB + count))
            assert fds() - before <= 4
        for _ in range(3):
            push(node, ring, bytes(40 * MIB))
    ring.collect()
    assert fds() - before <= 4
    del ring
    assert fds() == before


def test_unread_bytes_in_side_blocks_are_bounded():
    node = make(2, 64 * KIB)
    ring, reader = core.Ring(node), core.Ring(other(node, 1))
    assert ring.try_push(1, bytes(40 * MIB))
    assert not ring.try_push(2, bytes(40 * MIB))
    assert not ring.has_room(25 * MIB)
    assert ring.try_push(2, bytes(20 * MIB))
    assert ring.try_push(3, b"a small one needs no block")
    reader.pop()
    assert not ring.has_room(100 * MIB)
    reader.pop()
    # One that is larger than the bound goes alone.
    assert ring.try_push(4, bytes(100 * MIB))
    assert not ring.has_room(1 * MIB)
    assert [len(reader.pop()) for _ in range(2)] == [26, 100 * MIB]
    assert ring.has_room(1 * MIB)


def test_many_middling_messages_at_once():
    node = make(2, 1 * KIB)
    ring, reader = core.Ring(node), core.Ring(other(node, 1))
    pushed = 0
    while ring.try_push(pushed + 1, bytes([pushed]) * 2000):
        pushed += 1
    assert pushed == 4
    assert [bytes(reader.pop())[:1] for _ in range(pushed)] == [bytes([i]) for i in range(pushed)]


def test_no_memory_for_a_large_message_publishes_nothing():
    node = make(2, 1 * KIB)
    ring, reader = core.Ring(node), core.Ring(other(node, 1))
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 * MIB, hard))
    try:
        with pytest.raises((MemoryError, OSError)):
            ring.try_push(1, bytes(4 * MIB))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    assert ring.published == 0
    assert reader.pop() is None
    assert ring.try_push(1, bytes(4 * MIB))
    assert len(reader.pop()) == 4 * MIB


def test_a_reader_that_is_killed_holds_up_nobody_once_it_is_known():
    node = make(3, 1 * KIB)
    ring, where = core.Ring(node), address(node)

    def reader() -> None:
        mine = attached(*where, 1)
        theirs = core.Ring(mine)
        while True:
            wait(mine, theirs.pop, "a message")

    survivor = core.Ring(other(node, 2))
    with children(reader) as (pid,):
        for _ in range(30):
            push(node, ring, bytes(100))
            survivor.pop()
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        while ring.try_push(ring.published + 1, bytes(100)):
            survivor.pop()
        assert ring.slowest() == 1
        node.mark_gone(1, 9)
        assert ring.has_room(100)
        for _ in range(100):
            push(node, ring, bytes(100))
            assert survivor.pop() is not None
    assert node.status(1)["ended"] == 9
    assert node.status(1)["gone"]


def test_a_full_ring_wakes_the_writer():
    node = make(2, 1 * KIB)
    ring, where = core.Ring(node), address(node)

    def reader() -> None:
        mine = attached(*where, 1)
        theirs = core.Ring(mine)
        for _ in range(200):
            time.sleep(0.0005)
            wait(mine, theirs.pop, "a message")

    start = time.monotonic()
    with children(reader):
        for _ in range(200):
            push(node, ring, bytes(100))
    # Without being woken, it would sleep for 50 ms at each of some thirty times.
    assert time.monotonic() - start < 1.4


def test_each_side_keeps_to_its_own():
    node = make(2)
    mine = other(node, 1)
    with pytest.raises(ValueError, match="only the controller pushes"):
        core.Ring(mine).try_push(1, b"x")
    with pytest.raises(ValueError, match="only the controller pushes"):
        core.Ring(mine).has_room(1)
    with pytest.raises(ValueError, match="only workers other than worker 0"):
        core.Ring(node).pop()
    with pytest.raises(TypeError):
        core.Replies(node).send(b"x")
    with pytest.raises(ValueError, match="only the controller takes"):
        core.Replies(mine).poll(deque())
    with pytest.raises(TypeError):
        core.Ring("node")


# ------------------------------------------------------------------ replies


def test_replies_of_all_sizes_come_in_order():
    sizes = [0, 1, 7, 8, 9, 1000, 1023, 1024, 1025, 5000, 64 * KIB, 3 * MIB, 0, 12]
    node = make(4)
    boxes, where = core.Replies(node), address(node)

    def worker(number: int) -> None:
        mine = attached(*where, number)
        box = core.Replies(mine)
        for size in sizes:
            box.send(bytes([number]) * size)
        wait(mine, lambda: not box.pump(), "room")

    got: dict[int, list[bytes]] = {1: [], 2: [], 3: []}
    queue: deque[tuple[int, memoryview]] = deque()

    def complete() -> bool:
        boxes.poll(queue)
        for number, message in drain(queue):
            got[number].append(message)
        return all(len(messages) == len(sizes) for messages in got.values())

    with children(*(lambda w=w: worker(w) for w in (1, 2, 3))):
        wait(node, complete, "the replies")
    for number, messages in got.items():
        assert messages == [bytes([number]) * size for size in sizes]


def test_a_worker_never_waits_for_the_controller():
    node = make(2, box_size=256)
    boxes, box = core.Replies(node), core.Replies(other(node, 1))
    assert box.pump() is False
    assert box.send(b"x" * 100) is False
    assert box.send(b"y" * 1000) is True
    assert box.send(b"z") is True
    queue: deque[tuple[int, memoryview]] = deque()
    while box.pump():
        boxes.poll(queue)
    boxes.poll(queue)
    assert drain(queue) == [(1, b"x" * 100), (1, b"y" * 1000), (1, b"z")]
    boxes.poll(queue)
    assert not queue


@settings(max_examples=100, deadline=None)
@given(st.lists(st.one_of(st.integers(0, 200), st.none()), max_size=60))
def test_a_box_is_a_queue(steps):
    node = make(2, box_size=64)
    boxes, box = core.Replies(node), core.Replies(other(node, 1))
    queue: deque[tuple[int, memoryview]] = deque()
    sent = []
    for step in steps:
        if step is None:
            boxes.poll(queue)
            box.pump()
        else:
            sent.append(bytes([step]) * step)
            box.send(sent[-1])
    while box.pump():
        boxes.poll(queue)
    boxes.poll(queue)
    assert drain(queue) == [(1, message) for message in sent]


# ------------------------------------------------------------------ damage


def places(node: Any) -> tuple[int, int]:
    """Return where the ring and its boxes lie in the segment."""
    header = memoryview(node.segment)[core.SEGMENT_HEADER :]
    at = header[16:64].cast("Q")
    return at[1], at[5]


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_damaged_memory_crashes_nobody(data):
    node = make(3, 1 * KIB, 64)
    ring, reader = core.Ring(node), core.Ring(other(node, 1))
    boxes, box = core.Replies(node), core.Replies(other(node, 1))
    memory = memoryview(node.segment)
    start, end = places(node)
    assert end == len(memory)
    for number in range(1, data.draw(st.integers(1, 6))):
        ring.try_push(number, bytes(data.draw(st.integers(1, 500))))
        box.send(bytes(data.draw(st.integers(0, 100))))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(start, end - 8))
        # Small numbers and all bits set are what passes checks that were forgotten.
        value = data.draw(st.one_of(st.binary(min_size=1, max_size=8), st.just(b"\xff" * 8)))
        memory[at : at + len(value)] = value
    queue: deque[tuple[int, memoryview]] = deque()
    for _ in range(20):
        for step in (
            reader.pop,
            lambda: boxes.poll(queue),
            box.pump,
            lambda: ring.try_push(ring.published + 1, bytes(60)),
        ):
            try:
                step()
            except OSError:
                pass
            except MemoryError:
                pass
    memory.release()


def test_a_damaged_ring_says_so():
    node = make(2)
    ring, reader = core.Ring(node), core.Ring(other(node, 1))
    ring.try_push(1, b"x" * 20)
    start, _ = places(node)
    memoryview(node.segment)[start + 128 : start + 132] = b"\xff\xff\xff\x7f"
    for _ in range(2):
        with pytest.raises(OSError, match="the ring of commands is damaged"):
            reader.pop()


def test_a_damaged_box_says_so():
    node = make(2)
    boxes, box = core.Replies(node), core.Replies(other(node, 1))
    box.send(b"x")
    _, end = places(node)
    box_at = end - 1 * KIB
    memoryview(node.segment)[box_at : box_at + 8] = b"\xff" * 8
    with pytest.raises(OSError, match="a box of replies is damaged"):
        boxes.poll(deque())


def test_a_side_block_that_is_not_there():
    node = make(2, 1 * KIB)
    ring, reader = core.Ring(node), core.Ring(other(node, 1))
    ring.try_push(1, bytes(2000))
    start, _ = places(node)
    record = start + 128 + 16
    memoryview(node.segment)[record + 8 : record + 24] = b"another nonce..."
    with pytest.raises(OSError, match="is not the segment that was announced"):
        reader.pop()


# ------------------------------------------------------------------ under sanitizers


@pytest.mark.parametrize("sanitizer", SANITIZERS)
def test_threads_under_a_sanitizer(sanitizer, tmp_path):
    program = pathlib.Path(__file__).parent / "ring_stress.c"
    parts = [SOURCES / name for name in ("ring.c", "box.c", "node.c")]
    run_sanitized(sanitizer, [program, *parts], tmp_path)
