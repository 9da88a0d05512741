"""Write what the real encoders make, as inputs for tests/pure/fuzz_native.c, into a folder."""

from __future__ import annotations

import pathlib
import struct
import sys
from collections.abc import Iterator

from spmd_disco.codec import FunctionKind, RegisterRef, encode_arguments, encode_function
from spmd_disco.device import Device
from spmd_disco.protocol import ALL, DiscoAction, encode_command

#: What an input is for, as its first byte says.
VALUES, STEP, DRAIN, NODE, MAIL = (bytes([i]) for i in range(5))

ARGUMENTS: list[tuple[object, ...]] = [
    (),
    (None, True, False, 0, -1, 2**63 - 1, -(2**63)),
    (0.0, -1.5, float("nan"), float("inf")),
    ("", "text", "ä€😀", b"", b"bytes" * 100),
    ((), (1, (2, ("x", (None,))))),
    (RegisterRef(1), (RegisterRef(2), 3), RegisterRef(3)),
    (Device(1, 0), [1, {"a": 2}]),
    tuple(range(255)),
]


#: References to functions that the harness knows, or might.
FUNCTIONS = [
    encode_function(FunctionKind.REGISTER, 1),
    encode_function(FunctionKind.REGISTER, 3),
    encode_function(FunctionKind.GLOBAL, "f") + encode_function(FunctionKind.NONE, None),
    encode_function(FunctionKind.IMPORT, "m:f"),
    encode_function(FunctionKind.IMPORT, "m:g"),
    encode_function(FunctionKind.KNOWN, bytes(16)),
]


def commands() -> Iterator[bytes]:
    for number, arguments in enumerate(ARGUMENTS):
        encoded = b"".join(map(bytes, encode_arguments(arguments, {})[0]))
        for function in FUNCTIONS:
            yield encode_command(
                1, DiscoAction.CALL_PACKED, [function, encoded], 0, ALL, 9, list(range(number))
            )
    yield encode_command(1, DiscoAction.KILL_REG, kills=[1, 2, 3])
    for register in (2, 3, 4, 5, 6):
        for target in (1, 2):
            yield encode_command(1, DiscoAction.DEBUG_GET_FROM_REMOTE, (), 0, target, register, [2])
    yield encode_command(1, DiscoAction.SYNC_WORKER)


def damage(where: int, at: int, data: bytes) -> bytes:
    """Write `data` over some of the memory that the harness's `where` means."""
    return struct.pack("<BHB", where, at, len(data)) + data


def seeds() -> Iterator[bytes]:
    for arguments in ARGUMENTS:
        yield VALUES + b"".join(map(bytes, encode_arguments(arguments, {})[0]))[2:]
    for command in commands():
        yield STEP + command
        yield DRAIN + command
    # What is done with a node, step by step: see the harness.
    push, pop, send, pump, look = (bytes([i]) for i in (2, 3, 4, 5, 7))
    yield NODE + (push + b"\x20" + pop) * 20
    yield NODE + push + b"\xff" + pop + look + b"\1"
    yield NODE + (send + b"\x50") * 5 + pump * 6
    full = NODE + (push + b"\x30") * 3 + (send + b"\x20") * 2
    for at in range(0, 256, 4):
        for where in (0, 1):
            for value in (b"\xff" * 4, struct.pack("<I", 200)):
                yield full + damage(where, at, value) + pop * 3 + pump * 2
    for number in range(12, 16):
        # At the end of the ring: 64 bytes each, with their heads.
        passed = (push + b"\x18" + pop) * number + (push + b"\x18") * 8
        for size in (60, 100, 200, 400):
            yield NODE + passed + damage(0, 128 + 64 * number, struct.pack("<I", size)) + pop * 8
    for at in range(64, 1600, 8):
        yield full + damage(6, at, b"\xff" * 8) + (pop + pump) * 3 + look + b"\1"
    send, receive, drop, pump = (bytes([i]) for i in (2, 3, 4, 5))
    for size in range(7):
        yield MAIL + (send + bytes([size, 1]) + receive) * 4 + drop + pump
        yield MAIL + (send + bytes([size, 0])) * 12 + (receive + pump) * 12
        for at in (*range(0, 16, 8), *range(128, 144, 8), *range(256, 288, 8)):
            for value in (b"\xff" * 8, struct.pack("<Q", 60000)):
                yield MAIL + send + bytes([size, 1]) + damage(0, at, value) + receive * 2


if __name__ == "__main__":
    folder = pathlib.Path(sys.argv[1])
    for number, seed in enumerate(seeds()):
        (folder / f"seed-{number:04}").write_bytes(seed)
