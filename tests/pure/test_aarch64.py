"""The native module on aarch64: it compiles, and its parts without Python run in an emulator."""

from __future__ import annotations

import os
import pathlib
import shutil
import subprocess
import sysconfig

import pytest
from sanitized import DATA_PLANE, SOURCES, build

COMPILER = "aarch64-linux-gnu-gcc"
EMULATOR = "qemu-aarch64"
PROGRAMS = pathlib.Path(__file__).parent

pytestmark = [
    pytest.mark.skipif(
        shutil.which(COMPILER) is None,
        reason=f"there is no {COMPILER} (Debian's gcc-aarch64-linux-gnu, libc6-dev-arm64-cross)",
    ),
    pytest.mark.skipif(
        not os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h")),
        reason="there is no Python.h",
    ),
]
emulated = pytest.mark.skipif(
    shutil.which(EMULATOR) is None, reason=f"there is no {EMULATOR} (Debian's qemu-user)"
)


@pytest.mark.parametrize("source", sorted(SOURCES.glob("*.c")), ids=lambda source: source.stem)
def test_it_compiles_without_warnings(source, tmp_path):
    """Python's own headers are this machine's, which is near enough to compile with."""
    command = [
        *(COMPILER, "-std=gnu11", "-O2", "-Wall", "-Wextra", "-Werror"),
        # As setup.py has it.
        *("-Wno-unused-parameter", "-Wno-missing-field-initializers", "-Wno-cast-function-type"),
        *("-I", sysconfig.get_path("include"), "-c", str(source)),
        *("-o", str(tmp_path / "object.o")),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr


def run(name: str, parts: list[pathlib.Path], folder: pathlib.Path) -> str:
    program = folder / name
    built = build(COMPILER, ["-static"], [PROGRAMS / f"{name}.c", *parts], program)
    assert built.returncode == 0, built.stderr
    done = subprocess.run([EMULATOR, program], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@emulated
@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("ring_stress", [SOURCES / f"{part}.c" for part in ("ring", "box", "node")]),
        ("pool_stress", [SOURCES / f"{part}.c" for part in ("pool", "shared")]),
        ("cells_stress", DATA_PLANE),
    ],
    ids=["ring", "pool", "cells"],
)
def test_threads(name, parts, tmp_path):
    run(name, parts, tmp_path)


@emulated
def test_reductions_give_the_same_bits(tmp_path):
    parts = [SOURCES / "reduce.c"]
    there = run("reduce_digest", parts, tmp_path)
    program = tmp_path / "here"
    compiler = sysconfig.get_config_var("CC").split()[0]
    built = build(compiler, [], [PROGRAMS / "reduce_digest.c", *parts], program)
    assert built.returncode == 0, built.stderr
    here = subprocess.run([program], capture_output=True, text=True, timeout=100, check=True)
    assert there.splitlines() == here.stdout.splitlines()
    assert len(there.splitlines()) > 50
