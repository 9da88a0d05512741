"""Random commands: workers that fail, skip, disagree, and send messages.

What each worker must see follows from the plan alone: an operation is done by all of its members if
all of them come to it, and by none otherwise.
"""

from __future__ import annotations

import random
import time
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from spmd_disco.errors import PeerError
from spmd_disco.transport.host_ccl import HostCCL
from spmd_disco.transport.wait import Waiter

__all__ = ["Player", "expected", "make_plan"]

COLLECTIVES = ["allreduce", "allgather", "broadcast", "scatter", "gather"]


class Fails(Exception):
    """What a worker function raises of itself."""


@dataclass
class Step:
    """One thing that the workers do in a command."""

    what: str
    in_group: bool = False
    mismatch: bool = False
    caught: bool = False
    sender: int = 0
    receiver: int = 0


@dataclass
class Command:
    steps: list[Step]
    #: Worker to (step before which it stops, whether it fails then or just returns).
    stops: dict[int, tuple[int, bool]] = field(default_factory=dict)
    sync: bool = False


def make_plan(seed: int, commands: int, size: int) -> list[Command]:
    rng = random.Random(seed)
    plan = []
    for _ in range(commands):
        steps = []
        for _ in range(rng.choice([0, 1, 1, 2, 3])):
            if size > 1 and rng.random() < 0.25:
                sender, receiver = rng.sample(range(size), 2)
                steps.append(Step("message", sender=sender, receiver=receiver))
            else:
                steps.append(
                    Step(
                        rng.choice(COLLECTIVES),
                        in_group=rng.random() < 0.5,
                        mismatch=rng.random() < 0.1,
                        caught=rng.random() < 0.5,
                    )
                )
        command = Command(steps, sync=rng.random() < 0.02)
        if rng.random() < 0.3:
            for worker in rng.sample(range(size), rng.randint(1, min(2, size))):
                command.stops[worker] = (rng.randint(0, len(steps)), rng.random() < 0.6)
        plan.append(command)
    return plan


def value(number: int, step: int, worker: int) -> int:
    return number * 1000 + step * 100 + worker


def expected(plan: list[Command], size: int, groups: int) -> dict[int, list[list[str]]]:
    """Return, for each worker, the outcomes of the steps of each command that it comes to."""
    outcomes: dict[int, list[list[str]]] = {w: [] for w in range(size)}
    boxes: dict[tuple[int, int], deque[tuple[int, int]]] = defaultdict(deque)
    failed: dict[int, set[int]] = {w: set() for w in range(size)}
    for number, command in enumerate(plan, 1):
        active = set(range(size))
        for w in range(size):
            outcomes[w].append([])

        def fails(w: int, active: set[int] = active, number: int = number) -> None:
            active.discard(w)
            failed[w].add(number)

        for index, step in enumerate([*command.steps, None]):
            for w, (at, failing) in command.stops.items():
                if at == index and w in active:
                    if failing:
                        fails(w)
                    active.discard(w)
            if step is None:
                continue
            if step.what == "message":
                box = boxes[step.sender, step.receiver]
                if step.sender in active:
                    box.append((number, value(number, index, step.sender)))
                if step.receiver in active:
                    while box and box[0][0] in failed[step.receiver]:
                        box.popleft()
                    if box:
                        outcomes[step.receiver][-1].append(f"got {box.popleft()[1]}")
                    else:
                        outcomes[step.receiver][-1].append("PeerError")
                        fails(step.receiver)
                continue
            block = size // groups if step.in_group else size
            for first in range(0, size, block):
                members = set(range(first, first + block))
                if members <= active:
                    outcome = "ValueError" if step.mismatch and block > 1 else "done"
                else:
                    outcome = "PeerError"
                for w in sorted(members & active):
                    outcomes[w][-1].append(outcome)
                    if outcome == "PeerError" or (outcome == "ValueError" and not step.caught):
                        fails(w)
    return outcomes


