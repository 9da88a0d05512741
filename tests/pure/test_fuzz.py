"""A short run of scripts/fuzz."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

import pytest

SCRIPT = pathlib.Path(__file__).parents[2] / "scripts" / "fuzz"
#: What the script says of a machine on which it cannot run.
MISSING = ["fuzz: there is no '", "has no headers at", "has no library to link with", "may lack"]


def fuzz(seconds: int, *arguments: str, **settings: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", str(SCRIPT), str(seconds), *arguments],
        env={**os.environ, "FUZZ_PYTHON": sys.executable, **settings},
        capture_output=True,
        text=True,
        errors="replace",
        timeout=250,
    )


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_what_others_write_brings_nothing_down(tmp_path):
    result = fuzz(10, FUZZ_FOLDER=str(tmp_path))
    last = result.stderr.strip().splitlines()[-1]
    if any(text in last for text in MISSING):
        pytest.skip(last)
    assert result.returncode == 0, result.stderr[-5000:]
    # It has read what the encoders make, and gone on from there.
    assert "INITED" in result.stderr
    assert not list(tmp_path.glob("*-*"))


def test_what_is_missing_is_named(tmp_path):
    result = fuzz(1, FUZZ_CC="no-such-clang", FUZZ_FOLDER=str(tmp_path))
    assert result.returncode == 1
    assert result.stderr.startswith("fuzz: there is no 'no-such-clang': install clang")
