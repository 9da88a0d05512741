"""Records, and what follows from them."""

from __future__ import annotations

import itertools

import ml_dtypes
import numpy as np
import pytest

from spmd_disco.transport.arrival import (
    RECORD_SIZE,
    Operation,
    Record,
    State,
    Verdict,
    decide,
    make_record,
    mismatch_text,
    parse,
    peer_text,
    same_dtype_and_count,
    signature,
)
from spmd_disco.transport.ccl import ReduceKind

F4 = np.dtype("f4")
SUM = signature(Operation.ALLREDUCE, ReduceKind.SUM, F4, (4, 2))
MAX = signature(Operation.ALLREDUCE, ReduceKind.MAX, F4, (4, 2))


def arrived(command: int, ordinal: int = 0, what: bytes = SUM) -> bytes:
    return make_record(State.ARRIVED, ordinal, command, what)


def final(state: State, command: int) -> bytes:
    return make_record(state, 0, command)


@pytest.mark.parametrize(
    ("mine", "others", "verdict"),
    [
        (arrived(5), [arrived(5)], Verdict.MOVE),
        (arrived(5), [arrived(5, what=MAX)], Verdict.MISMATCH),
        (arrived(5), [arrived(5, ordinal=1)], Verdict.MISMATCH),
        (arrived(5), [arrived(4)], Verdict.AGAIN),
        (arrived(5), [final(State.FAILED, 4)], Verdict.AGAIN),
        (arrived(5), [final(State.LEFT, 4), arrived(5)], Verdict.AGAIN),
        (arrived(5), [final(State.FAILED, 5)], Verdict.GONE),
        (arrived(5), [final(State.LEFT, 5), arrived(5)], Verdict.GONE),
        (arrived(5), [final(State.LEFT, 7)], Verdict.GONE),
        (arrived(5), [arrived(6)], Verdict.GONE),
        (arrived(5), [final(State.SHUTDOWN, 9)], Verdict.GONE),
        # Both: those who wait for the older one must not be waited for.
        (arrived(5), [arrived(4), final(State.FAILED, 5)], Verdict.GONE),
        (final(State.SHUTDOWN, 9), [final(State.SHUTDOWN, 9)], Verdict.MOVE),
        (final(State.SHUTDOWN, 9), [arrived(8)], Verdict.AGAIN),
        (final(State.SHUTDOWN, 9), [final(State.LEFT, 8)], Verdict.AGAIN),
    ],
)
def test_decide(mine: bytes, others: list[bytes], verdict: Verdict) -> None:
    for order in itertools.permutations([mine, *others]):
        assert decide(mine, b"".join(order)) is verdict
        assert decide(mine, bytearray(b"".join(order))) is verdict


def test_members_at_one_command_agree() -> None:
    """Whatever three members post, those at the same command come to the same verdict."""
    records = [
        *(arrived(c, i, w) for c in (4, 5) for i in (0, 1) for w in (SUM, MAX)),
        *(final(s, c) for s in (State.FAILED, State.LEFT) for c in (3, 4, 5)),
    ]
    for three in itertools.product(records, repeat=3):
        block = b"".join(three)
        for command in (4, 5):
            verdicts = {
                decide(r, block)
                for r in three
                if (p := parse(r)[0]).state is State.ARRIVED and p.command == command
            }
            assert len(verdicts) <= 1
            if verdicts & {Verdict.MOVE, Verdict.MISMATCH}:
                assert all(p.command == command for p in parse(block))


def test_left() -> None:
    assert Record(State.ARRIVED, 0, 5).left == 4
    assert {Record(s, 0, 5).left for s in State if s is not State.ARRIVED} == {5}
    assert parse(arrived(5, 3) + final(State.LEFT, 2)) == [
        Record(State.ARRIVED, 3, 5),
        Record(State.LEFT, 0, 2),
    ]


def test_signatures_tell_apart() -> None:
    long = np.dtype([(f"a_long_name_{i}", "i4") for i in range(9)])
    other = np.dtype([(f"a_long_name_{i}", "i4") for i in range(8)] + [("z", "i4")])
    variants = [
        (Operation.ALLGATHER, None, dtype, shape)
        for dtype in [F4, np.dtype(">f4"), np.dtype(ml_dtypes.bfloat16), long, other]
        for shape in [(), (1,), (6,), (2, 3), (3, 2), (1,) * 8, (1,) * 7 + (2,), (1,) * 6 + (2, 1)]
    ]
    blocks = {signature(*v) for v in variants}
    assert len(blocks) == len(variants)
    assert {len(b) for b in blocks} == {len(SUM)}
    assert len(arrived(1)) == RECORD_SIZE


def test_same_dtype_and_count() -> None:
    a, b, c, d = (
        signature(Operation.SEND, None, np.dtype(dtype), shape)
        for dtype, shape in [("f4", (2, 3)), ("f4", (6,)), ("f4", (5,)), ("i4", (6,))]
    )
    assert same_dtype_and_count(a, b)
    assert not same_dtype_and_count(a, c)
    assert not same_dtype_and_count(b, d)


def test_mismatch_text() -> None:
    block = arrived(5) + arrived(5, what=MAX) + arrived(5) + arrived(5, 1)
    text = mismatch_text(block, range(4, 8), "in group 1")
    assert text.startswith("command 5: the workers in group 1 did not call the same operation")
    assert "workers 4, 6: allreduce sum of float32 (4, 2) (as operation 0)" in text
    assert "worker 5: allreduce max of float32 (4, 2)" in text
    assert "worker 7: allreduce sum of float32 (4, 2) (as operation 1)" in text
    many = arrived(5, what=MAX) + arrived(5) * 12
    assert "workers 1, 2, 3, 4, 5, 6, 7, 8 and 4 more: " in mismatch_text(many, range(13), "")


@pytest.mark.parametrize(
    ("record", "text"),
    [
        (Record(State.FAILED, 0, 5), "worker 2 failed in this command (5)"),
        (Record(State.LEFT, 0, 5), "worker 2 left this command (5) without taking part"),
        (Record(State.LEFT, 0, 8), "worker 2 left this command (5) without taking part"),
        (Record(State.ARRIVED, 0, 8), "and is at command 8"),
        (Record(State.SHUTDOWN, 0, 8), "worker 2 is shutting down"),
    ],
)
def test_peer_text(record: Record, text: str) -> None:
    assert text in peer_text(2, record, 5, "allreduce")