class Player:
    """One worker that plays its part of a plan."""

    def __init__(
        self, ccl: HostCCL, waiter: Waiter, barrier: Callable[[], Callable[[], bool]]
    ) -> None:
        self.ccl = ccl
        self.waiter = waiter
        #: Begins a barrier among all workers, and returns what says whether it is over.
        self.barrier = barrier
        self.size = ccl.num_workers
        self.worker = ccl.worker_id
        self.group_size = ccl.group_size

    def wait_idle(self, ready: Callable[[], bool]) -> None:
        self.waiter.until(ready, lambda: "the next command", idle=True)

    def play(self, plan: list[Command], pause: random.Random) -> list[list[str]]:
        outcomes: list[list[str]] = []
        for number, command in enumerate(plan, 1):
            outcomes.append([])
            self.ccl.begin(number)
            try:
                self.execute(number, command, outcomes[-1])
            except (Fails, PeerError, ValueError):
                self.ccl.fail(number)
            if self.ccl.leave is not None and pause.random() < 0.5:
                self.ccl.leave(number)
            if self.ccl.outstanding:
                self.ccl.pump(False)
            if command.sync:
                self.wait_idle(self.barrier())
            elif pause.random() < 0.01:
                end = time.perf_counter() + 2e-3
                self.wait_idle(lambda end=end: time.perf_counter() >= end)
        # As a session: workers wait for the command to shut down.
        self.wait_idle(self.barrier())
        self.ccl.begin(len(plan) + 1)
        self.ccl.close(len(plan) + 1)
        return outcomes

    def execute(self, number: int, command: Command, outcomes: list[str]) -> None:
        for index, step in enumerate([*command.steps, None]):
            at, failing = command.stops.get(self.worker, (-1, False))
            if at == index:
                if failing:
                    raise Fails
                return
            if step is None:
                return
            if step.what == "message":
                self.message(number, index, step, outcomes)
                continue
            try:
                self.collective(number, index, step)
                outcomes.append("done")
            except (PeerError, ValueError) as e:
                outcomes.append(type(e).__name__)
                if isinstance(e, PeerError) or not step.caught:
                    raise

    def message(self, number: int, index: int, step: Step, outcomes: list[str]) -> None:
        large = value(number, index, step.sender) % 3 == 0
        if self.worker == step.sender:
            data = np.full(2000 if large else 1, value(number, index, step.sender))
            # Every message has the same size for its receiver, whichever it takes.
            buffer = np.zeros(2000, np.int64)
            buffer[: data.size] = data
            self.ccl.send_to_worker(buffer, step.receiver)
            buffer[:] = -1
        elif self.worker == step.receiver:
            buffer = np.zeros(2000, np.int64)
            try:
                self.ccl.recv_from_worker(buffer, step.sender)
            except PeerError:
                outcomes.append("PeerError")
                raise
            outcomes.append(f"got {buffer[0]}")

    def collective(self, number: int, index: int, step: Step) -> None:
        block = self.group_size if step.in_group else self.size
        first = self.worker // block * block
        members = [value(number, index, w) for w in range(first, first + block)]
        mine = members[self.worker - first]
        # Small and large operations go different ways.
        count = 5 if value(number, index, first) % 4 else 7001
        if step.mismatch and self.worker == first + block - 1 and block > 1:
            count += 1
        send = np.full(count, mine, np.int64)
        recv = np.full(count, -7, np.int64)
        whole = np.full((block, count), -7, np.int64)
        first_only = self.worker == first
        ccl, flag = self.ccl, step.in_group
        if step.what == "allreduce":
            ccl.allreduce(send, "sum", flag, recv)
            assert (recv == sum(members)).all()
        elif step.what == "allgather":
            ccl.allgather(send, flag, whole)
            assert (whole == np.array(members)[:, None]).all()
        elif step.what == "broadcast":
            ccl.broadcast_from_worker0(send if first_only else None, flag, recv)
            assert (recv == members[0]).all()
        elif step.what == "scatter":
            whole[:] = np.array(members)[:, None]
            ccl.scatter_from_worker0(whole if first_only else None, flag, recv)
            assert (recv == mine).all()
        else:
            ccl.gather_to_worker0(send, flag, whole if first_only else None)
            assert not first_only or (whole == np.array(members)[:, None]).all()
