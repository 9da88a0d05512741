"""Build a test's C program, with a sanitizer or for another processor, and run it."""

from __future__ import annotations

import pathlib
import subprocess
import sysconfig
from collections.abc import Sequence

import pytest

__all__ = ["DATA_PLANE", "SANITIZERS", "SOURCES", "build", "run_sanitized"]

SOURCES = pathlib.Path(__file__).parents[2] / "spmd_disco" / "native" / "src"
SANITIZERS = ("thread", "address,undefined")

#: What the data plane in shared memory is made of, without the Python types.
DATA_PLANE = [
    SOURCES / f"{name}.c"
    for name in (
        *("cells", "cells_run", "peer_moves", "peer_staged", "peer_mail"),
        *("copy", "node", "pool", "reduce", "shared"),
    )
]


def build(
    compiler: str, options: Sequence[str], sources: Sequence[pathlib.Path], program: pathlib.Path
) -> subprocess.CompletedProcess[str]:
    """Build a program. It skips where there is no such compiler.

    What the sources have besides and the program does not call may use what is not there, as all
    of Python.
    """
    command = [
        *(compiler, "-std=gnu11", "-g1", "-O1", *options),
        *("-no-pie", "-ffunction-sections", "-Wl,--gc-sections,--unresolved-symbols=ignore-all"),
        *("-I", str(SOURCES), "-I", sysconfig.get_path("include")),
        *map(str, sources),
        *("-o", str(program), "-pthread", "-lrt"),
    ]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=100)
    except FileNotFoundError:
        pytest.skip(f"there is no {compiler}")


def run_sanitized(sanitizer: str, sources: Sequence[pathlib.Path], folder: pathlib.Path) -> None:
    """Build a program from `sources`, in `folder`, run it, and fail on whatever it reports.

    It skips where the compiler, or its library for the sanitizer, is missing.
    """
    program = folder / "program"
    options = [f"-fsanitize={sanitizer}", "-fno-sanitize-recover=all"]
    if sanitizer == "thread":
        # It does not understand fences: whatever is read after one must be atomic, or released.
        options.append("-Wno-tsan")
    built = build(sysconfig.get_config_var("CC").split()[0], options, sources, program)
    if "cannot find" in built.stderr:
        pytest.skip(f"the compiler has no -fsanitize={sanitizer}")
    assert built.returncode == 0, built.stderr
    ran = subprocess.run([program], capture_output=True, text=True, timeout=100)
    if "unexpected memory mapping" in ran.stderr:
        pytest.skip("this kernel's layout of addresses is too random for the sanitizer")
    assert ran.returncode == 0, ran.stdout + ran.stderr
