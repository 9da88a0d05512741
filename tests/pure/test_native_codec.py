"""The native codec against codec.py, which is the reference."""

import os
import random
import shutil
import struct
import sysconfig
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spmd_disco import native
from spmd_disco.codec import Reader, RegisterRef, encode_arguments, no_registers

core: Any = native.core

pytestmark = pytest.mark.skipif(core is None, reason=f"no native module: {native.why_not}")


@pytest.mark.skipif(os.environ.get("SPMD_DISCO_NATIVE") == "0", reason="switched off on purpose")
def test_the_native_module_is_there_where_it_can_be_built() -> None:
    header = os.path.join(sysconfig.get_path("include"), "Python.h")
    if shutil.which("cc") and os.path.exists(header):
        assert native.available(), native.why_not


compact = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(-(2**63), 2**63 - 1),
        st.floats(),
        st.text(max_size=20),
        st.binary(max_size=2000),
    ),
    lambda inner: st.lists(inner, max_size=4).map(tuple),
    max_leaves=12,
)


@given(st.lists(compact, max_size=6).map(tuple))
def test_both_encode_alike(args: tuple[Any, ...]) -> None:
    parts, flags = encode_arguments(args, {})
    assert flags == 0
    assert core.encode_arguments(args) == b"".join(parts)


@given(st.lists(compact, max_size=6).map(tuple))
def test_what_was_encoded_is_decoded(args: tuple[Any, ...]) -> None:
    message = core.encode_arguments(args)
    at, values = 2, []
    for _ in range(message[1]):
        value, size = core.decode_value(message[at:], no_registers)
        values.append(value)
        at += size
    assert at == len(message)
    assert repr(tuple(values)) == repr(args)  # NaNs are not equal to themselves


@pytest.mark.parametrize(
    "value",
    [
        2**63,
        -(2**63) - 1,
        [1],
        {"a": 1},
        1j,
        "\ud800",
        bytearray(b"x"),
        (1, [2]),
        (0,) * 256,
        object,
    ],
    ids=repr,
)
def test_what_is_not_compact_is_left_to_python(value: Any) -> None:
    assert core.encode_arguments((value,)) is None


def test_subclasses_are_not_compact() -> None:
    class Int(int):
        pass

    class Text(str):
        pass

    class Pair(tuple):  # type: ignore[type-arg]
        pass

    for value in (Int(1), Text("a"), Pair((1, 2))):
        assert core.encode_arguments((value,)) is None


def test_a_deep_tuple_does_not_overflow_the_stack() -> None:
    value: tuple[Any, ...] = ()
    for _ in range(100_000):
        value = (value,)
    assert core.encode_arguments((value,)) is None
    with pytest.raises(RecursionError):
        core.decode_value(b"t\1" * 100_000 + b"N", no_registers)


def test_a_register_is_looked_up() -> None:
    parts, _ = encode_arguments((RegisterRef(7),), {})
    payload = b"".join(parts)[2:]
    assert core.decode_value(payload, lambda register: register * 2) == (14, 9)


def test_what_lookup_raises_comes_through() -> None:
    with pytest.raises(TypeError, match="register 1 stands where only plain values can"):
        core.decode_value(b"r" + (1).to_bytes(8, "little"), no_registers)


def decoded(decode: Any) -> tuple[str, Any]:
    try:
        return "value", decode()
    except (ValueError, RecursionError, TypeError, IndexError, struct.error) as e:
        return "error", type(e)


@settings(max_examples=500)
@given(st.binary(max_size=200), st.sampled_from(b"iNTFfrsbtX"))
def test_malformed_bytes_are_an_error_in_both_or_in_none(rest: bytes, tag: int) -> None:
    payload = bytes([tag]) + rest
    native_result = decoded(lambda: core.decode_value(payload, no_registers))
    if native_result == ("value", NotImplemented):
        return
    reference = decoded(lambda: Reader(memoryview(payload), 0).value(no_registers))
    if reference[0] == "value":
        assert native_result[0] == "value"
        assert repr(native_result[1][0]) == repr(reference[1])
    else:
        assert native_result[0] == "error"


def test_random_changes_of_valid_messages_do_no_harm() -> None:
    rng = random.Random(3)
    valid = core.encode_arguments((1, "text", b"bytes", (2.0, None, (True, "x"))))
    for _ in range(20_000):
        message = bytearray(valid)
        for _ in range(rng.randrange(1, 4)):
            message[rng.randrange(2, len(message))] = rng.randrange(256)
        del message[rng.randrange(2, len(message)) :]
        at = 2
        try:
            while at < len(message):
                result = core.decode_value(bytes(message[at:]), no_registers)
                if result is NotImplemented:
                    break
                at += result[1]
        except (ValueError, TypeError):
            pass
