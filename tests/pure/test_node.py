"""The node block: its layout, status lines, doorbells and interrupts; waits at the doorbell."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from forked import children

import spmd_disco as di
from spmd_disco import native
from spmd_disco.transport import node as nodes
from spmd_disco.transport.wait import Waiter
from spmd_disco.transport.watch import NodeWatcher

core = native.core
pytestmark = pytest.mark.skipif(core is None, reason=f"the native module is {native.why_not}")

RING, BOX = 4096, 1024


def make(workers: int) -> Any:
    segment = core.Segment.create(core.node_size(workers, RING, BOX))
    return core.Node(segment, 0, workers, RING, BOX)


def waiter_at(node: Any, timeout: float | None = 20.0) -> Waiter:
    waiter = Waiter(timeout)
    waiter.node = node
    return waiter


# ------------------------------------------------------------------ layout


def test_the_block_is_found_through_the_segment():
    node = nodes.create_node(3)
    address = nodes.address_of(node)

    def worker() -> None:
        mine = nodes.attach_node(address, 2)
        assert (mine.workers, mine.me) == (3, 2)
        mine.leave_command(7)
        assert mine.status(2)["pid"] == os.getpid()

    with children(worker) as (pid,):
        pass
    assert node.executed() == [0, 7]
    assert node.status(2)["pid"] == pid
    assert node.status(0)["pid"] == os.getpid()


def test_only_the_right_memory_is_taken():
    node = make(2)
    address = nodes.address_of(node)
    with pytest.raises(OSError, match="is not the segment that was announced"):
        nodes.attach_node(address._replace(nonce=bytes(16)), 1)
    with pytest.raises(FileNotFoundError):
        nodes.attach_node(address._replace(pid=2**22 + 1), 1)
    with pytest.raises(ValueError, match="no node block of layout version 1 with a worker 2"):
        nodes.attach_node(address, 2)
    with pytest.raises(ValueError, match="no node block"):
        core.Node(core.Segment.create(1 << 16), 1)
    with pytest.raises(ValueError, match="does not fit"):
        core.Node(core.Segment.create(1 << 10), 0, 2, RING, BOX)
    with pytest.raises(ValueError, match="does not fit"):
        core.Node(node.segment, 1, 2, RING, BOX)
    for wrong in [(0, RING, BOX), (513, RING, BOX), (2, 5000, BOX), (2, RING, 100), (2, 0, BOX)]:
        with pytest.raises(ValueError, match="allowed are 1 to 512 workers"):
            core.node_size(*wrong)


@pytest.mark.parametrize("at", range(0, 64, 4))
def test_a_damaged_header_is_refused_or_harmless(at):
    node = make(2)
    memory = memoryview(node.segment)
    place = core.SEGMENT_HEADER + at
    for value in (b"\xff\xff\xff\xff", b"\x00\x00\x00\x00", b"\x00\x00\x00\x80"):
        before = bytes(memory[place : place + 4])
        memory[place : place + 4] = value
        try:
            mine = core.Node(node.segment, 1)
        except ValueError:
            pass
        else:
            assert core.Ring(mine).pop() is None
            mine.status(0)
        memory[place : place + 4] = before


# ------------------------------------------------------------------ status lines


def test_a_status_line():
    node = make(2)
    mine = core.Node(node.segment, 1)
    before = time.monotonic()
    mine.begin_command(5, "numpy.sum")
    mine.set_operation(5, 2)
    status = node.status(1)
    assert status["running"] == 5
    assert status["function"] == "numpy.sum"
    assert status["operation"] == (5, 2)
    assert before <= status["since"] <= time.monotonic()
    mine.clear_operation()
    mine.fail_command(5)
    mine.leave_command(5)
    mine.note_interrupt(4)
    mine.begin_command(6)
    status = node.status(1)
    assert status["running"] == 6
    assert status["function"] == "numpy.sum"
    assert status["operation"] is None
    assert (status["failed"], status["failures"], status["executed"]) == (5, 1, 5)
    assert status["interrupted_through"] == 4
    assert (status["ended"], status["gone"]) == (-1, False)
    for wrong in (-1, 2):
        with pytest.raises(ValueError, match="allowed are 0 to 1"):
            node.status(wrong)


@pytest.mark.parametrize("text", ["", "f", "x" * 184, "x" * 1000, "ä" * 500, "x" + "€" * 200])
def test_texts_are_cut_between_characters(text):
    node = make(2)
    core.Node(node.segment, 1).begin_command(1, text)
    shown = node.status(1)["function"]
    assert text.startswith(shown)
    assert len(text.encode()) <= 184 or 181 <= len(shown.encode()) <= 184


# ------------------------------------------------------------------ doorbells


def test_nobody_rings_for_those_who_do_not_wait():
    node = make(3)
    mine = core.Node(node.segment, 1)
    seen = mine.bell
    node.ring_bell(1)
    node.ring_all()
    assert mine.bell == seen
    mine.begin_wait()
    mine.begin_wait()
    node.ring_bell(1)
    node.ring_all()
    node.ring_bell(2)
    mine.end_wait()
    node.ring_bell(1)
    assert mine.bell == seen + 3
    mine.end_wait()
    mine.end_wait()
    node.ring_bell(1)
    assert mine.bell == seen + 3
    assert core.Node(node.segment, 2).bell == 0


def test_more_workers_than_a_word_has_bits():
    node = make(200)
    ends = {i: core.Node(node.segment, i) for i in (1, 63, 64, 127, 128, 199)}
    for end in ends.values():
        end.begin_wait()
    node.ring_all()
    node.ring_bell(128)
    assert {i: end.bell for i, end in ends.items()} == dict.fromkeys(ends, 1) | {128: 2}


def test_a_sleeper_is_woken():
    node = make(2)
    address = nodes.address_of(node)

    def worker() -> None:
        mine = nodes.attach_node(address, 1)
        mine.spin = 0
        waiter = waiter_at(mine)
        for number in range(1, 101):
            waiter.until(
                lambda n=number: mine.interrupted_through >= n, lambda: "the next", idle=True
            )
            mine.leave_command(number)
            mine.ring_bell(0)

    waiter = waiter_at(node)
    start = time.monotonic()
    with children(worker):
        for number in range(1, 101):
            if number % 10 == 0:
                time.sleep(0.01)  # both asleep
            node.interrupt(number)
            waiter.until(lambda n=number: node.executed() == [n], lambda: "it", idle=True)
    # If the doorbell did not wake them, each sleep would last for 50 ms.
    assert time.monotonic() - start < 2.5


def test_sleeps_are_bounded():
    node = make(2)
    mine = core.Node(node.segment, 1)
    mine.spin = 0
    start = time.monotonic()
    assert mine.wait(mine.bell, 1e9) is False
    assert 0.05 < time.monotonic() - start < 1
    assert mine.sleep(mine.bell, float("nan")) is False
    assert 1 < time.monotonic() - start < 5
    assert mine.wait(mine.bell - 1, 100.0) is True
    assert mine.sleep(mine.bell, -5.0) is False
    for wrong in (-1.0, float("inf"), float("nan")):
        with pytest.raises(ValueError, match="spin is a number of seconds"):
            mine.spin = wrong


def test_a_waiter_at_rest_costs_next_to_nothing():
    waiter = waiter_at(make(2))
    end = time.monotonic() + 1.0
    before = time.process_time()
    waiter.until(lambda: time.monotonic() > end, lambda: "the clock", idle=True)
    assert time.process_time() - before < 0.02


# ------------------------------------------------------------------ the waiter


def test_limits_at_the_doorbell(monkeypatch, caplog):
    monkeypatch.setenv("SPMD_DISCO_STALL_SECONDS", "0.02")
    waiter = waiter_at(make(2), None)
    with pytest.raises(di.DiscoTimeout, match=r"after 0\.08 s still waiting for Godot"):
        waiter.until(lambda: None, lambda: "Godot", timeout=0.08, idle=True)
    assert 1 <= caplog.text.count("waiting for Godot") <= 3
    caplog.clear()
    end = time.monotonic() + 0.1
    waiter.timeout = 0.01
    waiter.until(lambda: time.monotonic() > end, lambda: "it", idle=True, limited=False)
    assert not caplog.text
    with pytest.raises(di.DiscoTimeout):
        waiter.until(lambda: None, lambda: "it", rung=True)


def test_hooks_at_the_doorbell():
    seen = {True: [], False: []}
    for idle in (True, False):
        waiter = waiter_at(make(2))
        waiter.add_hook(seen[idle].append)
        end = time.monotonic() + 0.12
        waiter.until(lambda e=end: time.monotonic() > e, lambda: "it", idle=idle, rung=True)
        assert len(seen[idle]) < 10
    assert seen[True][-1] is True
    assert set(seen[False]) == {False}


def test_something_pending_is_looked_at_often():
    waiter = waiter_at(make(2))
    calls = []

    def pending(idle: bool) -> bool:
        calls.append(idle)
        return True

    waiter.add_hook(pending)
    end = time.monotonic() + 0.1
    waiter.until(lambda: time.monotonic() > end, lambda: "it", idle=True)
    assert len(calls) > 20


def test_signal_handlers_run_and_may_raise():
    class Struck(Exception):
        pass

    def strike(number: int, frame: object) -> None:
        raise Struck

    node = make(2)
    waiter = waiter_at(node)
    previous = signal.signal(signal.SIGALRM, strike)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        start = time.monotonic()
        with pytest.raises(Struck):
            waiter.until(lambda: None, lambda: "it", idle=True, limited=False)
        assert time.monotonic() - start < 2
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
    seen = node.bell
    core.Node(node.segment, 1).ring_bell(0)
    assert node.bell == seen  # it does not count as waiting any more


def test_threads_of_one_process_wait_at_the_same_doorbell():
    node = make(2)
    mine = core.Node(node.segment, 1)
    flags: set[int] = set()
    done: list[int] = []

    def work(number: int) -> None:
        waiter_at(mine).until(lambda: number in flags, lambda: "the flag", idle=True)
        done.append(number)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    start = time.monotonic()
    for number in range(4):
        flags.add(number)
        node.ring_bell(1)
        threads[number].join(5)
    assert done == [0, 1, 2, 3]
    assert time.monotonic() - start < 2


# ------------------------------------------------------------------ interrupts and watchers


def test_the_interrupt_word_only_grows():
    node = make(2)
    mine = core.Node(node.segment, 1)
    assert mine.interrupted_through == 0
    node.interrupt(5)
    node.interrupt(3)
    assert mine.interrupted_through == 5
    with pytest.raises(OverflowError):
        node.interrupt(-1)


def test_watchers_are_woken():
    node = make(2)
    mine = core.Node(node.segment, 1)
    seen = mine.watch_bell
    assert mine.wait_watch(seen, 0.01) == seen
    timer = threading.Timer(0.05, node.ring_watchers)
    timer.start()
    start = time.monotonic()
    assert mine.wait_watch(seen, 20.0) == seen + 1
    assert time.monotonic() - start < 10
    timer.join()


class StandIn:
    """What a watcher looks at of a worker."""

    def __init__(self) -> None:
        self.number = 0
        self.interrupted_through = 0
        self.running = False
        self.thread = threading.get_ident()


def test_a_watcher_interrupts_what_runs():
    node = make(2)
    address = nodes.address_of(node)

    def worker() -> None:
        mine = nodes.attach_node(address, 1)
        me = StandIn()
        watcher = NodeWatcher(me, mine)  # type: ignore[arg-type]
        watcher.start()
        me.running = True
        mine.leave_command(1)
        try:
            time.sleep(20)
        except KeyboardInterrupt:
            me.running = False
        else:
            raise AssertionError("slept through it")
        assert me.interrupted_through == 7
        start = time.monotonic()
        watcher.stop(Waiter())
        assert time.monotonic() - start < 5
        assert threading.active_count() == 1

    controller = StandIn()
    controller.number = 7
    controller.running = True
    watcher = NodeWatcher(controller, node)  # type: ignore[arg-type]
    watcher.start()
    with children(worker):
        waiter_at(node).until(lambda: node.executed() == [1], lambda: "the worker", rung=False)
        watcher.interrupt()
    # The controller's own half is not the watcher's affair.
    assert controller.interrupted_through == 0
    assert node.status(1)["interrupted_through"] == 7
    watcher.stop(Waiter())


def test_the_end_is_seen():
    node = make(2)
    mine = core.Node(node.segment, 1)
    assert not mine.closed
    node.close()
    assert mine.closed
    assert mine.watch_bell == 1


# ------------------------------------------------------------------ agreeing on a node


class Comm:
    """Stands for a communicator on which the other ranks say what the test wants."""

    def __init__(self, rank: int, size: int, others: Callable[[int, Any], list[Any]]) -> None:
        self.rank, self.size = rank, size
        self._others = others
        self._calls = 0

    def allgather(self, mine: Any) -> list[Any]:
        self._calls += 1
        return self._others(self._calls, mine)


def test_all_agree_on_a_node(monkeypatch):
    monkeypatch.delenv("SPMD_DISCO_CHANNEL", raising=False)
    others = {1: ("", "", "", None), 2: ""}
    node, why = nodes.open_node(Comm(0, 2, lambda call, mine: [mine, others[call]]))
    assert node is not None
    assert (node.workers, node.me, why) == (2, 0, "")
    address = nodes.address_of(node)
    theirs = {1: ("", "", "", address), 2: ""}
    mine, why = nodes.open_node(Comm(1, 2, lambda call, mine: [theirs[call], mine]))
    assert mine is not None
    assert (mine.me, why) == (1, "")


@pytest.mark.parametrize("asked", ["", "ring"])
def test_one_that_cannot_keeps_all_from_it(asked, monkeypatch):
    monkeypatch.setenv("SPMD_DISCO_CHANNEL", asked)

    def far_away(call: int, mine: Any) -> list[Any]:
        return [mine, (asked, "", "", None)] if call == 1 else [mine, "on another host"]

    def not_built(call: int, mine: Any) -> list[Any]:
        assert call == 1
        return [mine, (asked, "", "not built", None), (asked, "", "not built", None)]

    for others, size, text in [
        (far_away, 2, "rank 1: on another host"),
        (not_built, 3, r"rank 1 (and 1 more ranks): not built"),
    ]:
        if asked:
            with pytest.raises(di.DiscoError, match="cannot share memory; rank 1"):
                nodes.open_node(Comm(0, size, others))
        else:
            node, why = nodes.open_node(Comm(0, size, others))
            assert node is None
            assert why == text


def test_a_worker_that_finds_something_else_says_why(monkeypatch):
    monkeypatch.delenv("SPMD_DISCO_CHANNEL", raising=False)
    unrelated = make(2)
    wrong = nodes.address_of(unrelated)._replace(nonce=bytes(16))
    told = []

    def others(call: int, mine: Any) -> list[Any]:
        told.append(mine)
        return [{1: ("", "", "", wrong), 2: "", 3: (None, "no names")}[call], mine]

    node, why = nodes.open_node(Comm(1, 2, others))
    assert node is None
    assert "is not the segment that was announced" in why
    assert "is not the segment" in told[1]


def test_the_setting_is_the_same_everywhere(monkeypatch):
    monkeypatch.setenv("SPMD_DISCO_CHANNEL", "mpi")
    alike = Comm(0, 2, lambda call, mine: [mine, ("mpi", "", "", None)])
    assert nodes.open_node(alike) == (None, "SPMD_DISCO_CHANNEL=mpi")
    differs = Comm(0, 2, lambda call, mine: [mine, ("", "", "", None)])
    with pytest.raises(ValueError, match="rank 0: mpi, rank 1: unset"):
        nodes.open_node(differs)
    monkeypatch.setenv("SPMD_DISCO_CHANNEL", "pigeon")
    told = []
    with pytest.raises(ValueError, match="allowed are ring and mpi"):
        nodes.open_node(Comm(0, 2, lambda call, mine: told.append(mine) or [mine, mine]))
    assert told  # and not before the others have heard of it
    monkeypatch.delenv("SPMD_DISCO_CHANNEL")
    assert nodes.open_node(Comm(0, 1, lambda call, mine: [mine])) == (None, "there is one rank")


def test_without_the_native_module(monkeypatch):
    monkeypatch.delenv("SPMD_DISCO_CHANNEL", raising=False)
    monkeypatch.setattr(native, "core", None)
    monkeypatch.setattr(native, "why_not", "switched off by SPMD_DISCO_NATIVE")
    node, why = nodes.open_node(Comm(0, 2, lambda call, mine: [mine, ("", "", "", None)]))
    assert node is None
    assert why == "rank 0: switched off by SPMD_DISCO_NATIVE"
    with pytest.raises(di.DiscoError, match="no native module"):
        nodes.create_node(2)
