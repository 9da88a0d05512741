"""The control plane over shared memory, between real processes, without MPI."""

from __future__ import annotations

import os
import random
import signal
import time

import pytest
from forked import children

import spmd_disco as di
from spmd_disco import native
from spmd_disco.protocol import ALL
from spmd_disco.transport.node import address_of, attach_node, create_node
from spmd_disco.transport.ring_channel import RingControllerChannel, RingWorkerChannel
from spmd_disco.transport.wait import Waiter

pytestmark = pytest.mark.skipif(
    native.core is None, reason=f"the native module is {native.why_not}"
)


def controller_end(workers: int):
    node = create_node(workers)
    waiter = Waiter(20.0)
    waiter.node = node
    return node, waiter, RingControllerChannel(node, waiter)


def worker_end(address, worker: int):
    node = attach_node(address, worker)
    waiter = Waiter(20.0)
    waiter.node = node
    return node, waiter, RingWorkerChannel(node, waiter)


def replies(channel, waiter, count: int) -> list[tuple[int, bytes]]:
    waiter.until(lambda: len(channel.poll()) >= count, lambda: "replies", idle=True)
    queue = channel.poll()
    taken = [(worker, bytes(message)) for worker, message in queue]
    queue.clear()
    return sorted(taken)


def echo(address, worker: int) -> None:
    """Send back each message; the empty letter ends it."""
    _, _, channel = worker_end(address, worker)
    number = 0
    while True:
        message = channel.receive()
        number += 1
        size = len(message)
        if message[:1] != b"-":
            channel.reply([bytes(message)])
        channel.done(number, size)
        if message[:1] == b"q":
            break
    channel.close()


def test_messages_and_replies():
    node, waiter, channel = controller_end(3)
    address = address_of(node)
    messages = [b"a", b"b" * 1000, b"c" * 300_000, b"d" * 3_000_000, b"e", b"quit"]
    with children(*(lambda w=w: echo(address, w) for w in (1, 2))):
        for number, message in enumerate(messages, 1):
            channel.reserve(len(message))
            channel.publish(number, ALL if number % 2 else 1, message)
            assert channel.published == number
            assert replies(channel, waiter, 2) == [(1, message), (2, message)]
        waiter.until(lambda: channel.executed() == [6, 6], lambda: "the last", rung=False)
    channel.close()
    assert channel.published == 6
    assert channel.executed() == [6, 6]
    assert list(channel.poll()) == []
    channel.pump()
    with pytest.raises(di.SessionClosedError):
        channel.reserve(10)
    with pytest.raises(di.SessionClosedError):
        channel.publish(7, ALL, b"x")


def test_a_burst_is_bounded_by_the_ring():
    node, waiter, channel = controller_end(2)
    address = address_of(node)
    with children(lambda: echo(address, 1)):
        for number in range(1, 30_001):
            message = b"-" * 100 if number < 30_000 else b"q"
            channel.reserve(len(message))
            channel.publish(number, ALL, message)
        assert replies(channel, waiter, 1) == [(1, b"q")]


def test_waiting_for_room_names_the_slowest():
    _, waiter, channel = controller_end(2)
    waiter.timeout = 0.1
    number = 0
    while channel.ring.has_room(1000):
        number += 1
        channel.publish(number, ALL, bytes(1000))
    with pytest.raises(di.DiscoTimeout, match="waiting for worker 1 to work off earlier commands"):
        channel.reserve(1000)
    assert channel.published == number
    with pytest.raises(di.DiscoError, match="without room"):
        channel.publish(number + 1, ALL, bytes(1000))
    assert channel.published == number


def test_a_message_is_published_or_not_whatever_a_signal_does():
    """A handler that raises at any time leaves the number and the messages in agreement."""

    class Struck(Exception):
        pass

    def strike(signum: int, frame: object) -> None:
        raise Struck

    node, waiter, channel = controller_end(2)
    address = address_of(node)

    def count() -> None:
        _, _, mine = worker_end(address, 1)
        seen = 0
        while True:
            message = bytes(mine.receive())
            if message == b"end":
                break
            seen += 1
            assert message[:8] == seen.to_bytes(8, "little")
        mine.reply([seen.to_bytes(8, "little")])
        mine.close()

    previous = signal.signal(signal.SIGALRM, strike)
    with children(count):
        for _ in range(500):
            try:
                # Once, so that none comes while the last one is being dealt with.
                signal.setitimer(signal.ITIMER_REAL, random.uniform(1e-5, 5e-4))
                while True:
                    number = channel.published + 1
                    message = number.to_bytes(8, "little") + bytes(92)
                    channel.reserve(len(message))
                    channel.publish(number, ALL, message)
            except Struck:
                pass
        signal.signal(signal.SIGALRM, previous)
        number = channel.published
        channel.reserve(3)
        channel.publish(number + 1, ALL, b"end")
        ((_, reply),) = replies(channel, waiter, 1)
        assert int.from_bytes(reply, "little") == number


def test_the_controller_gives_up_the_session():
    node, waiter, _ = controller_end(2)
    address = address_of(node)

    def worker() -> None:
        mine, _, channel = worker_end(address, 1)
        mine.leave_command(1)
        with pytest.raises(di.SessionClosedError, match="given up"):
            channel.receive()

    with children(worker):
        waiter.until(lambda: node.executed() == [1], lambda: "the worker", rung=False)
        node.close()


def test_a_large_reply_flows_while_the_worker_waits():
    node, waiter, channel = controller_end(2)
    address = address_of(node)

    def worker() -> None:
        _, _, mine = worker_end(address, 1)
        mine.reply([b"x" * 20_000_000])
        assert bytes(mine.receive()) == b"go on"  # it pumps in there
        mine.close()

    with children(worker):
        time.sleep(0.1)
        assert replies(channel, waiter, 1) == [(1, b"x" * 20_000_000)]
        channel.publish(1, ALL, b"go on")


def test_nothing_of_it_stays_open():
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        node, _, channel = controller_end(2)
        channel.publish(1, ALL, bytes(1_000_000))
        channel.close()
        del node, channel, _
    assert len(os.listdir("/proc/self/fd")) == before
