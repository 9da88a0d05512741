"""Commands and replies as messages."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

import spmd_disco as di
from spmd_disco.codec import assemble
from spmd_disco.errors import Failure
from spmd_disco.protocol import (
    ALL,
    Reply,
    decode_command,
    decode_reply,
    decode_reply_value,
    encode_command,
    encode_reply,
    reply_number,
)

ids = st.integers(0, 2**64 - 1)


def test_actions_and_kinds_have_tvms_values():
    assert [(a.name, a.value) for a in di.DiscoAction] == [
        ("SHUT_DOWN", 0),
        ("KILL_REG", 1),
        ("GET_GLOBAL_FUNC", 2),
        ("CALL_PACKED", 3),
        ("SYNC_WORKER", 4),
        ("COPY_FROM_WORKER0", 5),
        ("COPY_TO_WORKER0", 6),
        ("DEBUG_GET_FROM_REMOTE", 7),
        ("DEBUG_SET_REGISTER", 8),
    ]
    assert [(k.name, k.value) for k in di.ReduceKind] == [
        ("SUM", 0),
        ("PROD", 1),
        ("MIN", 2),
        ("MAX", 3),
        ("AVG", 4),
    ]


@given(
    number=ids,
    action=st.sampled_from(di.DiscoAction),
    target=st.integers(-1, 2**31 - 1),
    register=ids,
    kills=st.lists(ids, max_size=5),
    payload=st.lists(st.binary(max_size=20), max_size=3),
)
def test_commands(number, action, target, register, kills, payload):
    message = encode_command(number, action, payload, target=target, register=register, kills=kills)
    command = decode_command(message)
    assert command.number == number
    assert command.action is action
    assert command.target == target
    assert command.register == register
    assert command.kills == tuple(kills)
    assert bytes(command.payload) == b"".join(payload)
    assert message[command.offset :] == b"".join(payload)


def test_the_default_target_is_all():
    assert decode_command(encode_command(1, di.DiscoAction.KILL_REG)).target == ALL


@pytest.mark.parametrize("value", [None, 5, [1, "a"], b"x" * 1000])
@pytest.mark.parametrize("failed", [False, True])
def test_replies(value, failed):
    failure = Failure(1, "host", "f", 3, "ValueError", "boom", "Traceback") if failed else None
    reply = Reply(9, value, failure, [failure] if failure else [], 2 if failed else 0)
    message = memoryview(assemble(encode_reply(reply)))
    assert reply_number(message) == 9
    got = decode_reply(message)
    assert (got.number, got.failure, got.dropped) == (9, failure, 2 if failed else 0)
    assert got.failures == reply.failures
    assert decode_reply_value(*got.value) == value
