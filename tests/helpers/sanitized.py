"""Build a test's C program with a sanitizer, and run it."""

from __future__ import annotations

import pathlib
import subprocess
import sysconfig
from collections.abc import Sequence

import pytest

__all__ = ["SANITIZERS", "SOURCES", "run_sanitized"]

SOURCES = pathlib.Path(__file__).parents[2] / "spmd_disco" / "native" / "src"
SANITIZERS = ("thread", "address,undefined")


def run_sanitized(sanitizer: str, sources: Sequence[pathlib.Path], folder: pathlib.Path) -> None:
    """Build a program from `sources`, in `folder`, run it, and fail on whatever it reports.

    It skips where the compiler, or its library for the sanitizer, is missing.
    """
    program = folder / "program"
    command = [
        *sysconfig.get_config_var("CC").split()[:1],
        *("-std=gnu11", "-g", "-O1", f"-fsanitize={sanitizer}", "-fno-sanitize-recover=all"),
        # It does not understand fences: whatever is read after one must be atomic, or released.
        *(("-Wno-tsan",) if sanitizer == "thread" else ()),
        *("-I", str(SOURCES), "-I", sysconfig.get_path("include")),
        *map(str, sources),
        *("-o", str(program), "-pthread"),
    ]
    try:
        built = subprocess.run(command, capture_output=True, text=True, timeout=100)
    except FileNotFoundError:
        pytest.skip(f"there is no {command[0]}")
    if "cannot find" in built.stderr:
        pytest.skip(f"the compiler has no -fsanitize={sanitizer}")
    assert built.returncode == 0, built.stderr
    ran = subprocess.run([program], capture_output=True, text=True, timeout=100)
    if "unexpected memory mapping" in ran.stderr:
        pytest.skip("this kernel's layout of addresses is too random for the sanitizer")
    assert ran.returncode == 0, ran.stdout + ran.stderr
